"""Pipelines, tensor ranks and products on the double of GPUs: the numbers of the CPU, and no wait but a message's.

A message of a pipeline costs its sender one wait, and its receiver one where the library takes pointers of the device;
so does a sum over the tensor axis. Nothing waits for a layer or a micro-batch; losses are brought once a step. Messages
use the memory that they were given until they are waited for: none is given out again, or written, before.
"""

from pathlib import Path
from types import ModuleType

import late_messages
import numpy as np
import pytest
from gpu_products import PRODUCTS, STEPS
from gpu_runs import Trained, check_same, with_pointers, write_text
from gpu_watch import Watch, expected_sites

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads import run_threads


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> dict[str, object]:
    return {"data.path": write_text(tmp_path / "text.txt", rng), "precision.mode": "float32"}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_on_the_gpu_is_that_of_the_cpu(
    gpu: ModuleType, text: dict[str, object], product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ranks, keys), pointers = PRODUCTS[product], list(PRODUCTS).index(product) % 2 == 0
    settings = text | keys

    def on_device(comm: Communicator) -> tuple[Trained, Watch]:
        if pointers:
            with_pointers(comm)
        watch = Watch(gpu, pointers)
        comm.events = watch  # type: ignore[misc]
        return Trained(comm, {**settings, "run.device": "gpu"}, watch.before_step, watch.after_step), watch

    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    late_messages.install(monkeypatch)
    found = run_threads(ranks, on_device)
    check_same(host, [run for run, _ in found], 1e-5, leave_out=("qkv.bias",))
    for run, watch in found:
        assert len(watch.steps) == STEPS
        for sites, messages in watch.steps:
            assert +sites == +expected_sites(gpu, run, messages, pointers)
            assert messages.total() > 0
