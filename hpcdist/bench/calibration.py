"""Run of a calibration: measure device and links, check that the machine was idle, and write the points to HDF5.

Two signs show that other processes disturbed a calibration: the load average and the spread of repetitions. Each rank
adds as many to the load as it has threads, because waiting ranks poll. Any further load is of other processes. The
one-minute average decays by a factor e per minute. After T seconds with a load a, which was b before, it is
a (1 - exp(-T/60)) + b exp(-T/60), so that b can be subtracted.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays.matmul_peak import blas
from hpcdist.bench import device_speed
from hpcdist.bench import link_speed as calibrate_links
from hpcdist.bench.device_speed import BusySeconds, CalibratedMachine, CalibrationPoints, CalibrationRequest
from hpcdist.bench.output_file import ResultsFormat
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import BOOT_ID
from hpcdist.constants import THREAD_VARIABLES
from hpcdist.reporting.machine import load_average

MINUTE_S: Final = 60.0
LEAST_S: Final = 30.0  # after a shorter time, the load before cannot be subtracted from a one-minute average
SPARE, SPARE_SHARE = 0.5, 0.05  # load of an idle machine: a constant, and a share of its cores
APART: Final = 0.2  # maximum spread; it is 0.02 on an idle machine, and 0.6 with one other process per core
FORMAT: Final = ResultsFormat("hpcdist.calibration", 1)
_MOVES_SHARE: Final = 0.2  # duration of the moves / duration of the products of a dtype
_LINKS_SHARE: Final = 0.3  # duration of the messages / duration of messages and collectives


class LoadSample(NamedTuple):
    """Load of a machine: load average (NaN if unknown), number of this job's threads, and number of cores."""

    load: float
    threads: int
    cores: int

    @property
    def most(self) -> float:
        """Highest load average without other processes: this job's threads plus a small margin."""
        return self.threads + max(SPARE, SPARE_SHARE * self.cores)


def sample_load(comm: Communicator, threads: int) -> tuple[LoadSample, ...]:
    """Return a tuple of one `LoadSample` per machine. ``threads``: number of this rank's threads. Collective."""
    sample = LoadSample(load_average(), threads, os.cpu_count() or 1)
    machines: dict[str, LoadSample] = {}
    for name, rank_sample in comm.allgather_object((_machine(comm), sample)):
        first = machines.get(name, rank_sample._replace(threads=0))
        machines[name] = first._replace(threads=first.threads + rank_sample.threads)
    return tuple(machines.values())


def _machine(comm: Communicator) -> str:
    # Containers and namespaces of one machine have the same boot id: they share the load.
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"node {comm.nodes().index}"


def busy_before(samples: Sequence[LoadSample]) -> str:
    """Return a warning text if other processes use a machine, or "". ``samples``: one `LoadSample` per machine."""
    return _worst([(sample.load, sample) for sample in samples])


def busy_meanwhile(
    before: Sequence[LoadSample], after: Sequence[LoadSample], seconds: float, spread: float | None
) -> str:
    """Return a warning text if other processes kept a machine busy during a measurement, or "".

    ``before``, ``after``: load of each machine before and after the measurement, ``seconds`` seconds apart.
    ``spread``: mean duration of the repetitions / first quartile of the durations - 1, or None if unknown.
    """
    loads = []
    for old, new in zip(before, after, strict=True):
        load = new.load
        if seconds >= LEAST_S:
            remaining = math.exp(-seconds / MINUTE_S)
            load = (new.load - old.load * remaining) / (1 - remaining)
        loads.append((load, new))
    reasons = []
    if loaded := _worst(loads) or busy_before(before):
        reasons.append(loaded)
    if spread is not None and spread > APART:
        reasons.append(f"repetitions took {spread:.0%} more on average than their first quartile")
    return ", ".join(reasons)


def _worst(loads: Sequence[tuple[float, LoadSample]]) -> str:
    excess = [(load - sample.most, load, sample.threads) for load, sample in loads if load > sample.most]
    if not excess:
        return ""
    _, load, threads = max(excess)
    return f"a load of {load:.1f}, of which this calibration causes {threads}"


def write_points(path: Path, calibration: CalibrationPoints, provenance: Mapping[str, Any]) -> None:
    """Write a calibration to the new HDF5 file ``path``. ``provenance``: file attributes. Raises StorageError."""
    attributes = {**provenance, **asdict(calibration.machine), "measured_in_s": calibration.seconds}
    with FORMAT.edit(path, {**attributes, "busy": calibration.busy}) as file:
        for dtype, products in calibration.products.items():
            _table(file.create_group(f"products/{dtype}"), products, m="m", k="k", n="n")
        _table(file.create_group("moves"), calibration.moves, operation="operation", bytes="nbytes")
        for number, model in enumerate(calibration.models):
            group = file.create_group(f"models/{number}")
            group.attrs.update({name: value for name, value in asdict(model.config).items() if value is not None})
            names, phases = ("context", "samples", "parameters", "operations"), ("forward", "backward")
            group.attrs.update({name: getattr(model, name) for name in names})
            rows = [_Row(kind.kind, phase, getattr(kind, phase)) for kind in model.kinds for phase in phases]
            rows += [_Row("norm", "step", model.norm), _Row("update", "step", model.update)]
            _table(group, [*rows, _Row("all", "step", model.step)], kind="kind", way="phase")
        columns = {"level": "level", "nbytes": "nbytes", "border": "border"}
        _table(file.create_group("messages"), calibration.links, **columns)
        columns |= {"operation": "operation", "algorithm": "algorithm", "ranks": "ranks"}
        _table(file.create_group("collectives"), calibration.collectives, **columns)


