"""Operations of torch.distributed on tensors in GPU memory, on doubles that compute as late as a GPU may.

What the program computes before an operation, and copies of the operation itself, are put off until somebody waits for
them, on the host or on a stream: where an order is missing the numbers are wrong, as the planted faults show.
"""

import functools
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from hpcdist.arrays.gpu import device
from hpcdist.collectives.gpu import nccl
from hpcdist.comm.events import EventSink
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError, UsageError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.torch import Group, Options, calls, hooks, launch, streams
from stubs.gpu import cuda_double, cupy_double, nccl_double, torch_double
from stubs.gpu.torch_double import Played, compute, read

SUM = dist.ReduceOp(dist.ReduceOp.SUM)
HERE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """The doubles of cupy and torch.cuda, and the log of transfers and waits."""
    made = cupy_double.module()
    monkeypatch.setattr(device, "cupy", lambda: made)
    monkeypatch.setattr(streams, "cuda", torch_double)
    monkeypatch.setattr(streams, "HAS_GPU", True)
    monkeypatch.setattr(streams.Streams, "future", lambda own: torch_double.Future())
    cupy_double.LOG.clear()
    return cupy_double


@pytest.fixture
def group(comm, gpu):
    made = Group(comm.dup("torch"), Options())
    yield made
    made.shutdown()


@pytest.fixture
def side():
    """A stream that the program computes on."""
    made = cuda_double.Stream(non_blocking=True)
    with torch_double.stream(made):
        yield made


def later(values, kind=Played):
    """Return a tensor on the GPU, into which a kernel of the program writes ``values``."""
    made = torch.full_like(values, -9)
    compute(lambda: made.copy_(values))
    return made.as_subclass(kind)


def everyones(rng, comm, *shape, dtype=torch.float32):
    return [torch.from_numpy(rng.integers(0, 9, shape)).to(dtype) for _ in range(comm.size)]


def options(is_async=True, root=0):
    return SimpleNamespace(asyncOp=is_async, rootRank=root, reduceOp=SUM)


def empty(like, shape):
    return torch.full(shape, -9, dtype=like.dtype).as_subclass(Played)


def all_reduce(group, own, opts):
    return [own], group.allreduce([own], opts)


def broadcast(group, own, opts):
    return [own], group.broadcast([own], opts)


def reduce(group, own, opts):
    return [own] if group.rank() == opts.rootRank else [], group.reduce([own], opts)


def all_gather(group, own, opts):
    found = [empty(own, own.shape) for _ in range(group.size())]
    return found, group.allgather([found], [own], opts)


def all_gather_single(group, own, opts):
    found = empty(own, (group.size() * len(own), *own.shape[1:]))
    return [found], group.all_gather_single(found, own, opts)


