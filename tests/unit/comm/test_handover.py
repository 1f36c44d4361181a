"""Device buffers at the hand-over: produced, staged through pinned memory, or passed on; never copied by accident."""

import gc

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.memory import Ledger
from hpcdist.comm.handover import COLLECTIVES, MESSAGES, OPERATIONS, Handover
from stubs.gpu import cuda_double


def on_device(gpu, values):
    """Return ``values`` on the device, as the result of a kernel that may still run."""
    array = backend.place(values, "gpu")
    array += values.dtype.type(1)
    gpu.LOG.clear()
    return array


def empty_the_pool():
    """Take all blocks out of it, also those that garbage of earlier tests would give back in the middle of this one."""
    gc.collect()
    staging.release()


def kinds(gpu):
    return [event.kind for event in gpu.LOG.events]


def test_staged_sending_waits_for_one_copy(gpu):
    message = Handover(device_pointers=False).outgoing(on_device(gpu, np.arange(4.0)))
    assert isinstance(message, np.ndarray) and message.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert cuda_double.is_pinned(message) and kinds(gpu) == [gpu.D2H, gpu.SYNCHRONISE]


def test_staged_receiving_waits_for_nothing(gpu):
    target = on_device(gpu, np.zeros(3, np.float16))
    message, finish = Handover(device_pointers=False).incoming(target)
    message.view(np.float16)[...] = [1, 2, 3]
    assert finish is not None and kinds(gpu) == []
    finish()
    assert kinds(gpu) == [gpu.H2D]
    target += np.float16(1)  # a kernel launched afterwards sees what came
    assert target.get().tolist() == [2, 3, 4]


@pytest.mark.parametrize("operation", ["", *COLLECTIVES])
def test_a_reduction_brings_the_data_and_takes_the_result(gpu, operation):
    target = on_device(gpu, np.arange(3.0))
    message, finish = Handover(device_pointers=(MESSAGES,)).both(target, operation)
    message += 1
    assert finish is not None
    finish()
    assert kinds(gpu) == [gpu.D2H, gpu.SYNCHRONISE, gpu.H2D]
    assert target.get().tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_device_pointers_are_passed_on_for_what_was_seen_to_work(gpu, operation):
    array = on_device(gpu, np.arange(4.0))
    handover = Handover(device_pointers=(operation,))
    assert gpu.LOG.kernels_pending()
    assert handover.outgoing(array, operation) is array and not gpu.LOG.kernels_pending()
    assert handover.incoming(array, operation) == handover.both(array, operation) == (array, None)
    assert kinds(gpu) == [gpu.SYNCHRONISE] * 3
    for other in set(OPERATIONS) - {operation}:
        assert cuda_double.is_pinned(handover.outgoing(array, other))
    assert handover.device_pointers is (operation == MESSAGES)


def test_what_has_no_name_is_staged_even_if_everything_takes_pointers(gpu):
    message, _ = Handover(device_pointers=True).both(on_device(gpu, np.arange(4.0)))
    assert isinstance(message, np.ndarray)


def test_the_wait_is_for_what_was_produced_and_not_for_the_device(gpu):
    array = on_device(gpu, np.arange(4.0))
    event = device.record()
    array += 1.0  # launched after the event
    event.synchronize()
    assert gpu.LOG.kernels_pending()


def test_host_buffers_are_not_copied():
    array = np.arange(4.0)
    handover = Handover(device_pointers=False)
    assert handover.outgoing(array) is array
    assert handover.incoming(array) == (array, None)
    half = np.zeros(4, np.float16)
    assert np.shares_memory(handover.outgoing(half), half) and handover.outgoing(half).dtype == np.uint16


def test_staging_memory_comes_back_at_the_same_address(gpu):
    empty_the_pool()
    handover = Handover(device_pointers=False)
    addresses = set()
    for _ in range(5):
        array = on_device(gpu, np.arange(1000.0))
        first = handover.outgoing(array)[10:]  # a view keeps the block
        second = handover.outgoing(array)
        assert not np.shares_memory(first, second)
        addresses |= {first.ctypes.data, second.ctypes.data}
        del first, second
    assert len(addresses) <= 4  # two blocks, seen from two offsets


def test_a_block_is_kept_while_its_copy_to_the_device_is_under_way(gpu):
    empty_the_pool()
    target = on_device(gpu, np.zeros(1000))
    message, finish = Handover(device_pointers=False).incoming(target)
    message[...] = 7
    finish()
    del message, finish
    gc.collect()
    staging.lease(1000, np.dtype(float))[...] = 9  # were it the same block, the copy would take this
    assert (target.get() == 7).all()


def test_the_ledger_counts_what_is_taken(gpu):
    empty_the_pool()
    ledger = Ledger()
    staging.account(ledger)
    try:
        block = staging.lease(5000, np.dtype(np.uint8))
        assert ledger.current["communication"] == 8192
        del block
        gc.collect()
        assert ledger.current["communication"] == 8192  # kept for the next
        staging.release()
        gc.collect()
        assert ledger.current["communication"] == 0
    finally:
        staging.account(None)


def test_pageable_memory_is_the_last_resort(gpu, monkeypatch):
    empty_the_pool()
    monkeypatch.setitem(cuda_double.LIMIT, "pinned", 0)
    message, finish = Handover(device_pointers=False).both(target := on_device(gpu, np.arange(3.0)), "allreduce")
    assert not cuda_double.is_pinned(message) and message.tolist() == [1.0, 2.0, 3.0]
    message *= 2
    finish()
    assert target.get().tolist() == [2.0, 4.0, 6.0]
    assert "pinned memory were refused" in staging.refusal() and "ulimit -l" in staging.refusal()
    staging.release()
