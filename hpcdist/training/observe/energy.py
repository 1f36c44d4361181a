"""Energy and time of a run, from its first step to its validation, over all of its starts.

A record in the run directory (usage.json) also counts steps that are repeated after a kill.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays.gpu import device
from hpcdist.checkpoint.restoring.restore import on_first_rank
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import boot_id
from hpcdist.constants import USAGE_FILE
from hpcdist.energy import energy_metrics, phase_shares
from hpcdist.energy import report as reports
from hpcdist.energy.attribution import Attribution, CounterSamples
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.energy_metrics import CarbonIntensity
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.energy.node_rows import NodeRows
from hpcdist.energy.part_time_sensor import PowerSensor, sensor_of
from hpcdist.energy.sampler import SourceSamples
from hpcdist.energy.sources.discovery import claim_gpus
from hpcdist.reporting import atomic, regular
from hpcdist.reporting.jsonable import json_number
from hpcdist.telemetry.metrics.row_channel import RowChannel
from hpcdist.training.build.state_source import scalars_of
from hpcdist.training.recipe.recipe import Recipe


def carbon_intensity(config: EnergyConfig) -> CarbonIntensity:
    """Return the carbon intensity of electricity from ``config``, or the default value if ``config`` sets no value."""
    if not config.carbon_g_per_kwh:
        return CarbonIntensity()
    return CarbonIntensity(config.carbon_g_per_kwh, config.carbon_source, config.carbon_date)


def electricity_figures(config: EnergyConfig, joules: float, seconds: float) -> dict[str, Any]:
    """Return {name: value} with the electricity, cost and emissions of ``joules`` consumed in ``seconds``.

    ``config``: price and carbon intensity of electricity. NaN as ``joules`` means that the energy is unknown.
    """
    return energy_metrics.figures(
        joules,
        seconds,
        pue=config.pue,
        intensity=carbon_intensity(config),
        price_per_kwh=config.price_per_kwh,
        currency=config.currency,
    )


def energy_figures(
    report: Mapping[str, Any],
    steps: int,
    samples: float = math.nan,
    tokens: float = math.nan,
    *,
    activities: Mapping[str, Any] | None = None,
    config: EnergyConfig | None = None,
) -> dict[str, Any]:
    """Return {name: value} of the energy in ``report``, a result of `EnergyMonitor.report`. Unknown values are None.

    ``steps``, ``samples``, ``tokens``: numbers of steps, samples and tokens trained with this energy. ``activities``:
    result of `phase_shares.job_activities`. ``config``: electricity price and carbon intensity.
    """
    phases, config = report["phases"], config or EnergyConfig()
    training = phases.get("training", {"joules": math.nan})["joules"]
    none: dict[str, Any] = {name: {} for name in ("joules", "error_j", "seconds", "reason")}
    activities = activities or none | {"unknown": phase_shares.NO_SPANS}
    seconds = math.fsum(phase["seconds"] for phase in phases.values())
    return {
        "energy_j": json_number(report["energy_j"]),
        "energy_reason": report["reason"],
        "energy_label": report["label"],
        "energy_j_by_phase": {name: json_number(phase["joules"]) for name, phase in phases.items()},
        "energy_reason_by_phase": {name: phase["reason"] for name, phase in phases.items() if phase["reason"]},
        "seconds_by_phase": {name: phase["seconds"] for name, phase in phases.items()},
        "energy_j_by_activity": {name: json_number(joules) for name, joules in activities["joules"].items()},
        "energy_error_j_by_activity": {name: json_number(joules) for name, joules in activities["error_j"].items()},
        "seconds_by_activity": dict(activities["seconds"]),
        "energy_reason_by_activity": dict(activities["reason"]),
        "energy_activity_reason": activities["unknown"],
        "energy_j_by_kind": {kind: json_number(joules) for kind, joules in report["by_kind"].items()},
        "energy_parts_j_by_kind": {kind: json_number(joules) for kind, joules in report["parts"].items()},
        "energy_not_included": report["not_included"],
        "energy_sources": [
            {**source, "joules": json_number(source["joules"]), "update_s": json_number(source["update_s"])}
            for source in report["sources"]
        ],
        **energy_metrics.rates(training, steps, samples, tokens),
        **electricity_figures(config, report["energy_j"], seconds),
        "energy_sampler_share": json_number(report["sampler_share"]),
    }


def energy_attributes(figures: Mapping[str, Any]) -> dict[str, float | str]:
    """Return {attribute: value or NaN} for the HDF5 metrics file from ``figures``, a result of `energy_figures`."""
    names = ("energy_j", "j_per_step", "j_per_sample", "j_per_token", "energy_delay_product_js", "emissions_g")
    attributes = {name: math.nan if figures[name] is None else figures[name] for name in names}
    return attributes | {"energy_reason": figures["energy_reason"] or "", "energy_label": figures["energy_label"]}


class EnergyRecorder:
    """Recorder of the energy that a run has consumed since step 0, restarts included. Construction is collective."""

    # ``directory``: run directory, or None to store nothing. ``spans()`` returns this rank's time spans since its last
    # call. Without it, the energy per activity is unknown. ``host``: name of this node. ``monitor``: open monitor.
    def __init__(
        self,
        comm: Communicator,
        recipe: Recipe,
        resume_from: Path | None,
        directory: Path | None = None,
        spans: Callable[[], np.ndarray] | None = None,
        host: str | None = None,
        monitor: EnergyMonitor | None = None,
    ) -> None:
        on_gpu = recipe.run.device == "gpu"
        of_gpu: dict[str, Any] = {"bus_id": device.bus_id(), "synchronise": device.synchronise} if on_gpu else {}
        # No deadline: the communication of the training has one.
        self.monitor = monitor or EnergyMonitor(comm, recipe.energy, host=host, deadline_s=math.inf, **of_gpu)
        self._comm, self._recipe = comm, recipe
        self._spans = spans
        self.channel: RowChannel | None = None  # for spans, to the first rank of the node
        self._node: Communicator | None = None
        self._attribution: Attribution | None = None
        self._users: dict[str, tuple[int, ...]] = {}  # ranks of this host by the GPU they use
        self._since_step = 0
        self._before: dict[str, Any] | None = None  # activities of earlier starts, from `activities_state`
        self._before_j: float | None = 0.0  # training joules of earlier starts
        if resume_from is not None:
            self._restore(_checkpointed(on_first_rank(comm, lambda: scalars_of(resume_from))))
        self._path = None if directory is None else directory / USAGE_FILE
        noted = comm.broadcast_object(self._noted() if comm.rank == 0 else None)
        if noted is not None:  # the record is newer than the checkpoint
            self._restore(noted)
        if spans is not None and self.monitor.measures:
            self._attend(boot_id() if host is None else host, device.bus_id() if on_gpu else None)

    def _noted(self) -> dict[str, Any] | None:
        if self._path is None:
            return None
        path = self._path
        try:
            return phase_shares.restored(regular.json_value(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            writes, now = regular.set_aside_damaged(path, error)
            self._path = path if writes else None
            reason = getattr(error, "strerror", None) or error
            text = f"hpcdist: {path} cannot be read ({reason}): energy and time count from the checkpoint{now}"
            print(text, file=sys.stderr, flush=True)
        return None

    def _restore(self, record: Mapping[str, Any]) -> None:
        self._since_step = record["since_step"]
        self.monitor.restore(record["joules"])
        self._before, self._before_j = None, 0.0
        if record["joules"] is not None:
            self._before = record.get("activities") or {}
            self._before_j = _training_j(record["joules"])

    def _attend(self, host: str, bus_id: str | None) -> None:
        # Create a communicator of each node's ranks, and list the ranks that use each GPU. Collective.
        hosts = self._comm.allgather_object(host)
        self._node = self._comm.split(list(dict.fromkeys(hosts)).index(host), self._comm.rank, "energy of a node")
        assert self._node is not None
        self.channel = RowChannel(self._node)
        local_gpus = () if bus_id is None else claim_gpus(self._recipe.energy, bus_id, os.environ).gpus
        for rank, gpus in enumerate(self._node.allgather_object(local_gpus)):
            for gpu in gpus:
                self._users[gpu] = (*self._users.get(gpu, ()), rank)
        if self._node.rank == 0:
            self._attribution = Attribution(self._sensor)

    def _sensor(self, name: str, kind: str) -> PowerSensor:
        track = next(track for track in self.monitor.sampler.tracks if (track.name, track.kind) == (name, kind))
        if kind != "gpu":
            return PowerSensor(0.1, 0.1).paced(track.pace.update_s)
        sensor = sensor_of(track.about.model, track.about.power_field if "integrated" in track.about.note else "")
        window_s = self._recipe.energy.sensor_window_s
        paced = sensor.paced(track.pace.update_s)
        return PowerSensor(paced.update_s, window_s, "energy.sensor_window_s") if window_s else paced

    def part_time_sensor(self) -> PowerSensor | None:
        """Return this node's `PowerSensor` with the smallest duty cycle, or None if all measure continuously. Local."""
        sensors = [self._sensor(track.name, track.kind) for track in self.monitor.sampler.tracks]
        least = min(sensors, key=lambda sensor: sensor.seen_share, default=None)
        return None if least is None or least.seen_share >= 1 else least

    def collect(self) -> list[NodeRows]:
        """Return a list of new energy samples, with one `NodeRows` per node. Collective.

        Ranks that are not the first rank of their node return [].
        """
        self.attribute(wait=True)
        return self.monitor.collect()

    def attribute(self, *, wait: bool = False) -> None:
        """Send new spans to the node's first rank, which attributes the energy to them. Collective if ``wait``."""
        # Without ``wait``, the call is local, and spans in flight are attributed later.
        if self._node is None or self.channel is None or self._spans is None:
            return
        ranks = [np.empty((0, 3), np.int64) for _ in range(self._node.size)]
        ranks[self._node.rank] = local_spans = np.ascontiguousarray(self._spans(), np.int64)
        if self._node.rank and len(local_spans):
            self.channel.send(local_spans)
        if wait or not self._node.rank:
            for rank, spans in self.channel.drain() if wait else self.channel.arrived():
                ranks[rank] = np.concatenate([ranks[rank], spans])
        if self._attribution is not None:
            self._attribution.add(
                ranks,
                [_counted(source, self._users.get(source.name)) for source in self.monitor.sampler.intervals()],
            )

    def state(self) -> dict[str, Any]:
        """Return a dict for a checkpoint: the run's energy until now, in total and per activity. Collective."""
        return self._state(final=False)

    def _state(self, *, final: bool) -> dict[str, Any]:
        joules = self.monitor.state()
        return self._record(joules, self._activities(joules, final=final))

    def _record(self, joules: Any, activities: Mapping[str, Any]) -> dict[str, Any]:
        activities_state = phase_shares.activities_state(activities)
        return {"since_step": self._since_step, "joules": joules, "activities": activities_state}

    def _activities(self, joules: Mapping[str, Any], *, final: bool) -> dict[str, Any]:
        local_rows = [] if self._attribution is None else self._attribution.rows(final=final)
        models = {track.name for track in self.monitor.sampler.tracks if track.about.declared}
        for phase in [phase for row in local_rows if row["name"] in models for phase in row["activities"].values()]:
            phase["reason"] = phase_shares.MODEL_REASON
        everywhere = [row for rows in self._comm.allgather_object(local_rows) for row in rows]
        now_j = _training_j(joules)
        if now_j is None or self._before_j is None:
            reason = joules["reason"] or "the energy of training is not known"
            return phase_shares.job_activities(everywhere, list(joules["by_kind"]), math.nan, reason, self._before)
        reasons = {phase["reason"] for row in everywhere for phase in row["activities"].values()}
        reason = phase_shares.MODEL_REASON if reasons == {phase_shares.MODEL_REASON} else None
        return phase_shares.job_activities(
            everywhere, list(joules["by_kind"]), now_j - self._before_j, reason, self._before
        )

    def note(self, *, final: bool = False) -> dict[str, Any]:
        """Store the result of `state` in the run directory, and return this result. Collective.

        Only rank 0 writes the file. Rank 0 raises StorageError if writing fails. ``final``: no sample or span follows.
        """
        state = self._state(final=final)
        self._write(state)
        return state

    def _write(self, state: Mapping[str, Any]) -> None:
        if self._path is not None and not self._comm.rank:
            atomic.save(self._path, json.dumps(state))

    def figures(self, steps: int, tokens_per_sample: float | None = None) -> dict[str, Any]:
        """Return `energy_figures` of the run after ``steps`` steps. Rank 0 stores the energy on disk. Collective."""
        # Only rank 0 raises StorageError. "j_per_step" excludes checkpoints and validation. A repeated step costs
        # energy, but counts once. ``tokens_per_sample`` is None if samples are not made of tokens.
        report = self.monitor.report()
        phases = {name: {"joules": json_number(phase["joules"])} for name, phase in report["phases"].items()}
        activities = self._activities({**report, "phases": phases}, final=True)
        self._write(self._record(reports.state(report), activities))
        batches = self._recipe.run.batches
        samples = batches.samples_before(steps) - batches.samples_before(self._since_step)
        tokens = math.nan if tokens_per_sample is None else samples * tokens_per_sample
        return energy_figures(
            report, steps - self._since_step, samples, tokens, activities=activities, config=self._recipe.energy
        )

    def close(self) -> None:
        """Free the communicators. Do not call `collect` afterwards. Collective."""
        if self._node is not None and self.channel is not None:
            self.channel.free()
            self._node.free()
            self._node = self.channel = None
        self.monitor.close()


def _training_j(joules: Mapping[str, Any]) -> float | None:
    training_j: float | None = joules["phases"].get("training", {"joules": 0.0})["joules"]
    return training_j


def _counted(source: SourceSamples, ranks: tuple[int, ...] | None) -> CounterSamples:
    used = np.diff(source.energy_mj, prepend=source.energy_mj[:1])
    used[1:][~source.known] = 0
    return CounterSamples(source.name, source.kind, source.times_ns, source.energy_mj[:1] + np.cumsum(used), ranks)


def _checkpointed(scalars: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return phase_shares.restored(scalars.get("energy"))
    except ValueError:
        return {"since_step": scalars["steps"], "joules": None}
