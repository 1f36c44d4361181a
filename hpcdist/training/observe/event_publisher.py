"""Event publisher: live figures of a run from every rank to the sinks of rank 0.

The console prints at most one line per kind of anomaly in `ANOMALY_QUIET_NS`. Unknown figures are left out.
"""

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.start import Session
from hpcdist.energy import energy_metrics
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.energy_metrics import CarbonIntensity
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.event_stream import run_info
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import StepRow
from hpcdist.telemetry.step_events import StepEvents
from hpcdist.training.build.trainer import Trainer


def energy_events(
    monitor: EnergyMonitor, config: EnergyConfig, state: Mapping[str, Any], tokens: float
) -> dict[str, dict[str, float]]:
    """Return {event kind: {name: value}} with the values of the events "energy" and "utilisation". Local.

    ``state``: result of `EnergyRecorder.state`. ``tokens``: number of tokens trained with the energy in ``state``.
    """
    joules = state["joules"] or {}
    by_kind = {kind: value for kind, value in joules.get("by_kind", {}).items() if value is not None}
    training = joules.get("phases", {}).get("training", {}).get("joules")
    energy = {quantities.key("energy_joules_total", kind): value for kind, value in by_kind.items()}
    energy |= {quantities.key("power_watts", kind): watts for kind, watts in monitor.live.power().items()}
    if training is not None and (per_token := energy_metrics.joules_per_item(training, tokens)) is not None:
        energy["energy_per_token_joules"] = per_token
    if by_kind and joules["reason"] is None and config.carbon_g_per_kwh:
        emitted = energy_metrics.emissions(sum(by_kind.values()), config.pue, CarbonIntensity(config.carbon_g_per_kwh))
        energy["emissions_grams_total"] = emitted.grams
    busy = {quantities.key("utilisation_ratio", name): share for name, share in monitor.live.utilisation().items()}
    busy |= {quantities.key("network_bytes_total", way): count for way, count in monitor.live.network().items()}
    return {
        kind: {name: value for name, value in figures.items() if math.isfinite(value)}
        for kind, figures in (("energy", energy), ("utilisation", busy))
    }


MOST_WAITING_STEPS: Final = 1 << 16  # steps of this rank that may wait for rows of slower workers


