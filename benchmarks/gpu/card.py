"""The GPU of a study: its description, and timing by events on its stream."""

from collections.abc import Callable
from typing import Any

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator


def card(comm: Communicator | None = None) -> dict[str, Any]:
    """Describe the GPU and the CUDA versions, and count the GPUs of the ranks of ``comm``. Collective over ``comm``."""
    runtime = device.cupy().cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    about = {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "cupy_version": getattr(device.cupy(), "__version__", "unknown"),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }
    if comm is not None:
        gpus = comm.allgather_object((comm.nodes().index, device.bus_id()))
        about |= {"gpus": len(set(gpus)), "ranks": comm.size}
    return about


def event_seconds(launch: Callable[[], object]) -> float:
    """Time ``launch`` by two events on the stream, in seconds."""
    cuda = device.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / 1e3
