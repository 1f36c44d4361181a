"""A gpt over tensor ranks on the double of GPUs: the numbers of the CPU, with necessary waits only."""

from collections import Counter

import pytest

from harness.devices import batches_of, place_batches
from harness.inputs import write_text
from harness.trainings import Trained as Run
from harness.trainings import check_same
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.gpu import nccl
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.tensor.model import cut_model
from stubs.gpu import nccl_double

TENSOR = {"parallel.tensor": 2, "parallel.sequence_parallel": "true", "parallel.microbatches": 2}
TENSOR |= {"precision.mode": "float64", "model.dropout": 0.2}


@pytest.mark.full
def test_tensor_training_on_the_gpu_matches_the_cpu(gpu, tmp_path, rng):
    settings = {"data.path": write_text(tmp_path / "text.txt", rng), **TENSOR}
    host = run_threads(2, lambda comm: Run(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(2, lambda comm: Run(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    check_same(host, device, 1e-12)


@pytest.mark.parametrize(
    ("by_rows", "algorithm"), [(False, "native"), (True, "native"), (False, "nccl"), (True, "nccl")]
)
@pytest.mark.full_except("True-native")
def test_only_messages_are_copied_to_the_host(gpu, rng, by_rows, algorithm, monkeypatch):
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")
    config = ModelConfig(layers=2, hidden=12, heads=3, vocabulary=11)
    batches = batches_of("gpt", rng)

    def body(comm):
        model = cut_model(models.build(config, "float64", context=7), comm, algorithm, sequence_parallel=by_rows)
        store, gradient = (FlatStore(model.layout, model.dtype, on="gpu") for _ in range(2))
        parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena(on="gpu")
        for stage in into:
            stage.begin_step()
        before = gpu.LOG.sites()
        for number, (x, targets) in enumerate(place_batches(batches, "gpu")):
            logits = model.forward(parameters, x, arena, number)
            model.loss.forward(logits, targets, model.operations, arena.saved(model.stages[-1].layer, number))
            model.backward(parameters, into, 1.0, arena, number)
        comm.barrier()
        return Counter(gpu.LOG.sites()) - Counter(before)

    result = run_threads(3, body)[0]
    messages = ("handover", "staging")  # what these bring to the host, they do on pointers no more
    waits = {site: count for site, count in result.items() if site[0] == gpu.D2H and not site[1].startswith(messages)}
    staged = [site for site in result if site[1].startswith(messages)]
    assert waits == {} and bool(staged) == (algorithm == "native" or by_rows)  # 28 rows are not the same for 3 ranks
