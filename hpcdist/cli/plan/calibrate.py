"""`hpcdist plan calibrate`: write a cluster file from measurements of the machine at hand.

One process measures a device; on the ranks of a launcher the links between them are measured as well. What is not
measured (storage, failures, power, prices) comes from a cluster by name.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.tune import ByteSize
from hpcdist.errors import OK, ConfigurationError, StorageError, UsageError

if TYPE_CHECKING:  # late at run time: --help must load neither numpy nor MPI
    from collections.abc import Mapping

    from hpcdist.bench.calibrate.device import CalibrationPoints, CalibrationRequest, ModelPoint
    from hpcdist.planner.calibrate.cluster_fit import ClusterMeasurements

_FROM: Final = "workstation"
_NAME: Final = "here"
_POINTS: Final = ".points.h5"  # beside a cluster that could not be made
_MATMUL, _ATTENTION = "matmul", "attention"
_ALGORITHMS: Final = ("auto", "ring", "hierarchical")
_DTYPES: Final = ("float32", "float64", "float16")


@click.command("calibrate")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="TOML file to write; must not exist.",
)
@click.option(
    "--from",
    "base",
    default=_FROM,
    metavar="CLUSTER",
    help="Name or file of the cluster that has what is not measured: storage, failures, power, prices.",
)
@click.option("--name", help=f"What the cluster is called.  [default: the file's, as {_NAME} for {_NAME}.toml]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Where trainings will compute.")
@click.option(
    "--dtype", "dtypes", type=click.Choice(_DTYPES), multiple=True, default=("float32",), help="May be repeated."
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=20.0, help="For the device, and again for the links."
)
@click.option("--max-bytes", type=ByteSize(), default="32M", help="The longest message, and buffer of a collective.")
@click.option(
    "--algorithm",
    "algorithms",
    type=click.Choice(_ALGORITHMS),
    multiple=True,
    default=("auto", "ring"),
    help="Collectives to measure; may be repeated. auto: what a training chooses.",
)
@click.option("--points", type=click.Path(dir_okay=False, path_type=Path), help="HDF5 file for all that was measured.")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of --points.")
def command(
    output: Path,
    base: str,
    name: str | None,
    device: str,
    dtypes: tuple[str, ...],
    seconds: float,
    max_bytes: int,
    algorithms: tuple[str, ...],
    points: Path | None,
    anonymous: bool,
) -> int:
    """Measure the machine at hand and write it as a cluster that `hpcdist plan --cluster` takes.

    One process measures a device: products of matrices over sizes, copies, and steps of small gpts. Under
    `hpcdist run -n N`, mpirun or srun all ranks measure the device together and then the links between them: messages
    on each level (inside a node, between nodes) and the collectives of trainings. The file says when, on how many
    hosts and over which range each number was measured, and how far fits are off at sizes they have not seen; a plan
    flags what lies outside, and that fewer ranks than devices of a node were at work.

    A machine that does something else meanwhile is measured for nothing: the load before and after, and repetitions
    that lie apart, are looked at, and a busy one is warned of and flagged in each plan with the file.

    Exit code 0 when the file is written, 2 for usage, 74 when a file cannot be written, which is tried first, and 78
    for a cluster that --from cannot read. Measurements that make no cluster (2 or 78) are kept as points.
    """
    from hpcdist.bench import output_file
    from hpcdist.bench.calibrate import run
    from hpcdist.comm import start
    from hpcdist.hdf5 import files
    from hpcdist.planner.cluster import toml_file

    if "float16" in dtypes and device == "cpu":
        raise UsageError(
            "--dtype float16 with --device cpu: the products of a training are float32 there; leave it out"
        )
    request = _wanted(device, dtypes, seconds, max_bytes, algorithms)
    session = start.start(device)
    comm = session.comm

    def check() -> None:
        toml_file.read(base)
        for path in (output, points):
            if path is not None:
                files.check_place(path)

    output_file.check_on_all_ranks(comm, check)
    points_measured = run.run(comm, request, session.library, _processor(), _print_summary)
    origin = _provenance(session, anonymous)
    output_file.check_on_all_ranks(
        comm, lambda: written(points_measured, output, points, base, name or output.stem, origin)
    )
    session.leave(OK)
    return OK


def written(
    measured: "CalibrationPoints", output: Path, points: Path | None, base: str, name: str, origin: "Mapping[str, Any]"
) -> None:
    """Write the points, then the cluster that they make, after it was read as a plan will read it (local).

    Points that make no cluster are not lost: without ``points`` they are then written beside ``output``. Raises
    UsageError or ConfigurationError, which say where they are, and StorageError.
    """
    import tomllib

    from hpcdist.bench.calibrate import run
    from hpcdist.planner.calibrate import cluster_fit
    from hpcdist.planner.cluster import toml_file

    if points is not None:
        run.write_points(points, measured, origin)
    try:
        calibrated = cluster_fit.assemble(name, toml_file.read(base), findings(measured))
        text = toml_file.dump(calibrated.cluster)
        toml_file.of_tree(tomllib.loads(text), str(output))
    except (UsageError, ConfigurationError) as error:
        place = points or output.with_name(output.name + _POINTS)
        if points is None:
            run.write_points(place, measured, origin)
        raise type(error)(
            f"what was measured makes no cluster: {error}; the measurements are kept in {place}"
        ) from None
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}") from None
    for line in calibrated.lines:
        click.echo(line)
    click.echo(f"{output}: {calibrated.cluster.name}, measured in {measured.seconds:.0f} s")


def _print_summary(text: str) -> None:
    click.echo(text, err=True)


def _processor() -> str:
    from hpcdist.telemetry.provenance import processor

    return f"core of {processor()}"


def _wanted(
    device: str, dtypes: tuple[str, ...], seconds: float, max_bytes: int, algorithms: tuple[str, ...]
) -> "CalibrationRequest":
    from hpcdist.bench.calibrate.device import CalibrationRequest, default_models

    return CalibrationRequest(
        dtypes=tuple(dict.fromkeys(dtypes)),
        on=device,
        models=default_models(),
        algorithms=tuple(dict.fromkeys(algorithms)),
        most_bytes=max_bytes,
        seconds=seconds,
    )


def _provenance(session: Any, anonymous: bool) -> dict[str, Any]:
    """Return what a file says of the run. Collective over the world."""
    from hpcdist.telemetry.provenance import provenance

    hosts = sorted(set(session.comm.allgather_object(session.place.host)))
    return provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous)


def findings(points: "CalibrationPoints") -> "ClusterMeasurements":
    """Return what was measured in the language of the planner (local)."""
    from datetime import UTC, datetime

    from hpcdist.planner.calibrate.cluster_fit import ClusterMeasurements
    from hpcdist.planner.calibrate.device_fits import MeasuredProduct

    machine = points.machine
    return ClusterMeasurements(
        date=datetime.now(UTC).date().isoformat(),
        device=machine.device,
        hosts=machine.hosts,
        ranks_per_host=machine.ranks_per_host,
        devices_per_host=machine.devices_per_host,
        memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_memory_bytes,
        products={
            dtype: [MeasuredProduct(point.m, point.k, point.n, point.seconds.all) for point in measured]
            for dtype, measured in points.products.items()
        },
        moves=[(point.nbytes, point.seconds.all) for point in points.moves if point.operation == "add"],
        steps=[step(point) for point in points.models],
        series=list(_series(points)),
        busy=points.busy,
        by=f"{machine.mpi_library.partition(',')[0]}; {machine.blas}",
    )


def step(point: "ModelPoint") -> Any:
    """Return a measured step of a model as the planner's fit takes it (local)."""
    from hpcdist.planner.calibrate.device_fits import MeasuredStep
    from hpcdist.planner.model import transformer

    def both(*kinds: str, beside: bool = False) -> tuple[float, float]:
        chosen = [kind for kind in point.kinds if (kind.kind in kinds) != beside]
        return sum(kind.forward.all for kind in chosen), sum(kind.backward.all for kind in chosen)

    return MeasuredStep(
        description=transformer.of_config(point.config, context=point.context),
        samples=point.samples,
        products_s=both(_MATMUL),
        attention_s=both(_ATTENTION),
        elementwise_s=both(_MATMUL, _ATTENTION, beside=True),
    )


