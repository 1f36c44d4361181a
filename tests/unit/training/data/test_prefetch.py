"""Prefetching: the same items in the same order, errors at their position, and no remaining thread."""

import threading
import time

import numpy as np
import pytest

from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.training.data import Prefetcher, open_source
from hpcdist.training.data.prefetch import ReadAhead
from hpcdist.training.recipe.config import DataConfig, RunConfig
from hpcdist.training.recipe.recipe import Recipe


def test_items_come_in_order_and_the_end_is_final():
    with ReadAhead(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_prefetch_reads_at_most_its_depth_ahead():
    read = []

    def numbers():
        for number in range(100):
            read.append(number)
            yield number

    with ReadAhead(numbers(), depth=2) as items:
        assert next(items) == 0
        time.sleep(0.2)
        assert len(read) <= 4  # one taken, two ready, one waiting for its place


def test_error_is_raised_at_its_position():
    def numbers():
        yield 1
        raise OSError("the disk is gone")

    with ReadAhead(numbers()) as items:
        assert next(items) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_early_exit_ends_the_thread():
    before = threading.active_count()
    with ReadAhead(iter(range(10**9))) as items:
        assert next(items) == 0
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(items)


def test_shares_of_all_ranks_are_the_global_batches(tmp_path, rng):
    (tmp_path / "a.txt").write_bytes(rng.integers(32, 127, 3000).astype(np.uint8).tobytes())
    config = DataConfig(path=str(tmp_path / "a.txt"), context=8)
    recipe = Recipe(data=config, run=RunConfig(global_batch=7, seed=int(rng.integers(1000))))

    def batches(comm, first=0):
        with Prefetcher(open_source(config, recipe.model, comm), recipe, comm, first, 60) as ahead:
            return [x for x, _ in ahead]

    alone = batches(solo())
    assert [len(x) for x in alone] == [7] * 60  # more than one epoch of 355 windows
    for size in (2, 3):
        parts = run_threads(size, batches)
        assert all(np.array_equal(np.concatenate(step), whole) for *step, whole in zip(*parts, alone, strict=True))
    resumed = batches(solo(), first=25)
    assert all(np.array_equal(a, b) for a, b in zip(resumed, alone[25:], strict=True))
