"""Checkpoints of `hpcdist.torch` compared with torch.distributed.checkpoint: the model and optimizer of a script.

    python -m benchmarks wrapped.checkpoints
    python -m benchmarks wrapped.checkpoints --hidden 2048 --directory /lustre/scratch/me/test -o checkpoints.h5

A GPT and its AdamW state, under DDP and FSDP2, are saved and loaded in turns over the backend hpcdist, with one thread
per rank. Both contenders call fsync for each file, and both save and load the complete state dicts of the model and the
optimizer. Only hpcdist computes digests at a save and compares them at a load, writes an index of whole tensors, and
calls fsync for the directory. The rest of PyTorch's settings are the defaults. A time starts at a barrier, and the
slowest rank counts. "load" reads from the page cache, "load from disk" after the kernel was asked to drop the files
from the page cache. Every load is compared bit by bit with the saved state. "x PyTorch" is the time relative to PyTorch
in the same round: below 1 means that hpcdist is faster. Needs the extra `torch`.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.operations.checkpoint import check_space, drop_from_cache
from benchmarks.wrapped.torch import SIZES, built, divided
from hpcdist.bench.output_file import check_on_all_ranks
from hpcdist.bench.step import contenders
from hpcdist.checkpoint.stripe import file_system
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import format_bytes

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-wrapped-checkpoints", 2, "wrapped/2026-11-30-checkpoints-2-ranks.h5"
SMALL, WORSE = {"rounds": 3}, 2.0  # a disk varies
STYLES: Final = ("ddp", "fsdp2")
FIGURES: Final = ("save", "load", "load from disk")
WAYS: Final = ("hpcdist", "PyTorch")
LARGE: Final = {"layers": 8, "hidden": 1024, "heads": 8, "context": 64}
OPTIONS: Final = {**SIZES, **LARGE, "rounds": 10, "styles": STYLES, "directory": ""}
Contender = tuple[Callable[[Path], object], Callable[[Path], object]]  # save in an empty folder, load in place


def contender(way: str, module: Any, optimizer: Any) -> Contender:
    import hpcdist.torch

    if way == "hpcdist":
        state = {"model": module, "optimizer": optimizer}
        return lambda folder: hpcdist.torch.save(folder, state), lambda folder: hpcdist.torch.load(folder, state)
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def content() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))

    def load(folder: Path) -> None:
        saved = content()
        checkpoint.load(saved, checkpoint_id=str(folder))
        set_state_dict(module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

    return lambda folder: checkpoint.save(content(), checkpoint_id=str(folder)), load


def trained(style: str, twin: Any, group: Any, vocabulary: int, context: int) -> tuple[Any, Any]:
    """Return ``twin`` under DDP or FSDP2, and its AdamW optimizer, after one step. Collective."""
    import torch

    module = divided(style, twin, group, "cpu")
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.randint(0, vocabulary, (1, context + 1))
    contenders.cross_entropy(module(tokens[:, :-1]), tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def local_tensors(module: Any, optimizer: Any) -> list[Any]:
    """Return this rank's parameters and optimizer state."""
    from torch.distributed.tensor import DTensor

    parameters = [*module.parameters()]  # a load may replace the optimizer's tensors, and reorder them
    states = [sorted(optimizer.state[parameter].items()) for parameter in parameters]
    tensors = [*parameters, *(value for state in states for _, value in state)]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]


def timed(
    comm: Communicator, way: str, style: str, states: tuple[Any, Any], expected: Sequence[Any], folder: Path
) -> list[float]:
    """Return this rank's seconds of a save and two loads of ``states``, in the order of `FIGURES`. Collective.

    ``expected``: values of `local_tensors`. Raises StorageError on all ranks if a load restores other values.
    """
    import torch

    save, load = contender(way, *states)
    place = Path(comm.broadcast_object(tempfile.mkdtemp(prefix=way, dir=folder) if comm.rank == 0 else None))
    seconds = [harness.seconds(lambda: save(place), comm)]
    for is_on_disk in (False, True):
        comm.barrier()
        if is_on_disk and comm.rank == 0:
            drop_from_cache(place)
        for tensor in local_tensors(*states):
            tensor.zero_()
        seconds.append(harness.seconds(lambda: load(place), comm))
        if not all(comm.allgather_object(all(map(torch.equal, local_tensors(*states), expected)))):
            raise StorageError(f"{way}: the loaded state of {style} differs from the saved state")
    if comm.rank == 0:
        shutil.rmtree(place)
        os.sync()  # so that the removal does not slow down the next contender
    return seconds


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    import torch
    import torch.distributed as dist

    import hpcdist.torch

    comm = session.comm
    if comm.size == 1:
        sys.exit("the comparison needs at least 2 ranks; choose --ranks 2")
    torch.set_num_threads(1)
    dist.init_process_group(hpcdist.torch.NAME)
    shape, model, store = built(chosen)
    nbytes = 3 * store.array.nbytes
    times: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=chosen.directory or None, prefix="checkpoints-") as temporary:
        folder = Path(comm.broadcast_object(temporary))  # on the file system of rank 0
        check_on_all_ranks(comm, lambda: check_space(folder, nbytes))
        for style in chosen.styles:
            twin = contenders.torch_twin(shape, model, store)
            states = trained(style, twin, dist.group.WORLD, chosen.vocabulary, chosen.context)
            expected = [tensor.clone() for tensor in local_tensors(*states)]
            calls = {f"{way} {style}": partial(timed, comm, way, style, states, expected, folder) for way in WAYS}
            times |= harness.alternate(calls, chosen.rounds, warm_up=1)
        kind = file_system(folder).kind
        comm.barrier()
    slowest = np.moveaxis(harness.of_ranks(comm, times).max(axis=2), 2, 1)
    dist.destroy_process_group()
    about = {"contenders": ";".join(times), "cases": ";".join(chosen.styles), "state_bytes": nbytes}
    about |= {"file_system": kind, "torch": str(torch.__version__)}
    return Results({"time_s": slowest}, {"time_s": f"contenders, ({', '.join(FIGURES)}), rounds"}, about)


def ratios(results: Results) -> harness.Ratios:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    return {
        f"{figure}, {style}": rows[f"{WAYS[0]} {style}"][number] / rows[f"{WAYS[1]} {style}"][number]
        for style in results.names("cases")
        for number, figure in enumerate(FIGURES)
    }


def lines(results: Results) -> Sequence[str]:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    about = results.attributes
    table = [("", *(f"{way} s" for way in WAYS), "x PyTorch", "interval")]
    for case, ratio in ratios(results).items():
        figure, style = case.rsplit(", ", 1)
        number = FIGURES.index(figure)
        both = [f"{np.median(rows[f'{way} {style}'][number]):.3f}" for way in WAYS]
        median, low, high = harness.interval(ratio)
        table.append((case, *both, f"{median:.3f}", f"{low:.3f} to {high:.3f}"))
    return [f"{format_bytes(int(about['state_bytes']))} on {about['file_system']}", *aligned(table)]
