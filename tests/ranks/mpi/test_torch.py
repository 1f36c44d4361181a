"""The torch.distributed backend over real messages, compared with PyTorch on the inputs of all ranks."""

import gc
import re
import threading
import weakref
from datetime import timedelta

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import hpcdist.torch
from hpcdist.comm.record.spans import SpanSink
from hpcdist.errors import BufferHandoverError, DeadlineError, UsageError
from hpcdist.torch import activity
from hpcdist.torch import work as handles

SUM, AVG, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
BYTES = [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module", autouse=True)
def default_group():
    dist.init_process_group("hpcdist")
    yield
    dist.destroy_process_group()


def draw(rng, dtype, *shape):
    """Return small whole numbers, whose sums are exact and the same in any order."""
    numbers = torch.from_numpy(rng.integers(0, 4, shape))
    if dtype.is_complex:
        numbers = numbers + 1j * torch.from_numpy(rng.integers(0, 4, shape))
    return numbers.to(dtype)


def draw_for_all_ranks(rng, comm, dtype, *shape):
    return [draw(rng, dtype, *shape) for _ in range(comm.size)]


def is_same(result, expected):
    """Return True if two tensors have the same type, shape and bits."""
    as_bytes = result.dtype in BYTES
    return (
        result.dtype == expected.dtype
        and result.shape == expected.shape
        and torch.equal(
            result.view(torch.uint8) if as_bytes else result, expected.view(torch.uint8) if as_bytes else expected
        )
    )


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_rank_all_reduce_sums_every_dtype(comm, rng, dtype, shape):
    inputs = draw_for_all_ranks(rng, comm, dtype, *shape)
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input)
    assert is_same(local_input, torch.stack(inputs).sum(dim=0).to(dtype))


OPERATIONS = {
    "avg": (AVG, lambda inputs: inputs.double().mean(dim=0)),
    "product": (PRODUCT, lambda inputs: inputs.prod(dim=0)),
    "min": (dist.ReduceOp.MIN, lambda inputs: inputs.amin(dim=0)),
    "max": (dist.ReduceOp.MAX, lambda inputs: inputs.amax(dim=0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("op", OPERATIONS)
def test_rank_all_reduce_with_other_operations(comm, rng, op, dtype):
    inputs = draw_for_all_ranks(rng, comm, dtype, 100)
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input, OPERATIONS[op][0])
    expected = OPERATIONS[op][1](torch.stack(inputs))
    assert torch.allclose(
        local_input.double(), (expected if dtype.is_floating_point else expected.trunc()).double(), rtol=1e-6
    )


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rank_max_and_min_propagate_nan_of_any_rank(comm, rng, op, dtype):
    inputs = draw_for_all_ranks(rng, comm, dtype, 3000)
    for rank, tensor in enumerate(inputs):
        tensor[rank :: 2 * comm.size] = torch.nan
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input, OPERATIONS[op][0])
    assert torch.equal(local_input.isnan(), torch.stack(inputs).isnan().any(dim=0))
    assert torch.equal(local_input.nan_to_num(7), OPERATIONS[op][1](torch.stack(inputs)).nan_to_num(7))


def test_rank_unaligned_tensors_are_reduced(comm):
    local_data = torch.frombuffer(bytearray(33), dtype=torch.float64, offset=1, count=4).fill_(comm.rank + 1)
    dist.all_reduce(local_data, dist.ReduceOp.MAX)
    assert (local_data == comm.size).all()


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_rank_all_reduce_with_bitwise_operations(comm, rng, op):
    inputs = [torch.from_numpy(rng.integers(0, 1 << 30, 50)) for _ in range(comm.size)]
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input, getattr(dist.ReduceOp, op))
    function = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op]
    assert np.array_equal(local_input.numpy(), function.reduce([tensor.numpy() for tensor in inputs]))


def test_rank_all_reduce_of_bool_tensors(comm, rng):
    inputs = [draw(rng, torch.int64, 40) > 1 for _ in range(comm.size)]
    for op, expected in [(SUM, torch.stack(inputs).any(dim=0)), (PRODUCT, torch.stack(inputs).all(dim=0))]:
        local_input = inputs[comm.rank].clone()
        dist.all_reduce(local_input, op)
        assert is_same(local_input, expected)


