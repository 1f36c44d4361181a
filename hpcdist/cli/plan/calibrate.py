"""`hpcdist plan calibrate`: write a cluster file from measurements of this machine."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import BYTE_SIZE, FILE
from hpcdist.errors import OK, ConfigurationError, UsageError
from hpcdist.reporting import atomic

if TYPE_CHECKING:  # late at run time: --help must load neither numpy nor MPI
    from collections.abc import Mapping

    from hpcdist.bench.device_speed import CalibrationPoints, ModelPoint
    from hpcdist.planner.calibrate.cluster_fit import ClusterMeasurements

_FROM: Final = "workstation"
_NAME: Final = "here"
_POINTS: Final = ".points.h5"  # suffix of the file for measurements that no cluster could be fitted to
_MATMUL, _ATTENTION = "matmul", "attention"
_ALGORITHMS: Final = ("auto", "ring", "hierarchical")
_DTYPES: Final = ("float32", "float64", "float16")


@click.command("calibrate")
@click.option("-o", "--output", type=FILE, required=True, help="New TOML file for the cluster.")
@click.option(
    "--from",
    "base",
    default=_FROM,
    metavar="CLUSTER",
    help="Cluster (name or file) for values that are not measured: storage, failures, power, prices.",
)
@click.option("--name", help=f"Name of the new cluster.  [default: from --output, e.g. {_NAME} for {_NAME}.toml]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Device to measure.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(_DTYPES),
    multiple=True,
    default=("float32",),
    help="Data type of the measured matrix products; repeatable.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=20.0, help="Time for the device, and again for the links."
)
@click.option(
    "--max-bytes", "most_bytes", type=BYTE_SIZE, default="32M", help="Largest message and collective buffer to measure."
)
@click.option(
    "--algorithm",
    "algorithms",
    type=click.Choice(_ALGORITHMS),
    multiple=True,
    default=("auto", "ring"),
    help="Algorithm of the measured collectives; repeatable. auto: the algorithm that a training would choose.",
)
@click.option("--points", type=FILE, help="HDF5 file to write all measurements to.")
@click.option("--anonymous", is_flag=True, help="Omit host names from --points.")
def command(
    output: Path, base: str, name: str | None, device: str, points: Path | None, anonymous: bool, **settings: Any
) -> int:
    """Measure this machine, and write a cluster file for `hpcdist plan --cluster`.

    One process measures a device: matrix products, copies, and steps of small GPT models. Under `hpcdist run -n N`,
    mpirun or srun, all ranks measure the device together and then their links: messages inside a node and between
    nodes, and the collectives of training. The file records the measured range and the fit error of each number.
    `hpcdist plan` marks values outside the measured range.

    Values that are not measured, such as prices, come from the cluster --from. --name names the new cluster. --points
    also writes the measurements to a file, in which --anonymous omits host names.

    Measure on an idle machine. A warning is printed, and stored in the file, if the machine is busy.

    Exit code 0: the file is written. 2: the options are invalid. 74: a file cannot be written. 78: the cluster --from
    cannot be read. If the measurements do not suffice for a cluster file, the exit code is 2 or 78, and the
    measurements are written.
    """
    from hpcdist.bench import calibration, output_file
    from hpcdist.bench.device_speed import CalibrationRequest, default_models
    from hpcdist.comm import start
    from hpcdist.hdf5 import files
    from hpcdist.planner.cluster import toml_file
    from hpcdist.reporting.machine import processor
    from hpcdist.telemetry.provenance import provenance

    if "float16" in settings["dtypes"] and device == "cpu":
        raise UsageError(
            "--dtype float16 does not apply to --device cpu: trainings on CPUs multiply in float32; leave --dtype out"
        )
    settings |= {name: tuple(dict.fromkeys(settings[name])) for name in ("dtypes", "algorithms")}
    request = CalibrationRequest(on=device, models=default_models(), **settings)
    session = start.start(device)
    comm = session.comm

    def check() -> None:
        toml_file.read(base)
        for path in (output, points):
            if path is not None:
                files.check_place(path)

    output_file.check_on_all_ranks(comm, check)
    say = functools.partial(click.echo, err=True)
    points_measured = calibration.run(comm, request, session.library, f"core of {processor()}", say)
    hosts = sorted(set(comm.allgather_object(session.place.host)))
    origin = provenance(mpi_library=session.library, hosts=hosts, anonymous=anonymous)
    output_file.check_on_all_ranks(
        comm, lambda: write_files(points_measured, output, points, base, name or output.stem, origin)
    )
    session.leave(OK)
    return OK


def write_files(
    measured: "CalibrationPoints", output: Path, points: Path | None, base: str, name: str, origin: "Mapping[str, Any]"
) -> None:
    """Fit a cluster to the measurements ``measured``. Write the cluster file ``output``. Raises HpcdistError.

    ``points``: file for the measurements, or None. ``base``: name or file of a cluster, for unmeasured values.
    ``name``: name of the new cluster. ``origin``: versions and machines, to store with the measurements.
    """
    # ``points`` None: write the measurements only if the fit fails, next to ``output``.
    import tomllib

    from hpcdist.bench import calibration
    from hpcdist.planner.calibrate import cluster_fit
    from hpcdist.planner.cluster import toml_file

    if points is not None:
        calibration.write_points(points, measured, origin)
    try:
        calibrated = cluster_fit.assemble(name, toml_file.read(base), planner_measurements(measured))
        text = toml_file.dump(calibrated.cluster)
        toml_file.of_tree(tomllib.loads(text), str(output))
    except (UsageError, ConfigurationError) as error:
        place = points or output.with_name(output.name + _POINTS)
        if points is None:
            calibration.write_points(place, measured, origin)
        raise type(error)(
            f"no cluster can be fitted to the measurements: {error}; the measurements are in {place}"
        ) from None
    atomic.save(output, text)
    for line in calibrated.lines:
        click.echo(line)
    click.echo(f"{output}: {calibrated.cluster.name}, measured in {measured.seconds:.0f} s")


def planner_measurements(points: "CalibrationPoints") -> "ClusterMeasurements":
    """Convert the measurements ``points`` to the input of the planner's cluster fit."""
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
        steps=[planner_step(point) for point in points.models],
        series=list(_series(points)),
        busy=points.busy,
        by=f"{machine.mpi_library.partition(',')[0]}; {machine.blas}",
    )


