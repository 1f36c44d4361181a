"""Restoring from memory: whatever the cuts, every wanted element arrives, and nothing moves that is there already."""

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


def boxes(rng, shape, parts):
    """Cut a tensor into boxes: along one dim, or along two; some may be empty."""
    found = [whole_box(shape)]
    for dim in rng.permutation(len(shape))[: rng.integers(0, 3)]:
        count = int(rng.integers(1, parts + 1))
        ends = np.sort(rng.integers(0, shape[dim] + 1, count - 1))
        cuts = list(zip([0, *ends.tolist()], [*ends.tolist(), shape[dim]], strict=True))
        found = [(*box[:dim], cut, *box[dim + 1 :]) for box in found for cut in cuts]
    return found


def pieces_of(rng, kind, name, whole, parts, *, fill):
    """Cut ``whole`` at random into pieces that are all of it: by boxes (pipeline, tensor), each by ranges (ZeRO)."""
    made = []
    for box in boxes(rng, whole.shape, parts):
        values = whole[tuple(slice(*bounds) for bounds in box)].reshape(-1)
        ends = np.sort(rng.integers(0, values.size + 1, int(rng.integers(0, parts)))).tolist()
        for start, stop in zip([0, *ends], [*ends, values.size], strict=True):
            array = values[start:stop].copy() if fill else np.zeros(stop - start, whole.dtype)
            made.append(Piece(kind, name, whole.shape, box, Range(start, stop), array))
    return made


def expected(whole, piece):
    return whole[tuple(slice(*bounds) for bounds in piece.box)].reshape(-1)[piece.flat.slice]


def dealt(rng, pieces, ranks):
    """Give each piece to a rank, some to several."""
    hands = [[] for _ in range(ranks)]
    for piece in pieces:
        for rank in rng.choice(ranks, rng.choice([1, 1, min(2, ranks)]), replace=False):
            hands[rank].append(piece)
    return hands


