"""The public collectives on arrays of any shape, over communicators of hpcdist and of mpi4py."""

import numpy as np
import pytest

import hpcdist
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.collectives import arrays
from hpcdist.comm.start import import_mpi
from hpcdist.energy import phases
from hpcdist.errors import BufferHandoverError, UsageError


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setenv("HPCDIST_TUNING", "on")
    monkeypatch.setattr(arrays, "BUDGET_S", 0.05)


@pytest.fixture(params=["ours", "mpi4py"])
def group(request, comm):
    if request.param == "ours":
        yield comm
        return
    parent = hpcdist.init().mpi4py
    if parent.Get_size() != comm.size:
        pytest.skip("one process without a launcher")
    reverse = parent.Split(0, -comm.rank)  # rank r of it is rank p - 1 - r of the world
    yield reverse
    reverse.Free()


def group_rank(group, comm):
    return comm.rank if group is comm else comm.size - 1 - comm.rank


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", BFLOAT16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 0, 2), (4, 3, 5)])
def test_rank_allreduce_of_any_shape(group, comm, rng, dtype, shape):
    inputs = rng.integers(0, 16, (comm.size, *shape)).astype(dtype)
    array = np.array(inputs[comm.rank])
    assert hpcdist.allreduce(array, comm=group) is array
    assert np.array_equal(array.astype(np.int64), inputs.astype(np.int64).sum(axis=0))
    if np.dtype(dtype).kind == "f":
        mean = hpcdist.allreduce(np.array(inputs[comm.rank]), "mean", comm=group)
        assert np.allclose(mean, inputs.mean(axis=0), rtol=4 * np.finfo(dtype).eps, atol=0)


def test_rank_allreduce_of_strided_arrays_and_numbers(group, comm, rng):
    inputs = rng.integers(0, 100, (comm.size, 6, 8)).astype(np.float64)
    local_input = inputs[comm.rank].copy()
    hpcdist.allreduce(local_input[::2, 1::3], "max", comm=group)
    expected = inputs[comm.rank].copy()
    expected[::2, 1::3] = inputs[:, ::2, 1::3].max(axis=0)
    assert np.array_equal(local_input, expected)
    assert hpcdist.allreduce(comm.rank, comm=group) == sum(range(comm.size))
    assert hpcdist.allreduce(0.5 * comm.rank, "mean", comm=group) == (comm.size - 1) / 4
    assert hpcdist.allreduce(np.float32(comm.rank), comm=group) == np.float32(sum(range(comm.size)))
    assert hpcdist.allreduce(2**60, "min", comm=group) == 2**60


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_rank_reduce_scatter_and_all_gather_split_rows(group, comm, rng, dtype, rows):
    inputs = rng.integers(0, 100, (comm.size, rows, 3)).astype(dtype)
    array, rank = inputs[comm.rank].copy(), group_rank(group, comm)
    local_data = hpcdist.reduce_scatter(array, comm=group)
    assert np.array_equal(local_data, np.array_split(inputs.sum(axis=0), comm.size)[rank])
    if dtype == "float32":
        mean = hpcdist.reduce_scatter(array, "mean", comm=group)
        assert np.allclose(mean, np.array_split(inputs.astype(np.float64).mean(axis=0), comm.size)[rank], rtol=1e-6)
    assert np.array_equal(array, inputs[comm.rank])
    assert np.array_equal(hpcdist.all_gather(local_data, comm=group), inputs.sum(axis=0))


def test_rank_all_to_all_of_uneven_parts(group, comm, rng):
    sizes = rng.integers(0, 5, (comm.size, comm.size))  # (from, to), by ranks of the group
    rank = group_rank(group, comm)
    received = hpcdist.all_to_all(
        [np.full((sizes[rank, to], 2), 10.0 * rank + to) for to in range(comm.size)], comm=group
    )
    for source, part in enumerate(received):
        assert part.shape == (sizes[source, rank], 2) and (part == 10 * source + rank).all()
    square = np.arange(comm.size * 3).reshape(comm.size, 3) + 100 * rank
    assert np.array_equal(
        np.stack(hpcdist.all_to_all(square, comm=group)),
        np.stack([np.arange(3) + 3 * rank + 100 * source for source in range(comm.size)]),
    )