@pytest.mark.parametrize("factor", [0.5, torch.tensor([2.0])])
def test_rank_all_reduce_with_premultiplied_sum(comm, rng, factor):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 9)
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input, dist._make_nccl_premul_sum(factor))
    assert torch.equal(local_input, sum(inputs) * factor)


def test_rank_sent_tensors_may_be_freed(comm):
    """FSDP resizes the storage of an unused parameter to zero, and back."""
    tensor, part = torch.ones(8), torch.ones(2)
    dist.all_reduce(tensor)
    dist.broadcast(part, 0)
    for each in (tensor, part):
        size = each.untyped_storage().nbytes()
        each.untyped_storage().resize_(0)
        each.untyped_storage().resize_(size)
    dist.all_reduce(tensor.fill_(2))
    assert torch.equal(tensor, torch.full((8,), 2.0 * comm.size))


def test_rank_strided_tensors_are_supported(comm, rng):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 6, 8)
    local_input = inputs[comm.rank].clone()
    dist.all_reduce(local_input[::2, 1::3])
    expected = inputs[comm.rank].clone()
    expected[::2, 1::3] = sum(inputs)[::2, 1::3]
    assert torch.equal(local_input, expected)
    root = comm.size - 1
    column = inputs[comm.rank].clone().t()
    dist.broadcast(column, root)
    assert torch.equal(column, inputs[root].t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64, *BYTES])
def test_rank_broadcast_and_all_gather_of_every_dtype(comm, rng, dtype):
    inputs = draw_for_all_ranks(rng, comm, dtype, 3, 2)
    for root in range(comm.size):
        local_input = inputs[comm.rank].clone()
        dist.broadcast(local_input, root)
        assert is_same(local_input, inputs[root])
    gathered = [torch.empty_like(inputs[0]) for _ in inputs]
    dist.all_gather(gathered, inputs[comm.rank])
    assert all(map(is_same, gathered, inputs))
    whole = torch.empty(3 * comm.size, 2, dtype=dtype)
    dist.all_gather_single(whole, inputs[comm.rank])
    assert is_same(whole, torch.cat(inputs))


def test_rank_all_gather_of_different_sizes(comm, rng):
    sizes = [rank % 3 for rank in range(comm.size)]
    inputs = [draw(rng, torch.float32, size) for size in sizes]
    gathered = [torch.empty(size) for size in sizes]
    dist.all_gather(gathered, inputs[comm.rank])
    assert all(map(is_same, gathered, inputs))


def test_rank_all_gather_in_place(comm, rng):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 4)
    whole = torch.zeros(4 * comm.size)
    local_data = whole[4 * comm.rank : 4 * comm.rank + 4]
    local_data.copy_(inputs[comm.rank])
    dist.all_gather_single(whole, local_data)
    assert torch.equal(whole, torch.cat(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [SUM, AVG, PRODUCT, dist.ReduceOp.MAX])
def test_rank_reduce_scatter_matches_the_sum(comm, rng, dtype, op):
    inputs = draw_for_all_ranks(rng, comm, dtype, comm.size, 5)
    stacked = torch.stack(inputs)
    function = {SUM: stacked.sum, PRODUCT: stacked.prod, dist.ReduceOp.MAX: stacked.amax}
    expected = (stacked.double().mean(dim=0) if op == AVG else function[op](dim=0))[comm.rank].to(dtype)
    local_data = torch.empty(5, dtype=dtype)
    dist.reduce_scatter_single(local_data, inputs[comm.rank].reshape(-1), op)
    assert torch.allclose(local_data.double(), expected.double(), rtol=1e-6 if dtype is torch.float32 else 1e-2)
    listed = torch.empty(5, dtype=dtype)
    dist.reduce_scatter(listed, list(inputs[comm.rank]), op)
    assert torch.equal(local_data, listed)


def test_rank_reduce_scatter_of_different_sizes(comm, rng):
    sizes = [rank + 1 for rank in range(comm.size)]
    inputs = [[draw(rng, torch.float32, size) for size in sizes] for _ in range(comm.size)]
    local_data = torch.empty(sizes[comm.rank])
    dist.reduce_scatter(local_data, inputs[comm.rank])
    assert torch.equal(local_data, sum(parts[comm.rank] for parts in inputs))


def test_rank_reduce_gather_and_scatter_from_every_root(comm, rng):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 6)
    for root in range(comm.size):
        local_input = inputs[comm.rank].clone()
        dist.reduce(local_input, root)
        assert torch.equal(local_input, sum(inputs) if comm.rank == root else inputs[comm.rank])
        received = [torch.empty(6) for _ in inputs] if comm.rank == root else None
        dist.gather(inputs[comm.rank], received, root)
        assert received is None or all(map(torch.equal, received, inputs))
        part = torch.empty(6)
        dist.scatter(part, inputs if comm.rank == root else None, root)
        assert torch.equal(part, inputs[comm.rank])


