"""Time to write and read a checkpoint, relative to plain files and to PyTorch's distributed checkpoint.

    python -m benchmarks checkpoint --ranks 2
    srun -n 8 python -m benchmarks checkpoint --bytes 4G --directory /lustre/scratch/me/test -o checkpoint.h5

Contenders write and read the same state in turns, in a new random order each round:

    hpcdist      sharded HDF5 files with checksums, a manifest, fsync and the commit by a rename
    plain files  one file per rank in blocks of 16 MiB, with fsync but without checksums
    PyTorch      torch.distributed.checkpoint, if PyTorch is installed

A time starts at a barrier, and the slowest rank counts. "read" takes the files from the page cache; "read from disk"
takes them after the kernel was asked to drop them from the page cache. Every read is compared bit by bit with the
written state. "x hpcdist" is the time relative to hpcdist in the same round: above 1 means that hpcdist is faster.
"""

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.bench.output_file import check_on_all_ranks
from hpcdist.bench.timing import begin_torch_group
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.stripe import file_system
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.units import format_bytes, parse_bytes

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-checkpoint", 2, "operations/2026-11-30-checkpoint-2-ranks.h5"
SMALL, WORSE = {"rounds": 3}, 1.6  # times of a disk are noisy

OPTIONS: Final = {"bytes": "256M", "tensors": 24, "rounds": 5, "writers": "rank", "directory": ""}  # bytes: all ranks
WARM_UP: Final = 1
BLOCK_BYTES: Final = 16 << 20
FIGURES: Final = ("write", "read", "read from disk")
State = dict[str, np.ndarray]  # this rank's tensors: float32, 1-D
Contender = tuple[Callable[[Path], object], Callable[[Path], object]]  # write to an empty folder, read into the state


def make_state(comm: Communicator, nbytes: int, tensors: int) -> State:
    """Return this rank's part of ``nbytes`` random bytes, in ``tensors`` arrays. Local."""
    share = split(nbytes // 4, comm.size, 4)[comm.rank]
    memory = np.random.default_rng([0, comm.rank]).standard_normal(share.size, np.float32)
    return {f"{n}.weight": memory[part.slice] for n, part in enumerate(split(share.size, tensors, 4)) if part}


def hpcdist_checkpoint(comm: Communicator, state: State, writers: str) -> Contender:
    def pieces() -> list[Piece]:
        return [Piece.whole("parameters", f"{comm.rank}.{name}", array) for name, array in state.items()]

    return (
        lambda folder: save(folder, 1, pieces(), {}, comm, writers=writers),
        lambda folder: restore(folder / "step-1", pieces()),
    )


def plain_files(comm: Communicator, state: State) -> Contender:
    def blocks() -> Iterator[memoryview]:
        for array in state.values():
            view = array.view(np.uint8).data
            yield from (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))

    # Blocks larger than Python's buffer are not copied into it.
    def write(folder: Path) -> None:
        with (folder / f"rank-{comm.rank}").open("xb") as target:
            for block in blocks():
                target.write(block)
            target.flush()
            os.fsync(target.fileno())

    def read(folder: Path) -> None:
        with (folder / f"rank-{comm.rank}").open("rb") as source:
            for block in blocks():
                if source.readinto(block) < len(block):
                    raise StorageError(f"{source.name} is shorter than the state")

    return write, read