def reduce_scatter(group, own, opts):
    found = empty(own, (len(own) // group.size(), *own.shape[1:]))
    return [found], group.reduce_scatter(found, list(own.chunk(group.size())), opts)


def reduce_scatter_single(group, own, opts):
    found = empty(own, (len(own) // group.size(), *own.shape[1:]))
    return [found], group.reduce_scatter_single(found, own, opts)


def all_to_all(group, own, opts):
    found = [empty(own, part.shape) for part in own.chunk(group.size())]
    return found, group.alltoall(found, list(own.chunk(group.size())), opts)


def all_to_all_single(group, own, opts):
    found = empty(own, own.shape)
    return [found], group.all_to_all_single(found, own, None, None, opts)


def gather(group, own, opts):
    is_root = group.rank() == opts.rootRank
    found = [empty(own, own.shape) for _ in range(group.size())] if is_root else []
    return found, group.gather([found] if is_root else [], [own], opts)


def scatter(group, own, opts):
    is_root = group.rank() == opts.rootRank
    found = empty(own, (len(own) // group.size(), *own.shape[1:]))
    return [found], group.scatter([found], [list(own.chunk(group.size()))] if is_root else [], opts)


def parts(inputs, rank):
    return [whole.chunk(len(inputs))[rank] for whole in inputs]


# operation -> (its call, what rank has of the inputs of all)
OPERATIONS = {
    "all_reduce": (all_reduce, lambda inputs, rank, root: [sum(inputs)]),
    "broadcast": (broadcast, lambda inputs, rank, root: [inputs[root]]),
    "reduce": (reduce, lambda inputs, rank, root: [sum(inputs)] if rank == root else []),
    "all_gather": (all_gather, lambda inputs, rank, root: inputs),
    "all_gather_single": (all_gather_single, lambda inputs, rank, root: [torch.cat(inputs)]),
    "reduce_scatter": (reduce_scatter, lambda inputs, rank, root: [sum(parts(inputs, rank))]),
    "reduce_scatter_single": (reduce_scatter_single, lambda inputs, rank, root: [sum(parts(inputs, rank))]),
    "all_to_all": (all_to_all, lambda inputs, rank, root: parts(inputs, rank)),
    "all_to_all_single": (all_to_all_single, lambda inputs, rank, root: [torch.cat(parts(inputs, rank))]),
    "gather": (gather, lambda inputs, rank, root: inputs if rank == root else []),
    "scatter": (scatter, lambda inputs, rank, root: [parts(inputs, rank)[root]]),
}


def carried_out(group, inputs, name, is_async=True, is_strided=False):
    """Return whether the program sees the right numbers on its stream, and what it sees."""
    rank, root = group.rank(), group.size() - 1
    values = inputs[rank]
    own = later(values.t().contiguous()).t() if is_strided else later(values)
    call, expect = OPERATIONS[name]
    found, work = call(group, own, options(is_async, root))
    if is_async:
        work.wait()
    for tensor in found:
        compute(functools.partial(tensor.as_subclass(torch.Tensor).add_, 1))
    expected = [1 + tensor for tensor in expect(inputs, rank, root)]
    del own, work
    return all(map(torch.equal, [read(tensor) for tensor in found], expected))


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_rank_an_operation_lies_between_what_the_program_computes(comm, group, side, rng, is_async):
    for name in OPERATIONS:
        inputs = everyones(rng, comm, 2 * comm.size, 3, dtype=torch.bfloat16)
        assert carried_out(group, inputs, name, is_async), name
        assert carried_out(group, inputs, name, is_async, is_strided=True), name
    assert torch_double.DEFAULT._given == 0, "the default stream has no part in it"


def without_marks(call):
    @contextmanager
    def communicating(own, *marks):
        with call(own):
            yield

    return communicating


FAULTS = {
    "the operation does not wait": ("communicating", without_marks(streams.Streams.communicating)),
    "the program does not wait": ("hold_back", lambda own, mark: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rank_a_missing_order_shows(comm, group, side, rng, monkeypatch, fault):
    if comm.size == 1:
        return  # one kernel, and those of the doubles are not late
    monkeypatch.setattr(streams.Streams, *FAULTS[fault])
    inputs = [1 + tensor for tensor in everyones(rng, comm, 2 * comm.size, 3)]
    assert not carried_out(group, inputs, "all_to_all_single")
    assert not carried_out(group, inputs, "all_gather_single")


def test_rank_the_host_waits_for_nothing(comm, group, side, rng):
    """The thread of the group stages the operation; the program goes on, and its handle says when the GPU is done."""
    if not group._queue.has_thread:
        return
    inputs = everyones(rng, comm, 5)
    own = later(torch.stack([inputs[comm.rank]] * 2, 1))[:, 0]  # strided: a copy of it travels
    torch_double.RECORDED.clear()
    work = group.allreduce([own], options())
    while not work.done:
        time.sleep(0.001)
    waits = cupy_double.LOG.count(cupy_double.SYNCHRONISE, "MainThread")
    assert work.wait() and not work.is_completed()
    assert cupy_double.LOG.count(cupy_double.SYNCHRONISE, "MainThread") == waits == 0
    assert [memory == own.data_ptr() for memory, _ in torch_double.RECORDED] == [False, True], (
        "the copy, and the tensor"
    )
    assert not {side, torch_double.DEFAULT} & {used for _, used in torch_double.RECORDED}
    assert torch.equal(read(own), sum(inputs))
    assert work.is_completed() and work.is_success()


def test_rank_operations_of_a_group_are_in_order_whichever_thread_runs_them(comm, group, side, rng):
    inputs = everyones(rng, comm, 5)
    own = later(inputs[comm.rank])
    works = [group.allreduce([own], options()) for _ in range(2)]
    while group._queue.has_thread and not works[-1].done:
        time.sleep(0.001)  # these were run by the thread of the group, the next one is by this thread
    group.allreduce([own], options(is_async=False))
    group.allreduce([own], options()).wait()
    assert torch.equal(read(own), comm.size**3 * sum(inputs))
    group._start_coalescing(HERE)
    pair = [later(inputs[comm.rank]) for _ in range(2)]
    for tensor in pair:
        group.allreduce([tensor], options())
    group._end_coalescing(HERE).wait()
    assert all(torch.equal(read(tensor), sum(inputs)) for tensor in pair)


def test_rank_a_batch_is_completed_when_the_gpu_is_done(comm, group, side, rng):
    inputs = everyones(rng, comm, 5)
    group._start_coalescing(HERE)
    own = later(torch.stack([inputs[comm.rank]] * 2, 1))[:, 0]  # strided: the copy back is late
    group.allreduce([own], options())
    batch = group._end_coalescing(HERE)
    assert batch.wait() and not batch.is_completed()
    assert torch.equal(read(own), sum(inputs)) and batch.is_completed()


def test_rank_what_fails_halfway_is_under_way_on_the_gpu(comm, group, side, monkeypatch):
    def fails_behind_a_kernel(*_):
        compute(lambda: done.append(True))
        raise RuntimeError("halfway")

    done = []
    monkeypatch.setattr(calls, "allreduce", fails_behind_a_kernel)
    work = group.allreduce([later(torch.ones(3))], options())
    with pytest.raises(RuntimeError, match="halfway"):
        work.wait()
    assert not work.is_completed() and not done
    group._queue.close()
    assert done and work.is_completed()


def test_rank_callbacks_come_behind_the_operation(comm, group, side, rng):
    inputs = everyones(rng, comm, 5)

    def again(done):
        (tensor,) = done.value()
        compute(lambda: tensor.as_subclass(torch.Tensor).mul_(2))
        return group.allreduce([tensor], options()).get_future().wait()[0]

    found = group.allreduce([later(inputs[comm.rank])], options()).get_future().then(again).wait()
    assert torch.equal(read(found), 2 * comm.size * sum(inputs))


def test_rank_messages(comm, group, side, rng):
    inputs = everyones(rng, comm, 4, 3)
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first, second = later(torch.zeros(4, 3)), later(torch.zeros(3, 4)).t()
    works = [group.recv([first], behind, 1), group.recv([second], behind, 2)]
    works += [group.send([later(inputs[comm.rank])], ahead, tag) for tag in (1, 2)]
    for work in works:
        work.wait()
    assert torch.equal(read(first), inputs[behind]) and torch.equal(read(second), inputs[behind])
    if comm.rank == 0:
        found = [later(torch.zeros(4, 3)) for _ in range(1, comm.size)]
        for tensor in found:
            work = group.recv_anysource([tensor], 3)
            work.wait()
            assert torch.equal(read(tensor), inputs[work.source_rank()])
    else:
        group.send([later(inputs[comm.rank])], 0, 3).wait()


@pytest.mark.parametrize("has_streams", [False, True])
def test_rank_a_barrier_waits_for_the_gpu(comm, group, side, has_streams):
    if has_streams:
        group.allreduce([later(torch.ones(3))], options()).wait()
    done = []
    compute(lambda: done.append(True))
    group.barrier(options(is_async=False)).wait()
    assert done


def test_rank_a_hook_of_ddp_reduces_on_the_stream_of_the_group(comm, group, side, rng):
    inputs = everyones(rng, comm, 6)
    gradient = later(inputs[comm.rank])
    state = hooks._State(group, "powersgd", CompressionConfig(warmup_steps=1), seed=1)
    bucket = SimpleNamespace(buffer=lambda: gradient, parameters=lambda: [torch.ones(6)])
    assert torch.allclose(read(hooks._hook(state, bucket).wait()), sum(inputs) / comm.size)


def test_rank_devices_that_do_not_fit(comm, group, side):
    ones = later(torch.ones(2))
    with pytest.raises(UsageError, match="are on cpu and cuda:0; bring them to one"):
        group.all_gather_single(torch.ones(2 * comm.size), ones)
    group.eager_connect_single_device(HERE)
    assert group.bound_device_id == HERE
    group.allreduce([ones], options()).wait()
    for call in (lambda tensor: group.allreduce([tensor]), lambda tensor: group.send([tensor], 0, 0)):
        with pytest.raises(UsageError, match=r"on cuda:1, and the group \S+ communicates from cuda:0; give"):
            call(later(torch.ones(2), torch_double.OnAnother))


def test_rank_without_cupy_only_tensors_in_gpu_memory_are_refused(comm, gpu, monkeypatch):
    def missing():
        raise MissingCapabilityError("cupy cannot be imported") from ImportError("No module named 'cupy'")

    monkeypatch.setattr(device, "cupy", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not launch._has_gpu()
    group = Group(comm.dup("torch"), Options())
    found = torch.ones(2)
    group.allreduce([found], options()).wait()
    assert torch.equal(found, torch.full((2,), float(comm.size)))
    with pytest.raises(MissingCapabilityError, match=r"No module named 'cupy'\): pip install 'hpcdist\[cuda13x\]'"):
        group.allreduce([found.as_subclass(Played)], options())
    group.shutdown()


def test_rank_without_a_driver_cupy_is_not_blamed(gpu, monkeypatch):
    def missing():
        raise MissingCapabilityError("no GPU is usable")

    monkeypatch.setattr(device, "count", missing)
    with pytest.raises(MissingCapabilityError, match="^no GPU is usable$"):
        streams.Streams(HERE)


class Events(EventSink):
    """Names of the operations that have begun, and have not ended."""

    def __init__(self):
        self.all = []

    def begin(self, comm, op, *_):
        self.all.append(op)
        return len(self.all) - 1

    def end(self, token):
        self.all[token] = ""

    @property
    def open(self):
        return list(filter(None, self.all))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rank_nobody_waits_on_the_host_for_nccl(comm, gpu, rng, monkeypatch, dtype):
    """Threads play the ranks, since the double of NCCL works between threads: once is enough."""
    if comm.size > 1:
        return
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")
    inputs = [torch.from_numpy(rng.integers(0, 9, 7)).to(dtype) for _ in range(2)]

    def body(ranks):
        ranks.events = Events()
        group = Group(ranks, Options(algorithm="nccl"))
        with torch_double.stream(cuda_double.Stream(non_blocking=True)):
            for is_async in (True, False):
                own = later(inputs[ranks.rank])
                work = group.allreduce([own], options(is_async))
                while not work.done:
                    time.sleep(0.001)
                assert work.wait() and not work.is_completed()
                assert ranks.events.open == ["nccl"], "the deadline is for what the GPU still computes"
                ranks.barrier()
                assert gpu.LOG.count(gpu.SYNCHRONISE) == 0
                ranks.barrier()
                assert torch.equal(read(own), sum(inputs))
                assert work.is_completed()
                while ranks.events.open:
                    time.sleep(0.001)
                ranks.barrier()
                gpu.LOG.clear()
                ranks.barrier()
        group.shutdown()

    run_threads(2, body)


def test_rank_the_event_of_nccl_ends_while_the_next_operation_waits(comm, gpu, monkeypatch):
    """The deadline is to name the barrier that a rank misses, not the operation before it."""
    if comm.size > 1:
        return
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")
    seen = threading.Event()

    def body(ranks):
        ranks.events = Events()
        group = Group(ranks, Options(algorithm="nccl"))
        own = later(torch.ones(3))
        group.allreduce([own], options()).wait()
        if ranks.rank == 0:
            barrier = group.barrier(options())
            limit = time.monotonic() + 10
            while ranks.events.open != ["barrier"] and time.monotonic() < limit:
                time.sleep(0.001)
            found = ranks.events.open
            seen.set()
        else:
            seen.wait()
            barrier = group.barrier(options())
        barrier.wait()
        group.shutdown()
        if ranks.rank == 0:
            assert found == ["barrier"]

    run_threads(2, body)
