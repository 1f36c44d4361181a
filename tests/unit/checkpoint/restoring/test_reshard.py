"""Resharding in memory: every requested element arrives for any layouts, and local elements are not sent."""

import numpy as np
import pytest

from harness.inputs import LAYOUT
from harness.marks import on_threads
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice, FileStore
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.restoring import messages
from hpcdist.checkpoint.restoring.reshard import reshard
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.strategies.core.exchange import pieces_of as pieces_at

DTYPES = ("float32", "float64", "bfloat16", "int64")


def cut_into_boxes(rng, shape, parts):
    """Cut a tensor into boxes along up to two dims. Some boxes may be empty."""
    results = [whole_box(shape)]
    for dim in rng.permutation(len(shape))[: rng.integers(0, 3)]:
        count = int(rng.integers(1, parts + 1))
        ends = np.sort(rng.integers(0, shape[dim] + 1, count - 1))
        cuts = list(zip([0, *ends.tolist()], [*ends.tolist(), shape[dim]], strict=True))
        results = [(*box[:dim], cut, *box[dim + 1 :]) for box in results for cut in cuts]
    return results


def random_pieces(rng, kind, name, whole, parts, *, fill):
    """Cut ``whole`` at random into pieces that cover it: into boxes (pipeline, tensor) and flat ranges (ZeRO)."""
    made = []
    for box in cut_into_boxes(rng, whole.shape, parts):
        values = whole[tuple(slice(*bounds) for bounds in box)].reshape(-1)
        ends = np.sort(rng.integers(0, values.size + 1, int(rng.integers(0, parts)))).tolist()
        for start, stop in zip([0, *ends], [*ends, values.size], strict=True):
            array = values[start:stop].copy() if fill else np.zeros(stop - start, whole.dtype)
            made.append(Piece(kind, name, whole.shape, box, Range(start, stop), array))
    return made


def elements_of(whole, piece):
    return whole[tuple(slice(*bounds) for bounds in piece.box)].reshape(-1)[piece.flat.slice]


def deal_pieces(rng, pieces, ranks):
    """Assign each piece to one rank or to several."""
    hands = [[] for _ in range(ranks)]
    for piece in pieces:
        for rank in rng.choice(ranks, rng.choice([1, 1, min(2, ranks)]), replace=False):
            hands[rank].append(piece)
    return hands


