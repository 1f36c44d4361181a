"""`hpcdist plan calibrate`: write a cluster file from measurements of the machine at hand.

One process measures a device; on the ranks of a launcher the links between them are measured as well. What is not
measured (storage, failures, power, prices) comes from a cluster by name.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import BYTE_SIZE, FILE
from hpcdist.errors import OK, ConfigurationError, UsageError
from hpcdist.reporting import atomic

if TYPE_CHECKING:  # late at run time: --help must load neither numpy nor MPI
    from collections.abc import Mapping

    from hpcdist.bench.calibrate.device import CalibrationPoints, ModelPoint
    from hpcdist.planner.calibrate.cluster_fit import ClusterMeasurements

_FROM: Final = "workstation"
_NAME: Final = "here"
_POINTS: Final = ".points.h5"  # beside a cluster that could not be made
_MATMUL, _ATTENTION = "matmul", "attention"
_ALGORITHMS: Final = ("auto", "ring", "hierarchical")
_DTYPES: Final = ("float32", "float64", "float16")


@click.command("calibrate")
@click.option("-o", "--output", type=FILE, required=True, help="TOML file to write; must not exist.")
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
@click.option(
    "--max-bytes", "most_bytes", type=BYTE_SIZE, default="32M", help="Longest message, and buffer of a collective."
)
@click.option(
    "--algorithm",
    "algorithms",
    type=click.Choice(_ALGORITHMS),
    multiple=True,
    default=("auto", "ring"),
    help="Collectives to measure; may be repeated. auto: what a training chooses.",
)
@click.option("--points", type=FILE, help="HDF5 file for all that was measured.")
@click.option("--anonymous", is_flag=True, help="Leave the names of hosts out of --points.")
def command(
    output: Path, base: str, name: str | None, device: str, points: Path | None, anonymous: bool, **wanted: Any
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
    from hpcdist.bench.calibrate.device import CalibrationRequest, default_models
    from hpcdist.comm import start
    from hpcdist.hdf5 import files
    from hpcdist.planner.cluster import toml_file
    from hpcdist.reporting.machine import processor
    from hpcdist.telemetry.provenance import provenance

    if "float16" in wanted["dtypes"] and device == "cpu":
        raise UsageError(
            "--dtype float16 with --device cpu: the products of a training are float32 there; leave it out"
        )
    wanted |= {name: tuple(dict.fromkeys(wanted[name])) for name in ("dtypes", "algorithms")}
    request = CalibrationRequest(on=device, models=default_models(), **wanted)
    session = start.start(device)
    comm = session.comm

    def check() -> None:
        toml_file.read(base)
        for path in (output, points):
            if path is not None:
                files.check_place(path)

    output_file.check_on_all_ranks(comm, check)
    say = functools.partial(click.echo, err=True)
    points_measured = run.run(comm, request, session.library, f"core of {processor()}", say)
    hosts = sorted(set(comm.allgather_object(session.place.host)))
    origin = provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous)
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
    atomic.save(output, text)
    for line in calibrated.lines:
        click.echo(line)
    click.echo(f"{output}: {calibrated.cluster.name}, measured in {measured.seconds:.0f} s")


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

    by_series: dict[tuple[Any, ...], list[Any]] = {}
    for link in points.links:
        by_series.setdefault((MESSAGE, "auto", link.level, link.ranks), []).append(link)
    for point in points.collectives:
        by_series.setdefault((point.operation, point.algorithm, point.level, point.ranks), []).append(point)
    for key, own in by_series.items():
        own.sort(key=lambda point: point.nbytes)
        is_link = key[0] == MESSAGE
        yield TimingSeries(
            **dict(zip(("operation", "algorithm", "level", "ranks"), key, strict=True)),
            nbytes=tuple(float(point.nbytes) for point in own),
            seconds=tuple(point.seconds.all if is_link else point.seconds for point in own),
            alone_s=tuple(point.seconds.one for point in own if is_link),
            borders=tuple(float(point.nbytes) for point in own if point.border),
        )
