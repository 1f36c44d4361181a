"""Throughput of checkpoints: contenders write and read the same bytes in turns; HDF5 results file.

A time is that of the slowest rank, from a barrier to its end. What makes the comparison fair:

- "raw" is the yardstick: every rank writes its bytes in calls of 16 MiB, one behind the other, into a file of its own
  and waits for the disk (fsync), and reads them back with calls of 16 MiB. It takes no digest; ours takes digests, and
  compares them when it reads.
- All read into the memory that they wrote from, whose pages exist. PyTorch's reader allocates memory of its own first,
  as it does for every user.
- What is read lies in the page cache (as after the death of one rank), or on the disk alone (as in a new job), where
  the kernel was told to drop it; the same files are read both ways, in this order.
- What is written is removed between two turns, with a sync, outside of the timed part. The order of turns is drawn anew
  in each round, so that a slow minute of the machine affects all contenders.
- Every reader must return the same bits: compared after every read, outside of the timed part.
- A ratio is taken in each round, between neighbours in time; the report has its median and quartiles over the rounds.

The results file has the time of every round on every rank:

    /                               provenance; ranks, tensors, seed, writers, file system
    /<bytes>/contenders/<name>      write_s, read_cache_s, read_disk_s (round, rank)
    /<bytes>/beside                 plain_s, saving_s, beside_s, saves_s, where a background save was measured
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist.arrays.ranges import split
from hpcdist.bench.checkpoint.background import SavingSteps
from hpcdist.bench.output_file import ResultsFormat, SampleColumn, check_on_all_ranks, write_samples
from hpcdist.bench.timing import own_s
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.reporting.table import aligned

OURS: Final = "hpcdist"
CACHE: Final = "cache"  # of pages
DISK: Final = "disk"
READS: Final = (CACHE, DISK)

State = dict[str, np.ndarray]  # of one rank: float32, 1-D


@dataclass(frozen=True)
class CheckpointContender:
    """Writer and reader of a state. Both calls are collective, get a folder, and return when the bytes are there."""

    name: str
    write: Callable[[Path], object]  # into an empty folder
    read: Callable[[Path], object]  # into the arrays of the state


@dataclass(frozen=True)
class CheckpointSamples:
    """Times of one contender, on every rank: (round, rank)."""

    name: str
    write_s: np.ndarray
    reads_s: dict[str, np.ndarray]  # by where the bytes came from


def make_state(comm: Communicator, nbytes: int, tensors: int, seed: int = 0) -> State:
    """Return this rank's share of ``nbytes`` of random numbers, in ``tensors`` arrays (local)."""
    share = split(nbytes // 4, comm.size, 4)[comm.rank]
    memory = np.random.default_rng([seed, comm.rank]).standard_normal(share.size, np.float32)
    parts = split(share.size, tensors, 4)
    return {f"{number}.weight": memory[part.slice] for number, part in enumerate(parts) if part}


@dataclass(frozen=True)
class CheckpointRequest:
    """Request: ``rounds`` after ``warmup`` that do not count; ``reads`` are some of `READS`, in that order."""

    directory: Path
    rounds: int
    warmup: int
    reads: tuple[str, ...]
    seed: int


def run(
    comm: Communicator,
    state: State,
    contenders: Sequence[CheckpointContender],
    wanted: CheckpointRequest,
    say: Callable[[str], None],
) -> list[CheckpointSamples]:
    """Measure and return the samples of each contender. Collective over ``comm``; ``say`` is called on rank 0.

    Raises StorageError, on all ranks, when one of them does not read what it wrote.
    """
    order = np.random.default_rng(wanted.seed)  # the same on every rank
    expected = _digest(state)
    times = np.zeros((1 + len(wanted.reads), wanted.warmup + wanted.rounds, len(contenders)))
    for number in range(wanted.warmup + wanted.rounds):
        for turn in order.permutation(len(contenders)):
            contender, folder = contenders[turn], wanted.directory / f"{contenders[turn].name}-{number}"
            _make(comm, folder)
            times[0, number, turn] = own_s(comm, partial(contender.write, folder))
            for k, source in enumerate(wanted.reads, start=1):
                _settle(comm, folder, source)
                for array in state.values():
                    array.fill(0)
                times[k, number, turn] = own_s(comm, partial(contender.read, folder))
                right = comm.allgather_object(_digest(state) == expected)
                if not all(right):
                    raise StorageError(f"{contender.name}: rank {right.index(False)} read other bits than it wrote")
            _remove(comm, folder)
        if comm.rank == 0:
            say(f"round {number + 1} of {wanted.warmup + wanted.rounds}")
    gathered = np.stack(comm.allgather_object(times[:, wanted.warmup :]), axis=-1)  # (what, round, contender, rank)
    return [
        CheckpointSamples(
            contender.name, gathered[0, :, k], {s: gathered[n, :, k] for n, s in enumerate(wanted.reads, start=1)}
        )
        for k, contender in enumerate(contenders)
    ]


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


def _settle(comm: Communicator, folder: Path, source: str) -> None:
    """Drop the files from the page cache where the disk is to be read; all of them are there already."""
    comm.barrier()
    if comm.rank == 0 and source == DISK:
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
    cure = "choose another --directory, or fewer --bytes"

    def check() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            space = os.statvfs(directory)
        except OSError as error:
            raise StorageError(f"{directory} cannot be written: {error.strerror}; {cure}") from error
        free = space.f_bavail * space.f_frsize
        if free < 2 * nbytes:
            raise StorageError(f"{directory} has {free} bytes, {2 * nbytes} are needed; {cure}")

    check_on_all_ranks(comm, check)


def figures(samples: Sequence[CheckpointSamples], nbytes: int) -> dict[str, Any]:
    """Return medians, rates, and how many times as fast we are as each contender: quartiles over the rounds.

    By what was done ("write", "read from the cache", ...) and name.
    """
    by_operation: dict[str, Any] = {}
    whats = {"write": {sample.name: sample.write_s for sample in samples}}
    whats |= {f"read from the {s}": {sample.name: sample.reads_s[s] for sample in samples} for s in samples[0].reads_s}
    for what, times in whats.items():
        slowest = {name: values.max(axis=1) for name, values in times.items()}
        by_operation[what] = {}
        for name, values in slowest.items():
            low, ratio, high = np.percentile(values / slowest[OURS], (25, 50, 75)).tolist()
            seconds = float(np.median(values))
            rate = nbytes / seconds
            by_operation[what][name] = {
                "median_s": seconds,
                "bytes_per_s": rate,
                "ratio": ratio,
                "ratio_quartiles": [low, high],
            }
    return by_operation


def text(by_operation: dict[str, Any]) -> str:
    """Return the table of the `figures`."""
    rows = [["", "who", "median ms", "GB/s", "hpcdist's speed over it (quartiles)"]]
    for what, figures_by_name in by_operation.items():
        for name, row in figures_by_name.items():
            low, high = row["ratio_quartiles"]
            over = "" if name == OURS else f"{row['ratio']:.2f}x ({low:.2f} - {high:.2f})"
            rows.append([what, name, f"{1e3 * row['median_s']:.1f}", f"{row['bytes_per_s'] / 1e9:.2f}", over])
    return "\n".join(aligned(rows, (0, 1, -1)))


RAW: Final = "raw"
TORCH: Final = "torch"
BLOCK_BYTES: Final = 16 << 20


def raw_files(comm: Communicator, state: State) -> CheckpointContender:
    """Return raw files, the yardstick, as a contender (local)."""

    def file(folder: Path) -> Path:
        return folder / f"raw-{comm.rank:05d}.bin"

    # Blocks longer than Python's buffer go past it, to the system and back.
    def write(folder: Path) -> None:
        with file(folder).open("xb") as target:
            for block in _blocks(state):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())

    def read(folder: Path) -> None:
        with file(folder).open("rb") as source:
            for block in _blocks(state):
                if source.readinto(block) < len(block):
                    raise StorageError("the file of the raw yardstick ends too early")

    return CheckpointContender(RAW, write, read)


