"""`hpcdist bench collectives`: time collective operations beside MPI's own; rank 0 prints and writes.

Every rank that a launcher started runs it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.errors import FAILURE, OK

if TYPE_CHECKING:  # late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.collectives.results import CollectivesConfiguration, CollectivesRequest
    from hpcdist.comm.start import Session

_SIZES: Final = "4K-64M x4"
# Of the environment of rank 0, what changes how fast collectives are; values may name no host or user.
_ENVIRONMENT: Final = (
    "OMP_NUM_THREADS",
    "OMPI_MCA_btl",
    "OMPI_MCA_coll",
    "OMPI_MCA_mtl",
    "OMPI_MCA_pml",
    "OMPI_MCA_smsc",
    "MPIR_CVAR_",
    "MPICH_",
    "I_MPI_",
    "MV2_",
    "UCX_",
    "FI_",
    "HPCDIST_CUDA_AWARE",
)


@click.command("collectives")
@click.option("--op", "operations", multiple=True, default=("allreduce",), help="Operation, or all; may be repeated.")
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    help="Algorithm to measure beside the MPI library's own; may be repeated.  [default: all that run here]",
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=(_SIZES,),
    metavar="SIZES",
    help="Sizes of a rank's whole buffer: 16K, '4K 64K 1M', 4K-64M, '4K-64M x4'; may be repeated.",
)
@click.option("--dtype", "dtypes", multiple=True, default=("float32",), help="Element type; may be repeated.")
@click.option(
    "--buffers",
    type=click.Choice(["ordinary", "shared", "both"]),
    default="both",
    help="Memory of a rank alone, or memory that the ranks of a node share, for algorithms that make use of it.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    help="About how long all algorithms together are measured for each operation, size and dtype.",
)
@click.option("--iterations", type=click.IntRange(min=1), help="Iterations of each algorithm, in place of --seconds.")
@click.option("--least", type=click.IntRange(min=1), default=10, help="Iterations, however long they take.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, help="Iterations before, which are not kept.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the order of everything.  [default: a new one, shown]")
@click.option("--check/--no-check", default=True, help="Compare every result, outside of the timed part.")
@click.option("--hot", is_flag=True, help="Work on one buffer that was just written, not on one that no cache holds.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="New HDF5 file for the time of every iteration."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves (.png, .pdf, .svg).")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of the results.")
def command(
    operations: tuple[str, ...],
    algorithms: tuple[str, ...],
    sizes: tuple[str, ...],
    dtypes: tuple[str, ...],
    buffers: str,
    check: bool,
    hot: bool,
    seed: int | None,
    seconds: float,
    iterations: int | None,
    least: int,
    warmup: int,
    output: Path | None,
    as_json: bool,
    plot: Path | None,
    anonymous: bool,
) -> None:
    """Measure collective operations beside the MPI library's own, and what the memory allows.

    Start it on several ranks: `hpcdist run -n 4 bench collectives`, or under mpirun or srun.

    A time is that of the slowest rank, from a barrier on; sizes and bandwidths are those of nccl-tests. Algorithms take
    turns in every iteration, and sizes come in random order, so that drift of the machine hits all alike.

    Exit code 0 when every result was right, 1 when any was wrong (the others are shown all the same), 2 for usage, 74
    when --output or --plot cannot be written, which is tried before anything is measured. `hpcdist compare A.h5 B.h5`
    tells whether two results differ.
    """
    from hpcdist.bench.collectives.results import CollectivesRequest
    from hpcdist.bench.collectives.results import sizes as parse_sizes
    from hpcdist.comm import start

    kinds = ("ordinary", "shared") if buffers == "both" else (buffers,)
    known = _known(operations, algorithms, dtypes)
    nbytes = parse_sizes(sizes)
    session = start.start()
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    chosen = session.comm.broadcast_object(drawn)
    request = CollectivesRequest(
        *known[:2], nbytes, known[2], kinds, seconds, iterations, warmup, least, check, hot, chosen
    )
    _check_places(session, output, plot)
    code = _measure(session, request, output, as_json, plot, anonymous)
    session.leave(code)


def _known(
    operations: Sequence[str], algorithms: Sequence[str], dtypes: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return operations, algorithms and dtypes without doubles. Raises UsageError for one that is not known."""
    from hpcdist.arrays.dtypes import dtype_of
    from hpcdist.bench.collectives import contenders
    from hpcdist.bench.collectives.results import OPERATIONS, choice

    every = OPERATIONS if "all" in operations else choice("--op", operations, (*OPERATIONS, "all"))
    names = dict.fromkeys(name for op in every for name in contenders.algorithms(op))
    for dtype in dtypes:
        dtype_of(dtype)
    among = f" for --op {' or '.join(every)}"
    return every, choice("--algorithm", algorithms, names, among), tuple(dict.fromkeys(dtypes))


