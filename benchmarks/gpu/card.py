"""The GPU of a study: which it is, and the seconds between two events on its stream."""

from collections.abc import Callable
from typing import Any

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator


def card(comm: Communicator | None = None) -> dict[str, Any]:
    """Return which GPU and which CUDA it is, and how many of them the ranks of ``comm`` have. Collective."""
    runtime = device.cupy().cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    about = {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "cupy_version": getattr(device.cupy(), "__version__", "unknown"),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }
    if comm is not None:
        places = comm.allgather_object((comm.nodes().index, device.bus_id()))
        about |= {"gpus": len(set(places)), "ranks": comm.size}
    return about


def event_seconds(launch: Callable[[], object]) -> float:
    """Return the seconds between two events around ``launch``."""
    cuda = device.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / 1e3
