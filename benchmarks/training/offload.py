"""Training with model states larger than a memory cap, with and without offloading to files, in one run.

    python -m benchmarks offload
    python -m benchmarks offload --ranks 2 --directory /local/scratch --output offload.h5 --anonymous

Memory: model states (16 bytes per parameter, divided by the ranks) are at least three times the cap. The kernel
enforces the cap on additional private writable memory (RLIMIT_DATA). With all states in files, zero3 runs some steps,
evaluates, saves a checkpoint and restores it, while its PSS is sampled. Then the same recipe tries without files. The
page cache, which keeps file contents while memory is free, does not count: it belongs to no process.

Time: without a cap, both alternate step by step. "cached" reads from the page cache. "from disk" starts each step with
an empty page cache, and ends when all data is on disk.
"""

import argparse
import gc
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training.turns import Training, cap, fits, texts
from hpcdist import models
from hpcdist.arrays.filestore import FileStore
from hpcdist.comm.start import Session
from hpcdist.reporting.units import parse_bytes
from hpcdist.telemetry.provenance import pss_bytes
from hpcdist.training.build.state import restore_state
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-offload", 1, "training/2026-11-21-offload.h5"
SMALL, WORSE = {"steps": 3}, 1.6

STATE_BYTES: Final = 16  # bytes per parameter: value, gradient, two moments
WAYS: Final = ("in memory", "cached", "from disk")
MIB: Final = 1 << 20
OPTIONS: Final = {"layers": 10, "hidden": 768, "steps": 5}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="samples per step, of 128 tokens each (default: 1 per rank)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "lamb"))
    parser.add_argument("--cap", type=parse_bytes, help="memory cap per rank in bytes (default: a third of its states)")
    parser.add_argument("--directory", type=Path, help="folder for the files (default: the temporary directory)")


@contextmanager
def peak_pss() -> Iterator[list[float]]:
    """Sample the PSS of this process in a thread. The yielded list contains the peak after the block."""
    peak, done = [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], pss_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def keys_of(chosen: argparse.Namespace, folder: Path | None) -> dict[str, object]:
    keys: dict[str, object] = {
        "model.layers": chosen.layers,
        "model.hidden": chosen.hidden,
        "model.heads": chosen.hidden // 64,
        "data.context": 128,
        "run.global_batch": chosen.batch,
        "run.validation_samples": chosen.batch,
        "optimizer.name": chosen.optimizer,
        "parallel.strategy": "zero3",
        "communication.algorithm": "ring",
    }
    if folder is not None:
        keys |= {"zero.offload_optimizer": "file", "zero.offload_parameters": "file", "zero.offload_directory": folder}
    return keys


@contextmanager
def training_of(session: Session, chosen: argparse.Namespace, folder: Path | None) -> Iterator[Training]:
    training = Training(session, keys_of(chosen, folder), chosen.steps + 3)
    try:
        yield training
    finally:
        training.close()


def step(session: Session, training: Training, *, to_disk: bool = False) -> float:
    exchange, call = training.trainer.exchange, training.next_step()
    held = [exchange.parameters, exchange.gradients, *exchange.update.optimizer.slots.values()]  # type: ignore[attr-defined]
    stores = [store for store in held if to_disk and isinstance(store, FileStore)]

    def forget() -> None:
        for store in stores:
            store.forget()

    def run_step() -> None:
        call()
        forget()

    forget()
    longest = np.array([harness.seconds(run_step, session.comm)])
    session.comm.allreduce(longest, "max")
    return float(longest[0])


def under_cap(session: Session, chosen: argparse.Namespace, folder: Path, limit: int) -> dict[str, float]:
    """Train under a memory cap and return the peaks in bytes, on the rank with the highest peak. Collective."""
    comm = session.comm
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoints = Path(comm.broadcast_object(temporary))
        baseline = pss_bytes()
        with cap(limit), peak_pss() as peak, training_of(session, chosen, folder) as training:
            trainer = training.trainer
            for _ in range(2):
                step(session, training)
            loss = mean_validation_loss(trainer)
            restore_state(trainer, CheckpointSource(CheckpointSaver(trainer, checkpoints).save(2)))
            assert mean_validation_loss(trainer) == loss
            step(session, training)
        comm.barrier()
    worst = np.array([peak[0] - baseline, trainer.ledger.peak_total], np.float64)
    comm.allreduce(worst, "max")
    return {"peak_pss_bytes": float(worst[0]), "peak_ledger_bytes": float(worst[1])}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    chosen.batch = chosen.batch or comm.size
    folder = Path(comm.broadcast_object(str(chosen.directory or tempfile.gettempdir())))
    small = argparse.Namespace(**{**vars(chosen), "layers": 1, "hidden": 64})
    for state_folder in (None, folder):  # compiles kernels and splits communicators
        with training_of(session, small, state_folder) as training:
            step(session, training)
    gc.collect()
    recipe = recipes.load(None, texts(keys_of(chosen, None)), {}).recipe
    parameters = models.build(recipe.model, "float32", context=recipe.data.context).layout.parameters
    states = STATE_BYTES * parameters // comm.size
    limit = chosen.cap or states // 3
    memory = under_cap(session, chosen, folder, limit)
    gc.collect()
    without = fits(session, keys_of(chosen, None), limit)
    gc.collect()
    with ExitStack() as open_:
        calls = {}
        for name, state_folder in zip(WAYS, (None, folder, folder), strict=True):
            training = open_.enter_context(training_of(session, chosen, state_folder))
            calls[name] = partial(step, session, training, to_disk=name == "from disk")
        times = harness.alternate(calls, chosen.steps, warm_up=1)
    about = {"ranks": comm.size, "parameters": parameters, "optimizer": chosen.optimizer, "state_bytes": states}
    about |= {"cap_bytes": limit, "fits_in_memory": float(without), **memory, "ways": ",".join(WAYS)}
    return Results({"step_s": np.array(list(times.values()))}, {"step_s": "ways, steps"}, about)


def lines(results: Results) -> Sequence[str]:
    about = results.attributes
    states, limit, pss, ledger = (
        about[name] / MIB for name in ("state_bytes", "cap_bytes", "peak_pss_bytes", "peak_ledger_bytes")
    )
    return [
        f"{about['parameters'] / 1e6:.1f} M parameters, {about['optimizer']}, float32, zero3",
        f"states of a rank: {states:.0f} MiB; cap: {limit:.0f} MiB ({states / limit:.2f}x smaller)",
        f"in files, under the cap: peak PSS {pss:.0f} MiB above the start, peak of the ledger {ledger:.0f} MiB",
        f"in memory, under the cap: {'it fits' if about['fits_in_memory'] else 'MemoryError'}",
        *harness.time_table(results.arrays["step_s"], WAYS),
    ]


def ratios(results):
    return harness.over_base(results.arrays["step_s"], WAYS)
