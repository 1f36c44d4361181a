"""Checkpoints of a training on GPUs: what one costs the steps when they wait for it, and in the background.

    python -m benchmarks gpu.checkpoint --layers 12 --hidden 768 -o gpu_checkpoint.h5 --anonymous

A GPT is trained on every rank, ZeRO-1. In each round there are some plain steps, a blocking save, and a save in the
background with the steps that follow until it is complete: first a copy of the state into pinned memory, then threads
that write it beside the steps. Times are those of the slowest rank, from a barrier until its GPU is done. "x plain" is
that of a step which begins a save, and of one beside it, over a plain one. What was saved last is verified, digests
included. Exit code 69 without a GPU.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from benchmarks.training.turns import Training, gpt_keys, texts
from hpcdist.arrays.gpu import device, staging
from hpcdist.checkpoint.verify import verify
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned
from hpcdist.training.run.saving import BackgroundCheckpointSaver, CheckpointSaver

SCHEMA, RANKS, ON = "hpcdist.benchmark.gpu_checkpoint", 1, "gpu"

SIZES: Final = {"layers": 12, "hidden": 768, "context": 512, "samples": 4}
OPTIONS: Final = {**SIZES, "rounds": 4, "plain": 8, "directory": ""}
WARM_UP: Final = 3
MOST_BESIDE: Final = 500  # steps beside a save
STEPS: Final = 1 << 20  # of the recipe: the rate of learning is no matter here


def measure(chosen: argparse.Namespace, session: Session) -> Results | None:
    """Return the seconds of all kinds of steps. Collective."""
    comm = session.comm
    keys = gpt_keys(chosen, **{"run.global_batch": chosen.samples * comm.size, "run.device": "gpu"})
    training = Training(session, [*texts(keys), "parallel.strategy=zero1"], STEPS)
    with tempfile.TemporaryDirectory(dir=chosen.directory or None) as own:
        folder = Path(comm.broadcast_object(own))
        seconds, state_bytes, last = _rounds(chosen, session, training, folder)
        damage = verify(last).damage if comm.rank == 0 else ()
        if comm.broadcast_object(bool(damage)):
            raise SystemExit(f"{last.name} is damaged: {'; '.join(damage)}")
        comm.barrier()  # nobody removes what is still read
    training.close()
    kinds = ";".join(seconds)
    arrays = {f"{name}_s": np.array(values).max(axis=1) for name, values in seconds.items()}
    about = card(comm) | {"kinds": kinds, "state_bytes": state_bytes, "pinned_memory": staging.refusal() or "pinned"}
    return Results(arrays, dict.fromkeys(arrays, "steps"), about)


class Steps:
    """Steps of ``training`` that a saver in the background is told of. Calling one is collective."""

    def __init__(self, training: Training, saver: BackgroundCheckpointSaver) -> None:
        self._training, self._saver = training, saver
        self.sums = np.zeros(2)

    def read(self) -> None:
        """Read the batch of the next one (local)."""
        self._step = self._training.next_step(self._saver.numbers())

    def __call__(self) -> None:
        """Make it."""
        self.sums = self._step().stop_requests


def _rounds(
    chosen: argparse.Namespace, session: Session, training: Training, folder: Path
) -> tuple[dict[str, list[Any]], int, Path]:
    """Return the seconds of all ranks by kind, the bytes of the state, and the last checkpoint. Collective."""
    comm, trainer = session.comm, training.trainer
    background, blocking = BackgroundCheckpointSaver(trainer, folder / "a"), CheckpointSaver(trainer, folder / "b")
    seconds: dict[str, list[Any]] = {name: [] for name in ("plain", "blocking", "saving", "beside", "complete")}
    step, last = Steps(training, background), folder

    def timed(*calls: Callable[[], Any]) -> list[float]:
        if step in calls:
            step.read()

        def together() -> None:
            for call in calls:
                call()
            device.synchronise()

        return comm.allgather_object(harness.seconds(together, comm))

    for number in range(1 + chosen.rounds):
        plain = [timed(step) for _ in range(chosen.plain if number else WARM_UP)]
        blocked = timed(lambda: blocking.save(training.number))
        saving = timed(step, lambda: background.save(training.number))
        last, beside = folder / "a" / f"step-{training.number}", list[list[float]]()
        while background.is_busy and len(beside) < MOST_BESIDE:
            beside.append(timed(step, lambda: background.settle(step.sums)))
        background.finish()
        if number:
            seconds["plain"] += plain
            seconds["blocking"].append(blocked)
            seconds["saving"].append(saving)
            seconds["beside"] += beside
            seconds["complete"].append(np.sum([saving, *beside], axis=0))
    nbytes = sum(piece.array.nbytes for piece in trainer.exchange.pieces())
    return seconds, sum(comm.allgather_object(nbytes)), last


def ratios(results: Results) -> harness.Ratios:
    """Return seconds over the median of a plain step."""
    plain = float(np.median(results.arrays["plain_s"]))
    names = [name for name in results.names("kinds")[1:] if len(results.arrays[f"{name}_s"])]
    return {name: results.arrays[f"{name}_s"] / plain for name in names}


def lines(results: Results) -> Sequence[str]:
    nbytes = int(results.attributes["state_bytes"])
    rows = [["", "ms", "x plain", "interval", "GB/s of the state"]]
    plain = results.arrays["plain_s"]
    rows.append(["plain", f"{1e3 * np.median(plain):.4g}", "1.000", "", ""])
    for name, samples in ratios(results).items():
        ratio, low, high = harness.interval(samples)
        own_s = float(np.median(results.arrays[f"{name}_s"]))
        speed = "" if name == "beside" else f"{nbytes / (own_s - (name == 'saving') * np.median(plain)) / 1e9:.3g}"
        rows.append([name, f"{1e3 * own_s:.4g}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", speed])
    about = f"{results.attributes['gpu']}: a state of {nbytes / 1e6:.1f} MB, {results.attributes['pinned_memory']}"
    return [about, *aligned(rows)]
