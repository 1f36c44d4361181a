"""The memory of activations: reuse, alignment, accounting."""

import gc

import numpy as np
import pytest

from hpcdist.arrays.backend import Ledger
from hpcdist.models.arena import Arena


def _step(arena, batch):
    arrays = []
    for layer in range(3):
        for microbatch in range(2):
            saved = arena.saved(layer, microbatch)
            arrays += [saved.empty("a", (batch, 7), np.float32), saved.empty("b", (batch, 3, 5), np.float64)]
    for layer in range(3):
        for microbatch in range(2):
            arena.saved(layer, microbatch).release()
    return arrays


def test_later_steps_allocate_no_memory():
    ledger = Ledger()
    arena = Arena(ledger)
    _step(arena, 16)
    first = ledger.current["activations"]
    for batch in (16, 13, 16, 16, 9, 16):
        _step(arena, batch)
    assert ledger.current["activations"] == first == ledger.peak["activations"]
    assert first >= 6 * 16 * (7 * 4 + 15 * 8)


@pytest.mark.parametrize("recomputing", [False, True])
def test_varying_sizes_keep_the_arena_small(recomputing, rng):
    """One case are rows of experts.

    The arena's size is proportional to the peak of bytes in use, in any order of requests.
    """
    for rows_of_step in (lambda step: int(rng.integers(200, 2000)), lambda step: 200 + 9 * step):
        ledger, peak = Ledger(), 0
        arena = Arena(ledger)
        for step in range(200):
            in_use = 0
            for layer in range(6):
                saved, rows = arena.saved(layer), rows_of_step(step)
                sizes = [64 * 1000, 64 * 1000, *(64 * width * rows for width in (2, 8, 8, 2))]
                for name, size in enumerate(sizes):
                    saved.empty(str(name), (size,), np.uint8)
                peak = max(peak, in_use + sum(sizes))
                in_use += 0 if recomputing else sum(sizes)
                if recomputing:
                    saved.release()
            for layer in range(6):
                arena.saved(layer).release()
        assert peak <= ledger.current["activations"] <= ledger.peak["activations"] <= 1.6 * peak


def test_repeated_sequence_of_any_sizes_stops_allocating(rng):
    """Live arrays do not overlap and are found by their memory. A repeated sequence stops allocating."""
    for _ in range(20):
        ledger, order, alive = Ledger(), [], []
        arena = Arena(ledger)
        for name in range(60):
            order.append((name, int(2 ** rng.uniform(3, 13))))
            alive.append(name)
            while alive and rng.random() < 0.45:
                order.append((alive.pop(int(rng.integers(len(alive)))), None))
        after, used, most = [], 0, 0
        for _ in range(25):
            held = {}
            for name, size in [*order, *((name, None) for name in alive)]:
                if size is None:
                    index, array, size = held.pop(name)
                    assert (array == name).all() and arena.find(array) == index
                    arena.give(index)
                    used -= size
                else:
                    index = arena.take(size)
                    held[name] = index, arena.view(index, (size,), np.uint8), size
                    held[name][1][...] = name
                    used += size
                    most = max(most, used)
            after.append(ledger.current["activations"])
        assert after[-5:] == after[-1:] * 5
        assert after[-1] <= 3 * most + 128 * len(order)


def test_old_block_is_freed_before_it_grows():
    ledger = Ledger()
    arena = Arena(ledger)
    for size in (1000, 1900, 3000, 2900):
        arena.saved(0).empty("x", (size,), np.float64)
        arena.saved(0).release()
    assert ledger.peak["activations"] == ledger.current["activations"] < 8 * 3100
    arena.saved(0).empty("x", (3001 * 2,), np.float64)
    arena.saved(0).release()
    assert ledger.current["activations"] >= 8 * 3 * 3000, "beyond twice its size a block stays as it is"