def values_of(rng, shape, dtype):
    return rng.integers(-1000, 1000, shape).astype(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.full_except("2")
def test_any_layout_is_resharded_to_any_other(rng, ranks, monkeypatch):
    tensors = []
    for number in range(900 // (ranks + 2)):
        shape = tuple(rng.integers(1, 9, rng.integers(0, 4)).tolist())
        tensors.append((f"t{number}", values_of(rng, shape, dtype_of(rng.choice(DTYPES)))))
    held, requested = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for name, whole in tensors:
        for _ in range(rng.integers(1, 3)):  # a tensor may be held in two different cuts
            for hand, pieces in zip(
                held, deal_pieces(rng, random_pieces(rng, "parameters", name, whole, 4, fill=True), ranks), strict=True
            ):
                hand += pieces
        for rank in range(ranks):
            if rng.random() < 0.6:
                new = random_pieces(rng, "parameters", name, whole, 4, fill=False)
                requested[rank] += [new[k] for k in rng.choice(len(new), rng.integers(1, len(new) + 1), replace=False)]
    monkeypatch.setattr(messages, "WINDOW_BYTES", int(rng.choice([32, 256, 4000, 1 << 20])))
    monkeypatch.setattr(messages, "MIN_MESSAGE_BYTES", 32)
    monkeypatch.setattr(messages, "LONG_BYTES", int(rng.choice([8, 40, 1 << 16])))
    before = [[piece.array.tobytes() for piece in pieces] for pieces in held]

    def body(comm):
        return reshard(comm, held[comm.rank], requested[comm.rank])

    received = run_threads(ranks, body)
    whole_of = dict(tensors)
    for pieces in requested:
        for piece in pieces:
            assert piece.array.tobytes() == elements_of(whole_of[piece.tensor], piece).tobytes(), piece
    assert before == [[piece.array.tobytes() for piece in pieces] for pieces in held]
    assert received[0] == 0 if ranks == 1 else sum(received) > 0


KINDS = ("parameters", "optimizer.m")


def shards(ranks, fill=True, on="cpu", directory=None):
    """Return the ZeRO shard of each rank by kind. Element i of a kind has the value of the kind's number + i."""
    made = []
    for part in split(LAYOUT.size, ranks, 4):
        stores = {}
        for number, kind in enumerate(KINDS):
            where = {"on": on} if directory is None else {"directory": directory}
            store = (FlatStore if directory is None else FileStore)(LAYOUT, np.dtype("f4"), part, **where)
            values = np.arange(part.start, part.stop, dtype=np.float32) + 10000 * (number + 1)
            if fill and part:
                store.write(part, values)
            stores[kind] = store
        made.append((stores, part))
    return made


def held_pieces(hand):
    stores, part = hand
    return pieces_at(stores, [part])


def held_elements(hand):
    """Return the tensor elements of a rank, without padding."""
    return [
        piece.array.copy() if isinstance(piece.array, FileSlice) else backend.to_host(piece.array)
        for piece in held_pieces(hand)
    ]


def have_same_elements(one, other):
    return [array.tobytes() for array in held_elements(one)] == [array.tobytes() for array in held_elements(other)]


@pytest.mark.parametrize("lost", range(4))
def test_only_the_lost_part_is_sent(lost):
    """Survivors keep their parts. The neighbour of the lost rank sends the copy to the new rank."""
    old, new = shards(4), shards(4, fill=False)

    def body(comm):
        held = [] if comm.rank == lost else held_pieces(old[comm.rank])
        if comm.rank == (lost + 1) % 4:
            held += held_pieces(old[lost])
        return reshard(comm, held, held_pieces(new[comm.rank]))

    received = run_threads(4, body)
    lost_bytes = sum(array.nbytes for array in held_elements(old[lost]))
    assert received == [lost_bytes if rank == lost else 0 for rank in range(4)]
    assert all(have_same_elements(one, other) for one, other in zip(old, new, strict=True))


def test_new_rank_receives_equal_shares_from_replicas():
    """All holders send equal shares to the new rank, and nothing is sent between the holders."""
    size = 1 << 20

    def body(comm):
        whole = np.arange(size, dtype=np.float32)
        into = np.zeros(size, np.float32) if comm.rank == 2 else whole
        piece = Piece.whole("parameters", "w", into)
        with count_traffic(comm) as traffic:
            received = reshard(comm, [] if comm.rank == 2 else [piece], [piece])
        assert into.tobytes() == np.arange(size, dtype=np.float32).tobytes()
        return received, traffic.sent_bytes

    for rank, (received, sent) in enumerate(run_threads(5, body)):
        assert received == (4 * size if rank == 2 else 0)
        assert 0 <= sent - (0 if rank == 2 else size) < 1000  # the remainder are requests


@pytest.mark.parametrize("source", ["memory", "file", "gpu"])
@pytest.mark.parametrize("target", ["memory", "file", "gpu"])
def test_gpu_and_file_state_is_resharded(gpu, tmp_path, monkeypatch, source, target):
    monkeypatch.setattr(messages, "WINDOW_BYTES", 1024)
    monkeypatch.setattr(messages, "MIN_MESSAGE_BYTES", 256)
    monkeypatch.setattr(messages, "LONG_BYTES", 64)
    kinds = {"memory": {}, "file": {"directory": tmp_path}, "gpu": {"on": "gpu"}}

    def body(comm):
        old, new = shards(3, **kinds[source])[comm.rank], shards(2, fill=False, **kinds[target])
        reshard(comm, held_pieces(old), held_pieces(new[comm.rank]) if comm.rank < 2 else [])
        assert comm.rank == 2 or have_same_elements(new[comm.rank], shards(2)[comm.rank])

    run_threads(3, body)


def test_columns_of_gpu_and_file_tensors_are_resharded(gpu, tmp_path, rng):
    """Short stretches are packed into blocks that enclose them."""
    whole = rng.standard_normal((40, 24)).astype(np.float32)
    columns, spec = [((0, 40), (0, 9)), ((0, 40), (9, 24))], TensorSpec(0, "w", (960,))

    def array(values, where):
        store = FileStore(Layout.of([spec]), values.dtype, directory=tmp_path) if where == "file" else None
        if store is None:
            return backend.place(values, "gpu" if where == "gpu" else "cpu")
        store.write(Range(0, values.size), values)
        return store.contents(Range(0, values.size))

    def body(comm):
        for source in ("memory", "file", "gpu"):
            for target in ("memory", "file", "gpu"):
                box = columns[comm.rank]
                values = np.ascontiguousarray(whole[:, slice(*box[1])]).reshape(-1)
                held = Piece("p", "w", whole.shape, box, Range(0, values.size), array(values, source))
                rows = ((0, 17) if comm.rank else (17, 40), (0, 24))
                expected = whole[slice(*rows[0])].reshape(-1)
                into = array(np.full(expected.size, -1, np.float32), target)
                reshard(comm, [held], [Piece("p", "w", whole.shape, rows, Range(0, expected.size), into)])
                got = into.copy() if target == "file" else backend.to_host(into)
                assert got.tobytes() == expected.tobytes(), (source, target)

    run_threads(2, body)


def reshard_error(held, requested):
    """Return the error message, which is equal on all ranks. Check that no array has changed."""
    before = [[piece.array.tobytes() for piece in pieces] for pieces in requested]

    def body(comm):
        with pytest.raises(StorageError) as caught:
            reshard(comm, held[comm.rank], requested[comm.rank])
        return str(caught.value)

    output = set(run_threads(len(held), body))
    assert len(output) == 1 and before == [[piece.array.tobytes() for piece in pieces] for pieces in requested]
    return output.pop()


def test_missing_element_is_named_on_all_ranks():
    old, new = shards(3), shards(3, fill=False)
    held = [held_pieces(old[0]), [], held_pieces(old[2])]
    requested = [held_pieces(hand) for hand in new]
    first = held_pieces(old[1])[0]
    at = first.flat.start
    expected = f"rank 1 cannot fill its tensors: element {at} of {first.name} is held by none of the 3 ranks"
    assert reshard_error(held, requested) == expected


def test_other_shapes_and_dtypes_are_rejected():
    def full(dtype, shape):
        return [Piece.whole("parameters", "w", np.zeros(shape, dtype))]

    held = "rank 1 holds parameters/w as float32[3, 4], expected float64[3, 4]"
    expected = f"rank 0 cannot fill its tensors: {held}; resume with the recipe that made the held state"
    assert reshard_error([[], full("f4", (3, 4))], [full("f8", (3, 4)), []]) == expected
    assert "float32[3, 4], expected float32[4, 3]" in reshard_error([full("f4", (3, 4)), []], [[], full("f4", (4, 3))])


@on_threads(2)
def test_reshard_accepts_merged_dims_and_optional_kinds(comm):
    values = np.arange(60, dtype=np.float32)
    held = [Piece.whole("parameters", "w", values.reshape(3, 4, 5))] if comm.rank == 0 else []
    into, kept = np.zeros((12, 5), np.float32), np.ones(3, np.float32)
    requested = [Piece.whole("parameters", "w", into), Piece.whole("outer", "w", kept)]
    reshard(comm, held, requested, optional=("outer",))
    assert into.reshape(-1).tobytes() == values.tobytes() and (kept == 1).all()
    with pytest.raises(StorageError, match="element 0 of outer/w"):
        reshard(comm, held, requested)
