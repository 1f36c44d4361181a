"""The rank suite under mpirun: one start for each size and tier, and proof that a failing rank is detected."""

import shutil
import textwrap
from pathlib import Path

import pytest

from harness.marks import cases

TESTS = Path(__file__).parents[1]
PYTEST = ["-P", "-m", "pytest", "--color=no", "-p", "no:cacheprovider", "-o", "timeout=0"]
# Two waiting ranks spin on separate cores: next to other tests the suite takes four times as long.
TWO = pytest.param(2, marks=pytest.mark.alone)


@pytest.mark.full_except("2-first", "3-first")
@pytest.mark.parametrize("tier", ["not full and not matrix", "full and not matrix"], ids=["first", "full"])
@pytest.mark.parametrize("size", [1, TWO, 3, 4])  # 3: not a power of two; 4: products of two axes
@pytest.mark.matrix_except("2-first", "3-first")
def test_rank_suite(mpiexec, size, tier):
    run_suite(mpiexec, size, tier, TESTS / "ranks")


@pytest.mark.full
def test_products_of_two_axes_on_four_ranks(mpiexec):
    run_suite(mpiexec, 4, "not full and not matrix", TESTS / "ranks" / "strategies" / "test_layouts.py")


def run_suite(mpiexec, size, tier, *files):
    """Run the tests of ``tier`` in ``files`` on ``size`` ranks."""
    done = mpiexec(size, [*PYTEST, "-m", tier, *map(str, files)], timeout=1500)
    print(done.stdout)
    assert done.returncode == 0, f"the rank suite failed at {size} ranks:\n{done.stdout[-20000:]}"
    assert f"ranks: {size}" in done.stdout
    assert " passed" in done.stdout


def write_suite(folder, body):
    """Write a rank suite of one module into ``folder`` and return the arguments that run it."""
    ranks = folder / "ranks"
    ranks.mkdir()
    shutil.copy(TESTS / "conftest.py", folder)
    shutil.copy(TESTS / "ranks" / "conftest.py", ranks)
    (ranks / "test_sample.py").write_text("import os, time\nimport pytest\n" + textwrap.dedent(body))
    return [*PYTEST, "--import-mode=importlib", "-o", f"pythonpath={TESTS}", "--rootdir", str(folder), str(ranks)]


def test_one_failing_rank_fails_the_suite_and_is_named(mpiexec, tmp_path):
    arguments = write_suite(
        tmp_path,
        """
        def test_one_rank(comm):
            assert comm.rank != 1, "only rank one"

        def test_setup_of_one_rank(failing):
            raise AssertionError("never called, on no rank")

        @pytest.fixture
        def failing(comm):
            assert comm.rank != 2, "only the setup of rank two"

        def test_skip_on_one_rank(comm):
            if comm.rank == 0:
                pytest.skip("here only")

        def test_goes_on(comm):
            comm.barrier()
        """,
    )
    done = mpiexec(3, arguments)
    assert done.returncode == 1, done.stdout
    assert "failed on rank 1 of 3" in done.stdout and "only rank one" in done.stdout
    assert "failed on rank 2 of 3" in done.stdout and "only the setup of rank two" in done.stdout
    assert "never called" not in done.stdout.replace('raise AssertionError("never called', "")
    assert "the ranks disagree: ['skipped', 'passed', 'passed']" in done.stdout
    assert "2 failed, 1 passed, 1 error" in done.stdout


@pytest.mark.full
def test_rank_that_fails_while_others_wait_ends_the_job(mpiexec, tmp_path):
    arguments = write_suite(
        tmp_path,
        """
        def test_others_wait(comm):
            assert comm.rank != 1, "only rank one"
            comm.barrier()
        """,
    )
    done = mpiexec(2, arguments, env={"HPCDIST_TEST_PATIENCE_S": "1"})
    assert done.returncode != 0
    assert "[rank 1]" in done.stdout and "only rank one" in done.stdout and "have not come to agree" in done.stdout


@cases(
    "body, shown",
    ("time.sleep(100) if comm.rank == 0 else comm.barrier()", "test_end"),
    ("os._exit(5) if comm.rank == 0 else comm.barrier()", ""),
    ids=["hangs", "dies"],
)
@pytest.mark.full
def test_rank_that_never_returns_ends_the_job(mpiexec, tmp_path, body, shown):
    arguments = write_suite(tmp_path, f"def test_end(comm):\n    {body}\n")
    done = mpiexec(2, arguments, env={"HPCDIST_TEST_LIMIT_S": "3"})
    assert done.returncode != 0
    assert shown in done.stdout


def test_start_that_exceeds_its_time_limit_fails(mpiexec):
    with pytest.raises(pytest.fail.Exception, match="no end after 3 s"):
        mpiexec(2, ["-c", "import time; time.sleep(60)"], timeout=3)
