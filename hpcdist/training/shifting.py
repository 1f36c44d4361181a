"""Steps that begin a little later now and then, so that sensors which look part of the time see all of them.

A sensor that looks 25 ms of every 100 ms sees the same part of each step where steps take a multiple of 100 ms, and its
counter is then wrong by as much as that part is unlike the others. Yang, Adamek and Armour (arXiv 2312.02741) shift the
repetitions of a measurement; in a training, whose ranks step together, it is enough that one of them waits.
"""

import time
from collections.abc import Callable
from typing import Final

from hpcdist.comm.record.spans import SpanSink, now_ns
from hpcdist.energy.accounts.part_time_sensor import PowerSensor, SensorShift

STEPS: Final = 64  # in so many, all positions are seen equally often; they wait for less than one update together
NAME: Final = "shift"  # of the spans


class Shifting:
    """Waits before steps of this rank, of which others know nothing but that it comes later (local).

    ``sensor`` returns the sensor in question, None while there is none that looks part of the time.
    """

    def __init__(self, sensor: Callable[[], PowerSensor | None], spans: SpanSink) -> None:
        self._sensor, self._spans = sensor, spans
        self._shift: SensorShift | None = None
        self._left = 0

    def wait(self, step: int) -> None:
        """Wait until ``step`` should begin."""
        if not self._left:
            sensor = self._sensor()  # its pace may be known better by now
            self._shift = None if sensor is None else SensorShift(sensor, STEPS)
            self._left = STEPS
        self._left -= 1
        if self._shift is None:
            return
        begun = now_ns()
        pause_s = self._shift.pause_s(begun)
        if pause_s > 0:
            time.sleep(pause_s)
            self._spans.add("other", NAME, step, begun, now_ns())
