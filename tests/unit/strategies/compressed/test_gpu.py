"""Compressed gradients with run.device = "gpu" on the double that rejects implicit copies: the numbers of the CPU."""

from functools import partial

import pytest

from harness.trainings import Trained, check_same
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training.build import selection

OWN = {
    "topk": {"compression.density": 0.1},
    "randomk": {"compression.density": 0.1},
    "powersgd": {"compression.rank": 2},
}
BOUNDS = {"powersgd": 1e-3}  # columns are made orthonormal otherwise

ONE_OF_A_KIND = ("int8", "topk", "randomk", "powersgd")  # each sums its own way; what encodes has tests of its own


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
@pytest.mark.full
def test_compressed_training_on_the_gpu_matches_the_cpu(gpu, words, name):
    settings = {**words, **OWN.get(name, {}), "communication.compression": name, "precision.mode": "float32"}
    settings["run.steps"] = 2
    host = run_threads(2, lambda comm: Trained(comm, settings))
    device = run_threads(2, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    for one in (*host, *device):  # which follow the last bit of a sum: a code more or less is a whole step of them
        one.state = {key: values for key, values in one.state.items() if not key[0].startswith("residual")}
    check_same(host, device, BOUNDS.get(name, 5e-4))


@pytest.mark.full
def test_automatic_compression_is_measured_on_the_gpu(gpu, words, monkeypatch):
    monkeypatch.setenv("HPCDIST_TUNING", "on")
    monkeypatch.setattr(selection, "decide", partial(selection.decide, budget_s=0.0))
    candidates = '["int8", "powersgd"]'
    settings = {**words, "communication.compression": "auto", "compression.candidates": candidates, "run.device": "gpu"}

    def run(comm):
        trained = Trained(comm, {**settings, "communication.algorithm": "ring", "precision.mode": "float32"})
        return [row.name for row in trained.trainer.compression.rows]

    assert run_threads(2, run) == [["none", "int8", "powersgd"]] * 2