def test_arrays_alive_at_once_do_not_overlap():
    arena = Arena()
    for _ in range(2):
        saved = [arena.saved(layer) for layer in range(4)]
        arrays = [one.empty(str(i), (size,), np.uint8) for one in saved for i, size in enumerate((1, 64, 65, 1000))]
        for i, array in enumerate(arrays):
            array[:] = i
        for i, array in enumerate(arrays):
            assert (array == i).all()
        for one in saved:
            one.release()


def test_arrays_have_shape_dtype_and_alignment():
    saved = Arena().saved(0)
    array = saved.empty("x", (3, 5), np.float64)
    assert array.shape == (3, 5) and array.dtype == np.float64 and array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0
    assert saved["x"] is array
    assert saved.empty("nothing", (0, 4), np.float32).shape == (0, 4)


def test_values_live_until_release():
    arena = Arena()
    arena.saved(2, 1).keep("kind", "gelu")
    assert arena.saved(2, 1)["kind"] == "gelu"
    arena.saved(2, 1).release()
    with pytest.raises(KeyError):
        arena.saved(2, 1)["kind"]


def test_saving_a_name_twice_raises_assertion_error():
    saved = Arena().saved(0)
    saved.keep("x", 1)
    with pytest.raises(AssertionError, match="release it first"):
        saved.keep("x", 2)


def test_scratch_is_shared_and_grows():
    arena = Arena()
    small = arena.saved(0).scratch("t", (4,), np.float32)
    assert np.may_share_memory(small, arena.saved(1).scratch("t", (2, 2), np.float32))
    large = arena.saved(0).scratch("t", (400,), np.float32)
    assert large.shape == (400,)
    assert np.may_share_memory(large, arena.saved(1).scratch("t", (4,), np.float32))
    assert not np.may_share_memory(large, arena.saved(1).scratch("u", (4,), np.float32))


def test_ledger_counts_the_release_of_the_arena():
    ledger = Ledger()
    arena = Arena(ledger)
    arena.saved(0).empty("x", (1000,), np.float64)
    assert ledger.current["activations"] >= 8000
    del arena
    gc.collect()
    assert ledger.current["activations"] == 0


def test_recorded_call_is_repeated_on_the_same_memory():
    arena = Arena()
    for layer in range(3):  # blocks of the same size, to choose among
        arena.saved(layer).empty("y", (4, 8), "float32")
    for layer in range(3):
        arena.saved(layer).release()
    first = arena.saved(0)
    arena.begin_record()
    y = first.empty("y", (4, 8), "float32")
    first.hold("y")
    first.within().empty("inner", (4, 8), "float32")
    inner = first.within()
    inner.empty("inner", (2, 8), "float32")
    inner.release()
    use, state = arena.end_record(), first.state()
    assert len(use.taken) == 3 and not arena.has_free(use)
    uses = list(arena._uses)
    first.narrow()
    first.release()
    for index, count in enumerate(arena._uses):  # of `within`, which nobody released
        for _ in range(count):
            arena.give(index)
    assert arena.has_free(use)
    later = arena.saved(5)
    arena.repeat(use)
    later.restore(state)
    assert arena._uses == uses and later["y"] is y and later.owns(y)
    assert arena.saved(6).empty("y", (4, 8), "float32").ctypes.data != y.ctypes.data
    later.narrow()
    assert later["y"] is y and not arena.has_free(use)
    later.release()
    assert not arena._uses[arena.find(y)]


def test_blocks_of_a_recorded_call_do_not_grow():
    arena = Arena()
    arena.begin_record()
    y = arena.saved(0).empty("y", (64,), "float32")
    use, state = arena.end_record(), arena.saved(0).state()
    arena.saved(0).release()
    arena.saved(1).empty("larger", (96,), "float32")
    assert arena.has_free(use)
    arena.repeat(use)
    arena.saved(2).restore(state)
    assert arena.saved(2).owns(y) and arena.find(y) in use.taken
