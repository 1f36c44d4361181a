"""What a context axis is for: tokens that one rank cannot hold, on four that have no more memory each."""

import pytest

from benchmarks import harness

pytestmark = pytest.mark.full

SIZES = ["--layers", "8", "--hidden", "64", "--context", "512", "--samples", "1"]


def test_a_context_that_one_rank_cannot_hold_trains_on_four(mpi):
    """The memory of each process has a cap; without one, activations of 4 T tokens on 4 ranks are 1.1 of T on one."""
    done = harness.launch(4, ["-m", "benchmarks", "context", "--memory", *SIZES], capture=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["one rank"][2] == "512" and rows["ring"][1] == "2,048"
    assert max(float(rows[method][3]) for method in ("ring", "all_to_all")) <= 1.1
    assert done.stdout.strip().endswith("one rank: MemoryError, ring: a step, all_to_all: a step")