class EventPublisher:
    """Publisher of a run's log events to the sinks on rank 0. Construction and `gather` are collective."""

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        timing: OperationTiming,
        directory: Path,
        say: Callable[[str], None],
        resumed: int | None,
    ) -> None:
        self._comm, self._trainer, self._timing = session.comm, trainer, timing
        self._steps: dict[int, tuple[int, float]] = {}  # end time and gradient norm of steps whose rows are pending
        self._overlapped: defaultdict[str, float] = defaultdict(float)  # since the last gather, on this rank
        self._fetched: Counter[str] = Counter()
        self._waited_s, self._made = 0.0, 0  # wait for data and number of steps since the last gather, on this rank
        self._data_s = math.nan  # mean wait for data per step over the ranks
        self._all_waited_s, self._all_made = 0.0, 0  # wait and steps since the start, without its first step
        self._before: dict[str, tuple[float, float]] = {}  # seconds and bytes by operation, at the last gather
        self._checkpoints = 0
        self._scale = 1.0  # last published loss scale
        self._done = trainer.first_step
        self._saved_bytes = sum(session.comm.allgather_object(trainer.state_bytes()))
        self._events: StepEvents | None = None
        if session.comm.rank == 0:
            recipe = trainer.recipe
            strategy = recipe.parallel.strategy
            run = run_info(directory, session.comm.size, session.place.nodes, strategy, resumed, session.is_part)
            self._events = StepEvents(
                run,
                recipe.telemetry,
                say,
                unit=trainer.speed_unit,
                lock_step=trainer.exchange.traits.lock_step,
                done=self._done,
                tokens=round(recipe.run.batches.samples_before(self._done) * trainer.model.tokens_per_sample),
                first={"skipped_steps_total": trainer.executor.loss_scale.skipped},
            )

    def _add(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        if self._events is not None:
            self._events.add(kind, step, values)

    def stepped(self, step: int, result: StepResult, waited_s: float) -> None:
        """Record that this rank completed ``step`` with ``result``. The rank waited ``waited_s`` seconds for data."""
        self._done = step
        self._waited_s += waited_s
        self._made += 1
        if step > self._trainer.first_step + 1:
            self._all_waited_s += waited_s
            self._all_made += 1
        if self._events is not None:
            self._steps[step] = time.time_ns(), result.gradient_norm
            if len(self._steps) > MOST_WAITING_STEPS:
                del self._steps[next(iter(self._steps))]
            figures = {"loss_scale": result.loss_scale} if result.loss_scale != self._scale else {}
            self._scale = result.loss_scale
            if result.skipped:
                self._events.skip(step)
                figures["skipped_steps_total"] = self._trainer.executor.loss_scale.skipped
            if figures:
                self._add("skipped", step, figures)

    def overlapped(self, exposed_s: float, total_s: float, hits: int, misses: int) -> None:
        """Record that a step's collectives took ``total_s`` seconds and delayed computation by ``exposed_s`` seconds.

        ``hits``: number of layers that were prefetched in time. ``misses``: number of layers that arrived too late.
        """
        self._overlapped["exposed_s"] += exposed_s
        self._overlapped["overlapped_s"] += total_s
        self._fetched.update(hits=hits, misses=misses)

    def row(self, step: int, loss: float, learning_rate: float, tokens: int, ranks: Mapping[str, np.ndarray]) -> None:
        """Queue the metrics of ``step`` for `publish`. ``ranks``: {metric: one value per rank}. Call this on rank 0."""
        time_ns, norm = self._steps.pop(step, (time.time_ns(), math.nan))
        assert self._events is not None
        self._events.row(StepRow(step, time_ns, loss, learning_rate, tokens, norm, ranks))

    def saved(self, step: int, held_s: float) -> None:
        """Record that the checkpoint after ``step`` is complete. The save delayed training by ``held_s`` seconds."""
        self._checkpoints += 1
        if self._events is not None:
            self._events.hold_up(step + 1)
        figures = {"checkpoint_seconds": held_s, "checkpoint_bytes": self._saved_bytes}
        self._add("checkpoint", step, figures | {"checkpoints_total": self._checkpoints})

    def evaluated(self, step: int, loss: float) -> None:
        """Record the validation loss ``loss`` after ``step``. NaN means that the loss is unknown."""
        if self._events is not None:
            self._events.hold_up(step + 1)
        if not math.isnan(loss):
            self._add("evaluation", step, {"validation_loss_nats": loss})

    def logged(self, rows: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
        """Queue the values that a script logged on all ranks: (step, weight, {name: value}). Call this on rank 0."""
        by_step: defaultdict[int, list[tuple[float, Mapping[str, float]]]] = defaultdict(list)
        for step, weight, values in rows:
            by_step[step].append((weight, values))
        assert self._events is not None
        for step in sorted(by_step):
            self._events.log(step, by_step[step])

    def gather(self, monitor: EnergyMonitor, energy: Mapping[str, Any]) -> None:
        """Gather communication times, bytes and memory use of all ranks, and queue events on rank 0. Collective.

        ``monitor``: monitor that measures energy and utilisation. ``energy``: result of `EnergyRecorder.state`.
        """
        ledger = self._trainer.ledger
        counted = dict(self._timing.totals()), dict(self._overlapped), self._fetched.copy()
        waited = self._waited_s, self._made, self._all_waited_s, self._all_made
        ranks = self._comm.allgather_object((*counted, ledger.current, ledger.peak, *waited))
        self._overlapped.clear()
        self._waited_s, self._made = 0.0, 0
        if self._events is None:
            return
        operations, overlapped, fetched, current, peak, *waits = zip(*ranks, strict=True)
        self._data_s, since_start_s = _mean_wait(*waits[:2]), _mean_wait(*waits[2:])
        self._memory(current, peak)
        self._collectives(operations, overlapped, fetched, since_start_s)
        batches = self._trainer.recipe.run.batches
        samples = batches.samples_before(self._done) - batches.samples_before(energy["since_step"])
        tokens = samples * self._trainer.model.tokens_per_sample
        for kind, figures in energy_events(monitor, self._trainer.recipe.energy, energy, tokens).items():
            if figures:
                self._add(kind, self._done, figures)

    def _memory(self, current: Sequence[Mapping[str, int]], peak: Sequence[Mapping[str, int]]) -> None:
        figures = {
            quantities.key(name, category): max(rank[category] for rank in ranks)
            for name, ranks in (("memory_bytes", current), ("memory_peak_bytes", peak))
            for category in ranks[0]
        }
        self._add("memory", self._done, figures)

    def _collectives(
        self,
        operations: Sequence[Mapping[str, tuple[int, float, float]]],
        overlapped: Sequence[Mapping[str, float]],
        fetched: Sequence[Mapping[str, int]],
        data_s: float,
    ) -> None:
        figures = {"data_seconds": data_s}
        for name in sorted({name for rank in operations for name in rank}):
            made = [rank[name] for rank in operations if name in rank]
            seconds = sum(seconds for _, seconds, _ in made)
            nbytes = sum(nbytes for *_, nbytes in made)
            figures[quantities.key("collective_seconds_total", name)] = seconds / len(made)
            if math.isnan(nbytes) or not nbytes:
                continue
            figures[quantities.key("collective_bytes_total", name)] = nbytes
            before_s, before = self._before.get(name, (0.0, 0.0))
            if seconds > before_s:
                rate = (nbytes - before) / (seconds - before_s)
                figures[quantities.key("collective_bytes_per_second", name)] = rate
            self._before[name] = seconds, nbytes
        totals = Counter[str]()
        for rank in fetched:
            totals.update(rank)
        if totals.total():
            figures |= {"prefetch_hits_total": totals["hits"], "prefetch_misses_total": totals["misses"]}
        exposed = sum(rank.get("exposed_s", 0.0) for rank in overlapped)
        total = sum(rank.get("overlapped_s", 0.0) for rank in overlapped)
        if total > 0:  # False for NaN: without a thread the time is unknown
            figures["hidden_communication_ratio"] = max(0.0, 1 - exposed / total)
        self._add("collectives", self._done, figures)

    def publish(self) -> list[RunEvent]:
        """Write the queued events to the sinks, and return a list of these events. Ranks other than 0 return []."""
        if self._events is None:
            return []
        data_s, self._data_s = self._data_s, math.nan
        return self._events.publish(data_s)

    def end(self) -> None:
        self._add("end", self._done, {})

    def close(self, *, normal: bool) -> None:
        """Publish the queued events, and close the sinks. ``normal``: True after a run without error."""
        self.publish()
        if self._events is not None:
            self._events.close(normal=normal)
            self._events = None


def _mean_wait(waited_s: Sequence[float], steps: Sequence[int]) -> float:
    waits = [seconds / made for seconds, made in zip(waited_s, steps, strict=True) if made]
    return statistics.mean(waits) if waits else math.nan
