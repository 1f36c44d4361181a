"""`hpcdist bench collectives`: measure collective operations of hpcdist and of the MPI library.

The command runs on every rank that a launcher started. Rank 0 prints and writes the results.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.bench import skeleton
from hpcdist.cli.bench.skeleton import Outputs, count_option
from hpcdist.errors import FAILURE, OK
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # imported late at run time: --help must load neither h5py nor MPI
    from hpcdist.bench.collectives.results import CollectivesConfiguration, CollectivesRequest
    from hpcdist.comm.start import Session

# Beginnings of environment variables that change the speed of collectives. The results contain their values.
_ENVIRONMENT: Final = (
    *("OMP_NUM_THREADS", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_", "UCX_", "FI_", "HPCDIST_CUDA_AWARE"),
    *(f"OMPI_MCA_{framework}" for framework in ("btl", "coll", "mtl", "pml", "smsc")),
)


@click.command("collectives")
@click.option(
    *("--op", "--operation", "operations"),
    multiple=True,
    default=("allreduce",),
    help="Operation, all, or alltoallv (three distributions of uneven parts); may be repeated.",
)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    help='Algorithm, in addition to the MPI library ("native"); may be repeated.  [default: all that run here]',
)
@click.option(
    "--bytes",
    "sizes",
    multiple=True,
    default=("4K-64M x4",),
    metavar="SIZES",
    help="Sizes of a rank's whole buffer: 16K, '4K 64K 1M', 4K-64M, '4K-64M x4'; may be repeated.",
)
@click.option("--dtype", "dtypes", multiple=True, default=("float32",), help="Element type; may be repeated.")
@click.option(
    "--buffers",
    type=click.Choice(["ordinary", "shared", "both"]),
    default="both",
    help="Buffers in private memory, or in shared memory of the node for the algorithms that use it.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    help="Approximate time for all algorithms together, per operation, size and dtype.",
)
@count_option("--iterations", help="Iterations of each algorithm, instead of --seconds.")
@count_option("--least", default=10, help="Minimum number of iterations within --seconds.")
@count_option("--warmup", least=0, default=3, help="Untimed iterations before the timed iterations.")
@count_option("--seed", least=0, help="Seed for the order of sizes and algorithms.  [default: a random seed, printed]")
@click.option("--check/--no-check", default=True, help="Compare every result, outside the timed section.")
@click.option("--hot", is_flag=True, help="Use one recently written buffer, not buffers that no cache holds.")
@skeleton.output_options("New HDF5 file for the time of every iteration.", "Plot time and bandwidth over size")
def command(sizes: tuple[str, ...], buffers: str, seed: int | None, **options: Any) -> None:
    """Measure collective operations of hpcdist and of the MPI library, and the speed of a memory copy.

    Start this command on several ranks: `hpcdist run -n 4 bench collectives`, or with mpirun or srun.

    A time is the slowest rank's time after a barrier; sizes and bandwidths are defined as in nccl-tests. Algorithms
    take turns in every iteration, and sizes come in random order. A drift of the machine thus affects all alike.

    Exit codes: 0 if all results are correct, 1 if a result is wrong (the other results are printed), 2 for invalid
    options, 74 if --output or --plot cannot be written. The files are checked before the measurement. To compare two
    results, use `hpcdist compare A.h5 B.h5`.
    """
    from hpcdist.bench.collectives.results import CollectivesRequest
    from hpcdist.bench.collectives.results import sizes as parse_sizes

    outputs = Outputs.of(options)
    names = _valid_names(*(options.pop(name) for name in ("operations", "algorithms", "dtypes")))
    options |= dict(zip(("operations", "algorithms", "dtypes"), names, strict=True))
    options |= {"bytes": parse_sizes(sizes), "buffers": ("ordinary", "shared") if buffers == "both" else (buffers,)}
    session = skeleton.begin(outputs.check)
    seed = session.comm.broadcast_object(int.from_bytes(os.urandom(4), "little") if seed is None else seed)
    session.leave(_measure(session, CollectivesRequest(seed=seed, **options), outputs))


def _valid_names(
    operations: Sequence[str], algorithms: Sequence[str], dtypes: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    # "all" means every operation, and "alltoallv" means its three operations.
    from hpcdist.arrays.dtypes import dtype_of
    from hpcdist.bench.collectives import contenders
    from hpcdist.bench.collectives.results import OPERATIONS, UNEVEN

    skeleton.chosen("--op", operations, (*OPERATIONS, UNEVEN, "all"))
    valid = tuple(op for op in OPERATIONS if {op, op.partition("-")[0], "all"}.intersection(operations))
    names = dict.fromkeys(name for op in valid for name in contenders.algorithms(op))
    for dtype in dtypes:
        dtype_of(dtype)
    context = f" for --op {' or '.join(valid)}"
    return valid, skeleton.chosen("--algorithm", algorithms, names, context), tuple(dict.fromkeys(dtypes))


def _measure(session: "Session", request: "CollectivesRequest", outputs: Outputs) -> int:
    from hpcdist.bench.collectives import report as reports
    from hpcdist.bench.collectives import results, run

    comm = session.comm
    provenance = _provenance(session, request, outputs.anonymous)
    measured: list[CollectivesConfiguration] = []

    def save(configurations: "Sequence[CollectivesConfiguration]") -> None:
        measured.extend(configurations)
        if outputs.file is not None:
            results.append(outputs.file, configurations, provenance)

    if comm.rank == 0 and not outputs.as_json:
        size = f"{counted(comm.size, 'rank')} on {counted(comm.nodes().count, 'node')}"
        click.echo(f"{size}, {session.library}, seed {request.seed}, {'hot' if request.hot else 'cold'} buffers")
    run.run(comm, request, session.library, save, skeleton.print_progress)
    if comm.rank == 0:
        table = reports.rows(measured)
        outputs.show(
            lambda: reports.jsonable(results.CollectivesResults(provenance, tuple(measured))),
            lambda: "\n".join(["", reports.text(table), "", *reports.notes(table)]),
            lambda file: reports.plot(table, file),
        )
        if outputs.file is not None:
            skeleton.print_progress(f"the time of every iteration on every rank is in {outputs.file}")
    wrong = comm.broadcast_object(any(configuration.wrong for configuration in measured))
    return FAILURE if wrong else OK


def _provenance(session: "Session", request: "CollectivesRequest", anonymous: bool) -> dict[str, Any]:
    from hpcdist.bench.collectives.contenders import last_level_cache_bytes

    comm = session.comm
    hosts, nodes = zip(*comm.allgather_object((session.place.host, session.place.node)), strict=True)
    variables = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    if anonymous:
        variables = {name: value for name, value in variables.items() if not any(host in value for host in hosts)}
    return skeleton.origin(
        session,
        anonymous,
        ranks=comm.size,
        nodes=comm.nodes().count,
        node_of_rank=list(nodes),
        last_level_cache_bytes=last_level_cache_bytes() or -1,
        environment=json.dumps(variables, sort_keys=True),
        seed=request.seed,
        warmup=request.warmup,
        order="cells in random order; the contenders of a cell take turns, in a new random order in each iteration",
    )
