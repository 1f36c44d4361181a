"""Run a calibration: measure device and links, check that the machine was quiet, and write the points to HDF5.

A machine that did something else while it was measured shows by its load and by the spread of repetitions. The load
is the kernel's one-minute average of what runs or wants to, to which each rank of ours adds as many as it has
threads: ranks that wait for a message poll without end. Any more belongs to other processes. The average decays by a
factor e a minute, so that what ran before is subtracted: after T seconds the load a meanwhile and b before show as a
(1 - exp(-T/60)) + b exp(-T/60). Repetitions of the same call, in which others take the core now and then, have a mean
far above their first quartile.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays.matmul_peak import blas
from hpcdist.bench.calibrate import device
from hpcdist.bench.calibrate import links as calibrate_links
from hpcdist.bench.calibrate.device import (
    BusySeconds,
    CalibratedMachine,
    CalibrationPoints,
    CalibrationRequest,
    ModelPoint,
)
from hpcdist.bench.output_file import ResultsFormat
from hpcdist.comm.communicator import Communicator
from hpcdist.reporting.machine import load_average

MINUTE_S: Final = 60.0
LEAST_S: Final = 30.0  # of measuring, below which an average over a minute does not tell it from what was before
SPARE, SPARE_SHARE = 0.5, 0.05  # of load, and of cores: what a machine does for itself
APART: Final = 0.2  # mean over first quartile, less 1: 0.02 on an idle machine, 0.6 with one more process for each core
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and namespaces of a machine


class LoadSample(NamedTuple):
    """A machine at a moment: its load over the last minute, NaN where it tells none, and what is ours to come."""

    load: float
    own: int
    cores: int

    @property
    def most(self) -> float:
        """The load that is explained by our ranks."""
        return self.own + max(SPARE, SPARE_SHARE * self.cores)


def sample_load(comm: Communicator, threads: int) -> tuple[LoadSample, ...]:
    """Return all machines of the ranks, each of which computes with ``threads``. Collective over ``comm``."""
    by_rank = comm.allgather_object((_machine(comm), load_average(), threads, os.cpu_count() or 1))
    samples = []
    for machine in dict.fromkeys(of_rank[0] for of_rank in by_rank):
        own = [of_rank for of_rank in by_rank if of_rank[0] == machine]
        samples.append(LoadSample(load=own[0][1], own=sum(of_rank[2] for of_rank in own), cores=own[0][3]))
    return tuple(samples)


def _machine(comm: Communicator) -> str:
    """Return an identity that ranks of one kernel share: hosts in namespaces of one machine have one load."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return f"node {comm.nodes().index}"


def busy_before(looks: Sequence[LoadSample]) -> str:
    """Return the sign that a machine is busy already; empty: it is not (local)."""
    return _worst([(look.load - look.most, f"a load of {look.load:.1f}", look) for look in looks])


def busy_meanwhile(then: Sequence[LoadSample], now: Sequence[LoadSample], seconds: float, spread: float | None) -> str:
    """Return the signs that a machine was busy between two samples, ``seconds`` apart; empty: it was not (local).

    ``spread`` is that of repetitions: their mean over their first quartile, less 1.
    """
    loads = []
    for old, new in zip(then, now, strict=True):
        during = new.load
        if seconds >= LEAST_S:
            remaining = math.exp(-seconds / MINUTE_S)
            during = (new.load - old.load * remaining) / (1 - remaining)
        loads.append((during - new.most, f"a load of {during:.1f}", new))
    reasons = []
    if loaded := _worst(loads) or busy_before(then):
        reasons.append(loaded)
    if spread is not None and spread > APART:
        reasons.append(f"repetitions took {spread:.0%} more on average than their first quartile")
    return ", ".join(reasons)


def _worst(loads: Sequence[tuple[float, str, LoadSample]]) -> str:
    """Return the text of the greatest excess above 0; a load that is not known has none."""
    worst = max((load for load in loads if load[0] > 0), default=None, key=lambda load: load[0])
    return "" if worst is None else f"{worst[1]} where {worst[2].own} are ranks of this calibration"


FORMAT: Final = ResultsFormat("hpcdist.calibration", 1)


def write_points(path: Path, calibration: CalibrationPoints, provenance: Mapping[str, Any]) -> None:
    """Write a new file, as a whole or not at all. Raises StorageError."""
    about = {**provenance, **asdict(calibration.machine), "measured_in_s": calibration.seconds}
    with FORMAT.edit(path, {**about, "busy": calibration.busy}) as file:
        for dtype, points in calibration.products.items():
            _table(file.create_group(f"products/{dtype}"), _columns(points, m="m", k="k", n="n"), _seconds(points))
        moves = calibration.moves
        _table(file.create_group("moves"), _columns(moves, operation="operation", bytes="nbytes"), _seconds(moves))
        for number, model in enumerate(calibration.models):
            group = file.create_group(f"models/{number}")
            shape = {name: value for name, value in asdict(model.config).items() if value is not None}
            names = ("context", "samples", "parameters", "operations")
            group.attrs.update({**shape, **{name: getattr(model, name) for name in names}})
            rows = [(point.kind, way, getattr(point, way)) for point in model.kinds for way in ("forward", "backward")]
            rows += [("norm", "step", model.norm), ("update", "step", model.update), ("all", "step", model.step)]
            kinds, ways, seconds = map(list, zip(*rows, strict=True))
            _table(group, {"kind": kinds, "way": ways}, seconds)
        links, collectives = calibration.links, calibration.collectives
        both = {"level": "level", "nbytes": "nbytes", "border": "border"}
        _table(file.create_group("messages"), _columns(links, **both), _seconds(links))
        columns = _columns(collectives, operation="operation", algorithm="algorithm", ranks="ranks", **both)
        _table(file.create_group("collectives"), columns, [BusySeconds(of.seconds, of.seconds) for of in collectives])


