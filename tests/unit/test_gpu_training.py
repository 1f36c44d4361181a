"""Whole training steps with run.device = "gpu" on the double: every architecture gives the numbers of the CPU.

Between two steps nothing crosses to or from the device but the batch, one loss a micro-batch, one norm, and what the
message layer stages: counted for each rank, by the place in the code that asks for it.
"""

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads import run_threads
from hpcdist.strategies.schedule.executor import PHASES
from hpcdist.strategies.schedule.operations import Kind
from hpcdist.training import recipe as recipes
from hpcdist.training.data import microbatches
from hpcdist.training.evaluation import mean_validation_loss
from hpcdist.training.trainer import Trainer, assemble

STEPS = 4
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
SETTINGS = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.tied": "true",
    "data.context": 8,
    "run.steps": STEPS,
    "run.global_batch": 7,
    "run.validation_samples": 5,
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0.5,
    "communication.algorithm": "ring",
    "communication.bucket_bytes": 4096,
}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 3, "run.global_batch": 12}
# An architecture: the numbers of ranks that it runs on, and its keys.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "allreduce": ((1, 2, 4), {"parallel.strategy": "allreduce", "parallel.microbatches": 2}),
    "zero1": ((1, 2, 4), {"parallel.strategy": "zero1", "parallel.microbatches": 2}),
    "zero2": ((1, 2, 4), {"parallel.strategy": "zero2", "parallel.microbatches": 2}),
    "zero3": ((1, 2, 4), {"parallel.strategy": "zero3", "parallel.microbatches": 2}),
    "gpipe": ((2, 4), {**PIPELINE, "parallel.schedule": "gpipe"}),
    "1f1b": ((2, 4), {**PIPELINE, "parallel.schedule": "1f1b"}),
    "1f1b, recomputing": ((2, 4), {**PIPELINE, "parallel.schedule": "1f1b", "parallel.recompute": "true"}),
    "gpipe, recomputing": ((2,), {**PIPELINE, "parallel.schedule": "gpipe", "parallel.recompute": "true"}),
    "1f1b x zero1": ((4,), {**PIPELINE, "parallel.strategy": "zero1"}),
    "pipeline of 4": ((4,), {**PIPELINE, "parallel.pipeline": 4}),
}
CASES = [(name, ranks) for name, (sizes, _) in LAYOUTS.items() for ranks in sizes]
STAGED_TO_HOST = ("send", "isend", "sendrecv", "broadcast", "allreduce", "reduce_scatter", "all_gather", "all_to_all")
STAGED_TO_DEVICE = ("recv", "irecv", *STAGED_TO_HOST[2:])


class Watch:
    """An event sink that counts messages of parameters, gradients and activations: those of ``dtype``."""

    def __init__(self, gpu: ModuleType | None) -> None:
        self._gpu, self._dtype = gpu, "float32"  # what ranks agree on is float64, on the host
        self.counts: Counter[str] = Counter()

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        if dtype == self._dtype and op in (*STAGED_TO_HOST, *STAGED_TO_DEVICE):
            self.counts[op] += 1
            if self._gpu is not None:
                assert threading.current_thread().name not in self._gpu.LOG.pending, f"{op} begins while kernels write"
        return 0

    def end(self, token: int) -> None:
        return


