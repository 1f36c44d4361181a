"""The cupy double is strict: it rejects what cupy rejects, counts implicit transfers, and has no additional names."""

import gc
import pickle
import weakref

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device, graphs, staging
from hpcdist.arrays.jit import jit
from hpcdist.collectives import peer_memory
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.layers import cuda_kernels
from stubs.gpu import cuda_double

HOST = np.arange(6.0).reshape(2, 3)


@jit
def double_in_place(values):
    for i in range(values.size):
        values[i] *= 2


def on_device(gpu):
    array = backend.place(HOST, "gpu")
    gpu.LOG.clear()
    return array


REFUSED = {
    "np.asarray": (TypeError, lambda a: np.asarray(a)),
    "np.array of a list": (TypeError, lambda a: np.array([a[0], a[1]])),
    "array + numpy": (TypeError, lambda a: a + HOST),
    "numpy + array": (TypeError, lambda a: HOST + a),
    "array += numpy": (TypeError, lambda a: a.__iadd__(HOST)),
    "numpy += array": (TypeError, lambda a: HOST.copy().__iadd__(a)),
    "array + list": (TypeError, lambda a: a.__add__([1.0, 2.0, 3.0])),
    "ufunc into numpy": (TypeError, lambda a: np.add(a, a, out=HOST.copy())),
    "cupy ufunc of numpy": (TypeError, lambda a: backend.namespace(a).sqrt(HOST)),
    "setitem of numpy": (ValueError, lambda a: a.__setitem__(Ellipsis, HOST)),
    "setitem into numpy": (TypeError, lambda a: HOST.copy().__setitem__(Ellipsis, a)),
    "an index of the host": (TypeError, lambda a: a[np.array([0, 1])]),
    "matmul of numpy": (TypeError, lambda a: backend.namespace(a).matmul(a, HOST.T)),
    "matmul by @": (TypeError, lambda a: a @ HOST.T),
    "a numpy function without a cupy one": (TypeError, lambda a: np.sinc(a)),
    "set of a list": (TypeError, lambda a: a.set([1.0])),
    "set of another dtype": (TypeError, lambda a: a.set(HOST.astype(np.float32))),
    "set of another shape": (ValueError, lambda a: a.set(HOST[0])),
    "set of a part in steps": (RuntimeError, lambda a: a[:, ::2].set(HOST[:, ::2].copy())),
    "memoryview": (TypeError, lambda a: memoryview(a)),
    "hash": (TypeError, lambda a: hash(a)),
    "flags.writeable": (AttributeError, lambda a: a.flags.writeable),
    "ctypes": (AttributeError, lambda a: a.ctypes),
    "__array_interface__": (AttributeError, lambda a: a.__array_interface__),
    "a kernel of the CPU": (TypeError, lambda a: double_in_place(a.reshape(-1))),
    "pickle": (TypeError, lambda a: pickle.dumps(a)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_double_rejects_the_same_arguments_as_cupy(gpu, name):
    error, use = REFUSED[name]
    array = on_device(gpu)
    with pytest.raises(error):
        use(array)
    assert gpu.LOG.events == []


def test_rejected_cpu_kernel_error_names_the_cure(gpu):
    with pytest.raises(
        TypeError, match=r"double_in_place runs on the CPU but got an array on a GPU; check .*is_device"
    ):
        double_in_place(backend.zeros(3, np.dtype("float32"), "gpu"))
    with pytest.raises(Exception, match="annot determine Numba type"):  # other wrong arguments keep Numba's message
        double_in_place(object())


COUNTED = {
    "float": (8, lambda a: float(a[0, 1])),
    "int": (8, lambda a: int(a[0, 1])),
    "bool": (1, lambda a: bool((a == a).all())),
    "if": (8, lambda a: 1 if a[0, 1] else 0),
    "item": (8, lambda a: a[0, 1].item()),
    "tolist": (48, lambda a: a.tolist()),
    "get": (48, lambda a: a.get()),
    "asnumpy": (48, lambda a: backend.to_host(a)),
    "a comparison that decides": (1, lambda a: max(a[0, 1], 0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_transfers_to_the_host_are_counted_at_their_call_site(gpu, name):
    nbytes, use = COUNTED[name]
    use(on_device(gpu))
    (event,) = gpu.LOG.events
    assert (event.kind, event.nbytes) == (gpu.D2H, nbytes)
    assert event.site == "test_cupy_double.<lambda>" and event.thread == "MainThread"


def test_transfers_to_the_device_and_waits_are_counted(gpu):
    array = backend.place(HOST, "gpu")
    assert backend.place(array, "gpu") is array
    array.set(HOST + 1)
    array[array > 3]  # only the device knows the size of the result
    backend.synchronise(array)
    assert backend.is_device(array) and not backend.is_device(HOST) and not backend.is_device(None)
    backend.synchronise(HOST)
    kinds = [(event.kind, event.nbytes) for event in gpu.LOG.events]
    assert kinds == [(gpu.H2D, 48), (gpu.H2D, 48), (gpu.SYNCHRONISE, 0), (gpu.SYNCHRONISE, 0)]


def test_device_operations_make_no_transfers(gpu, rng):
    host = rng.standard_normal((4, 6)).astype(np.float32)
    array = backend.place(host, "gpu")
    gpu.LOG.clear()
    xp = backend.namespace(array)
    out = xp.empty((4, 6), np.float32)
    results = [
        (np.float32(2) * array, np.float32(2) * host),
        (np.add(array, 1.5), host + 1.5),
        (array.sum(axis=0), host.sum(axis=0)),
        (xp.where(array > 0, -xp.inf, array), np.where(host > 0, np.float32(-np.inf), host)),
        (xp.matmul(array, array.T), host @ host.T),
        (np.exp(array, out=out), np.exp(host)),
        (array.reshape(2, 12)[:, ::5].swapaxes(0, 1), host.reshape(2, 12)[:, ::5].swapaxes(0, 1)),
        (1 / (array * array), 1 / (host * host)),
        (array.view(np.uint32) >> np.uint32(16), host.view(np.uint32) >> np.uint32(16)),
        (xp.take(array, xp.arange(3), axis=0), host[:3]),
    ]
    assert gpu.LOG.events == []
    for got, want in results:
        assert type(got) is gpu.ndarray and got.dtype == want.dtype
        assert np.array_equal(got.get(), want)


def test_views_share_memory(gpu):
    array = backend.zeros(8, np.dtype("float32"), "gpu")
    part = array[2:6].reshape(2, 2)
    part[...] = 3
    part += 1
    part[0] = array[:2]
    part[:, 1] -= part[:, 0]
    xp = backend.namespace(array)
    xp.add.at(array, xp.arange(2), xp.ones(2, np.float32))
    assert array.get().tolist() == [1, 1, 0, 0, 4, 0, 0, 0]
    assert xp.may_share_memory(part, array) and not xp.may_share_memory(part, array[6:])
    assert part.data.ptr == array.data.ptr + 8


def test_uninitialised_memory_is_nan(gpu):
    assert np.isnan(backend.empty(3, np.dtype("float64"), "gpu").get()).all()


def test_copy_to_pinned_memory_is_visible_after_its_event(gpu):
    array, host = on_device(gpu), staging.lease(6, np.dtype(float)).reshape(2, 3)
    stream = device.new_stream()
    device.record().hold_back(stream)
    array.get(stream=stream, out=host, blocking=False)
    event = device.record(stream)
    assert not event.done and np.isnan(host).all()  # an early read is visible
    event.synchronize()
    assert event.done and np.array_equal(host, HOST)


def test_copy_from_pinned_memory_reads_late(gpu):
    array, host = on_device(gpu), staging.lease(6, np.dtype(float)).reshape(2, 3)
    host[...] = 1
    array.set(host)
    host[...] = 2  # too early: the copy has not run yet
    assert (array.get() == 2).all()
    host[...] = 3
    array.set(host)
    array += 1.0  # after the copy on the stream
    host[...] = 4
    assert (array.get() == 4).all()


def test_copy_that_does_not_wait_for_its_producer_is_rejected(gpu):
    array, host = on_device(gpu), staging.lease(6, np.dtype(float)).reshape(2, 3)
    stream = device.new_stream()
    before = device.record()
    array += 1.0
    before.hold_back(stream)
    with pytest.raises(cuda_double.StreamOrderError, match="does not wait for the kernels"):
        array.get(stream=stream, out=host, blocking=False)


def test_peer_memory_must_be_read_after_its_kernels(gpu):
    def body(comm, ordered):
        local_data = peer_memory.allocate(64)
        mapping = peer_memory.open_handle(comm.allgather_object(peer_memory.export(local_data))[1 - comm.rank])
        local_data[...] = comm.rank + 5
        if ordered:
            device.produced()
        comm.barrier()
        read = (mapping.array[:2] + np.uint8(1)).get().tolist()
        comm.barrier()
        mapping.close()
        return read

    assert run_threads(2, lambda comm: body(comm, True)) == [[7, 7], [6, 6]]
    with pytest.raises(cuda_double.StreamOrderError, match="may still be writing"):
        run_threads(2, lambda comm: body(comm, False))


def test_memory_that_cannot_be_shared_is_rejected(gpu):
    cupy = device.cupy()
    pooled = cupy.zeros(10, np.uint8)
    stream_ordered = cupy.ndarray(64, np.uint8, cupy.cuda.MemoryPointer(cupy.cuda.MemoryAsync(64), 0))
    for array, reason in ((pooled, "part of a pool"), (stream_ordered, "cudaMallocAsync cannot be shared")):
        with pytest.raises(MissingCapabilityError, match=reason):
            peer_memory.export(array)


def test_every_name_of_the_double_exists_in_cupy(gpu):
    """Needs the cupy package, but no GPU."""
    cupy = pytest.importorskip("cupy")
    made = gpu.module()
    assert [name for name in gpu.__all__ if not hasattr(cupy, name)] == []
    hidden = {"_host", "_reduced"} | set(dir(object))
    members = {name for name in dir(made.ndarray) if name not in hidden and not name.startswith("__")}
    assert [name for name in sorted(members) if not hasattr(cupy.ndarray, name)] == []
    for group in ("cuda", "cuda.runtime", "cuda.Device", "cuda.Stream", "cuda.Event", "cuda.MemoryPointer"):
        ours, theirs = made, cupy
        for part in group.split("."):
            ours, theirs = getattr(ours, part), getattr(theirs, part)
        names = set(dir(ours)) - {"nccl"}  # cupy hides nccl if the library is not installed
        assert [n for n in sorted(names) if not n.startswith("_") and not hasattr(theirs, n)] == [], group


NOT_CAPTURED = {
    "a wait": lambda a: device.synchronise(),
    "an event": lambda a: device.record(),
    "an event of before": lambda a: EVENTS[0].done,
    "float": lambda a: float(a[0, 1]),
    "get": lambda a: a.get(),
    "a copy from the host": lambda a: backend.place(HOST, "gpu"),
    "set": lambda a: a.set(HOST),
    "a size that the device knows": lambda a: a[a > 3],
    "pinned memory": lambda a: device.cupy().cuda.alloc_pinned_memory(64),
    "a product by cupy": lambda a: backend.namespace(a).matmul(a, a.T, out=a[:, :2]),
    "a second capture": lambda a: device.current_stream().begin_capture(),
}
EVENTS = []


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_operations_that_cuda_cannot_capture_are_rejected(gpu, name):
    array, recorder = on_device(gpu), graphs.GraphRecorder()
    EVENTS[:] = [device.record()]
    with pytest.raises(
        (cuda_double.CUDARuntimeError, NotImplementedError), match="Unsupported|IllegalState|unsupported"
    ):
        recorder.capture(lambda: NOT_CAPTURED[name](array))
    assert not recorder._stream.is_capturing()
    assert (array.get() == HOST).all()


def test_graph_runs_at_launch_on_captured_addresses(gpu):
    array, recorder = on_device(gpu), graphs.GraphRecorder()

    def call():
        array.__iadd__(1.0)
        return (array * 2.0).sum()

    graph, total = recorder.capture(call)
    assert (array.get() == HOST).all() and np.isnan(total.get())
    graph.launch()
    assert (array.get() == HOST + 1).all() and total.get() == 2 * (HOST + 1).sum()
    array[...] = 0.0
    graph.launch()
    assert total.get() == 2 * HOST.size
    assert recorder.nbytes >= HOST.nbytes + total.nbytes


def test_capture_cannot_use_the_common_memory_pool(gpu):
    array, stream = on_device(gpu), device.new_stream()
    with stream:
        stream.begin_capture()
        with pytest.raises(cuda_double.CUDARuntimeError, match="memory of the common pool"):
            array + 1.0
        stream.end_capture()
    with pytest.raises(RuntimeError, match="cannot capture on the default"):
        device.current_stream().begin_capture()


KERNELS = {
    "fill": lambda a: a.fill(7.0),
    "an operator": lambda a: a.__iadd__(a),
    "a result": lambda a: (a + 1.0) * a,
    "a gather": lambda a: a[backend.namespace(a).arange(2)],
    "a compiled one": lambda a: cuda_kernels.relu(a, a),
}


@pytest.mark.parametrize("name", KERNELS)
def test_graph_with_freed_memory_cannot_be_launched(gpu, name):
    arrays, recorder = [on_device(gpu)], graphs.GraphRecorder()
    graph = recorder.capture(lambda: KERNELS[name](arrays[0]))[0]
    graph.launch()
    arrays.clear()
    with pytest.raises(cuda_double.CUDARuntimeError, match="memory that a graph was captured with is freed"):
        graph.launch()


def test_garbage_collector_is_off_during_capture(gpu):
    """A finalizer might wait for the stream, like the finalizer of memory of another process."""
    waited, recorder = [], graphs.GraphRecorder()

    class Cycle:
        def __init__(self):
            self.own = self
            weakref.finalize(self, lambda: waited.append(device.synchronise()))

    def call():
        for _ in range(gc.get_threshold()[0] + 10):
            Cycle()

    recorder.capture(call)
    gc.collect()
    assert gc.isenabled() and len(waited) == gc.get_threshold()[0] + 10