def torch_checkpoint(comm: Communicator, state: State) -> Contender:
    import torch
    from torch.distributed import checkpoint

    tensors = {f"rank{comm.rank}.{name}": torch.from_numpy(array) for name, array in state.items()}
    return (
        lambda folder: checkpoint.save(tensors, checkpoint_id=str(folder / "dcp")),
        lambda folder: checkpoint.load(tensors, checkpoint_id=str(folder / "dcp")),
    )


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    harness.at_least(chosen, tensors=1, rounds=1)
    try:
        nbytes = parse_bytes(chosen.bytes)
    except ValueError as error:
        raise UsageError(f"--bytes {error}") from error
    if chosen.directory and not Path(chosen.directory).is_dir():
        raise StorageError(f"--directory {chosen.directory} does not exist; create this directory")
    with tempfile.TemporaryDirectory(dir=chosen.directory or None, prefix="checkpoint-") as temporary:
        folder = Path(comm.broadcast_object(temporary))  # on the file system of rank 0
        check_on_all_ranks(comm, lambda: check_space(folder, nbytes))
        state = make_state(comm, nbytes, chosen.tensors)
        contenders = {"hpcdist": hpcdist_checkpoint(comm, state, chosen.writers)}
        contenders["plain files"] = plain_files(comm, state)
        if all(comm.allgather_object(importlib.util.find_spec("torch") is not None)):
            begin_torch_group(comm, folder)
            contenders["PyTorch"] = torch_checkpoint(comm, state)
        times = alternate(comm, state, contenders, folder, chosen.rounds)
        about = {"contenders": ";".join(contenders), "state_bytes": nbytes, "file_system": file_system(folder).kind}
        comm.barrier()
    return Results({"time_s": times}, {"time_s": f"contenders, ({', '.join(FIGURES)}), rounds, ranks"}, about)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise StorageError if ``folder`` has no room for two checkpoints."""
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes:
        raise StorageError(
            f"{folder} has {format_bytes(free)} free space, but the study needs {format_bytes(2 * nbytes)}; choose "
            "another --directory, or fewer --bytes"
        )


def alternate(
    comm: Communicator, state: State, contenders: Mapping[str, Contender], folder: Path, rounds: int
) -> np.ndarray:
    """Write and read in turns; return seconds of shape (contenders, `FIGURES`, rounds, ranks). Collective.

    Raises StorageError on all ranks if a contender does not read the bits that it wrote.
    """
    expected = {name: array.copy() for name, array in state.items()}

    def turn(name: str, number: int) -> list[float]:
        write, read = contenders[name]
        place = folder / f"{name}-{number}"
        if comm.rank == 0:
            place.mkdir()
        seconds = [harness.seconds(lambda: write(place), comm)]
        for is_on_disk in (False, True):
            comm.barrier()
            if is_on_disk and comm.rank == 0:
                drop_from_cache(place)
            for array in state.values():
                array.fill(0)
            seconds.append(harness.seconds(lambda: read(place), comm))
            is_same = comm.allgather_object(all(np.array_equal(state[key], expected[key]) for key in state))
            if not all(is_same):
                raise StorageError(f"{name}: rank {is_same.index(False)} read other values than it wrote")
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(place)
            os.sync()  # so that the removal does not slow down the next contender
        return seconds

    order, samples = np.random.default_rng(1), {name: list[list[float]]() for name in contenders}
    for number in range(WARM_UP + rounds):
        for name in order.permutation(list(contenders)).tolist():
            samples[name].append(turn(name, number))
    return np.moveaxis(harness.of_ranks(comm, {name: rows[WARM_UP:] for name, rows in samples.items()}), 3, 1)


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to drop the files in ``folder`` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def ratios(results: Results) -> harness.Ratios:
    """Return the times of hpcdist relative to the other contenders: below 1 means that hpcdist is faster."""
    times = results.arrays["time_s"].max(axis=3)
    return {
        f"{figure}, hpcdist / {name}": times[0, number] / times[index, number]
        for number, figure in enumerate(FIGURES)
        for index, name in enumerate(results.names())
        if index
    }


def lines(results: Results) -> Sequence[str]:
    times, nbytes = results.arrays["time_s"].max(axis=3), int(results.attributes["state_bytes"])
    tables = [f"{format_bytes(nbytes)} on {results.attributes['file_system']}"]
    for number, figure in enumerate(FIGURES):
        rates = {"GB/s": [f"{nbytes / np.median(row) / 1e9:.2f}" for row in times[:, number]]}
        tables += ["", figure, *harness.time_table(times[:, number], results.names(), more=rates)]
    return tables
