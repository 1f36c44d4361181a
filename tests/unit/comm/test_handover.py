"""Handover of device buffers to MPI: staging through pinned memory, device pointers, and no needless copies."""

import gc
import weakref
from collections import deque

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.gpu import device, staging
from hpcdist.comm.handover import COLLECTIVES, MESSAGES, OPERATIONS, Handover
from stubs.gpu import cuda_double


def on_device(gpu, values):
    """Return ``values`` on the device, as the result of a kernel that may still run."""
    array = backend.place(values, "gpu")
    array += values.dtype.type(1)
    gpu.LOG.clear()
    return array


def empty_pool():
    """Release all pinned blocks, including the blocks that garbage of earlier tests would return during this test."""
    gc.collect()
    staging.release()


def kinds(gpu):
    return [event.kind for event in gpu.LOG.events]


def test_staged_send_waits_for_one_copy(gpu):
    message = Handover(device_pointers=False).outgoing(on_device(gpu, np.arange(4.0)))
    assert isinstance(message, np.ndarray) and message.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert cuda_double.is_pinned(message) and kinds(gpu) == [gpu.D2H, gpu.SYNCHRONISE]


def test_staged_receive_does_not_wait(gpu):
    target = on_device(gpu, np.zeros(3, np.float16))
    message, finish = Handover(device_pointers=False).incoming(target)
    message.view(np.float16)[...] = [1, 2, 3]
    assert finish is not None and kinds(gpu) == []
    finish()
    assert kinds(gpu) == [gpu.H2D]
    target += np.float16(1)  # a later kernel sees the received data
    assert target.get().tolist() == [2, 3, 4]


@pytest.mark.parametrize("operation", ["", *COLLECTIVES])
def test_staged_reduction_copies_data_to_host_and_back(gpu, operation):
    target = on_device(gpu, np.arange(3.0))
    message, finish = Handover(device_pointers=(MESSAGES,)).both(target, operation)
    message += 1
    assert finish is not None
    finish()
    assert kinds(gpu) == [gpu.D2H, gpu.SYNCHRONISE, gpu.H2D]
    assert target.get().tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_device_pointers_are_passed_only_for_working_operations(gpu, operation):
    array = on_device(gpu, np.arange(4.0))
    handover = Handover(device_pointers=(operation,))
    assert gpu.LOG.kernels_pending()
    assert handover.outgoing(array, operation) is array and not gpu.LOG.kernels_pending()
    assert handover.incoming(array, operation) == handover.both(array, operation) == (array, None)
    assert kinds(gpu) == [gpu.SYNCHRONISE] * 3
    for other in set(OPERATIONS) - {operation}:
        assert cuda_double.is_pinned(handover.outgoing(array, other))
    assert handover.device_pointers is (operation == MESSAGES)


def test_unnamed_operation_is_staged_despite_device_pointers(gpu):
    message, _ = Handover(device_pointers=True).both(on_device(gpu, np.arange(4.0)))
    assert isinstance(message, np.ndarray)


def test_event_wait_leaves_later_kernels_pending(gpu):
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


def test_staging_memory_is_reused_at_the_same_address(gpu):
    empty_pool()
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


def test_staging_block_is_kept_during_copy_to_device(gpu):
    empty_pool()
    target = on_device(gpu, np.zeros(1000))
    message, finish = Handover(device_pointers=False).incoming(target)
    message[...] = 7
    finish()
    del message, finish
    gc.collect()
    staging.lease(1000, np.dtype(float))[...] = 9  # if this were the same block, the copy would read these values
    assert (target.get() == 7).all()


def test_device_memory_is_kept_during_copy_to_host(gpu):
    """If it were freed, its stream could reuse it for a new array before the copy has read it."""
    empty_pool()
    source, target = on_device(gpu, np.zeros(1000)), staging.lease(1000, np.dtype(float))
    memory, event = weakref.ref(source), staging.begin_to_host(source, target)
    del source
    gc.collect()
    staging.lease(8, np.dtype(float))
    assert memory() is not None
    event.synchronize()
    staging.lease(8, np.dtype(float))  # the next call releases finished copies
    gc.collect()
    assert memory() is None and (target == 1).all()


def test_completed_copy_to_host_keeps_no_reference(gpu):
    source = on_device(gpu, np.zeros(1000))
    memory = weakref.ref(source)
    assert staging.to_host(source).sum() == 1000
    del source
    gc.collect()
    assert memory() is None


def test_unreferenced_events_are_reused(gpu, monkeypatch):
    monkeypatch.setattr(device, "_free_events", deque())
    made = []
    monkeypatch.setattr(cuda_double.Event, "__init__", record_calls(cuda_double.Event.__init__, made))
    source, target = on_device(gpu, np.zeros(1000)), staging.lease(1000, np.dtype(float))
    first, second = device.record(), device.record()
    assert first._event is not second._event  # both are held
    del first, second
    for step in range(5):
        source += 1
        staging.begin_to_host(source, target).synchronize()
        assert (target == step + 2).all()
        device.produced()
    assert len(made) == 2  # one before the copy and one after it


def test_stream_waits_for_the_first_record_of_a_reused_event(gpu, monkeypatch):
    monkeypatch.setattr(device, "_free_events", deque())
    copies, source, target = device.new_stream(), on_device(gpu, np.zeros(4)), staging.lease(4, np.dtype(float))
    device.record().hold_back(copies)  # the event is not referenced after this
    device.record(device.new_stream())
    device.to_host_on(copies, source, target)  # would raise if the copy did not come after the kernel
    copies.synchronize()
    assert (target == 1).all()


def record_calls(function, made):
    """Return a wrapper of ``function`` that appends the object of each call to ``made``."""

    def call(self, *args, **keywords):
        made.append(self)
        function(self, *args, **keywords)

    return call


def test_ledger_counts_leased_staging_memory(gpu):
    empty_pool()
    ledger = Ledger()
    staging.account(ledger)
    try:
        block = staging.lease(5000, np.dtype(np.uint8))
        assert ledger.current["communication"] == 8192
        del block
        gc.collect()
        assert ledger.current["communication"] == 8192  # kept for the next lease
        staging.release()
        gc.collect()
        assert ledger.current["communication"] == 0
    finally:
        staging.account(None)


def test_pageable_memory_is_used_if_pinned_memory_is_refused(gpu, monkeypatch):
    empty_pool()
    monkeypatch.setitem(cuda_double.LIMIT, "pinned", 0)
    message, finish = Handover(device_pointers=False).both(target := on_device(gpu, np.arange(3.0)), "allreduce")
    assert not cuda_double.is_pinned(message) and message.tolist() == [1.0, 2.0, 3.0]
    message *= 2
    finish()
    assert target.get().tolist() == [2.0, 4.0, 6.0]
    assert "bytes of pinned memory" in staging.refusal() and "ulimit -l" in staging.refusal()
    staging.release()
