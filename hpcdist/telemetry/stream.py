"""The stream of events of a run, and the sinks that it goes to. One rank has them: rank 0.

Every sink sees the same events in the same order. One that fails is told of once and tried again with what comes next:
a full disk or a gateway that is away must not cost a training.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np

KINDS: Final = (
    "begin", "step", "evaluation", "checkpoint", "skipped", "anomaly", "energy", "utilisation", "memory",
    "collectives", "end",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that became known after ``step`` steps, at ``time_ns`` of the wall clock.

    ``values`` has figures under the keys of `catalogue` (a counter's value is its total so far) and, under any other
    key, texts. ``ranks`` has figures of each rank, (world,), NaN where one is not known. What is not known is left out.
    """

    kind: str
    step: int
    values: Mapping[str, float | int | str] = field(default_factory=dict)
    ranks: Mapping[str, np.ndarray] = field(default_factory=dict)
    time_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True)
class Run:
    """What sinks know of the run. ``resumed_step`` is None in its first start; ``owner`` is that of `jobs.owner`."""

    name: str
    directory: Path
    jobid: str
    world: int
    nodes: int
    strategy: str
    resumed_step: int | None = None
    started_ns: int = field(default_factory=time.time_ns)
    owner: Mapping[str, str] = field(default_factory=dict)


class Sink(Protocol):
    """Takes events somewhere. Its constructor raises, with the cure, what keeps it from beginning."""

    name: str

    def write(self, events: Sequence[Event]) -> None:
        """Take ``events``. Any exception means that they may be lost."""
        ...

    def close(self, normal: bool) -> None:
        """End; ``normal``: the run came to its end, and was not stopped."""
        ...


class Stream:
    """Hands events to ``sinks``. ``warn`` tells a person, once for each sink that fails until it works again."""

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], None]) -> None:
        self.sinks = tuple(sinks)
        self._warn = warn
        self._failing: set[str] = set()

    def publish(self, events: Sequence[Event]) -> None:
        """Give ``events`` to every sink; never raises what a sink raises."""
        if not events:
            return
        for sink in self.sinks:
            self._try(sink, lambda sink=sink: sink.write(events))  # type: ignore[misc]

    def close(self, normal: bool) -> None:
        """End all sinks."""
        for sink in self.sinks:
            self._try(sink, lambda sink=sink: sink.close(normal))  # type: ignore[misc]

    def _try(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a sink raises, the run goes on
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self._warn(f"{sink.name}: {error}; the run goes on, and it is tried again with what comes next")
            return
        if sink.name in self._failing:
            self._failing.discard(sink.name)
            self._warn(f"{sink.name}: works again")
