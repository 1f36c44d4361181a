"""Every kind of model over real messages, on 1 to 4 ranks, matches one process."""

import pytest

from harness.inputs import KINDS, STEPS, keys_of, write_data
from harness.trainings import check_training, run_single_process, trainer_of

WAYS = {
    "replicas": {},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "pipeline": {"parallel.pipeline": 0, "parallel.microbatches": 4},
    "tensor": {"parallel.tensor": 0, "parallel.sequence_parallel": "true"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full_except("gpt with the options of Llama-replicas", "encoder-zero2", "convnet-pipeline")
def test_rank_training_of_every_kind_matches_one_process(comm, folder, kind, way):
    if way == "tensor" and (kind.startswith("convnet") or comm.size not in (2,)):
        pytest.skip("a convnet is not cut, and two heads of keys and values are for two ranks")
    if comm.rank == 0:
        write_data(folder)
    comm.barrier()
    ways = {key: comm.size if value == 0 else value for key, value in WAYS[way].items()}
    keys = keys_of(kind, folder) | ways
    expected, together = run_single_process(keys, STEPS), trainer_of(comm, keys)
    check_training(together, expected, STEPS, 1e-11)
    together.close()
