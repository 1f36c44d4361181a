"""Event log of a run on rank 0: derives the figures of each step, detects anomalies, and passes both to the sinks.

The console prints at most one line per kind of anomaly in `ANOMALY_QUIET_NS`. Unknown figures are left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.telemetry.anomalies import DATA_SECONDS, KINDS, Anomalies, Anomaly
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import EventStream, RunInfo, StreamSink
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import DerivedFigures, StepRow

MOST_RANKS_IN_EVENT: Final = 512  # with more ranks, step events have no figures of single ranks
ANOMALY_QUIET_NS: Final = 60 * 10**9
_OTHER: Final = quantities.key("phase_seconds", "other")
# Columns of a metrics row, with their names in sinks.
_OF_RANKS: Final = {
    "step_s": "step_seconds",
    "compute_s": "compute_seconds",
    "communication_s": "communication_seconds",
    "update_s": "update_seconds",
}


def logged_number(name: str, value: Any) -> float:
    """Return ``value``, which a script logs as ``name``, as a float. Raises UsageError if it is not one number."""
    try:
        return float(value.item() if hasattr(value, "item") else value)  # arrays and tensors have ``item``
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"log: {name} is a {type(value).__name__}, not a number; pass a number or a tensor with one element"
        ) from None


def build_sinks(run: RunInfo, config: TelemetryConfig, say: Callable[[str], None]) -> list[StreamSink]:
    """Return a list of the event sinks, such as files, that ``config`` selects. Called only on rank 0.

    ``run``: description of the run. ``say``: function that prints a message.
    """
    sinks: list[StreamSink] = []
    try:
        if config.jsonl:
            from hpcdist.telemetry.jsonl import FILE, JsonLines

            sinks.append(JsonLines(run, config))
            say(f"events: {run.directory / FILE}")
        if config.tensorboard:
            from hpcdist.telemetry import tensorboard

            sinks.append(tensorboard.TensorBoard(run, config))
            say(f"TensorBoard: {run.directory / tensorboard.DIRECTORY}")
        if config.prometheus != "off":
            from hpcdist.telemetry.prometheus import PrometheusSink

            prometheus = PrometheusSink(run, config)
            sinks.append(prometheus)
            say(f"Prometheus: {prometheus.where}")
    except BaseException:  # an error closes all sinks
        for sink in sinks:
            sink.close(False)
        raise
    return sinks


class StepEvents:
    """Event log of a run, from one start to its end. Rank 0 only. ``say(text)`` prints a line."""

    # ``unit``: unit that ``tokens`` counts, such as "samples". ``done`` and ``tokens``: number of steps and of tokens
    # before this start. ``first``: further values of the first event.
    def __init__(
        self,
        run: RunInfo,
        config: TelemetryConfig,
        say: Callable[[str], None],
        *,
        unit: str,
        lock_step: bool = True,
        done: int = 0,
        tokens: int = 0,
        first: Mapping[str, float] | None = None,
    ) -> None:
        self._say = say
        self._stream = EventStream(build_sinks(run, config, say), say)
        self._derived = DerivedFigures(lock_step=lock_step)
        self._anomalies = Anomalies(loss_spike=config.loss_spike, throughput_drop=config.throughput_drop, unit=unit)
        self._lines: dict[str, tuple[int, int]] = {}  # by anomaly kind: time of the last line, suppressed lines
        self._skipped: set[int] = set()  # skipped steps whose rows are pending
        self._held_up: set[int] = set()  # pending steps that include a checkpoint or a validation
        self._events: list[RunEvent] = []
        self._rows: list[StepRow] = []
        self._tokens, self._sent_bytes, self._step = tokens, 0.0, done
        initial: dict[str, float | str] = {"world_ranks": run.world, "nodes": run.nodes, "strategy": run.strategy}
        # Counts start at 0, so that dashboards show them from the start.
        initial |= {quantities.key("anomalies_total", kind): 0 for kind in KINDS}
        initial |= {"checkpoints_total": 0, **(first or {}), "start_timestamp_seconds": run.started_ns / 1e9}
        self.add("begin", done, initial)

    def add(self, kind: str, step: int, values: Mapping[str, float | int | str], **more: Any) -> None:
        """Add an event, without its NaN and infinite values. ``**more``: other fields of `RunEvent`."""
        valid = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
        self._events.append(RunEvent(kind, step, valid, **more))

    def log(self, step: int, rows: Sequence[tuple[float, Mapping[str, float]]]) -> None:
        """Add the values that a script logged for ``step``: the mean over the rows that have a value, by name.

        ``rows``: pairs (weight, {name: value}). Weights that sum to 0 are not used.
        """
        figures = {}
        for name in dict.fromkeys(name for _, values in rows for name in values):
            weights, values = zip(*((weight, row[name]) for weight, row in rows if name in row), strict=True)
            figures[quantities.key("logged_value", name)] = fmean(values, weights if sum(weights) > 0 else None)
        if figures:
            self.add("logged", step, figures)

    def row(self, row: StepRow) -> None:
        """Add the measurements of a step. `publish` derives its figures. Rows must be added in order."""
        self._rows.append(row)

    def skip(self, step: int) -> None:
        """Mark ``step``, whose row follows, as skipped: it made no update."""
        self._skipped.add(step)

    def hold_up(self, step: int) -> None:
        """Mark ``step``, whose row follows, as delayed by a checkpoint or validation: its speed does not count."""
        self._held_up.add(step)

    def publish(self, data_s: float = math.nan) -> list[RunEvent]:
        """Pass the new events to the sinks, and return them. ``data_s``: seconds of a step that waited for data."""
        rows, self._rows = self._rows, []
        for row, figures in zip(rows, self._derived.of(rows), strict=True):
            self._derive(row, figures, data_s)
        events, self._events = self._events, []
        events.sort(key=lambda event: event.time_ns)
        self._stream.publish(events)
        return events

    def _derive(self, row: StepRow, figures: dict[str, float], data_s: float) -> None:
        # A row of a script may stand for several steps, with their mean values.
        steps, self._step = max(1, row.step - self._step), row.step
        self._tokens += int(row.tokens) * steps
        figures |= {"steps_total": row.step, "tokens_total": self._tokens}
        if not math.isnan(data_s) and (other := figures.get(_OTHER)) is not None:
            figures |= {DATA_SECONDS: min(data_s, other), _OTHER: max(0.0, other - data_s)}
        figures["last_step_timestamp_seconds"] = row.time_ns / 1e9
        sent = row.ranks.get("sent_bytes")
        if sent is not None and np.isfinite(sent).all():
            self._sent_bytes += float(sent.sum()) * steps
            figures["sent_bytes_total"] = self._sent_bytes
        few = row.ranks if len(next(iter(row.ranks.values()), ())) <= MOST_RANKS_IN_EVENT else {}
        ranks = {_OF_RANKS[name]: values for name, values in few.items() if name in _OF_RANKS}
        self.add("step", row.step, figures, ranks=ranks, time_ns=row.time_ns)
        special = {"skipped": row.step in self._skipped, "held_up": row.step in self._held_up}
        self._skipped.discard(row.step)
        self._held_up.discard(row.step)
        for anomaly in self._anomalies.of(row.step, row.tokens, figures, **special):
            self._print_anomaly(anomaly, row.time_ns)
            count = self._anomalies.counts[anomaly.kind]
            values: dict[str, float | str] = {quantities.key("anomalies_total", anomaly.kind): count}
            self.add("anomaly", row.step, values | {"text": anomaly.text}, time_ns=row.time_ns)

    def _print_anomaly(self, anomaly: Anomaly, time_ns: int) -> None:
        last_ns, silent = self._lines.get(anomaly.kind, (0, 0))
        if last_ns and time_ns - last_ns < ANOMALY_QUIET_NS:
            self._lines[anomaly.kind] = last_ns, silent + 1
            return
        self._say(anomaly.text + (f" ({silent} more like it before, see `hpcdist report`)" if silent else ""))
        self._lines[anomaly.kind] = time_ns, 0

    def close(self, *, normal: bool) -> None:
        """Publish the remaining events, and close the sinks. ``normal``: True after a run without error."""
        self.publish()
        self._stream.close(normal)
