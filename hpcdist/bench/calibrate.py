"""`hpcdist plan calibrate`: what products, moves, models, messages and collectives take here, as points."""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Final

from hpcdist.arrays.peak import blas
from hpcdist.bench import calibrate_device, calibrate_links, calibrate_quiet
from hpcdist.bench.calibrate_points import Machine, ModelPoint, Points, Wanted
from hpcdist.comm.communicator import Communicator

Say = Callable[[str], None]
_MOVES_SHARE: Final = 0.2  # of the seconds for the device
_LINKS_SHARE: Final = 0.3  # of the seconds for links: the rest is for collectives
_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run(comm: Communicator, wanted: Wanted, mpi_library: str, processor: str, say: Say) -> Points:
    """Measure all that is ``wanted`` and return it on all ranks; ``say`` is called on rank 0. Collective.

    ``processor`` is what the file calls a core; a GPU tells its own name.
    """
    begin_s = time.perf_counter()
    threads = threads_of_rank()
    before = calibrate_quiet.look(comm, threads)

    def said(text: str) -> None:
        if comm.rank == 0:
            say(text)

    if busy := calibrate_quiet.before(before):
        said(f"warning: the machine is busy: {busy}; what is measured now is of what the others leave")
    products = {}
    for dtype in wanted.dtypes:
        said(f"products of {dtype} matrices")
        products[dtype] = calibrate_device.products(comm, dtype, wanted.on, wanted.seconds)
    said("copies and sums")
    moves = calibrate_device.moves(comm, wanted.on, _MOVES_SHARE * wanted.seconds)
    models: list[ModelPoint] = []
    for config, context, samples in wanted.models:
        for each in samples:
            said(f"a gpt of width {config.hidden}, {context} tokens, {each} samples")
            models.append(calibrate_device.model(comm, config, context, each, wanted.on))
    bounds = wanted.least_bytes, wanted.most_bytes
    links = calibrate_links.links(comm, *bounds, _LINKS_SHARE * wanted.seconds, wanted.on, said)
    collectives = calibrate_links.of_collectives(
        comm, wanted.algorithms, bounds, (1 - _LINKS_SHARE) * wanted.seconds, mpi_library, said
    )
    seconds = time.perf_counter() - begin_s
    times = [one.seconds for one in moves] + [one.seconds for found in products.values() for one in found]
    spread = median(one.spread for one in times if one.spread is not None)
    busy = comm.broadcast_object(
        calibrate_quiet.meanwhile(before, calibrate_quiet.look(comm, threads), seconds, spread)
    )
    if busy:
        said(f"warning: the machine was busy: {busy}; measure again while nothing else runs")
    return Points(
        machine=machine(comm, wanted.on, mpi_library, processor),
        products=products,
        moves=moves,
        models=tuple(models),
        links=links,
        collectives=collectives,
        seconds=seconds,
        busy=busy,
    )


def machine(comm: Communicator, on: str, mpi_library: str, processor: str) -> Machine:
    """Return what rank 0 computes on, and how many there are. Collective over ``comm``."""
    nodes = comm.nodes()
    each = max(len(members) for members in nodes.members)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, memory_bytes, devices = processor, host_bytes, len(os.sched_getaffinity(0))
    if on == "gpu":
        from hpcdist.arrays import device as gpus  # late: only where there is one

        properties = gpus.cupy().cuda.runtime.getDeviceProperties(gpus.index())
        device, memory_bytes, devices = properties["name"].decode(), int(properties["totalGlobalMem"]), gpus.count()
    threads = threads_of_rank()
    if on == "cpu":
        devices = max(each, devices // threads)
        memory_bytes = host_bytes // devices
    return Machine(
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
    """Return how many threads a product of this rank uses: what the environment says, else all of its cores."""
    said = next((os.environ[name] for name in _VARIABLES if os.environ.get(name, "").isdigit()), "")
    return max(1, int(said)) if said else len(os.sched_getaffinity(0))