def _check_places(session: "Session", output: Path | None, plot: Path | None) -> None:
    """Raise, on every rank, what rank 0 finds in the way of its files. Collective over the world."""
    from hpcdist.bench import output_file
    from hpcdist.bench.collectives import report
    from hpcdist.hdf5 import files

    def check() -> None:
        if output is not None:
            files.check_place(output)
        if plot is not None:
            report.check_plot(plot)

    output_file.check_on_all_ranks(session.comm, check)


def _measure(
    session: "Session",
    request: "CollectivesRequest",
    output: Path | None,
    as_json: bool,
    plot: Path | None,
    anonymous: bool,
) -> int:
    """Measure, show and write; return the exit code. Collective over the world."""
    from hpcdist.bench.collectives import report as reports
    from hpcdist.bench.collectives import results as collectives_results
    from hpcdist.bench.collectives import run

    comm = session.comm
    origin = _provenance(session, request, anonymous)
    measured: list[CollectivesConfiguration] = []

    def keep(configurations: "Sequence[CollectivesConfiguration]") -> None:
        measured.extend(configurations)
        if output is not None:
            collectives_results.append(output, configurations, origin)

    if comm.rank == 0 and not as_json:
        click.echo(_headline(session, request))
    run.run(comm, request, session.library, keep, lambda line: click.echo(line, err=True))
    if comm.rank == 0:
        results = collectives_results.CollectivesResults(origin, tuple(measured))
        table = reports.rows(measured)
        if as_json:
            click.echo(json.dumps(reports.jsonable(results)))
        else:
            click.echo("\n".join(["", reports.text(table), "", *reports.notes(table)]))
        if plot is not None:
            reports.plot(table, plot)
        if output is not None:
            click.echo(f"every iteration of every rank is in {output}", err=True)
    wrong = comm.broadcast_object(any(configuration.wrong for configuration in measured))
    return FAILURE if wrong else OK


def _headline(session: "Session", request: "CollectivesRequest") -> str:
    ranks, nodes = session.comm.size, session.comm.nodes().count
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    return f"{where}, {session.library}, seed {request.seed}, {'hot' if request.hot else 'cold'} buffers"


def _provenance(session: "Session", request: "CollectivesRequest", anonymous: bool) -> Mapping[str, Any]:
    """Return what the file says of the run. Collective over the world."""
    from hpcdist.bench.collectives.contenders import last_level_cache_bytes
    from hpcdist.telemetry.provenance import provenance

    comm, place = session.comm, session.place
    places = comm.allgather_object((place.host, place.node, ",".join(map(str, place.cores))))
    hosts = list(dict.fromkeys(host for host, _, _ in places))
    if comm.rank > 0:
        return {}
    named = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    variables = {
        name: value for name, value in named.items() if not (anonymous and any(host in value for host in hosts))
    }
    return {
        **provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous),
        "ranks": comm.size,
        "nodes": comm.nodes().count,
        "node_of_rank": [node for _, node, _ in places],
        "cores_of_rank": [cores for _, _, cores in places],
        "last_level_cache_bytes": last_level_cache_bytes() or -1,
        "environment": json.dumps(variables, sort_keys=True),
        "seed": request.seed,
        "warmup": request.warmup,
        "order": "sizes, dtypes and operations at random; the contenders of one take turns, in a new order each time",
    }