def values_of(rng, shape, dtype):
    return rng.integers(-1000, 1000, shape).astype(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.full_except("2")
def test_any_cut_to_any_other(rng, ranks, monkeypatch):
    tensors = []
    for number in range(900 // (ranks + 2)):
        shape = tuple(rng.integers(1, 9, rng.integers(0, 4)).tolist())
        tensors.append((f"t{number}", values_of(rng, shape, dtype_of(rng.choice(DTYPES)))))
    held, wanted = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for name, whole in tensors:
        for _ in range(rng.integers(1, 3)):  # what is cut in several ways is held in all of them
            for hand, pieces in zip(
                held, dealt(rng, pieces_of(rng, "parameters", name, whole, 4, fill=True), ranks), strict=True
            ):
                hand += pieces
        for rank in range(ranks):
            if rng.random() < 0.6:
                new = pieces_of(rng, "parameters", name, whole, 4, fill=False)
                wanted[rank] += [new[k] for k in rng.choice(len(new), rng.integers(1, len(new) + 1), replace=False)]
    monkeypatch.setattr(messages, "WINDOW_BYTES", int(rng.choice([32, 256, 4000, 1 << 20])))
    monkeypatch.setattr(messages, "MIN_MESSAGE_BYTES", 32)
    monkeypatch.setattr(messages, "LONG_BYTES", int(rng.choice([8, 40, 1 << 16])))
    before = [[piece.array.tobytes() for piece in pieces] for pieces in held]

    def body(comm):
        return reshard(comm, held[comm.rank], wanted[comm.rank])

    received = run_threads(ranks, body)
    whole_of = dict(tensors)
    for pieces in wanted:
        for piece in pieces:
            assert piece.array.tobytes() == expected(whole_of[piece.tensor], piece).tobytes(), piece
    assert before == [[piece.array.tobytes() for piece in pieces] for pieces in held]
    assert received[0] == 0 if ranks == 1 else sum(received) > 0


KINDS = ("parameters", "optimizer.m")


def shards(ranks, fill=True, on="cpu", directory=None):
    """The state of each rank as ZeRO cuts it, by kind; element i of a kind is its number + i."""
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


def held_by(hand):
    stores, part = hand
    return pieces_at(stores, [part])


def stored(hand):
    """The elements of tensors that a rank has, padding left out."""
    return [
        piece.array.copy() if isinstance(piece.array, FileSlice) else backend.to_host(piece.array)
        for piece in held_by(hand)
    ]


def same(one, other):
    return [array.tobytes() for array in stored(one)] == [array.tobytes() for array in stored(other)]


@pytest.mark.parametrize("lost", range(4))
def test_only_what_is_lost_moves(lost):
    """Survivors have theirs; the copy of the lost rank's part, with its neighbour, goes to the new one."""
    old, new = shards(4), shards(4, fill=False)

    def body(comm):
        held = [] if comm.rank == lost else held_by(old[comm.rank])
        if comm.rank == (lost + 1) % 4:
            held += held_by(old[lost])
        return reshard(comm, held, held_by(new[comm.rank]))

    received = run_threads(4, body)
    lost_bytes = sum(array.nbytes for array in stored(old[lost]))
    assert received == [lost_bytes if rank == lost else 0 for rank in range(4)]
    assert all(same(one, other) for one, other in zip(old, new, strict=True))


def test_a_newcomer_takes_equal_shares_of_replicas():
    """What many have comes from all of them, and nothing moves among those who have it."""
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
        assert 0 <= sent - (0 if rank == 2 else size) < 1000  # the rest asks for it


@pytest.mark.parametrize("source", ["memory", "file", "gpu"])
@pytest.mark.parametrize("target", ["memory", "file", "gpu"])
def test_state_on_a_gpu_or_in_a_file(gpu, tmp_path, monkeypatch, source, target):
    monkeypatch.setattr(messages, "WINDOW_BYTES", 1024)
    monkeypatch.setattr(messages, "MIN_MESSAGE_BYTES", 256)
    monkeypatch.setattr(messages, "LONG_BYTES", 64)
    kinds = {"memory": {}, "file": {"directory": tmp_path}, "gpu": {"on": "gpu"}}

    def body(comm):
        old, new = shards(3, **kinds[source])[comm.rank], shards(2, fill=False, **kinds[target])
        reshard(comm, held_by(old), held_by(new[comm.rank]) if comm.rank < 2 else [])
        assert comm.rank == 2 or same(new[comm.rank], shards(2)[comm.rank])

    run_threads(3, body)


def test_columns_of_a_tensor_on_a_gpu_or_in_a_file(gpu, tmp_path, rng):
    """Short stretches are packed: by blocks that enclose them."""
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


def refused(held, wanted):
    """Return what all ranks say, the arrays being as they were."""
    before = [[piece.array.tobytes() for piece in pieces] for pieces in wanted]

    def body(comm):
        with pytest.raises(StorageError) as caught:
            reshard(comm, held[comm.rank], wanted[comm.rank])
        return str(caught.value)

    told = set(run_threads(len(held), body))
    assert len(told) == 1 and before == [[piece.array.tobytes() for piece in pieces] for pieces in wanted]
    return told.pop()


def test_what_nobody_holds_is_named_by_all():
    old, new = shards(3), shards(3, fill=False)
    held = [held_by(old[0]), [], held_by(old[2])]
    wanted = [held_by(hand) for hand in new]
    first = held_by(old[1])[0]
    at = first.flat.start
    expected = f"element {at} of {first.name} is held by none of the 3 ranks (wanted by rank 1)"
    assert refused(held, wanted) == expected


def test_other_shapes_and_dtypes_are_refused():
    def whole(dtype, shape):
        return [Piece.whole("parameters", "w", np.zeros(shape, dtype))]

    expected = "rank 1 holds parameters/w as float32[3, 4], expected float64[3, 4]; go on with the recipe of before"
    assert refused([[], whole("f4", (3, 4))], [whole("f8", (3, 4)), []]) == f"{expected} (wanted by rank 0)"
    assert "float32[3, 4], expected float32[4, 3]" in refused([whole("f4", (3, 4)), []], [[], whole("f4", (4, 3))])


@on_threads(2)
def test_dims_may_be_joined_and_kinds_optional(comm):
    values = np.arange(60, dtype=np.float32)
    held = [Piece.whole("parameters", "w", values.reshape(3, 4, 5))] if comm.rank == 0 else []
    into, kept = np.zeros((12, 5), np.float32), np.ones(3, np.float32)
    wanted = [Piece.whole("parameters", "w", into), Piece.whole("outer", "w", kept)]
    reshard(comm, held, wanted, optional=("outer",))
    assert into.reshape(-1).tobytes() == values.tobytes() and (kept == 1).all()
    with pytest.raises(StorageError, match="element 0 of outer/w"):
        reshard(comm, held, wanted)
