"""The last figures of a run as metrics for Prometheus: names and meanings from the catalogue; no counter ever falls."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry import catalogue
from hpcdist.telemetry.catalogue import COUNTER, QUANTITIES
from hpcdist.telemetry.stream import Event, Run

# Totals that a run which goes on has from its checkpoint; all others begin at zero with each start.
RESTORED: Final = frozenset(
    ("steps_total", "tokens_total", "skipped_steps_total", "energy_joules_total", "emissions_grams_total")
)
INFO: Final = catalogue.PREFIX + "job_info"


class Totals:
    """What counters showed last, kept in ``path`` for the next start of the run.

    A run that is killed and goes on from a checkpoint makes steps again. Prometheus would take a counter that falls for
    one that began anew at zero, and count all of it a second time. It does where ``path`` is gone or damaged, which is
    no reason not to train.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: dict[str, float] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError, OverflowError):
            self._before = {key: float(value) for key, value in regular.json_value(path).items()}
        self.shown = dict(self._before)

    def show(self, key: str, value: float) -> float:
        """Return what the counter ``key`` shows, of which this start knows the total ``value``."""
        if catalogue.split(key)[0] not in RESTORED:
            value += self._before.get(key, 0.0)
        self.shown[key] = max(value, self.shown.get(key, 0.0))
        return self.shown[key]

    def keep(self) -> None:
        """Write the totals. Raises StorageError."""
        write_whole(self._path, json.dumps(self.shown).encode(), "free space, or set telemetry.prometheus = 'off'")


class Figures:
    """The last value of every figure: a collector of prometheus_client, which may read from another thread.

    Every metric has the labels ``jobid`` (the name of the run, outside of a job) and ``run``, and at most one more:
    there are as many series as figures, however many ranks and steps there are. Whose job it is stands in the labels of
    one metric alone, INFO, whose value is 1: all others are joined with it.
    """

    def __init__(self, run: Run, totals: Totals) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._counter: Any = CounterMetricFamily
        self._gauge: Any = GaugeMetricFamily
        self._labels = {"jobid": identity(run), "run": run.name}
        self._owner = run.owner
        self._totals = totals
        self._values: Mapping[str, float] = dict(totals.shown)

    def update(self, events: Sequence[Event]) -> None:
        """Take the figures of ``events``; a gauge that is not known any more (NaN) is not shown any more."""
        values = dict(self._values)
        for event in events:
            for key, value in event.values.items():
                quantity = QUANTITIES.get(catalogue.split(key)[0])
                if quantity is None or isinstance(value, str):
                    continue
                if not math.isnan(value):
                    values[key] = self._totals.show(key, value) if quantity.kind == COUNTER else float(value)
                elif quantity.kind != COUNTER:
                    values.pop(key, None)
        self._values = values  # at once: a reader has the old ones or the new ones

    def collect(self) -> Iterator[Any]:
        """Yield the owner of the job, and the metrics in the order of the catalogue."""
        if self._owner:
            about = self._gauge(INFO, "Whose job this is, in its labels (1)", labels=[*self._labels, *self._owner])
            about.add_metric([*self._labels.values(), *self._owner.values()], 1.0)
            yield about
        by_name: dict[str, list[tuple[str | None, float]]] = {}
        for key, value in self._values.items():
            name, label = catalogue.split(key)
            by_name.setdefault(name, []).append((label, value))
        for name, quantity in QUANTITIES.items():
            if name not in by_name:
                continue
            labels = [*self._labels, *([quantity.label] if quantity.label else [])]
            family = self._counter if quantity.kind == COUNTER else self._gauge
            metric = family(quantity.prometheus, f"{quantity.meaning} ({quantity.unit})", labels=labels)
            for label, value in by_name[name]:
                metric.add_metric([*self._labels.values(), *([label] if label is not None else [])], value)
            yield metric

    def describe(self) -> Iterable[Any]:
        """Return no names: which figures there will be is not known yet."""
        return ()


def identity(run: Run) -> str:
    """Return the number of the job, or the name of the run where there is none."""
    return run.jobid or run.name


def write_whole(path: Path, content: bytes, cure: str) -> None:
    """Put ``content`` into ``path`` so that a reader, whoever it is, sees all of it or what was there before.

    Raises StorageError, which ends with ``cure``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as file:
            os.fchmod(file.fileno(), 0o644)  # an exporter runs as another user
            file.write(content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}; {cure}") from error
