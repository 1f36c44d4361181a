"""How fast a state is written and read back: contenders take turns in every round, on the same bytes and ranks.

A time is that of the slowest rank, from a barrier to its end. "raw" is the yardstick: every rank writes its bytes one
behind the other into a file of its own and waits for the disk (fsync), and reads them back into the same memory. What
is written is removed between two turns, and what is read comes from the disk, unless it is to lie in the page cache:
both outside of the timed part. Whoever reads must bring back the same bits.
"""

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist.arrays.ranges import split
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError

RAW: Final = "raw"
OURS: Final = "hpcdist"
TORCH: Final = "torch"
BLOCK_BYTES: Final = 16 << 20

State = dict[str, np.ndarray]  # of one rank: float32, 1-D


@dataclass(frozen=True)
class Contender:
    """One way to keep a state. Both calls are collective, get a folder, and return when the bytes are there."""

    name: str
    write: Callable[[Path], object]  # into an empty folder
    read: Callable[[Path], object]  # into the arrays of the state


@dataclass(frozen=True)
class Samples:
    """Times of one contender, on every rank: (round, rank)."""

    name: str
    write_s: np.ndarray
    read_s: np.ndarray


def make_state(comm: Communicator, nbytes: int, tensors: int, seed: int = 0) -> State:
    """Return this rank's share of ``nbytes`` of random numbers, in ``tensors`` arrays (local)."""
    share = split(nbytes // 4, comm.size, 4)[comm.rank]
    memory = np.random.default_rng([seed, comm.rank]).standard_normal(share.size, np.float32)
    parts = split(share.size, tensors, 4)
    return {f"{number}.weight": memory[part.slice] for number, part in enumerate(parts) if part}


def raw(comm: Communicator, state: State) -> Contender:
    """Return the yardstick (local)."""

    def file(folder: Path) -> Path:
        return folder / f"raw-{comm.rank:05d}.bin"

    def write(folder: Path) -> None:
        fd = os.open(file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for block in _blocks(state):
                _whole(lambda view: os.write(fd, view), block)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(folder: Path) -> None:
        fd = os.open(file(folder), os.O_RDONLY)
        try:
            for block in _blocks(state):
                _whole(lambda view: os.readv(fd, [view]), block)
        finally:
            os.close(fd)

    return Contender(RAW, write, read)


def _blocks(state: State) -> Iterator[memoryview]:
    for array in state.values():
        view = array.view(np.uint8).data
        yield from (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))


def _whole(move: Callable[[memoryview], int], view: memoryview) -> None:
    while view:
        moved = move(view)
        if not moved:
            raise StorageError("the file of the raw yardstick ends too early")
        view = view[moved:]


def torch_missing() -> str:
    """Return why PyTorch does not take part, "" where it can."""
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed"


def torch(comm: Communicator, state: State, folder: Path) -> Contender:
    """Return PyTorch's distributed checkpoint of it. Collective: its ranks find each other in ``folder``."""
    import torch as module
    import torch.distributed as group
    import torch.distributed.checkpoint as saved

    place = comm.broadcast_object(str((folder / f"rendezvous-{os.getpid()}").absolute()))
    group.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)
    # Every rank's tensors have names of their own, as parts of a sharded state have.
    tensors = {f"rank{comm.rank}.{name}": module.from_numpy(array) for name, array in state.items()}

    def write(into: Path) -> None:
        saved.save(tensors, checkpoint_id=str(into / "dcp"))

    def read(back: Path) -> None:
        saved.load(tensors, checkpoint_id=str(back / "dcp"))

    return Contender(TORCH, write, read)


@dataclass(frozen=True)
class Wanted:
    """What is measured: ``rounds`` after ``warmup`` that do not count; ``cached``: read from the page cache."""

    directory: Path
    rounds: int
    warmup: int
    cached: bool
    seed: int


