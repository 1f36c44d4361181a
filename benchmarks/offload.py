"""Training states that are larger than a cap on memory, with and without files, in one run.

    python benchmarks/offload.py
    mpirun -n 2 python benchmarks/offload.py --directory /local/scratch --output offload.h5 --anonymous

First the memory: model states of 16 bytes a parameter (divided by the ranks) are at least three times the cap. Under a
cap that the kernel enforces (RLIMIT_DATA: what the process may have of private, writable memory beyond what it had
before), zero3 with optimizer state, parameters and gradients in files takes some steps, evaluates, saves a checkpoint
and restores it. Its PSS (/proc/self/smaps_rollup) is sampled all the while. Then the same recipe without files tries
under the same cap. Pages of the page cache, where the kernel keeps what files hold while memory is free, are in neither
figure: they belong to no process, and a job whose memory is capped by its cgroup loses them first.

Then the time: without a cap the two take turns, a step each. "cached" reads what the page cache still has; "from disk"
begins each step without any of it in memory and ends it when all is on the disk. Medians over the steps of the slowest
rank are printed; raw times go to the HDF5 file.
"""

import argparse
import gc
import resource
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcdist import models
from hpcdist.arrays.filestore import FileStore
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.hdf5 import files
from hpcdist.reporting.units import parse_bytes
from hpcdist.telemetry.provenance import provenance, pss_bytes
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.state import restore_state
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import microbatches
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STATE_BYTES = 16  # of each parameter: itself, its gradient, two moments
WAYS = ("in memory", "cached", "from disk")
CONTEXT = 128
MIB = 1 << 20


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, help="samples of a step, of 128 tokens each (default: one for each rank)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "lamb"))
    parser.add_argument("--cap", type=parse_bytes, help="bytes of memory of a rank (default: a third of its states)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each way (default 5)")
    parser.add_argument("--directory", type=Path, help="where files go (default: the temporary directory)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def data_bytes() -> int:
    """Return what counts against RLIMIT_DATA."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmData")


class Peak:
    """Samples the PSS in a thread. A context manager."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, pss_bytes())


class Cap:
    """Lets this process take ``nbytes`` more of private memory than it has now. A context manager."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + self._nbytes, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


def recipe_of(wanted: argparse.Namespace, folder: Path | None) -> recipes.Recipe:
    """Return the training; its states are in files in ``folder``, if one is given."""
    keys: dict[str, object] = {
        "model.layers": wanted.layers,
        "model.hidden": wanted.hidden,
        "model.heads": wanted.hidden // 64,
        "data.context": CONTEXT,
        "run.global_batch": wanted.batch,
        "run.validation_samples": wanted.batch,
        "optimizer.name": wanted.optimizer,
        "parallel.strategy": "zero3",
        "communication.algorithm": "ring",
    }
    if folder is not None:
        keys |= {"zero.offload_optimizer": "file", "zero.offload_parameters": "file", "zero.offload_directory": folder}
    return recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {}).recipe


def trainer_of(session: start.Session, wanted: argparse.Namespace, folder: Path | None) -> Trainer:
    """Return the training, assembled. Collective."""
    return assemble(session, recipe_of(wanted, folder))


def stores(trainer: Trainer) -> list[FileStore]:
    """Return what this rank keeps in files."""
    exchange = trainer.exchange
    kept = [exchange.parameters, exchange.gradients, *exchange.sharded_update.optimizer.slots.values()]
    return [store for store in kept if isinstance(store, FileStore)]


def step(trainer: Trainer, number: int, *, to_disk: bool = False) -> float:
    """Take step ``number`` and return its seconds, of the slowest rank. Collective."""
    trainer = replace(trainer, first_step=number - 1)
    with trainer.batches(number) as batches:
        parts = microbatches(next(iter(batches)), trainer.recipe.parallel.microbatches)
    if to_disk:
        for store in stores(trainer):
            store.forget()
    trainer.comm.barrier()
    began = time.perf_counter()
    trainer.executor.run(trainer.operations, parts, trainer.recipe.run.global_batch, number, np.zeros(2))
    if to_disk:
        for store in stores(trainer):
            store.forget()
    took = np.array([time.perf_counter() - began])
    trainer.comm.allreduce(took, "max")
    return float(took[0])


def fits(session: start.Session, wanted: argparse.Namespace, cap: int) -> bool:
    """Return whether the run without files takes a step under the cap. Collective."""
    with Cap(cap):
        try:
            step(trainer_of(session, wanted, None), 1)
            here = True
        except MemoryError:
            here = False
    return any(session.comm.allgather_object(here))


def under_cap(session: start.Session, wanted: argparse.Namespace, folder: Path, cap: int) -> dict[str, float]:
    """Return the peaks of memory in bytes, of the rank that has most. Collective."""
    comm = session.comm
    with tempfile.TemporaryDirectory(dir=folder) as own:
        checkpoints = Path(comm.broadcast_object(own))
        baseline = pss_bytes()
        with Cap(cap), Peak() as peak:
            trainer = trainer_of(session, wanted, folder)
            for number in (1, 2):
                step(trainer, number)
            loss = mean_validation_loss(trainer)
            restore_state(trainer, CheckpointSource(CheckpointSaver(trainer, checkpoints).save(2)))
            assert mean_validation_loss(trainer) == loss
            step(trainer, 3)
        comm.barrier()
    worst = np.array([peak.bytes - baseline, trainer.ledger.peak_total], np.float64)
    comm.allreduce(worst, "max")
    return {"peak_pss_bytes": float(worst[0]), "peak_ledger_bytes": float(worst[1])}


def in_turns(session: start.Session, wanted: argparse.Namespace, folder: Path) -> np.ndarray:
    """Return seconds of a step, (ways, steps), after one of each that is not counted. Collective."""
    runs = [trainer_of(session, wanted, place_of_files) for place_of_files in (None, folder, folder)]
    found = np.zeros((len(WAYS), wanted.steps + 1))
    for number in range(wanted.steps + 1):
        for way, trainer in enumerate(runs):
            found[way, number] = step(trainer, number + 1, to_disk=WAYS[way] == "from disk")
    return found[:, 1:]


def write(wanted: argparse.Namespace, times: np.ndarray, about: dict[str, float | str], session: start.Session) -> None:
    """Write `step_s` (ways, steps), the figures of the memory, and the provenance."""
    files.write_contiguous(
        wanted.output,
        {"step_s": times},
        {**provenance(mpi_library=session.library, anonymous=wanted.anonymous), **about, "ways": ",".join(WAYS)},
        {"step_s": {"dims": "ways, steps"}},
        schema="hpcdist-benchmark-offload",
        version=1,
    )


def main() -> None:
    """Measure and print. Collective."""
    wanted = arguments()
    session = start.start()
    wanted.batch = wanted.batch or session.comm.size
    output_file.exit_unless_writable(session, wanted.output)
    comm = session.comm
    folder = Path(comm.broadcast_object(str(wanted.directory or tempfile.gettempdir())))
    small = argparse.Namespace(**{**vars(wanted), "layers": 1, "hidden": 64})
    for place_of_files in (None, folder):  # kernels are compiled and communicators split
        step(trainer_of(session, small, place_of_files), 1)
    gc.collect()
    parameters = models.build(recipe_of(wanted, None).model, "float32", context=CONTEXT).layout.parameters
    states = STATE_BYTES * parameters // comm.size
    cap = wanted.cap or states // 3
    memory = under_cap(session, wanted, folder, cap)
    gc.collect()
    without = fits(session, wanted, cap)
    gc.collect()
    times = in_turns(session, wanted, folder)
    about: dict[str, float | str] = {
        "ranks": comm.size,
        "parameters": parameters,
        "optimizer": wanted.optimizer,
        "state_bytes": states,
        "cap_bytes": cap,
        "fits_in_memory": float(without),
        **memory,
    }
    if comm.rank == 0:
        print(f"{comm.size} ranks, {parameters / 1e6:.1f} M parameters, {wanted.optimizer}, float32, zero3")
        print(f"states of a rank: {states / MIB:.0f} MiB; cap: {cap / MIB:.0f} MiB ({states / cap:.2f}x smaller)")
        pss, ledger = memory["peak_pss_bytes"] / MIB, memory["peak_ledger_bytes"] / MIB
        print(f"in files, under the cap: peak PSS {pss:.0f} MiB above the start, peak of the ledger {ledger:.0f} MiB")
        print(f"in memory, under the cap: {'it fits' if without else 'MemoryError'}")
        medians = np.median(times, axis=1)
        for way, median in zip(WAYS, medians, strict=True):
            print(f"{way:>10}: {median:7.3f} s a step, {median / medians[0]:5.2f}x")
        if wanted.output is not None:
            write(wanted, times, about, session)
    session.leave(0)


if __name__ == "__main__":
    main()