def _series(points: "CalibrationPoints") -> Any:
    """Yield the messages of each level, then each collective by algorithm and level."""
    from hpcdist.planner.calibrate.cluster_fit import MESSAGE, TimingSeries

    for level in dict.fromkeys(point.level for point in points.links):
        own = sorted((point for point in points.links if point.level == level), key=lambda point: point.nbytes)
        yield TimingSeries(
            operation=MESSAGE,
            algorithm="auto",
            level=level,
            ranks=own[0].ranks,
            nbytes=tuple(float(point.nbytes) for point in own),
            seconds=tuple(point.seconds.all for point in own),
            alone_s=tuple(point.seconds.one for point in own),
            borders=tuple(float(point.nbytes) for point in own if point.border),
        )
    for key in dict.fromkeys(
        (point.operation, point.algorithm, point.level, point.ranks) for point in points.collectives
    ):
        measured = [
            point for point in points.collectives if (point.operation, point.algorithm, point.level, point.ranks) == key
        ]
        measured.sort(key=lambda point: point.nbytes)
        yield TimingSeries(
            operation=key[0],
            algorithm=key[1],
            level=key[2],
            ranks=key[3],
            nbytes=tuple(float(point.nbytes) for point in measured),
            seconds=tuple(point.seconds for point in measured),
            borders=tuple(float(point.nbytes) for point in measured if point.border),
        )
