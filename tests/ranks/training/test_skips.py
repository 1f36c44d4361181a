"""Skip connections over real messages: the bits of one process."""

import pytest

from harness.pipelines import run, run_single_process, schedule_passes


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_rank_skip_connections_have_the_bits_of_one_process(comm, name, chunks):
    if not 2 <= comm.size <= 4:
        pytest.skip("for 2 to 4 ranks")
    loss, evaluated, expected = run_single_process(8)
    local_data, of_all, gradients = run(comm, schedule_passes(name, comm.size, chunks, 8))
    assert (local_data, of_all) == (loss, evaluated)
    assert gradients and gradients == {key: expected[key] for key in gradients}
    assert sum(comm.allgather_object(len(gradients))) == len(expected)