def test_rank_all_to_all_of_uneven_splits(comm, rng):
    rows = rng.integers(0, 4, (comm.size, comm.size))  # from, to
    parts = [[draw(rng, torch.float32, int(count), 3) for count in local_input] for local_input in rows]
    expected = [sent[comm.rank] for sent in parts]
    output = torch.empty(int(rows[:, comm.rank].sum()), 3)
    sizes = rows[:, comm.rank].tolist(), rows[comm.rank].tolist()
    dist.all_to_all_single(output, torch.cat(parts[comm.rank]), *sizes)
    assert torch.equal(output, torch.cat(expected))
    listed = [torch.empty_like(part) for part in expected]
    dist.all_to_all(listed, parts[comm.rank])
    assert all(map(torch.equal, listed, expected))
    even = draw(rng, torch.complex64, comm.size, 2)
    swapped = torch.empty_like(even)
    dist.all_to_all_single(swapped, even)
    dist.all_to_all_single(even, swapped)
    assert not comm.size > 1 or even.dtype is torch.complex64


def test_rank_messages_complete_and_arrive(comm):
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = torch.empty(1000)[::2]
    requests = [
        dist.isend(torch.full((500,), float(comm.rank)), ahead, tag=5),
        dist.irecv(received, behind, tag=5),
    ]
    for request in requests:
        assert request.wait() and request.is_completed()
    assert bool((received == behind).all())
    large = torch.full((1 << 20,), float(comm.rank))
    arrived = torch.empty_like(large)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, arrived, behind), dist.P2POp(dist.isend, large, ahead)]):
        work.wait()
    assert bool((arrived == behind).all())


def test_rank_messages_from_any_rank(comm):
    if comm.rank == 0:
        sources = set()
        for _ in range(comm.size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(number)
            assert number == 10 * source
            sources.add(source)
        assert sources == set(range(1, comm.size))
    else:
        dist.send(torch.tensor([10 * comm.rank]), 0)


def test_rank_operations_keep_their_order(comm, rng):
    """Asynchronous operations are waited for in any order, between synchronous operations and delayed messages."""
    inputs = draw_for_all_ranks(rng, comm, torch.float64, 20, 50)
    local_input = inputs[comm.rank].clone()
    works = [dist.all_reduce(row, async_op=True) for row in local_input]
    if comm.rank:
        dist.recv(torch.empty(1), comm.rank - 1)
    if comm.rank < comm.size - 1:
        dist.send(torch.empty(1), comm.rank + 1)
    last = inputs[comm.rank][0].clone()
    dist.all_reduce(last)
    assert torch.equal(last, sum(inputs)[0])
    for index in rng.permutation(20):
        assert works[index].wait()
        assert works[index].is_success()
    assert torch.equal(local_input, sum(inputs))


def test_rank_futures_run_their_callbacks(comm, rng):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 30)
    local_input = inputs[comm.rank].clone()
    doubled = dist.all_reduce(local_input, async_op=True).get_future().then(lambda done: 2 * done.value()[0])
    assert torch.equal(doubled.wait(), 2 * sum(inputs))

    def again(done):  # a callback that communicates and waits, as the hook of PowerSGD
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    local_input = inputs[comm.rank].clone()
    twice = dist.all_reduce(local_input, async_op=True).get_future().then(again)
    assert torch.equal(twice.wait(), comm.size * sum(inputs))