def _blocks(state: State) -> Iterator[memoryview]:
    for array in state.values():
        view = array.view(np.uint8).data
        yield from (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))


def torch_missing() -> str:
    """Return why PyTorch cannot take part, "" where it can."""
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed"


def torch_checkpoint(comm: Communicator, state: State) -> CheckpointContender:
    """Return PyTorch's distributed checkpoint as a contender (local)."""
    import torch as module
    import torch.distributed.checkpoint as saved

    # Every rank's tensors have names of their own, as parts of a sharded state have.
    tensors = {f"rank{comm.rank}.{name}": module.from_numpy(array) for name, array in state.items()}

    def write(into: Path) -> None:
        saved.save(tensors, checkpoint_id=str(into / "dcp"))

    def read(back: Path) -> None:
        saved.load(tensors, checkpoint_id=str(back / "dcp"))

    return CheckpointContender(TORCH, write, read)


FORMAT: Final = ResultsFormat("hpcdist.checkpoint_benchmark", 2)


def write_results(
    path: Path, measured: Mapping[int, tuple[Sequence[CheckpointSamples], SavingSteps | None]], about: Mapping[str, Any]
) -> None:
    """Write a new file of what was ``measured`` for each number of bytes. Raises StorageError."""
    with FORMAT.edit(path, about) as file:
        for nbytes, (contenders, beside) in measured.items():
            for samples in contenders:
                columns = {"write_s": (samples.write_s, _declared("on the disk"))}
                columns |= {f"read_{name}_s": (of, _declared("in memory")) for name, of in samples.reads_s.items()}
                write_samples(file.create_group(f"{nbytes}/contenders/{samples.name}"), columns)
            if beside is not None:
                group = file.create_group(f"{nbytes}/beside")
                for name, values in asdict(beside).items():
                    group.create_dataset(name, data=np.array(values)).attrs["units"] = "s"


def _declared(where: str) -> SampleColumn:
    return SampleColumn(f"from a barrier until all is {where}", "round", "rank")