def _columns(points: Sequence[Any], **fields: str) -> dict[str, list[Any]]:
    """Return the columns of a table: the ``fields`` of points by the name of the column."""
    return {name: [getattr(point, field) for point in points] for name, field in fields.items()}


def _seconds(points: Sequence[Any]) -> list[BusySeconds]:
    return [point.seconds for point in points]


def _table(group: Any, columns: Mapping[str, Sequence[Any]], seconds: Sequence[BusySeconds]) -> None:
    """Write columns of one length, the seconds (rows, one rank at work or all), and their spread, NaN if not kept."""
    for name, values in columns.items():
        group.create_dataset(
            name, data=np.array(values, dtype=object if values and isinstance(values[0], str) else None)
        )
    times = np.array([busy[:2] for busy in seconds], np.float64).reshape(len(seconds), 2)
    spread = [np.nan if busy.spread is None else busy.spread for busy in seconds]
    group.create_dataset("spread", data=np.array(spread, np.float64)).attrs["units"] = "1"
    group.create_dataset("seconds", data=times).attrs.update(
        {"units": "s", "columns": "one rank of a node, all of them"}
    )


Say = Callable[[str], None]
_MOVES_SHARE: Final = 0.2  # of the seconds for the device
_LINKS_SHARE: Final = 0.3  # of the seconds for links: the rest is for collectives
_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run(
    comm: Communicator, wanted: CalibrationRequest, mpi_library: str, processor: str, say: Say
) -> CalibrationPoints:
    """Measure all that is ``wanted`` and return it on all ranks; ``say`` is called on rank 0. Collective.

    ``processor`` is what the file calls a core; a GPU tells its own name.
    """
    begin_s = time.perf_counter()
    threads = threads_of_rank()
    before = sample_load(comm, threads)

    def said(text: str) -> None:
        if comm.rank == 0:
            say(text)

    if busy := busy_before(before):
        said(f"warning: the machine is busy: {busy}; what is measured now is of what the others leave")
    products = {}
    for dtype in wanted.dtypes:
        said(f"products of {dtype} matrices")
        products[dtype] = device.products(comm, dtype, wanted.on, wanted.seconds)
    said("copies and sums")
    moves = device.moves(comm, wanted.on, _MOVES_SHARE * wanted.seconds)
    models: list[ModelPoint] = []
    for config, context, samples in wanted.models:
        for each in samples:
            said(f"a gpt of width {config.hidden}, {context} tokens, {each} samples")
            models.append(device.model(comm, config, context, each, wanted.on))
    bounds = wanted.least_bytes, wanted.most_bytes
    links = calibrate_links.links(comm, *bounds, _LINKS_SHARE * wanted.seconds, wanted.on, said)
    collectives = calibrate_links.of_collectives(
        comm, wanted.algorithms, bounds, (1 - _LINKS_SHARE) * wanted.seconds, mpi_library, said
    )
    seconds = time.perf_counter() - begin_s
    times = [move.seconds for move in moves]
    times += [product.seconds for points in products.values() for product in points]
    spread = median(busy_s.spread for busy_s in times if busy_s.spread is not None)
    busy = comm.broadcast_object(busy_meanwhile(before, sample_load(comm, threads), seconds, spread))
    if busy:
        said(f"warning: the machine was busy: {busy}; measure again while nothing else runs")
    return CalibrationPoints(
        machine=machine(comm, wanted.on, mpi_library, processor),
        products=products,
        moves=moves,
        models=tuple(models),
        links=links,
        collectives=collectives,
        seconds=seconds,
        busy=busy,
    )


def machine(comm: Communicator, on: str, mpi_library: str, processor: str) -> CalibratedMachine:
    """Return the device of rank 0, and the number of such devices. Collective over ``comm``."""
    nodes = comm.nodes()
    each = max(len(members) for members in nodes.members)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, memory_bytes, devices = processor, host_bytes, len(os.sched_getaffinity(0))
    if on == "gpu":
        from hpcdist.arrays.gpu import device as gpus  # late: only where there is one

        properties = gpus.cupy().cuda.runtime.getDeviceProperties(gpus.index())
        device, memory_bytes, devices = properties["name"].decode(), int(properties["totalGlobalMem"]), gpus.count()
    threads = threads_of_rank()
    if on == "cpu":
        devices = max(each, devices // threads)
        memory_bytes = host_bytes // devices
    return CalibratedMachine(
        device=device,
        on=on,
        hosts=nodes.count,
        ranks_per_host=each,
        devices_per_host=max(each, devices),
        threads=threads,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_bytes,
        blas=blas(),
        mpi_library=mpi_library,
    )


def threads_of_rank() -> int:
    """Return the number of threads of a product on this rank: that of the environment, else all of its cores."""
    setting = next((os.environ[name] for name in _VARIABLES if os.environ.get(name, "").isdigit()), "")
    return max(1, int(setting)) if setting else len(os.sched_getaffinity(0))