class Seen:
    """What one rank saw of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.losses: list[float] = []
        self.sites: list[Counter[tuple[str, str]]] = []
        self.messages: list[Counter[str]] = []
        self.validation = float("nan")
        self.state: dict[tuple[str, str, int], np.ndarray] = {}


def _abort(code: int) -> None:
    raise SystemExit(code)


def _assembled(comm: Communicator, settings: dict[str, object], pointers: bool = False) -> Trainer:
    comm.handover = Handover(device_pointers=pointers)  # type: ignore[attr-defined]
    recipe = recipes.load(None, [f"{key}={value}" for key, value in {**SETTINGS, **settings}.items()]).recipe
    return assemble(Session(comm, locate(comm, None), "threads", _abort), recipe)


def _trained(gpu: ModuleType | None, comm: Communicator, settings: dict[str, object], pointers: bool = False) -> Seen:
    seen = Seen(_assembled(comm, settings, pointers))
    trainer, name = seen.trainer, threading.current_thread().name
    watch = Watch(gpu if settings.get("precision.mode") != "float64" else None)
    comm.events = watch  # type: ignore[misc]
    with trainer.batches(STEPS) as batches:
        for step, batch in enumerate(batches, start=1):
            before = gpu.LOG.sites(name) if gpu is not None else Counter()
            watch.counts.clear()
            parts = microbatches(trainer.place(batch), trainer.recipe.parallel.microbatches)
            samples = trainer.recipe.run.global_batch
            found = trainer.executor.run(trainer.operations, parts, samples, step, np.zeros(2))
            seen.losses.append(found.loss)
            seen.sites.append((gpu.LOG.sites(name) if gpu is not None else Counter()) - before)
            seen.messages.append(Counter(watch.counts))
    seen.validation = mean_validation_loss(trainer)
    for piece in trainer.exchange.pieces():
        values = piece.array.get() if hasattr(piece.array, "get") else piece.array.copy()
        seen.state[piece.kind, piece.tensor, piece.flat.start] = values
    return seen


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> dict[str, object]:
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(30)]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(rng.choice(words, 1000)))
    return {"data.path": path}


def compare(host: list[Seen], device: list[Seen], bound: float) -> None:
    for ours, theirs in zip(device, host, strict=True):
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=bound)
        np.testing.assert_allclose(ours.validation, theirs.validation, rtol=bound)
        assert ours.state.keys() == theirs.state.keys()
    for kind in {kind for seen in host for kind, _, _ in seen.state}:
        got, want = (
            np.concatenate([values for seen in side for key, values in sorted(seen.state.items()) if key[0] == kind])
            for side in (device, host)
        )
        assert np.linalg.norm(got - want) <= 10 * bound * np.linalg.norm(want), kind


@pytest.mark.parametrize("mode", BOUNDS)
@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_a_run_on_the_gpu_is_that_of_the_cpu(
    gpu: ModuleType, text: dict[str, object], layout: str, ranks: int, mode: str
) -> None:
    settings = {**text, **LAYOUTS[layout][1], "precision.mode": mode}
    host = run_threads(ranks, lambda comm: _trained(None, comm, settings))
    device = run_threads(ranks, lambda comm: _trained(gpu, comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    compare(host, device, BOUNDS[mode])


def expected_sites(gpu: ModuleType, seen: Seen, messages: Counter[str], pointers: bool) -> Counter[tuple[str, str]]:
    """What a step of one rank transfers, and where."""
    trainer = seen.trainer
    samples = len(range(trainer.recipe.run.global_batch)[trainer.data_axis.rank :: trainer.data_axis.size])
    last = len(trainer.model.stages) - 1
    forwards = [op for op in trainer.operations if op.kind is Kind.FORWARD and op.unit == last]
    losses = sum(op.microbatch < samples for op in forwards)
    to_host = sum(messages[op] for op in STAGED_TO_HOST)
    to_device = sum(messages[op] for op in STAGED_TO_DEVICE)
    both = sum(messages[op] for op in ("broadcast", "allreduce", "reduce_scatter", "all_gather"))
    phases = [PHASES.get(op.kind, "communication_s") for op in trainer.operations]
    return Counter(
        {
            (gpu.SYNCHRONISE, "executor.run"): 1 + sum(a != b for a, b in pairwise(phases)),
            (gpu.H2D, "trainer.place"): 2,
            (gpu.D2H, "cross_entropy.forward"): losses,
            (gpu.D2H, "clip.sum_of_squares"): 1,
            (gpu.D2H, "handover.outgoing"): 0 if pointers else to_host - both,
            (gpu.D2H, "handover.both"): 0 if pointers else both,
            (gpu.H2D, "handover.<lambda>"): 0 if pointers else to_device,
            (gpu.SYNCHRONISE, "handover.outgoing"): to_host - both,
            (gpu.SYNCHRONISE, "handover.incoming"): to_device,
        }
    )


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_a_step_transfers_no_more_than_it_must(
    gpu: ModuleType, text: dict[str, object], layout: str, ranks: int, pointers: bool
) -> None:
    settings = {**text, **LAYOUTS[layout][1], "run.device": "gpu"}
    for seen in run_threads(ranks, lambda comm: _trained(gpu, comm, settings, pointers)):
        for sites, messages in zip(seen.sites, seen.messages, strict=True):
            assert +sites == +expected_sites(gpu, seen, messages, pointers)
            assert (messages.total() > 0) == (ranks > 1)