def run(
    comm: Communicator, state: State, contenders: Sequence[Contender], wanted: Wanted, say: Callable[[str], None]
) -> list[Samples]:
    """Measure and return the samples of each contender. Collective over ``comm``; ``say`` is called on rank 0.

    Raises StorageError, on all ranks, when one of them does not read what it wrote.
    """
    order = np.random.default_rng(wanted.seed)  # the same on every rank
    expected = _digest(state)
    times = np.zeros((2, wanted.warmup + wanted.rounds, len(contenders)))
    for number in range(wanted.warmup + wanted.rounds):
        for turn in order.permutation(len(contenders)):
            one, folder = contenders[turn], wanted.directory / f"{contenders[turn].name}-{number}"
            _make(comm, folder)
            times[0, number, turn] = _timed(comm, one.write, folder)
            _settle(comm, folder, wanted.cached)
            for array in state.values():
                array.fill(0)
            times[1, number, turn] = _timed(comm, one.read, folder)
            right = comm.allgather_object(_digest(state) == expected)
            if not all(right):
                raise StorageError(f"{one.name}: rank {right.index(False)} read other bits than it wrote")
            _remove(comm, folder)
        if comm.rank == 0:
            say(f"round {number + 1} of {wanted.warmup + wanted.rounds}")
    gathered = np.stack(comm.allgather_object(times[:, wanted.warmup :]), axis=-1)  # (2, round, contender, rank)
    return [Samples(one.name, gathered[0, :, k], gathered[1, :, k]) for k, one in enumerate(contenders)]


def _timed(comm: Communicator, call: Callable[[Path], object], folder: Path) -> float:
    comm.barrier()
    begin = time.perf_counter()
    call(folder)
    return time.perf_counter() - begin


def _digest(state: State) -> str:
    digest = xxhash.xxh3_128()
    for array in state.values():
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def _make(comm: Communicator, folder: Path) -> None:
    comm.barrier()
    if comm.rank == 0:
        folder.mkdir(parents=True)
    comm.barrier()


def _settle(comm: Communicator, folder: Path, cached: bool) -> None:
    """Drop the files from the page cache, unless they are to stay there; all of them are on the disk already."""
    comm.barrier()
    if comm.rank == 0 and not cached:
        for file in _files(folder):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _remove(comm: Communicator, folder: Path) -> None:
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
        os.sync()  # what the removal left to do is not the next one's


def check_space(comm: Communicator, directory: Path, nbytes: int) -> None:
    """Raise StorageError, on all ranks, where ``directory`` has no room for ``nbytes`` twice. Collective."""
    error = ""
    if comm.rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            space = os.statvfs(directory)
            if space.f_bavail * space.f_frsize < 2 * nbytes:
                error = f"{directory} has {space.f_bavail * space.f_frsize} bytes, {2 * nbytes} are needed"
        except OSError as failure:
            error = f"{directory} cannot be written: {failure.strerror}"
    error = comm.broadcast_object(error)
    if error:
        raise StorageError(f"{error}; choose another --directory, or fewer --bytes")


def figures(found: Sequence[Samples], nbytes: int) -> dict[str, Any]:
    """Return medians, rates, and the ratio to each other contender: the median over rounds of its time over ours."""
    by_name = {one.name: one for one in found}
    told: dict[str, Any] = {}
    for what in ("write", "read"):
        slowest = {name: getattr(one, f"{what}_s").max(axis=1) for name, one in by_name.items()}
        ours = slowest[OURS]
        told[what] = {
            name: {
                "median_s": float(np.median(times)),
                "bytes_per_s": nbytes / float(np.median(times)),
                "ratio": float(np.median(times / ours)),
            }
            for name, times in slowest.items()
        }
    return told


def text(told: dict[str, Any]) -> str:
    """Return the table."""
    lines = [f"{'':<8}{'who':<10}{'median s':>10}{'GB/s':>8}   hpcdist over it"]
    for what in ("write", "read"):
        for name, one in told[what].items():
            over = "" if name == OURS else f"{one['ratio']:.2f}x"
            lines.append(f"{what:<8}{name:<10}{one['median_s']:>10.3f}{one['bytes_per_s'] / 1e9:>8.2f}   {over}")
    return "\n".join(lines)
