"""`hpcdist bench collectives`: time collective operations beside MPI's own; rank 0 prints and writes.

Every rank that a launcher started runs it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.errors import FAILURE, OK
from hpcdist.reporting.units import counted

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
@click.option(
    *("--op", "--operation", "operations"),
    multiple=True,
    default=("allreduce",),
    help="Operation, all, or alltoallv: uneven ones of three skews; may be repeated.",
)
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
@count_option("--iterations", help="Iterations of each algorithm, in place of --seconds.")
@count_option("--least", default=10, help="Iterations, however long they take.")
@count_option("--warmup", least=0, default=3, help="Iterations before, which are not kept.")
@count_option("--seed", least=0, help="Of the order of everything.  [default: a new one, shown]")
@click.option("--check/--no-check", default=True, help="Compare every result, outside of the timed part.")
@click.option("--hot", is_flag=True, help="Work on one buffer that was just written, not on one that no cache holds.")
@skeleton.output_options("New HDF5 file for the time of every iteration.", "Draw the curves")
def command(sizes: tuple[str, ...], buffers: str, seed: int | None, **options: Any) -> None:
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

    outputs = Outputs.of(options)
    names = ("operations", "algorithms", "dtypes")
    known: dict[str, Any] = dict(zip(names, _known(*(options.pop(name) for name in names)), strict=True))
    nbytes, kinds = parse_sizes(sizes), ("ordinary", "shared") if buffers == "both" else (buffers,)
    session = skeleton.begin(outputs.check)
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    drawn = session.comm.broadcast_object(drawn)
    session.leave(
        _measure(session, CollectivesRequest(bytes=nbytes, buffers=kinds, seed=drawn, **known, **options), outputs)
    )


def _known(
    operations: Sequence[str], algorithms: Sequence[str], dtypes: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return operations, algorithms and dtypes without doubles. Raises UsageError for one that is not known."""
    from hpcdist.arrays.dtypes import dtype_of
    from hpcdist.bench.collectives import contenders
    from hpcdist.bench.collectives.results import OPERATIONS, UNEVEN

    skeleton.chosen("--op", operations, (*OPERATIONS, UNEVEN, "all"))
    every = tuple(op for op in OPERATIONS if {op, op.partition("-")[0], "all"}.intersection(operations))
    names = dict.fromkeys(name for op in every for name in contenders.algorithms(op))
    for dtype in dtypes:
        dtype_of(dtype)
    among = f" for --op {' or '.join(every)}"
    return every, skeleton.chosen("--algorithm", algorithms, names, among), tuple(dict.fromkeys(dtypes))


def _measure(session: "Session", request: "CollectivesRequest", outputs: Outputs) -> int:
    """Measure, show and write; return the exit code. Collective over the world."""
    from hpcdist.bench.collectives import report as reports
    from hpcdist.bench.collectives import results, run

    comm = session.comm
    about = _provenance(session, request, outputs.anonymous)
    measured: list[CollectivesConfiguration] = []

    def keep(configurations: "Sequence[CollectivesConfiguration]") -> None:
        measured.extend(configurations)
        if outputs.file is not None:
            results.append(outputs.file, configurations, about)

    if comm.rank == 0 and not outputs.as_json:
        click.echo(_headline(session, request))
    run.run(comm, request, session.library, keep, skeleton.print_progress)
    if comm.rank == 0:
        table = reports.rows(measured)
        outputs.show(
            lambda: reports.jsonable(results.CollectivesResults(about, tuple(measured))),
            lambda: "\n".join(["", reports.text(table), "", *reports.notes(table)]),
            lambda file: reports.plot(table, file),
        )
        if outputs.file is not None:
            skeleton.print_progress(f"every iteration of every rank is in {outputs.file}")
    wrong = comm.broadcast_object(any(configuration.wrong for configuration in measured))
    return FAILURE if wrong else OK


def _headline(session: "Session", request: "CollectivesRequest") -> str:
    where = f"{counted(session.comm.size, 'rank')} on {counted(session.comm.nodes().count, 'node')}"
    return f"{where}, {session.library}, seed {request.seed}, {'hot' if request.hot else 'cold'} buffers"


def _provenance(session: "Session", request: "CollectivesRequest", anonymous: bool) -> Mapping[str, Any]:
    """Return what the file says of the run. Collective over the world."""
    from hpcdist.bench.collectives.contenders import last_level_cache_bytes

    comm = session.comm
    places = comm.allgather_object((session.place.host, session.place.node))
    hosts = {host for host, _ in places}
    named = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    variables = {
        name: value for name, value in named.items() if not (anonymous and any(host in value for host in hosts))
    }
    return skeleton.origin(
        session,
        anonymous,
        ranks=comm.size,
        nodes=comm.nodes().count,
        node_of_rank=[node for _, node in places],
        last_level_cache_bytes=last_level_cache_bytes() or -1,
        environment=json.dumps(variables, sort_keys=True),
        seed=request.seed,
        warmup=request.warmup,
        order="sizes, dtypes and operations at random; the contenders of one take turns, in a new order each time",
    )