def test_rank_subgroups_reduce_over_their_members(comm, rng):
    inputs = draw_for_all_ranks(rng, comm, torch.float32, 10)
    even = dist.new_group(range(0, comm.size, 2))
    reverse = dist.new_group(sorted(range(comm.size), reverse=True))
    local_input = inputs[comm.rank].clone()
    if comm.rank % 2 == 0:
        dist.all_reduce(local_input, group=even)
        assert torch.equal(local_input, sum(inputs[::2]))
        dist.destroy_process_group(even)
    local = dist.new_group([comm.rank], use_local_synchronization=True)
    dist.all_reduce(local_input, group=local)
    dist.broadcast(local_input, 0, group=reverse)
    assert torch.equal(local_input, sum(inputs[::2]))
    dist.destroy_process_group(reverse)
    dist.destroy_process_group(local)
    with pytest.raises(UsageError, match="was destroyed"):
        reverse.allreduce([local_input])
    with pytest.raises(UsageError, match="was destroyed"):
        local.send([local_input], 0, 0)


def test_rank_functions_take_a_process_group(comm, rng, folder):
    """They use a separate context, while operations of the group are in flight."""
    halves = [dist.new_group(list(range(half, comm.size, 2))) for half in range(min(2, comm.size))]
    group = halves[comm.rank % 2]
    size, path = dist.get_world_size(group), folder / f"half-{comm.rank % 2}"
    tensor = torch.ones(1000)
    handle = dist.all_reduce(tensor, group=group, async_op=True)
    assert hpcdist.allreduce(np.ones(5), comm=group).tolist() == [size] * 5
    layer = torch.nn.Linear(3, 2)
    dist.broadcast(layer.weight.data, comm.rank % 2, group=group)
    state = {"layer": layer, "half": comm.rank % 2}
    hpcdist.torch.save(path, state, background=True, comm=group)
    handle.wait()
    assert (tensor == size).all()
    hpcdist.torch.finish_saves(group)
    weight = layer.weight.detach().clone()
    layer.weight.data.zero_()
    assert hpcdist.torch.load(path, state, comm=group)["half"] == comm.rank % 2
    assert torch.equal(layer.weight, weight)
    assert [*hpcdist.torch.until_stop(range(3), comm=group)] == [0, 1, 2]
    hpcdist.torch.save(path, state, background=True, comm=group)
    dist.destroy_process_group(group)  # completes the save
    comm.barrier()
    paths = [folder / f"half-{half}" for half in range(min(2, comm.size))]
    assert [hpcdist.checkpoint.load(path, comm=comm)["half"] for path in paths] == [*range(min(2, comm.size))]


def test_rank_split_group_separates_disjoint_groups(comm):
    whole = dist.new_group(list(range(comm.size)))
    mine = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    half = whole.split_group(mine)
    assert (half.rank(), half.size()) == (mine.index(comm.rank), len(mine))
    tensor = torch.tensor([float(comm.rank)])
    half.allreduce([tensor]).wait()
    assert tensor.item() == sum(mine)
    half.shutdown()
    dist.destroy_process_group(whole)


def test_rank_coalesced_all_reduce_sums_each_tensor(comm, rng):
    inputs = [draw_for_all_ranks(rng, comm, dtype, 8) for dtype in (torch.float32, torch.float32)]
    local_values = [tensors[comm.rank].clone() for tensors in inputs]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in local_values:
            dist.all_reduce(tensor)
    assert all(torch.equal(tensor, sum(tensors)) for tensor, tensors in zip(local_values, inputs, strict=True))
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(local_values[0], comm.size - 1)
    manager.wait()


def test_rank_objects_are_gathered_and_broadcast(comm):
    gathered = [None] * comm.size
    dist.all_gather_object(gathered, {"rank": comm.rank})
    assert gathered == [{"rank": rank} for rank in range(comm.size)]
    values = ["of the last rank"] if comm.rank == comm.size - 1 else [None]
    dist.broadcast_object_list(values, comm.size - 1)
    assert values == ["of the last rank"]