def test_rank_broadcast_from_every_root(group, comm, rng):
    inputs = rng.standard_normal((comm.size, 4, 6))
    for root in range(comm.size):
        source = root if group is comm else comm.size - 1 - root
        array = inputs[comm.rank].copy()
        hpcdist.broadcast(array[:, ::2], root, comm=group)
        assert np.array_equal(array[:, ::2], inputs[source][:, ::2])
        assert np.array_equal(array[:, 1::2], inputs[comm.rank][:, 1::2])


def test_rank_bad_arguments_are_rejected(comm):
    for wrong in (np.zeros(3, complex), np.zeros(3, bool)):
        with pytest.raises(BufferHandoverError, match="dtype .* is not supported; pass array.view"):
            hpcdist.allreduce(wrong, comm=comm)
    with pytest.raises(UsageError, match="choose one of sum, mean, max, min"):
        hpcdist.allreduce(np.zeros(3), "product", comm=comm)
    for sequence in ([1.0, 2.0], (1.0, 2.0)):  # a copy of which would be reduced
        for call in (hpcdist.allreduce, hpcdist.broadcast):
            with pytest.raises(
                UsageError, match=f"{call.__name__} works in place, and got a {type(sequence).__name__}"
            ):
                call(sequence, comm=comm)
    with pytest.raises(UsageError, match="is not an integer"):
        hpcdist.allreduce(np.zeros(3, np.int32), "mean", comm=comm)
    with pytest.raises(UsageError, match="is not an integer"):
        hpcdist.reduce_scatter(np.zeros(3, np.int32), "mean", comm=comm)
    with pytest.raises(UsageError, match="at least one dimension"):
        hpcdist.all_gather(np.zeros(()), comm=comm)
    with pytest.raises(UsageError, match=f"{comm.size + 1} arrays for {comm.size} ranks"):
        hpcdist.all_to_all(np.zeros((comm.size + 1, 2)), comm=comm)
    with pytest.raises(UsageError, match=r"pass the result of hpcdist.init\(\)"):
        hpcdist.allreduce(np.zeros(3), comm="world")


def test_rank_init_returns_the_world(comm):
    world = hpcdist.init()
    assert world is hpcdist.init() and (world.rank, world.size) == (comm.rank, comm.size)
    assert world.bcast({"from": comm.rank}, comm.size - 1) == {"from": comm.size - 1}
    assert world.allgather(str(comm.rank)) == [str(rank) for rank in range(comm.size)]
    assert world.mpi4py.Get_size() == comm.size and 0 <= world.local_rank < world.local_size
    with pytest.raises(UsageError, match="the ranks are"):
        world.bcast(1, comm.size)


def test_rank_functions_on_a_part_do_not_wait_for_other_ranks(comm, folder, monkeypatch):
    monkeypatch.setattr(phases, "_monitors", [])
    monkeypatch.setattr(phases, "_entered", {})
    everyone, mpi = hpcdist.init().mpi4py, import_mpi()
    part = everyone.Split(0 if comm.rank < max(1, comm.size - 1) else mpi.UNDEFINED)
    if not part:
        with pytest.raises(UsageError, match="COMM_NULL"):
            hpcdist.should_stop(comm=part)
    else:
        size = part.Get_size()
        state = {"rows": hpcdist.checkpoint.Sharded(np.full((2, 3), comm.rank)), "size": size}
        hpcdist.checkpoint.save(folder, state, background=True, comm=part)
        hpcdist.checkpoint.finish_saves(part)
        saved = hpcdist.checkpoint.load(folder, comm=part)
        assert saved["size"] == size and saved["rows"][:, 0].tolist() == [r for r in range(size) for _ in (0, 1)]
        assert hpcdist.should_stop(margin_s=0, comm=part) == 0
        hpcdist.energy.configure(sources="declared", cpu_tdp_w=100.0, utilisation_s=0.0, comm=part)
        with hpcdist.energy.window("part"):
            pass
        assert "part" in hpcdist.energy.usage()["phases"]
        phases._monitors[0].stop()
        phases._monitors[0].close()
        part.Free()


def test_rank_pytorch_tensors_are_reduced_in_place(comm):
    torch = pytest.importorskip("torch")
    tensor = torch.full((3, 4), float(comm.rank))
    assert hpcdist.allreduce(tensor, comm=comm) is tensor
    assert (tensor == sum(range(comm.size))).all()
    hpcdist.broadcast(tensor[0] + comm.rank, comm.size - 1, comm=comm)
