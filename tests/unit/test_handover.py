"""Device buffers at the hand-over: synchronised, staged through the host, or passed on; never copied by accident."""

import numpy as np
import pytest

from hpcdist.arrays import device
from hpcdist.comm.handover import Handover


class DeviceArray:
    """Memory that the host cannot touch except by an explicit transfer, which is counted."""

    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    def __init__(self, data: np.ndarray, log: list[str]) -> None:
        self.data_, self.log = data, log
        self.dtype, self.shape, self.size, self.ndim = data.dtype, data.shape, data.size, data.ndim
        self.nbytes, self.itemsize, self.flags = data.nbytes, data.itemsize, data.flags

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("implicit copy from the device")

    def set(self, values: np.ndarray) -> None:
        self.log.append("to device")
        self.data_[...] = values

    def view(self, dtype: np.dtype) -> "DeviceArray":
        return DeviceArray(self.data_.view(dtype), self.log)


class Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("synchronise")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order, on a double of cupy."""
    events: list[str] = []

    class Cupy:
        class cuda:  # noqa: N801
            @staticmethod
            def get_current_stream() -> Stream:
                return Stream(events)

        @staticmethod
        def asnumpy(array: DeviceArray) -> np.ndarray:
            events.append("to host")
            return array.data_.copy()

    monkeypatch.setattr(device, "cupy", lambda: Cupy)
    return events


def test_staged_sending_synchronises_then_copies_once(log: list[str]) -> None:
    message = Handover(device_pointers=False).outgoing(DeviceArray(np.arange(4.0), log))
    assert isinstance(message, np.ndarray) and message.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert log == ["synchronise", "to host"]


def test_staged_receiving_copies_back_when_the_message_is_there(log: list[str]) -> None:
    target = DeviceArray(np.zeros(3, np.float16), log)
    message, finish = Handover(device_pointers=False).incoming(target)
    message.view(np.float16)[...] = [1, 2, 3]
    assert finish is not None and log == ["synchronise"]
    finish()
    assert target.data_.tolist() == [1, 2, 3] and log == ["synchronise", "to device"]


def test_a_reduction_brings_the_data_and_takes_the_result(log: list[str]) -> None:
    target = DeviceArray(np.arange(3.0), log)
    message, finish = Handover(device_pointers=False).both(target)
    message += 1
    assert finish is not None
    finish()
    assert target.data_.tolist() == [1.0, 2.0, 3.0] and log == ["synchronise", "to host", "to device"]


def test_device_pointers_are_passed_on_after_synchronising(log: list[str]) -> None:
    array = DeviceArray(np.arange(4.0), log)
    handover = Handover(device_pointers=True)
    assert handover.outgoing(array) is array
    assert handover.incoming(array) == (array, None)
    assert log == ["synchronise", "synchronise"]


def test_host_buffers_are_not_copied() -> None:
    array = np.arange(4.0)
    handover = Handover(device_pointers=False)
    assert handover.outgoing(array) is array
    assert handover.incoming(array) == (array, None)
    half = np.zeros(4, np.float16)
    assert np.shares_memory(handover.outgoing(half), half) and handover.outgoing(half).dtype == np.uint16
