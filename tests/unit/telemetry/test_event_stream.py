"""The event stream: every sink gets every event, no sink can end a run, and names follow one convention."""

import re

import pytest

from hpcdist.telemetry.event_stream import EventStream
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES


class Keeping:
    def __init__(self, name, fails=()):
        self.name, self.fails, self.calls, self.seen, self.closed = name, fails, 0, [], None

    def write(self, events):
        self.calls += 1
        if self.calls in self.fails:
            raise OSError("no space left")
        self.seen += events

    def close(self, normal):
        self.closed = normal


def test_failing_sink_is_reported_once_until_it_recovers():
    lines = []
    good, bad = Keeping("good"), Keeping("bad", fails=(2, 3))
    stream = EventStream([bad, good], lines.append)
    events = [RunEvent("step", step, {"training_loss_nats": 1.0 / step}) for step in (1, 2, 3, 4)]
    for event in events:
        stream.publish([event])
    stream.publish([])
    stream.close(normal=True)
    assert good.seen == events and bad.seen == [events[0], events[3]]
    assert good.calls == 4 and good.closed and bad.closed
    assert len(lines) == 2 and "no space left" in lines[0] and "works again" in lines[1]


def test_unknown_event_kind_raises_assertion_error():
    with pytest.raises(AssertionError):
        RunEvent("stop", 1)


def test_names_contain_their_units():
    ends = {"s": "seconds", "By": "bytes", "J": "joules", "W": "watts", "By/s": "bytes_per_second", "g": "grams"}
    for quantity in QUANTITIES.values():
        assert re.fullmatch(r"[a-z][a-z_]*", quantity.name) and quantity.meaning and quantity.tag
        base = quantity.name.removesuffix("_total")
        assert quantity.name.endswith("_total") == (quantity.kind == COUNTER)
        assert quantity.unit not in ends or base.endswith(ends[quantity.unit]), quantity
    assert len({quantity.tag for quantity in QUANTITIES.values()}) == len(QUANTITIES)


def test_keys_are_split_into_name_and_label():
    assert quantities.split(quantities.key("memory_bytes", "activations")) == ("memory_bytes", "activations")
    assert quantities.split(quantities.key("learning_rate")) == ("learning_rate", None)
    for name, label in (("memory_bytes", ""), ("learning_rate", "x")):
        with pytest.raises(AssertionError):
            quantities.key(name, label)