class _Row(NamedTuple):
    kind: str
    phase: str
    seconds: BusySeconds


def _table(group: Any, points: Sequence[Any], **fields: str) -> None:
    for name, field in fields.items():
        values = [getattr(point, field) for point in points]
        kind = object if values and isinstance(values[0], str) else None
        group.create_dataset(name, data=np.array(values, dtype=kind))
    times = [point.seconds for point in points]  # a number for collectives
    busy = [value if isinstance(value, BusySeconds) else BusySeconds(value, value) for value in times]
    spread = [math.nan if value.spread is None else value.spread for value in busy]
    group.create_dataset("spread", data=np.array(spread, np.float64)).attrs["units"] = "1"
    seconds = group.create_dataset("seconds", data=np.array([value[:2] for value in busy], np.float64).reshape(-1, 2))
    seconds.attrs.update({"units": "s", "columns": "one rank of a node, all of them"})


def run(
    comm: Communicator,
    request: CalibrationRequest,
    mpi_library: str,
    processor: str,
    print_line: calibrate_links.Report,
) -> CalibrationPoints:
    """Run the calibration ``request``, and return the measurements on every rank. Collective over ``comm``.

    ``mpi_library``, ``processor``: names to store in the result. ``print_line``: function that prints on rank 0.
    """
    begin_s = time.perf_counter()
    threads = threads_of_rank()
    before = sample_load(comm, threads)

    def report(text: str) -> None:
        if comm.rank == 0:
            print_line(text)

    if busy := busy_before(before):
        report(f"warning: the machine is busy: {busy}; the results will be of its free capacity")
    products = {}
    for dtype in request.dtypes:
        report(f"products of {dtype} matrices")
        products[dtype] = device_speed.products(comm, dtype, request.on, request.seconds)
    report("copies and sums")
    moves = device_speed.moves(comm, request.on, _MOVES_SHARE * request.seconds)
    models = []
    for config, context, batches in request.models:
        for samples in batches:
            report(f"a GPT of hidden size {config.hidden}, {samples} samples of {context} tokens")
            models.append(device_speed.model(comm, config, context, samples, request.on))
    bounds, links_s = (request.least_bytes, request.most_bytes), _LINKS_SHARE * request.seconds
    links = calibrate_links.links(comm, bounds, links_s, request.on, report)
    collectives = calibrate_links.of_collectives(
        comm, request.algorithms, bounds, request.seconds - links_s, mpi_library, report
    )
    seconds = time.perf_counter() - begin_s
    times = [move.seconds for move in moves]
    times += [product.seconds for points in products.values() for product in points]
    spread = median(busy_s.spread for busy_s in times if busy_s.spread is not None)
    busy = comm.broadcast_object(busy_meanwhile(before, sample_load(comm, threads), seconds, spread))
    if busy:
        report(f"warning: the machine was busy: {busy}; measure again while nothing else runs")
    return CalibrationPoints(
        machine=machine(comm, request.on, mpi_library, processor),
        products=products,
        moves=moves,
        models=tuple(models),
        links=links,
        collectives=collectives,
        seconds=seconds,
        busy=busy,
    )


def machine(comm: Communicator, device_kind: str, mpi_library: str, processor: str) -> CalibratedMachine:
    """Return a description of the machine and of this rank's device (``device_kind``: "cpu" or "gpu"). Collective.

    ``mpi_library``, ``processor``: names of the MPI library and of the CPU model, to store in the result.
    """
    nodes, threads = comm.nodes(), threads_of_rank()
    ranks_per_host = max(len(members) for members in nodes.members)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, memory_bytes, devices = processor, host_bytes, len(os.sched_getaffinity(0))
    if device_kind == "gpu":
        from hpcdist.arrays.gpu import device as gpus  # late: only with a GPU

        properties = gpus.cupy().cuda.runtime.getDeviceProperties(gpus.index())
        device, memory_bytes, devices = properties["name"].decode(), int(properties["totalGlobalMem"]), gpus.count()
    else:
        devices = max(ranks_per_host, devices // threads)
        memory_bytes = host_bytes // devices
    return CalibratedMachine(
        device=device,
        on=device_kind,
        hosts=nodes.count,
        ranks_per_host=ranks_per_host,
        devices_per_host=max(ranks_per_host, devices),
        threads=threads,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_bytes,
        blas=blas(),
        mpi_library=mpi_library,
    )


def threads_of_rank() -> int:
    """Return the number of BLAS threads of this rank, from the environment or else the number of cores. Local."""
    setting = next((os.environ[name] for name in THREAD_VARIABLES if os.environ.get(name, "").isdigit()), "")
    return max(1, int(setting)) if setting else len(os.sched_getaffinity(0))
