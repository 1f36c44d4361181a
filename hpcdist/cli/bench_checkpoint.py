"""`hpcdist bench checkpoint`: every rank that a launcher started runs this; rank 0 speaks and writes."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcdist.errors import OK

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.checkpoint import Contender, Samples, State
    from hpcdist.bench.checkpoint_beside import Steps
    from hpcdist.comm.communicator import Communicator
    from hpcdist.comm.start import Session


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    from hpcdist.arrays.sizes import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("checkpoint")
@click.option("--bytes", "nbytes", callback=_bytes, default="256M", help="Size of the state of all ranks together.")
@click.option("--tensors", type=click.IntRange(min=1), default=24, help="Tensors that a rank has of it.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Rounds; contenders take turns in each.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, help="Rounds before, which are not kept.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("checkpoint-benchmark"),
    help="Where it is written; made, and removed when it was not there.",
)
@click.option("--writers", default="rank", help="As checkpoint.writers: rank, node, or a number.")
@click.option("--cached", is_flag=True, help="Read from the page cache, not from the disk.")
@click.option(
    "--torch/--no-torch", "with_torch", default=True, help="PyTorch's distributed checkpoint, if it is there."
)
@click.option("--asynchronous", is_flag=True, help="Also what a save in the background costs the steps beside it.")
@click.option("--step-s", type=click.FloatRange(min=1e-3), default=0.2, help="Length of such a step.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the state and the order of turns.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="New HDF5 file for all times.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
def command(
    nbytes: int, output: Path | None, as_json: bool, asynchronous: bool, step_s: float, anonymous: bool, **options: Any
) -> None:
    """Write and read back a state by checkpoints, beside raw files of the same bytes by the same ranks.

    Start it on several ranks: `hpcdist run -n 2 bench checkpoint`, or under mpirun or srun. Times are those of the
    slowest rank, digests, manifest and fsync included; ratios are medians over the rounds, in which all take turns.
    """
    from hpcdist.bench import checkpoint as bench
    from hpcdist.bench import checkpoint_beside, checkpoint_file, place
    from hpcdist.comm import start
    from hpcdist.hdf5 import files

    session = start.start()
    comm, directory = session.comm, options["directory"]
    place.agree(comm, lambda: None if output is None else files.check_place(output))
    new = comm.broadcast_object(not directory.exists() if comm.rank == 0 else None)
    bench.check_space(comm, directory, nbytes)
    say = (lambda line: click.echo(line, err=True)) if comm.rank == 0 else (lambda line: None)
    try:
        state = bench.make_state(comm, nbytes, options["tensors"], options["seed"])
        held = comm.allgather_object(sum(array.nbytes for array in state.values()))
        wanted = bench.Wanted(directory, options["rounds"], options["warmup"], options["cached"], options["seed"])
        contenders = _contenders(comm, state, directory, options, say)
        found = bench.run(comm, state, contenders, wanted, say)
        beside = None
        if asynchronous:
            saver = _beside(comm, state, directory / "beside", options["writers"])
            beside = checkpoint_beside.run(comm, saver, step_s, options["rounds"], say)
        comm.barrier()
        if comm.rank == 0:
            told = _told(session, sum(held), found, beside, options)
            _show(told, as_json)
            if output is not None:
                checkpoint_file.write(output, found, beside, _about(session, told, options, anonymous))
    finally:
        if comm.rank == 0:
            shutil.rmtree(directory if new else directory / "beside", ignore_errors=True)
    session.leave(OK)


def _contenders(
    comm: "Communicator", state: "State", directory: Path, options: dict[str, Any], say: Any
) -> "list[Contender]":
    """Return who takes part. Collective."""
    from hpcdist.bench import checkpoint as bench
    from hpcdist.checkpoint.restore import restore
    from hpcdist.checkpoint.save import save

    def write(folder: Path) -> None:
        save(folder, 1, pieces(comm, state), {}, comm, writers=options["writers"])

    def read(folder: Path) -> None:
        restore(folder / "step-1", pieces(comm, state))

    found = [bench.Contender(bench.OURS, write, read), bench.raw(comm, state)]
    missing = bench.torch_missing() if options["with_torch"] else "--no-torch"
    missing = next((one for one in comm.allgather_object(missing) if one), "")
    if missing:
        say(f"torch.distributed.checkpoint is left out: {missing}")
    else:
        found.append(bench.torch(comm, state, directory))
    return found


def pieces(comm: "Communicator", state: "State") -> list[Any]:
    """Return the state of this rank as pieces: each tensor is whole on one rank (local)."""
    from hpcdist.arrays.piece import Piece

    return [Piece.whole("parameters", f"{comm.rank}.{name}", array) for name, array in state.items()]


def _beside(comm: "Communicator", state: "State", directory: Path, writers: str) -> Any:
    """Return a saver in the background."""
    from hpcdist.checkpoint.background import Background
    from hpcdist.checkpoint.save import Plan

    class Beside(Background):
        count = 0

        def begin(self) -> None:  # type: ignore[override]
            self.count += 1
            plan = Plan(directory, self.count, comm.size, {}, {}, 1)
            super().begin(plan, pieces(comm, state), writers)

    return Beside(comm)


def _told(
    session: "Session", nbytes: int, found: "list[Samples]", beside: "Steps | None", options: dict[str, Any]
) -> dict[str, Any]:
    from hpcdist.bench import checkpoint as bench
    from hpcdist.checkpoint.stripe import file_system

    told = {"bytes": nbytes, "ranks": session.comm.size, "rounds": options["rounds"], "cached": options["cached"]}
    told |= {"writers": options["writers"], "file_system": file_system(options["directory"]).kind}
    told |= bench.figures(found, nbytes)
    return told | ({} if beside is None else {"beside": beside.figures()})


def _show(told: dict[str, Any], as_json: bool) -> None:
    from hpcdist.arrays.sizes import counted, in_units
    from hpcdist.bench import checkpoint as bench

    if as_json:
        click.echo(json.dumps(told))
        return
    read = "the page cache" if told["cached"] else "the disk"
    ranks, rounds = counted(told["ranks"], "rank"), counted(told["rounds"], "round")
    where = f"{told['file_system']}, read from {read}"
    click.echo(f"{in_units(told['bytes'])} on {ranks}, {rounds}, {where}")
    click.echo(bench.text(told))
    if "beside" in told:
        one = told["beside"]
        click.echo(
            f"in background: saving step {one['saving_over_plain']:.2f}x a plain one ({one['plain_step_s']:.3f} s), "
            f"steps beside it {one['beside_over_plain']:.2f}x, complete after {one['save_s']:.2f} s"
        )


def _about(session: "Session", told: dict[str, Any], options: dict[str, Any], anonymous: bool) -> dict[str, Any]:
    from hpcdist.telemetry.provenance import provenance

    known = {name: value for name, value in told.items() if not isinstance(value, dict)}
    kept = {"tensors": options["tensors"], "seed": options["seed"], "warmup": options["warmup"]}
    return {**provenance(mpi_library=session.library, anonymous=anonymous), **known, **kept}
