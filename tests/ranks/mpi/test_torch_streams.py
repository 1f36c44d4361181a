"""Operations of torch.distributed on GPU tensors, on doubles that compute as late as a GPU may.


Kernels of the program and copies of an operation are deferred until the host or a stream waits for them. A missing
order gives wrong numbers, as the planted faults show.
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
from hpcdist.collectives import nccl
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.transport import EventSink
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
    monkeypatch.setattr(streams.Streams, "future", lambda local_data: torch_double.Future())
    cupy_double.LOG.clear()
    return cupy_double


@pytest.fixture
def group(comm, gpu):
    made = Group(comm.dup("torch"), Options())
    yield made
    made.shutdown()


@pytest.fixture
def side():
    """A side stream on which the program computes."""
    made = cuda_double.Stream(non_blocking=True)
    with torch_double.stream(made):
        yield made


def write_later(values, kind=Played):
    """Return a GPU tensor into which a deferred kernel of the program writes ``values``."""
    made = torch.full_like(values, -9)
    compute(lambda: made.copy_(values))
    return made.as_subclass(kind)


def draw_for_all_ranks(rng, comm, *shape, dtype=torch.float32):
    return [torch.from_numpy(rng.integers(0, 9, shape)).to(dtype) for _ in range(comm.size)]


def options(is_async=True, root=0):
    return SimpleNamespace(asyncOp=is_async, rootRank=root, reduceOp=SUM)


def empty(like, shape):
    return torch.full(shape, -9, dtype=like.dtype).as_subclass(Played)


def all_reduce(group, local_data, opts):
    return [local_data], group.allreduce([local_data], opts)


def broadcast(group, local_data, opts):
    return [local_data], group.broadcast([local_data], opts)


def reduce(group, local_data, opts):
    return [local_data] if group.rank() == opts.rootRank else [], group.reduce([local_data], opts)


def all_gather(group, local_data, opts):
    results = [empty(local_data, local_data.shape) for _ in range(group.size())]
    return results, group.allgather([results], [local_data], opts)


def all_gather_single(group, local_data, opts):
    received = empty(local_data, (group.size() * len(local_data), *local_data.shape[1:]))
    return [received], group.all_gather_single(received, local_data, opts)


def reduce_scatter(group, local_data, opts):
    received = empty(local_data, (len(local_data) // group.size(), *local_data.shape[1:]))
    return [received], group.reduce_scatter(received, list(local_data.chunk(group.size())), opts)


def reduce_scatter_single(group, local_data, opts):
    received = empty(local_data, (len(local_data) // group.size(), *local_data.shape[1:]))
    return [received], group.reduce_scatter_single(received, local_data, opts)


def all_to_all(group, local_data, opts):
    results = [empty(local_data, part.shape) for part in local_data.chunk(group.size())]
    return results, group.alltoall(results, list(local_data.chunk(group.size())), opts)


def all_to_all_single(group, local_data, opts):
    received = empty(local_data, local_data.shape)
    return [received], group.all_to_all_single(received, local_data, None, None, opts)


def gather(group, local_data, opts):
    is_root = group.rank() == opts.rootRank
    result = [empty(local_data, local_data.shape) for _ in range(group.size())] if is_root else []
    return result, group.gather([result] if is_root else [], [local_data], opts)


def scatter(group, local_data, opts):
    is_root = group.rank() == opts.rootRank
    received = empty(local_data, (len(local_data) // group.size(), *local_data.shape[1:]))
    return [received], group.scatter([received], [list(local_data.chunk(group.size()))] if is_root else [], opts)


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


def has_expected_result(group, inputs, name, is_async=True, is_strided=False):
    """Run an operation. Return True if the program sees the expected numbers on its stream."""
    rank, root = group.rank(), group.size() - 1
    values = inputs[rank]
    local_data = write_later(values.t().contiguous()).t() if is_strided else write_later(values)
    call, expect = OPERATIONS[name]
    result, work = call(group, local_data, options(is_async, root))
    if is_async:
        work.wait()
    for tensor in result:
        compute(functools.partial(tensor.as_subclass(torch.Tensor).add_, 1))
    expected = [1 + tensor for tensor in expect(inputs, rank, root)]
    del local_data, work
    return all(map(torch.equal, [read(tensor) for tensor in result], expected))


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_rank_operations_run_in_order_with_kernels_of_the_program(comm, group, side, rng, is_async):
    for name in OPERATIONS:
        inputs = draw_for_all_ranks(rng, comm, 2 * comm.size, 3, dtype=torch.bfloat16)
        assert has_expected_result(group, inputs, name, is_async), name
        assert has_expected_result(group, inputs, name, is_async, is_strided=True), name
    assert torch_double.DEFAULT._given == 0, "the default stream has no part in it"


def without_marks(call):
    @contextmanager
    def communicating(local_data, *marks):
        with call(local_data):
            yield

    return communicating


FAULTS = {
    "the operation does not wait": ("communicating", without_marks(streams.Streams.communicating)),
    "the program does not wait": ("hold_back", lambda own, mark: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rank_missing_stream_order_gives_wrong_numbers(comm, group, side, rng, monkeypatch, fault):
    if comm.size == 1:
        return  # one kernel; kernels of the doubles are not late
    monkeypatch.setattr(streams.Streams, *FAULTS[fault])
    inputs = [1 + tensor for tensor in draw_for_all_ranks(rng, comm, 2 * comm.size, 3)]
    assert not has_expected_result(group, inputs, "all_to_all_single")
    assert not has_expected_result(group, inputs, "all_gather_single")


def test_rank_asynchronous_operations_do_not_block_the_host(comm, group, side, rng):
    """The thread of the group stages the operation while the program continues.

    The handle reports the end on the GPU.
    """
    if not group._queue.has_thread:
        return
    inputs = draw_for_all_ranks(rng, comm, 5)
    local_input = write_later(torch.stack([inputs[comm.rank]] * 2, 1))[:, 0]  # strided: a copy of it travels
    torch_double.RECORDED.clear()
    work = group.allreduce([local_input], options())
    while not work.done:
        time.sleep(0.001)
    waits = cupy_double.LOG.count(cupy_double.SYNCHRONISE, "MainThread")
    assert work.wait() and not work.is_completed()
    assert cupy_double.LOG.count(cupy_double.SYNCHRONISE, "MainThread") == waits == 0
    assert [memory == local_input.data_ptr() for memory, _ in torch_double.RECORDED] == [False, True], (
        "the copy, and the tensor"
    )
    assert not {side, torch_double.DEFAULT} & {used for _, used in torch_double.RECORDED}
    assert torch.equal(read(local_input), sum(inputs))
    assert work.is_completed() and work.is_success()


def test_rank_operations_of_a_group_run_in_order_on_any_thread(comm, group, side, rng):
    inputs = draw_for_all_ranks(rng, comm, 5)
    local_input = write_later(inputs[comm.rank])
    works = [group.allreduce([local_input], options()) for _ in range(2)]
    while group._queue.has_thread and not works[-1].done:
        time.sleep(0.001)  # these were run by the thread of the group, the next one is by this thread
    group.allreduce([local_input], options(is_async=False))
    group.allreduce([local_input], options()).wait()
    assert torch.equal(read(local_input), comm.size**3 * sum(inputs))
    group._start_coalescing(HERE)
    pair = [write_later(inputs[comm.rank]) for _ in range(2)]
    for tensor in pair:
        group.allreduce([tensor], options())
    group._end_coalescing(HERE).wait()
    assert all(torch.equal(read(tensor), sum(inputs)) for tensor in pair)


def test_rank_batch_is_completed_when_the_gpu_is_done(comm, group, side, rng):
    inputs = draw_for_all_ranks(rng, comm, 5)
    group._start_coalescing(HERE)
    local_input = write_later(torch.stack([inputs[comm.rank]] * 2, 1))[:, 0]  # strided: the copy back is late
    group.allreduce([local_input], options())
    batch = group._end_coalescing(HERE)
    assert batch.wait() and not batch.is_completed()
    assert torch.equal(read(local_input), sum(inputs)) and batch.is_completed()


def test_rank_operation_that_fails_halfway_is_still_in_flight(comm, group, side, monkeypatch):
    def fail_after_a_kernel(*_):
        compute(lambda: done.append(True))
        raise RuntimeError("halfway")

    done = []
    monkeypatch.setattr(calls, "allreduce", fail_after_a_kernel)
    work = group.allreduce([write_later(torch.ones(3))], options())
    with pytest.raises(RuntimeError, match="halfway"):
        work.wait()
    assert not work.is_completed() and not done
    group._queue.close()
    assert done and work.is_completed()


def test_rank_callbacks_run_after_the_operation(comm, group, side, rng):
    inputs = draw_for_all_ranks(rng, comm, 5)

    def again(done):
        (tensor,) = done.value()
        compute(lambda: tensor.as_subclass(torch.Tensor).mul_(2))
        return group.allreduce([tensor], options()).get_future().wait()[0]

    result = group.allreduce([write_later(inputs[comm.rank])], options()).get_future().then(again).wait()
    assert torch.equal(read(result), 2 * comm.size * sum(inputs))


def test_rank_messages_of_gpu_tensors_arrive(comm, group, side, rng):
    inputs = draw_for_all_ranks(rng, comm, 4, 3)
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first, second = write_later(torch.zeros(4, 3)), write_later(torch.zeros(3, 4)).t()
    works = [group.recv([first], behind, 1), group.recv([second], behind, 2)]
    works += [group.send([write_later(inputs[comm.rank])], ahead, tag) for tag in (1, 2)]
    for work in works:
        work.wait()
    assert torch.equal(read(first), inputs[behind]) and torch.equal(read(second), inputs[behind])
    if comm.rank == 0:
        results = [write_later(torch.zeros(4, 3)) for _ in range(1, comm.size)]
        for tensor in results:
            work = group.recv_anysource([tensor], 3)
            work.wait()
            assert torch.equal(read(tensor), inputs[work.source_rank()])
    else:
        group.send([write_later(inputs[comm.rank])], 0, 3).wait()


@pytest.mark.parametrize("has_streams", [False, True])
def test_rank_barrier_waits_for_the_gpu(comm, group, side, has_streams):
    if has_streams:
        group.allreduce([write_later(torch.ones(3))], options()).wait()
    done = []
    compute(lambda: done.append(True))
    group.barrier(options(is_async=False)).wait()
    assert done


def test_rank_ddp_hook_reduces_on_the_stream_of_the_group(comm, group, side, rng):
    inputs = draw_for_all_ranks(rng, comm, 6)
    gradient = write_later(inputs[comm.rank])
    state = hooks._State(group, "powersgd", CompressionConfig(warmup_steps=1), seed=1)
    bucket = SimpleNamespace(buffer=lambda: gradient, parameters=lambda: [torch.ones(6)], index=lambda: 0)
    assert torch.allclose(read(hooks._hook(state, bucket).wait()), sum(inputs) / comm.size)


def test_rank_tensors_on_different_devices_are_rejected(comm, group, side):
    ones = write_later(torch.ones(2))
    with pytest.raises(UsageError, match="are on cpu and cuda:0; move all tensors to one"):
        group.all_gather_single(torch.ones(2 * comm.size), ones)
    group.eager_connect_single_device(HERE)
    assert group.bound_device_id == HERE
    group.allreduce([ones], options()).wait()
    for call in (lambda tensor: group.allreduce([tensor]), lambda tensor: group.send([tensor], 0, 0)):
        with pytest.raises(UsageError, match=r"on cuda:1, but earlier tensors of the process group \S+ were on cuda:0"):
            call(write_later(torch.ones(2), torch_double.OnAnother))


@pytest.fixture
def without_cupy(gpu, monkeypatch):
    """Only PyTorch can use the GPU."""

    def raise_missing():
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", raise_missing)
    monkeypatch.setattr(streams, "has_cupy", lambda: False)
    monkeypatch.setattr(streams, "pinned_like", lambda tensor: torch.full(tensor.shape, -9, dtype=tensor.dtype))


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_rank_without_cupy_gpu_tensors_are_copied_through_the_host(comm, without_cupy, group, side, rng, is_async):
    for name in OPERATIONS:
        inputs = draw_for_all_ranks(rng, comm, 2 * comm.size, 3, dtype=torch.bfloat16)
        assert has_expected_result(group, inputs, name, is_async), name
        assert has_expected_result(group, inputs, name, is_async, is_strided=True), name
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received, sent = write_later(torch.zeros(2 * comm.size, 3)), write_later(inputs[comm.rank].float())
    works = [group.recv([received], behind, 1), group.send([sent], ahead, 1)]
    for work in works:
        work.wait()
    assert torch.equal(read(received), inputs[behind].float())
    group.barrier(options(is_async=False)).wait()


def test_rank_missing_wait_without_cupy_gives_wrong_numbers(comm, without_cupy, group, side, rng, monkeypatch):
    if comm.size == 1:
        return
    monkeypatch.setattr(streams.Streams, *FAULTS["the operation does not wait"])
    inputs = [1 + tensor for tensor in draw_for_all_ranks(rng, comm, 2 * comm.size, 3)]
    assert not has_expected_result(group, inputs, "all_to_all_single")


def test_rank_features_that_compute_on_the_gpu_need_cupy(comm, without_cupy, side, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not launch._has_gpu()
    group = Group(comm.dup("torch"), Options(algorithm="nccl"))
    with pytest.raises(MissingCapabilityError, match=r"needs the package cupy; run pip install 'hpcdist\[cuda13x\]'"):
        group.allreduce([torch.ones(2).as_subclass(Played)], options())
    group.shutdown()


class Events(EventSink):
    """Names of the operations that have begun and have not ended."""

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
def test_rank_nccl_operations_do_not_block_the_host(comm, gpu, rng, monkeypatch, dtype):
    """Threads act as the ranks because the double of NCCL works between threads. One run is enough."""
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
                local_input = write_later(inputs[ranks.rank])
                work = group.allreduce([local_input], options(is_async))
                while not work.done:
                    time.sleep(0.001)
                assert work.wait() and not work.is_completed()
                assert ranks.events.open == ["nccl"], "the deadline is for what the GPU still computes"
                ranks.barrier()
                assert gpu.LOG.count(gpu.SYNCHRONISE) == 0
                ranks.barrier()
                assert torch.equal(read(local_input), sum(inputs))
                assert work.is_completed()
                while ranks.events.open:
                    time.sleep(0.001)
                ranks.barrier()
                gpu.LOG.clear()
                ranks.barrier()
        group.shutdown()

    run_threads(2, body)


def test_rank_nccl_event_ends_while_the_next_operation_waits(comm, gpu, monkeypatch):
    """The deadline must name the barrier that a rank misses, not the operation before it."""
    if comm.size > 1:
        return
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")
    seen = threading.Event()

    def body(ranks):
        ranks.events = Events()
        group = Group(ranks, Options(algorithm="nccl"))
        local_data = write_later(torch.ones(3))
        group.allreduce([local_data], options()).wait()
        if ranks.rank == 0:
            barrier = group.barrier(options())
            limit = time.monotonic() + 10
            while set(ranks.events.open) != {"barrier"} and time.monotonic() < limit:
                time.sleep(0.001)
            result = set(ranks.events.open)
            seen.set()
        else:
            seen.wait()
            barrier = group.barrier(options())
        barrier.wait()
        group.shutdown()
        if ranks.rank == 0:
            assert result == {"barrier"}

    run_threads(2, body)
