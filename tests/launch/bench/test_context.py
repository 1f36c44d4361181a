"""The purpose of a context axis: four ranks train samples that do not fit into the memory of one rank."""

import pytest

from benchmarks import harness

pytestmark = pytest.mark.full

SIZES = ["--layers", "8", "--hidden", "64", "--context", "512", "--samples", "1"]


def test_context_too_long_for_one_rank_trains_on_four_ranks(mpi):
    """The memory of each process is limited.

    Without a context axis, activations of 4 T tokens need 1.1 times the memory of T tokens on one rank.
    """
    done = harness.launch(4, ["-m", "benchmarks", "context", "--memory", *SIZES], capture=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["one rank"][2] == "512" and rows["ring"][1] == "2,048"
    assert max(float(rows[method][3]) for method in ("ring", "all_to_all")) <= 1.1
    assert done.stdout.strip().endswith("one rank: MemoryError, ring: a step, all_to_all: a step")
