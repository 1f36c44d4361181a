"""Checkpoints of a training: cost for the steps of blocking saves and of background saves.

    python -m benchmarks background_saves --ranks 2
    python -m benchmarks background_saves --device gpu --layers 12 --hidden 768 --context 512 -o saves.h5 --anonymous

Every rank trains a GPT with ZeRO-1. A round has plain steps, a blocking save, and a background save with the steps
until the save is complete. A background save copies the state (of a GPU: into pinned memory); threads write the copy
during the steps. The slowest rank's time counts, from a barrier until its GPU is done. "x plain" is relative to a plain
step. The last checkpoint is verified. `--device gpu` ends with exit code 69 without a GPU.
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
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import staging
from hpcdist.checkpoint.listing import verify
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned
from hpcdist.training.run.saving import BackgroundCheckpointSaver, CheckpointSaver

SCHEMA, RANKS = "hpcdist.benchmark.gpu_checkpoint", 1

SIZES: Final = {"layers": 4, "hidden": 256, "context": 128, "samples": 4}
DEVICES: Final = {"cpu": None, "gpu": None}  # the first is the default
OPTIONS: Final = {"device": DEVICES, **SIZES, "rounds": 4, "plain": 8, "directory": ""}
WARM_UP: Final = 3
MOST_BESIDE: Final = 500  # maximum steps during a background save
STEPS: Final = 1 << 20  # steps of the recipe; the learning rate does not matter here


def measure(chosen: argparse.Namespace, session: Session) -> Results | None:
    comm = session.comm
    harness.at_least(chosen, rounds=1, plain=1)
    keys = gpt_keys(chosen, **{"run.global_batch": chosen.samples * comm.size, "run.device": chosen.device})
    training = Training(session, [*texts(keys), "parallel.strategy=zero1"], STEPS)
    with tempfile.TemporaryDirectory(dir=chosen.directory or None) as temporary:
        folder = Path(comm.broadcast_object(temporary))
        seconds, state_bytes, last = _rounds(chosen, session, training, folder)
        damage = verify(last).damage if comm.rank == 0 else ()
        if comm.broadcast_object(bool(damage)):
            raise SystemExit(f"{last.name} is damaged: {'; '.join(damage)}")
        comm.barrier()  # all reads are done before the folder is removed
    training.close()
    kinds = ";".join(seconds)
    arrays = {f"{name}_s": np.array(values).max(axis=1) for name, values in seconds.items()}
    about = {"kinds": kinds, "state_bytes": state_bytes}
    if chosen.device == "gpu":
        about |= card(comm) | {"pinned_memory": staging.refusal() or "pinned"}
    return Results(arrays, dict.fromkeys(arrays, "steps"), about)


class Steps:
    """Steps of ``training`` with a background saver. Calling an instance runs a step. Collective."""

    def __init__(self, training: Training, saver: BackgroundCheckpointSaver) -> None:
        self._training, self._saver = training, saver
        self.sums = np.zeros(2)

    def read(self) -> None:
        self._step = self._training.next_step(self._saver.numbers())

    def __call__(self) -> None:
        self.sums = self._step().stop_requests


def _rounds(
    chosen: argparse.Namespace, session: Session, training: Training, folder: Path
) -> tuple[dict[str, list[Any]], int, Path]:
    """Return the seconds of all ranks by kind of step, the state's bytes, and the last checkpoint. Collective."""
    comm, trainer = session.comm, training.trainer
    background, blocking = BackgroundCheckpointSaver(trainer, folder / "a"), CheckpointSaver(trainer, folder / "b")
    seconds: dict[str, list[Any]] = {name: [] for name in ("plain", "blocking", "saving", "beside", "complete")}
    step, last = Steps(training, background), folder

    def timed(*calls: Callable[[], Any]) -> list[float]:
        if step in calls:
            step.read()

        def run_all() -> None:
            for call in calls:
                call()
            backend.synchronise(trainer.exchange.parameters.array)

        return comm.allgather_object(harness.seconds(run_all, comm))

    for number in range(1 + chosen.rounds):
        plain = [timed(step) for _ in range(chosen.plain if number else WARM_UP)]
        blocking_s = timed(lambda: blocking.save(training.number))
        saving = timed(step, lambda: background.save(training.number))
        last, beside = folder / "a" / f"step-{training.number}", list[list[float]]()
        while background.is_busy and len(beside) < MOST_BESIDE:
            beside.append(timed(step, lambda: background.settle(step.sums)))
        background.finish()
        if number:
            seconds["plain"] += plain
            seconds["blocking"].append(blocking_s)
            seconds["saving"].append(saving)
            seconds["beside"] += beside
            seconds["complete"].append(np.sum([saving, *beside], axis=0))
    nbytes = sum(piece.array.nbytes for piece in trainer.exchange.pieces())
    return seconds, sum(comm.allgather_object(nbytes)), last


def ratios(results: Results) -> harness.Ratios:
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
        kind_s = float(np.median(results.arrays[f"{name}_s"]))
        speed = "" if name == "beside" else f"{nbytes / (kind_s - (name == 'saving') * np.median(plain)) / 1e9:.3g}"
        rows.append([name, f"{1e3 * kind_s:.4g}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", speed])
    where = [str(results.attributes[name]) for name in ("gpu", "pinned_memory") if name in results.attributes]
    return [", ".join([f"state of {nbytes / 1e6:.1f} MB", *where]), *aligned(rows)]