def planner_step(point: "ModelPoint") -> Any:
    """Convert ``point``, the measured training step of a model, to the input of the planner's device fit."""
    from hpcdist.planner.calibrate.device_fits import MeasuredStep
    from hpcdist.planner.model import transformer

    def passes_s(*kinds: str, exclude: bool = False) -> tuple[float, float]:
        selected = [kind for kind in point.kinds if (kind.kind in kinds) != exclude]
        return sum(kind.forward.all for kind in selected), sum(kind.backward.all for kind in selected)

    return MeasuredStep(
        description=transformer.of_config(point.config, context=point.context),
        samples=point.samples,
        products_s=passes_s(_MATMUL),
        attention_s=passes_s(_ATTENTION),
        elementwise_s=passes_s(_MATMUL, _ATTENTION, exclude=True),
    )


def _series(points: "CalibrationPoints") -> Any:
    from hpcdist.planner.calibrate.cluster_fit import MESSAGE, TimingSeries

    by_series: dict[tuple[Any, ...], list[Any]] = {}
    for link in points.links:
        by_series.setdefault((MESSAGE, "auto", link.level, link.ranks), []).append(link)
    for point in points.collectives:
        by_series.setdefault((point.operation, point.algorithm, point.level, point.ranks), []).append(point)
    for key, samples in by_series.items():
        samples.sort(key=lambda point: point.nbytes)
        is_link = key[0] == MESSAGE
        yield TimingSeries(
            **dict(zip(("operation", "algorithm", "level", "ranks"), key, strict=True)),
            nbytes=tuple(float(point.nbytes) for point in samples),
            seconds=tuple(point.seconds.all if is_link else point.seconds for point in samples),
            alone_s=tuple(point.seconds.one for point in samples if is_link),
            borders=tuple(float(point.nbytes) for point in samples if point.border),
        )