def test_rank_ddp_with_compression_hooks_matches_one_process(comm, rng):
    """DDP matches one process with all samples. The PowerSGD hook, which nests operations, also runs."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    alone = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    alone.load_state_dict(module.state_dict())
    inputs = torch.from_numpy(rng.standard_normal((comm.size, 8, 16), np.float32))
    model = DistributedDataParallel(module, bucket_cap_mb=0.002)
    for step in range(3):
        for local_input, samples in [(model, inputs[comm.rank]), (alone, inputs.reshape(-1, 16))]:
            local_input.zero_grad()
            ((local_input(samples) - samples.flip(1) * step) ** 2).mean().backward()
        pairs = zip(module.parameters(), alone.parameters(), strict=True)
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6) for a, b in pairs)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        (model(inputs[comm.rank]) ** 2).mean().backward()
    mean = [parameter.grad.clone() for parameter in module.parameters()]
    for gradient in mean:
        dist.all_reduce(gradient, AVG)
    assert all(torch.allclose(a, b.grad, rtol=1e-5) for a, b in zip(mean, module.parameters(), strict=True))


def test_rank_fsdp2_gradients_match_one_process(comm, rng):
    """FSDP2 over this backend has the gradients of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 8))
    alone = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 8))
    alone.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (comm.size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    inputs = torch.from_numpy(rng.standard_normal((comm.size, 4, 8), np.float32))
    model(inputs[comm.rank]).square().mean().backward()
    alone(inputs.reshape(-1, 8)).square().mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert all(torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_rank_monitored_barrier_names_the_late_rank(comm):
    if comm.size == 1:
        hpcdist.torch.monitored_barrier(timeout_s=5)
        return
    group = dist.new_group()
    if comm.rank == comm.size - 1:
        pass
    elif comm.rank == 0:
        with pytest.raises(DeadlineError, match=f"rank {comm.size - 1} did not call it within 0.3 s"):
            hpcdist.torch.monitored_barrier(group, timeout_s=0.3)
    else:
        with pytest.raises(DeadlineError, match="rank 0 did not report"):
            hpcdist.torch.monitored_barrier(group, timeout_s=0.6)
    comm.barrier()


def test_rank_wait_with_a_short_timeout_raises(comm):
    if comm.size == 1:
        return
    number = torch.zeros(1)
    if comm.rank == 0:
        work = dist.irecv(number, 1)
        with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
        comm.barrier()
        assert work.wait()
    else:
        comm.barrier()
        if comm.rank == 1:
            dist.send(number, 0)


def test_rank_wait_for_a_collective_keeps_its_timeout(comm):
    if comm.size == 1 or not comm.supports("thread_multiple"):
        return
    ones = torch.ones(3)
    if comm.rank == 0:
        work = dist.all_reduce(ones, async_op=True)
        with pytest.raises(DeadlineError, match=r"all_reduce on the communicator world/torch\d+ has not ended"):
            work.wait(timedelta(seconds=0.05))
        options = dist.BarrierOptions()
        options.timeout, options.asyncOp = timedelta(seconds=0.05), False
        with pytest.raises(DeadlineError, match=r"barrier on the communicator world/torch\d+ has not ended"):
            dist.group.WORLD.barrier(options)
        comm.barrier()
        assert work.wait()
    else:
        comm.barrier()
        dist.all_reduce(ones)
        dist.barrier()
    assert ones.tolist() == [comm.size] * 3


def test_rank_coalesced_calls_read_all_inputs_before_writing(comm):
    size, group = comm.size, dist.group.WORLD
    total = size * (size + 1) / 2
    for first, second in ((slice(0, 4), slice(0, 4)), (slice(0, 3), slice(1, 4)), (slice(0, 4, 2), slice(1, 4))):
        numbers = torch.full((4,), comm.rank + 1.0)
        group.allreduce_coalesced([numbers[first], numbers[second]]).wait()
        expected = torch.full((4,), comm.rank + 1.0)
        expected[first] = expected[second] = total
        assert torch.equal(numbers, expected)
    local_data, gathered, others = torch.full((2,), comm.rank + 1.0), torch.zeros(2 * size), torch.ones(2 * size)
    group.allgather_into_tensor_coalesced([gathered, others], [local_data, gathered[:2]]).wait()
    assert gathered.tolist() == [rank + 1.0 for rank in range(size) for _ in range(2)] and not others.any()
    numbers, output = torch.ones(2 * size), torch.zeros(2)
    group.reduce_scatter_tensor_coalesced([numbers[:2], output], [numbers, numbers]).wait()
    assert numbers[:2].tolist() == output.tolist() == [size] * 2


def test_rank_bad_arguments_raise_clear_errors(comm):
    ones = torch.ones(4)
    with pytest.raises(BufferHandoverError, match=r"sparse_coo tensors are not supported.*sparse=False"):
        dist.distributed_c10d._get_default_group().allreduce([ones.to_sparse()])
    with pytest.raises(BufferHandoverError, match="cannot be communicated"):
        dist.all_reduce(ones.to("meta"))
    with pytest.raises(UsageError, match="BAND is not defined for torch.float32 tensors"):
        dist.all_reduce(ones, dist.ReduceOp.BAND)
    with pytest.raises(UsageError, match="too few bits"):
        dist.all_reduce(ones.to(torch.float8_e5m2))
    with pytest.raises(UsageError, match="the output of all_gather has 4 elements"):
        dist.all_gather_single(ones, torch.ones(5))
    with pytest.raises(UsageError, match="output_split_sizes"):
        dist.all_to_all_single(ones, ones.clone(), [3] * comm.size, [4] + [0] * (comm.size - 1))
    with pytest.raises(UsageError, match="algorithm: 'rings' is unknown, did you mean ring"):
        hpcdist.torch.Options(algorithm="rings")


def reduce_with(op):
    def run(local_data, group, **options):
        return [local_data], dist.all_reduce(local_data, op, group=group, **options)

    return run


def all_gather(local_data, group, ranks, **options):
    results = [torch.empty_like(local_data) for _ in range(ranks)]
    return results, dist.all_gather(results, local_data, group=group, **options)


def all_gather_single(local_data, group, ranks, **options):
    received = local_data.new_empty(ranks * local_data.numel())
    return [received], dist.all_gather_single(received, local_data, group=group, **options)


def reduce_scatter(local_data, group, ranks, **options):
    received = local_data.new_empty(local_data.numel() // ranks)
    return [received], dist.reduce_scatter_single(received, local_data, group=group, **options)


def broadcast(local_data, group, root, **options):
    return [local_data], dist.broadcast(local_data, root, group=group, **options)


def reduce_to_root(local_data, group, root, **options):
    work = dist.reduce(local_data, root, group=group, **options)
    return [local_data] if dist.get_rank() == root else [], work


def all_to_all(local_data, group, rows, place, **options):
    sent, received = rows[place].tolist(), rows[:, place].tolist()
    output = local_data.new_empty(sum(received))
    return [output], dist.all_to_all_single(
        output, local_data[: sum(sent)].clone(), received, sent, group=group, **options
    )


# name -> (operation, its parameters after tensor and group)
SEQUENCE = {
    **{op: (reduce_with(getattr(dist.ReduceOp, op)), ()) for op in ("SUM", "PRODUCT", "MIN", "MAX")},
    "broadcast": (broadcast, ("root",)),
    "reduce": (reduce_to_root, ("root",)),
    "all_gather": (all_gather, ("ranks",)),
    "all_gather_single": (all_gather_single, ("ranks",)),
    "reduce_scatter_single": (reduce_scatter, ("ranks",)),
    "all_to_all_single": (all_to_all, ("rows", "place")),
}


def check(what, expected, result, work):
    if work is not None:
        work.wait()
    assert all(map(is_same, result, expected)), what


OF_GLOO = [dtype for dtype in (*FLOATS, *INTEGERS) if dtype is not torch.int16]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.full_except("0")
def test_rank_random_sequence_of_operations_matches_gloo(comm, rng, seed):
    """Operations run on overlapping groups, with many types and sizes, and some of them concurrently."""
    some = sorted(rng.permutation(comm.size)[: rng.integers(1, comm.size + 1)].tolist())
    groups = [
        (members, dist.new_group(members), dist.new_group(members, backend="gloo"))
        for members in (list(range(comm.size)), some, list(range(comm.size))[::2])
    ]
    under_way = []
    for _ in range(60):
        members, ours, gloo = groups[rng.integers(len(groups))]
        name = str(rng.choice(list(SEQUENCE)))
        dtype = OF_GLOO[rng.integers(len(OF_GLOO))]
        ranks = len(members)
        facts = {"root": members[rng.integers(ranks)], "ranks": ranks, "rows": rng.integers(0, 40, (ranks, ranks))}
        inputs = draw_for_all_ranks(rng, comm, dtype, ranks * int(rng.choice([1, 40, 3000])) + 40 * ranks)
        is_async, most = bool(rng.integers(2)), int(rng.integers(4))
        if comm.rank not in members:
            continue
        run, requested = SEQUENCE[name]
        facts["place"] = members.index(comm.rank)
        needed = {key: facts[key] for key in requested}
        local_input = inputs[comm.rank]
        expected, _ = run(local_input.clone(), gloo, **needed)
        result, work = run(local_input.clone(), ours, **needed, async_op=is_async)
        under_way.append((f"{name} of {dtype}", expected, result, work))
        while len(under_way) > most:
            check(*under_way.pop(0))
    for operation in under_way:
        check(*operation)
    for members, ours, gloo in groups:
        if comm.rank in members:
            dist.destroy_process_group(ours)
            dist.destroy_process_group(gloo)


@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.full_except("20")
def test_rank_destroyed_groups_free_threads_and_memory(comm, count):
    """Threads, communicators (MPI has only some thousands) and memory of a group end with the group."""
    for _ in range(count):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        if comm.size > 1:
            dist.isend(torch.ones(1), (comm.rank + 1) % comm.size, group=group)
            dist.recv(torch.ones(1), (comm.rank - 1) % comm.size, group=group)
        work.wait()
        dist.destroy_process_group(group)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith(("collectives of", "messages of")) for name in names) <= 4, names


def test_rank_messages_without_a_wait_end_with_the_group(comm):
    """MPI may write a receive into its tensor at any time, so the tensor must live until then."""
    group = dist.new_group()
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large = torch.full((1 << 20,), float(comm.rank))
    arrived = torch.empty_like(large)
    dist.irecv(arrived, behind, group=group)
    dist.isend(large, ahead, group=group)
    never = torch.empty(1)
    dist.irecv(never, behind, group=group, tag=7)
    is_there = weakref.ref(never)
    del never
    dist.destroy_process_group(group)
    assert bool((arrived == behind).all())
    assert is_there() is not None


COMPRESSED = {
    "bfloat16": {},
    "int8": {"warmup_steps": 1},
    "topk": {"density": 0.2},
    "randomk": {"density": 0.2},
    "powersgd": {"rank": 1},
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_rank_compressed_gradients_sum_up_with_error_feedback(comm, rng, name):
    """The gradient is constant: all received messages add up to all sent gradients, up to one residual."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(int(rng.integers(1 << 31)))
    module = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 3))
    model = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    hpcdist.torch.compress(model, name, seed=5, **COMPRESSED[name])
    inputs = torch.from_numpy(rng.standard_normal((comm.size, 6, 12), np.float32))
    # A number that is drawn with probability 0.2 waits for 40 steps once in 7,500 times, and is then 0.2 off after 200.
    steps = 200 if name == "randomk" else 60
    received = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for _ in range(steps):
        model.zero_grad()
        model(inputs[comm.rank]).square().mean().backward()
        for total, parameter in zip(received, module.parameters(), strict=True):
            total += parameter.grad
    alone = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 3))
    alone.load_state_dict(module.state_dict())
    alone(inputs.reshape(-1, 12)).square().mean().backward()
    for total, parameter in zip(received, alone.parameters(), strict=True):
        largest = total.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(largest, total), "ranks received different gradients"
        error = (total / steps - parameter.grad).norm() / parameter.grad.norm()
        assert error < 0.2, f"{name}: {error}"


def test_rank_compress_rejects_bad_options(comm):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="'power' is unknown"):
        hpcdist.torch.compress(model, "power")
    with pytest.raises(UsageError, match="density is not an option of compressor int8"):
        hpcdist.torch.compress(model, "int8", density=0.1)


def test_rank_work_held_only_by_cpp_lives_until_its_release(comm):
    total = torch.ones(3)
    work = dist.all_reduce(total, async_op=True)
    reference, boxed = weakref.ref(work), work.boxed()
    del work
    gc.collect()
    assert reference() is not None  # without it, the wait below never returns
    dist.Work.unbox(boxed).wait()
    assert total.tolist() == [comm.size] * 3
    del boxed
    dist.barrier()  # the thread of the queue drops the operation before it
    gc.collect()
    assert reference() is None


def test_pytorch_bindings_store_works_only_in_known_places():
    bindings = torch._C._distributed_c10d
    functions = [(bindings, name) for name in vars(bindings)]
    functions += [(owner, name) for owner in vars(bindings).values() if isinstance(owner, type) for name in vars(owner)]
    texts = {(owner, name): getattr(getattr(owner, name), "__doc__", None) or "" for owner, name in functions}
    stores = {key for key, text in texts.items() if re.search(r"(?<!self): c10d::Work\b", text)}
    assert not stores  # `work.install` has replaced them
    assert all(hasattr(owner, name) for owner, name in handles.STORES)


def test_rank_join_by_number_of_active_ranks_averages_over_them(comm):
    """Rank r has 1 + r batches. Each adds 2 to the gradient, the mean over the ranks that still have a batch."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + comm.rank):
            model(torch.ones(2, 4)).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0 * (1 + comm.rank)] * 4]


class ListedSpans(SpanSink):
    def __init__(self):
        self.rows = []

    def add(self, phase, name, step, begin_ns, end_ns, microbatch=-1, unit=-1):
        self.rows.append((phase, name, step, begin_ns, end_ns))


def test_rank_activities_are_disjoint_and_cover_the_time(comm, monkeypatch):
    clock = [0]
    monkeypatch.setattr(activity, "now_ns", lambda: clock[0])
    spans = ListedSpans()
    activities = activity.Activities(spans)

    def after(ns, call, *arguments):
        clock[0] += ns
        return call(*arguments)

    assert after(5, activities.enter, "data")
    assert not after(1, activities.enter, "update"), "the outer phase counts"
    after(1, activities.begin_wait, "all_reduce")
    after(2, activities.begin_wait, "message")  # of another thread
    after(3, activities.end_wait, "all_reduce")
    after(4, activities.end_wait, "message")
    after(1, activities.leave)
    after(7, activities.end_step, 1)
    # DDP waits for both futures, at the end of the backward pass.
    values = torch.ones(2, requires_grad=True)
    product = values * values
    product.register_hook(lambda gradient: after(10, activities.await_future, 1))
    values.register_hook(lambda gradient: after(20, activities.await_future, 2))
    product.sum().backward()
    after(3, activities.end_future, 1)
    after(4, activities.end_future, 2)
    after(5, activities.end_step, 2)
    assert spans.rows == [
        ("compute", "compute", 1, 0, 5),
        ("data", "data", 1, 5, 7),
        ("communication", "wait all_reduce", 1, 7, 9),
        ("communication", "wait all_reduce", 1, 9, 12),
        ("communication", "wait message", 1, 12, 16),
        ("data", "data", 1, 16, 17),
        ("compute", "compute", 1, 17, 24),
        ("step", "step", 1, 0, 24),
        ("compute", "compute", 2, 24, 54),
        ("communication", "wait gradients", 2, 54, 61),
        ("compute", "compute", 2, 61, 66),
        ("step", "step", 2, 24, 66),
    ]
    assert activities.take_seconds() == pytest.approx({"compute": 47e-9, "data": 3e-9, "communication": 16e-9})
    assert activities.take_seconds() == {}
