"""Import and export of a Hugging Face directory, relative to plain files, under any layout.

    python -m benchmarks huggingface --ranks 2 --layouts zero3 "pipeline 2"
    srun -n 4 python -m benchmarks huggingface --bytes 4G --directory /lustre/scratch/me/test -o huggingface.h5

    hpcdist      "import": all ranks read their elements of the directory; "export": all ranks write the directory, with
                 fsync and the commit by a rename
    plain files  one file per rank with the same number of bytes, in blocks of 16 MiB; the writes end with fsync

A time starts at a barrier, and the slowest rank counts. Imports read from the disk: the kernel is asked to drop the
files from the page cache. The import of the export must equal the exported parameters bit by bit. "x hpcdist" is the
time of the plain files relative to hpcdist in the same round: above 1 means that hpcdist is faster.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.operations.checkpoint import check_space, drop_from_cache, make_state, plain_files
from hpcdist.arrays.piece import Piece
from hpcdist.bench.output_file import check_on_all_ranks
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.convert.huggingface_export import ExportPlan, ExportWriter
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.checkpoint.stripe import file_system
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import format_bytes, parse_bytes
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes

SCHEMA, RANKS, NO_CHECK = "hpcdist-benchmark-huggingface", 2, "no result is committed"
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "allreduce": {},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "pipeline 2": {"parallel.pipeline": 2},
    "tensor 2": {"parallel.tensor": 2},
    "context 2": {"parallel.context": 2},
    "tensor 2, zero2": {"parallel.tensor": 2, "parallel.strategy": "zero2"},
    "pipeline 2, tensor 2": {"parallel.pipeline": 2, "parallel.tensor": 2},
    "context 2, zero3": {"parallel.context": 2, "parallel.strategy": "zero3"},
}
OPTIONS: Final = {"bytes": "1G", "rounds": 5, "layouts": tuple(LAYOUTS), "directory": ""}
FIGURES: Final = ("export", "import")
WAYS: Final = ("hpcdist", "plain files")
HIDDEN: Final = 1024


def trainer_keys(nbytes: int) -> dict[str, Any]:
    """Return the recipe keys of a llama of at least ``nbytes`` bytes, without the state of an optimizer."""
    layers = 2 * max(1, round(nbytes / (2 * 4 * 16 * HIDDEN**2)))
    model = {"layers": layers, "hidden": HIDDEN, "heads": 8, "kind": "gpt", "positions": "rotary", "norm": "rms"}
    model |= {"activation": "swiglu", "bias": False, "vocabulary": 256}
    keys = {f"model.{name}": value for name, value in model.items()}
    return keys | {"data.context": 16, "run.global_batch": 8, "run.steps": 1, "optimizer.name": "sgd"}


def local_state(trainer: Any) -> list[Piece]:
    """Return the parameters that this rank saves: each element belongs to one rank."""
    return [piece for piece in trainer.pieces() if piece.kind == PARAMETERS]


def export_pieces(comm: Communicator, plan: ExportPlan, pieces: Iterable[Piece]) -> None:
    """Write ``pieces`` of all ranks to the directory of ``plan``. Collective."""
    if comm.rank == 0:
        plan.prepare()
    comm.barrier()
    writer = ExportWriter(plan)
    for piece in pieces:
        writer.write(piece.tensor, piece.box, piece.flat, np.asarray(piece.array))
    writer.finish()
    comm.barrier()
    if comm.rank == 0:
        plan.commit()


def import_pieces(folder: Path, pieces: Iterable[Piece]) -> None:
    """Read ``pieces`` from the directory ``folder``. Local."""
    with HuggingFaceDirectory(folder) as source:
        source.fill(pieces)


def turn(comm: Communicator, trainer: Any, target: Path, way: str) -> list[float]:
    """Return this rank's seconds of an export and of an import, by ``way``. Collective."""
    pieces = local_state(trainer)
    nbytes = max(comm.allgather_object(sum(piece.array.nbytes for piece in pieces)))
    if way == WAYS[0]:
        recipe = trainer.recipe
        plan = ExportPlan(target, recipe.model, recipe.data.context)
        expected = [np.array(piece.array) for piece in pieces]
        loaded = [piece for piece in trainer.exchange.wanted() if piece.kind == PARAMETERS]
        calls = (lambda: export_pieces(comm, plan, pieces), lambda: import_pieces(target, loaded))
    else:
        if comm.rank == 0:
            target.mkdir()
        comm.barrier()
        state = make_state(comm, nbytes * comm.size, 24)
        write, read = plain_files(comm, state)
        calls = (lambda: write(target), lambda: read(target))
    seconds = [harness.seconds(calls[0], comm)]
    comm.barrier()
    if comm.rank == 0:
        drop_from_cache(target)
    seconds.append(harness.seconds(calls[1], comm))
    if way == WAYS[0]:
        same = all(np.array_equal(piece.array, values) for piece, values in zip(pieces, expected, strict=True))
        if not all(comm.allgather_object(same)):
            raise StorageError(f"{target} has other parameters than the exported parameters")
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(target)
    return seconds


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    harness.at_least(chosen, rounds=1)
    try:
        nbytes = parse_bytes(chosen.bytes)
    except ValueError as error:
        raise UsageError(f"--bytes {error}") from error
    times: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=chosen.directory or None, prefix="huggingface-") as temporary:
        folder = Path(comm.broadcast_object(temporary))  # on the file system of rank 0
        check_on_all_ranks(comm, lambda: check_space(folder, nbytes))
        np.save(folder / "tokens.npy", np.arange(4096, dtype=np.uint16) % 256)
        for layout in chosen.layouts:
            keys = trainer_keys(nbytes) | LAYOUTS[layout] | {"data.path": folder / "tokens.npy"}
            ranks = int(np.prod([keys.get(f"parallel.{axis}", 1) for axis in ("pipeline", "tensor", "context")]))
            if comm.size % ranks:
                continue  # the layout needs more ranks
            trainer = assemble(session, recipes.load(None, [f"{key}={value}" for key, value in keys.items()]).recipe)
            for number in range(1 + chosen.rounds):
                for way in WAYS:
                    row = turn(comm, trainer, folder / f"model-{number}", way)
                    if number:  # the first round warms up
                        times.setdefault(f"{way}, {layout}", []).append(row)
            trainer.close()
        kind = file_system(folder).kind
        comm.barrier()
    slowest = np.moveaxis(harness.of_ranks(comm, times).max(axis=2), 2, 1)
    about = {"contenders": ";".join(times), "state_bytes": nbytes, "file_system": kind}
    return Results({"time_s": slowest}, {"time_s": f"contenders, ({', '.join(FIGURES)}), rounds"}, about)


def ratios(results: Results) -> harness.Ratios:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    layouts = [name.partition(", ")[2] for name in rows if name.startswith(WAYS[0])]
    return {
        f"{figure}, {layout}": rows[f"{WAYS[0]}, {layout}"][number] / rows[f"{WAYS[1]}, {layout}"][number]
        for layout in layouts
        for number, figure in enumerate(FIGURES)
    }


def lines(results: Results) -> Sequence[str]:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    table = [("", *(f"{way} s" for way in WAYS), "x hpcdist", "interval")]
    for case, ratio in ratios(results).items():
        figure, layout = case.split(", ", 1)
        both = [f"{np.median(rows[f'{way}, {layout}'][FIGURES.index(figure)]):.3f}" for way in WAYS]
        median, low, high = harness.interval(1 / ratio)
        table.append((case, *both, f"{median:.3f}", f"{low:.3f} to {high:.3f}"))
    about = results.attributes
    return [f"{format_bytes(int(about['state_bytes']))} on {about['file_system']}", *aligned(table)]
