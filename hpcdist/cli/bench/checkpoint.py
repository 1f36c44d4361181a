"""`hpcdist bench checkpoint`: time saves and restores beside other writers; rank 0 prints and writes.

Every rank that a launcher started runs it.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.cli.common import DIRECTORY
from hpcdist.errors import OK

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.checkpoint.throughput import CheckpointContender, State
    from hpcdist.comm.communicator import Communicator
    from hpcdist.comm.start import Session


def _bytes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    from hpcdist.reporting.units import parse_bytes

    try:
        return tuple(dict.fromkeys(parse_bytes(value) for value in values))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("checkpoint")
@click.option(
    "--bytes",
    "sizes",
    callback=_bytes,
    multiple=True,
    default=("256M",),
    show_default="256M",
    help="Size of the state of all ranks together; may be given several times.",
)
@count_option("--tensors", default=24, help="Tensors that a rank has of it.")
@count_option("--rounds", default=5, help="Rounds; contenders take turns in each.")
@count_option("--warmup", least=0, default=1, help="Rounds before, which are not kept.")
@click.option(
    "--directory",
    type=DIRECTORY,
    default=Path("checkpoint-benchmark"),
    help="Where it is written; made, and removed when it was not there.",
)
@click.option("--writers", default="rank", help="As checkpoint.writers: rank, node, or a number.")
@click.option(
    "--read",
    type=click.Choice(("cache", "disk", "both")),
    default="both",
    help="Read from the page cache, or the disk.",
)
@click.option(
    "--torch/--no-torch", "with_torch", default=True, help="PyTorch's distributed checkpoint, if it is there."
)
@click.option("--asynchronous", is_flag=True, help="Also what a save in the background costs the steps beside it.")
@click.option("--step-s", type=click.FloatRange(min=1e-3), default=0.2, help="Length of such a step.")
@click.option(
    "--mtbf-hours", type=click.FloatRange(min=0.01), default=24.0, help="Of failures, for the interval of Daly."
)
@count_option("--seed", least=0, default=0, help="Of the state and the order of turns.")
@skeleton.output_options("New HDF5 file for all times.")
def command(**options: Any) -> None:
    """Write and read back a state by checkpoints, beside raw files of the same bytes by the same ranks.

    Start it on several ranks: `hpcdist run -n 2 bench checkpoint`, or under mpirun or srun. Times are those of the
    slowest rank, digests, manifest and fsync included; ratios are medians over the rounds, in which all take turns.
    """
    from hpcdist.bench.checkpoint import background, throughput

    outputs = Outputs.of(options)
    session = skeleton.begin(outputs.check)
    comm, directory = session.comm, options["directory"]
    new = comm.broadcast_object(not directory.exists() if comm.rank == 0 else None)
    throughput.check_space(comm, directory, max(options["sizes"]))
    say = skeleton.print_progress if comm.rank == 0 else (lambda line: None)
    reads = throughput.READS if options["read"] == "both" else (options["read"],)
    request = throughput.CheckpointRequest(directory, options["rounds"], options["warmup"], reads, options["seed"])
    meeting = _torch_group(comm, directory, options["with_torch"], say)
    samples_of, figures = {}, []
    try:
        for nbytes in options["sizes"]:
            state = throughput.make_state(comm, nbytes, options["tensors"], options["seed"])
            held = sum(comm.allgather_object(sum(array.nbytes for array in state.values())))
            contenders = _contenders(comm, state, options["writers"], meeting)
            samples, beside = throughput.run(comm, state, contenders, request, say), None
            if options["asynchronous"]:
                saver = _beside(comm, state, directory / "beside" / str(held), options["writers"])
                beside = background.run(comm, saver, options["step_s"], options["rounds"], say)
            samples_of[held] = samples, beside
            figures.append({"bytes": held, "speeds": throughput.figures(samples, held)})
            if beside is not None:
                figures[-1]["beside"] = beside.figures(3600 * options["mtbf_hours"])
        origin = skeleton.origin(session, outputs.anonymous)
        if comm.rank == 0:
            about = _about(session, options)
            outputs.show(lambda: {**about, "sizes": figures}, lambda: _text(about, figures), lambda file: None)
            if outputs.file is not None:
                throughput.write_results(outputs.file, samples_of, about | origin)
    finally:
        if comm.rank == 0:
            shutil.rmtree(directory if new else directory / "beside", ignore_errors=True)
    session.leave(OK)


def _torch_group(comm: "Communicator", directory: Path, with_torch: bool, say: Any) -> bool:
    """Let the ranks meet as PyTorch has it; return whether they could. Collective."""
    from hpcdist.bench import timing
    from hpcdist.bench.checkpoint import throughput

    missing = throughput.torch_missing() if with_torch else "--no-torch"
    missing = next((reason for reason in comm.allgather_object(missing) if reason), "")
    if missing:
        say(f"torch.distributed.checkpoint is left out: {missing}")
        return False
    timing.begin_torch_group(comm, directory)
    return True


def _contenders(comm: "Communicator", state: "State", writers: str, with_torch: bool) -> "list[CheckpointContender]":
    """Return who takes part (local)."""
    from hpcdist.bench.checkpoint import throughput
    from hpcdist.checkpoint.restoring.restore import restore
    from hpcdist.checkpoint.saving.two_phase import save

    def write(folder: Path) -> None:
        save(folder, 1, pieces(comm, state), {}, comm, writers=writers)

    def read(folder: Path) -> None:
        restore(folder / "step-1", pieces(comm, state))

    contenders = [throughput.CheckpointContender(throughput.OURS, write, read), throughput.raw_files(comm, state)]
    return [*contenders, throughput.torch_checkpoint(comm, state)] if with_torch else contenders


def pieces(comm: "Communicator", state: "State") -> list[Any]:
    """Return the state of this rank as pieces: each tensor is whole on one rank (local)."""
    from hpcdist.arrays.piece import Piece

    return [Piece.whole("parameters", f"{comm.rank}.{name}", array) for name, array in state.items()]


def _beside(comm: "Communicator", state: "State", directory: Path, writers: str) -> Any:
    """Return a saver in the background."""
    from hpcdist.checkpoint.saving.background import BackgroundCheckpoints
    from hpcdist.checkpoint.saving.two_phase import SavePlan

    class Beside(BackgroundCheckpoints):
        count = 0

        def begin(self) -> None:  # type: ignore[override]
            self.count += 1
            plan = SavePlan(directory, self.count, comm.size, {}, {}, 1)
            super().begin(plan, pieces(comm, state), writers)

    return Beside(comm)


def _about(session: "Session", options: dict[str, Any]) -> dict[str, Any]:
    from hpcdist.checkpoint.stripe import file_system

    settings = {name: options[name] for name in ("rounds", "warmup", "writers", "tensors", "seed")}
    return {"ranks": session.comm.size, **settings, "file_system": file_system(options["directory"]).kind}


def _text(about: dict[str, Any], figures: list[dict[str, Any]]) -> str:
    from hpcdist.bench.checkpoint import background, throughput
    from hpcdist.reporting.units import counted, format_bytes

    ranks, rounds, tensors = (counted(about[name], name[:-1]) for name in ("ranks", "rounds", "tensors"))
    lines = []
    for row in figures:
        lines.append(f"{format_bytes(row['bytes'])} on {ranks}, {tensors} each, {rounds}, {about['file_system']}")
        lines.append(throughput.text(row["speeds"]))
        if "beside" in row:
            lines.append(background.text(row["beside"]))
    return "\n".join(lines)
