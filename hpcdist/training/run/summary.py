"""Summary of a run, as figures and as text."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.timing import BytesMoved
from hpcdist.errors import HpcdistError
from hpcdist.models.config import FOREIGN
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import json_number
from hpcdist.reporting.units import counted
from hpcdist.strategies.core.grid import ORDER
from hpcdist.telemetry.metrics import run_figures
from hpcdist.telemetry.page import run_data
from hpcdist.telemetry.page.run_data import ExternalData
from hpcdist.telemetry.provenance import pss_bytes
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe import figures, step_meters
from hpcdist.training.observe.energy import electricity_figures
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run.loop import RunOutcome

NO_STEP_MADE: Final = "no step was made in this start"
NOT_VISIBLE: Final = "the MPI library's own collectives were used, and their traffic is not visible"
NOT_COUNTED: Final = (
    "the comparison before each collective uses the MPI library's own collectives, and their traffic is not visible; "
    "set communication.checked to false to count"
)
NOT_HIDDEN: Final = "with polling, a rank does not see when data moves: set communication.overlap to thread"
OVERLAP_FIGURES: Final = ("reductions_s", "reductions_exposed_s", "communication_hidden_share")
LOADED_FIGURE: Final = "bytes_loaded_per_step"
PREFETCH_FIGURES: Final = ("prefetch_hits", "prefetch_misses", "prefetch_exposed_s")
Rank: TypeAlias = Mapping[str, Any]  # figures of one rank by name; figures of steps from `StepStatistics.measured`


@dataclass(frozen=True)
class StepThroughput:
    """Speed of the steps since the last start of the run. Unknown values are NaN."""

    tokens_per_s: float = math.nan
    step_s: float = math.nan  # the median
    mean_step_s: float = math.nan
    training_s: float = 0.0
    sent_bytes: float = math.nan


def lock_step_throughput(
    ranks: Sequence[Rank], workers: Sequence[Rank], targets: float, *, alike: bool = True
) -> StepThroughput:
    """Return the `StepThroughput` of a run in which all ranks make each step together. Local.

    ``ranks``: one dict of measurements per rank. ``workers``: the dicts of the ranks that compute. ``targets``:
    mean number of loss terms per step.
    """
    # A step takes the time of the slowest worker. The sent bytes of a step are from the rank that sends most; the
    # result is the median or, if ``alike`` is False, the mean over the steps.
    if not workers[0]["count"]:
        return StepThroughput()
    slowest = [max(step_s for step_s, *_ in step) for step in zip(*map(_steady, workers), strict=True)]
    sent = [_most([nbytes for _, nbytes, _ in step]) for step in zip(*map(_steady, ranks), strict=True)]
    count, steady_s = max(1, workers[0]["count"] - 1), sum(slowest)
    if count > len(slowest):
        longest = max(workers, key=lambda rank: rank["sums"]["step_s"])
        steady_s *= longest["sums"]["step_s"] / sum(step_s for step_s, *_ in longest["sample"])
    first_s = max(rank["first"]["step_s"] for rank in workers) if workers[0]["count"] > 1 else 0.0
    return StepThroughput(
        tokens_per_s=targets * count / steady_s,
        step_s=statistics.median(slowest),
        mean_step_s=steady_s / count,
        training_s=first_s + steady_s,
        sent_bytes=math.nan if math.isnan(sum(sent)) else (statistics.median if alike else statistics.mean)(sent),
    )


def async_throughput(ranks: Sequence[Rank], workers: Sequence[Rank]) -> StepThroughput:
    """Return the `StepThroughput` of a run in which workers do not wait for each other. Local.

    ``ranks``: one dict of measurements per rank. ``workers``: the dicts of the ranks that compute.
    """
    # The token rate is measured from the end of the first step of any worker. The step time is the median of the
    # workers' medians.
    made = [rank for rank in workers if rank["count"]]
    if not made:
        return StepThroughput()
    training_s = max(rank["first"]["step_s"] + rank["sums"].get("step_s", 0.0) for rank in made)
    targets = sum(rank["sums"].get("targets", 0) for rank in made)
    if targets:
        tokens_per_s = targets / (training_s - min(rank["first"]["step_s"] for rank in made))
    else:
        tokens_per_s = sum(rank["first"]["targets"] for rank in made) / training_s
    served = [rank["served"] for rank in ranks if not math.isnan(rank["served"])]
    stepping = [rank for rank in ranks if rank["count"] and math.isnan(rank["served"])]
    return StepThroughput(
        tokens_per_s=tokens_per_s,
        step_s=statistics.median(statistics.median(step_s for step_s, *_ in _steady(rank)) for rank in made),
        mean_step_s=_mean_of_all(made, "step_s"),
        training_s=training_s,
        sent_bytes=max([*served, *(statistics.median(nbytes for _, nbytes, _ in _steady(rank)) for rank in stepping)]),
    )


def _most(counts: Sequence[float]) -> float:
    return math.nan if math.isnan(sum(counts)) else max(counts)


def _steady(rank: Rank) -> Sequence[tuple[float, float, float]]:
    # (seconds, sent bytes, communication seconds) of the sampled steps, or else of the first step.
    first = rank["first"]
    if not rank["count"] or rank["sample"]:
        return rank["sample"]
    return [(first["step_s"], first["sent_bytes"], first.get("communication_s", math.nan))]


def _mean(rank: Rank, figure: str) -> float:
    if rank["count"] > 1:
        return float(rank["sums"].get(figure, math.nan)) / (rank["count"] - 1)
    return float(rank["first"].get(figure, math.nan))


def summarise(
    comm: Communicator,
    trainer: Trainer,
    outcome: RunOutcome,
    directory: Path,
    val_loss: float,
    entropies: dict[str, Any],
) -> dict[str, Any]:
    """Return the run summary as {name: value or None}, from the measurements of all ranks. Collective."""
    # ``entropies``: n-gram entropies of the training text, used on rank 0.
    ranks = comm.allgather_object(_measured(trainer, outcome))
    workers, pss = [rank for rank in ranks if rank["computes"]], [rank["pss"] for rank in ranks]
    if trainer.exchange.traits.lock_step:
        alike = trainer.recipe.parallel.strategy != "local_sgd"
        pace = lock_step_throughput(ranks, workers, _targets(trainer, outcome), alike=alike)
    else:
        pace = async_throughput(ranks, workers)
    summary = {
        "steps": outcome.done,
        "world": comm.size,
        "strategy": trainer.recipe.parallel.strategy,
        "architecture": figures.describe_architecture(trainer),
        "grid": {axis: getattr(trainer.grid, axis) for axis in ORDER},
        "algorithm": trainer.exchange.traits.algorithm,
        "selection_from": trainer.selection.source,
        "selection_s": trainer.selection.seconds,
        "compression": trainer.compression.numbers(),
        "parameters": trainer.model.layout.parameters,
        "train_loss": json_number(outcome.loss),
        "val_loss": json_number(val_loss),
        "entropy": entropies,
        "tokens_per_s": json_number(pace.tokens_per_s),
        "speed_unit": trainer.speed_unit,
        "loss_unit": trainer.loss_unit,
        **step_figures(pace, workers),
        **figures.utilisation_figures(comm, trainer, pace.tokens_per_s, NO_STEP_MADE),
        **overlap_figures(workers),
        **prefetch_figures(workers),
        "bytes_sent_per_step": None if math.isnan(pace.sent_bytes) else round(pace.sent_bytes),
        "bytes_moved_per_step": moved_figures(ranks, pace.sent_bytes),
        LOADED_FIGURE: loaded_figure(ranks),
        "peak_bytes": {kind: max(rank["peak"][kind] for rank in ranks) for kind in trainer.ledger.peak},
        "peak_bytes_total": max(rank["held"] for rank in ranks),
        "counts_activations": trainer.recipe.model.kind not in FOREIGN,  # PyTorch and JAX hold theirs
        "pss_bytes": {"most": json_number(_most(pss)), "sum": json_number(sum(pss))},
        "skipped_steps": trainer.executor.loss_scale.skipped,
        "loss_scale": trainer.executor.loss_scale.scale,
        "training_s": pace.training_s,
        "chaos": trainer.recipe.chaos.described() or None,
        "lives": [],  # incarnations after rank failures, set by an elastic job
        **figures.consensus_figures(trainer),
        **figures.straggler_figures(trainer, workers),
        **step_meters.noise_figures(trainer.noise, trainer.recipe.run.global_batch),
        "run_dir": str(directory),
        "stopped_by": outcome.stop_request.name.lower() if outcome.stop_request is not None else None,
    }
    has_steps = any(rank["count"] for rank in workers)
    return summary | step_meters.router_figures(trainer.router) | _reasons(trainer, summary, has_steps)


def step_figures(pace: StepThroughput, workers: Sequence[Rank]) -> dict[str, float | None]:
    """Return {name: value or None} with the mean and median of step time and of communication fraction. Local.

    ``pace``: speed of the run. ``workers``: one dict of measurements per computing rank.
    """
    step_s = {"step_s_median": json_number(pace.step_s), "step_s_mean": json_number(pace.mean_step_s)}
    made = [rank for rank in workers if rank["count"]]
    if not made:
        return step_s | {"comm_fraction": None, "comm_fraction_median": None}
    means = [_mean(rank, "communication_s") / _mean(rank, "step_s") for rank in made]
    medians = [statistics.median(spent / step_s for step_s, _, spent in _steady(rank)) for rank in made]
    return step_s | {
        "comm_fraction": json_number(statistics.mean(means)),
        "comm_fraction_median": json_number(statistics.mean(medians)),
    }


def _reasons(trainer: Trainer, summary: Mapping[str, Any], has_steps: bool) -> dict[str, str]:
    reasons = {}
    if trainer.exchange.background is not None and summary["communication_hidden_share"] is None:
        reasons["communication_hidden_reason"] = NOT_HIDDEN
    if not has_steps:
        return reasons | {f"{name}_reason": NO_STEP_MADE for name in ("train", "tokens", "step", "comm", "bytes_sent")}
    if summary["bytes_sent_per_step"] is None:
        reasons["bytes_sent_reason"] = _not_counted(trainer)
    return reasons


def _not_counted(trainer: Trainer) -> str:
    if trainer.recipe.communication.checked:
        return NOT_COUNTED
    if trainer.exchange.traits.algorithm == "native":
        return f"{NOT_VISIBLE}; set communication.algorithm to ring, or any but native, to count"
    return NOT_VISIBLE


def _measured(trainer: Trainer, outcome: RunOutcome) -> dict[str, Any]:
    return {
        **outcome.steps.measured(),
        "served": outcome.served_bytes,
        "loaded": trainer.exchange.loaded_bytes,
        "prefetches": bool(trainer.exchange.traits.ahead),
        "computes": trainer.context.computes,
        "stalest": outcome.stalest,
        "dropped": outcome.dropped,
        "shares": None if trainer.shares is None else list(trainer.shares.of(max(0, outcome.done - 1))),
        "peak": trainer.ledger.peak,
        "held": trainer.ledger.peak_total,
        "pss": pss_bytes(),
    }


def _targets(trainer: Trainer, outcome: RunOutcome) -> float:
    batches = trainer.recipe.run.batches
    first = outcome.first + (outcome.done > outcome.first + 1)  # see `_steady`
    taken = batches.samples_before(outcome.done) - batches.samples_before(first)
    return taken * trainer.model.tokens_per_sample / max(1, outcome.done - first)


def overlap_figures(workers: Sequence[Rank]) -> dict[str, float | None]:
    """Return {name: mean or None}: seconds of reductions per step, exposed seconds, and hidden fraction.

    Exposed seconds delay the computation. ``workers``: one dict of measurements per rank that computes.
    """
    exposed_s, total_s = (_mean_of_all(workers, name) for name in ("reductions_exposed_s", "reductions_s"))
    share = 1 - exposed_s / total_s if total_s else math.nan
    overlap = (total_s, exposed_s, share)
    return {name: json_number(figure) for name, figure in zip(OVERLAP_FIGURES, overlap, strict=True)}


def prefetch_figures(workers: Sequence[Rank]) -> dict[str, float | None]:
    """Return {name: mean per step or None}: layers prefetched in time, layers prefetched late, seconds of waiting.

    ``workers``: one dict of measurements per rank that computes.
    """
    ahead = [rank for rank in workers if rank["prefetches"]]
    means = [_mean_of_all(ahead, name) for name in ("hits", "misses", "fetches_exposed_s")]
    return {name: json_number(mean) for name, mean in zip(PREFETCH_FIGURES, means, strict=True)}


def _mean_of_all(ranks: Sequence[Rank], figure: str) -> float:
    made = [(_mean(rank, figure), max(1, rank["count"] - 1)) for rank in ranks if rank["count"]]
    return sum(mean * count for mean, count in made) / sum(count for _, count in made) if made else math.nan


def moved_figures(ranks: Sequence[Rank], sent: float) -> dict[str, int] | None:
    """Return {transport: bytes per step on the rank with most bytes}, or None if no steps were made.

    ``ranks``: one dict of measurements per rank. ``sent``: bytes sent in messages per step, or NaN if unknown.
    """
    # Each value is a mean over the steps, of the rank with the largest mean. ``sent`` replaces the value of messages.
    made = [rank for rank in ranks if rank["count"]]
    if not made:
        return None
    most = {way: max(_mean(rank, way) for rank in made) for way in BytesMoved._fields}
    most["shared"] = max(most["shared"], *(rank["loaded"] / rank["count"] for rank in made))
    if not math.isnan(sent):
        most["messages"] = sent
    return {way: round(nbytes) for way, nbytes in most.items()}


def loaded_figure(ranks: Sequence[Rank]) -> int | None:
    """Return the bytes per step that the busiest of ``ranks`` reads from shared memory, or None if the number is 0."""
    most = max((rank["loaded"] / rank["count"] for rank in ranks if rank["count"]), default=0.0)
    return round(most) or None


def describe(summary: dict[str, Any], figure_lines: Sequence[str]) -> str:
    """Return the console text for ``summary``, a result of `summarise`.

    ``figure_lines``: result of `catalogue_lines`, to be included in the text.
    """
    made = f"{counted(summary['steps'], 'step')} on {counted(summary['world'], 'rank')}"
    lines = [f"{made}, {summary['parameters']:,} parameters"]
    if summary["chaos"] is not None:
        lines.append(f"chaos: {summary['chaos']}")
    if summary["lives"]:
        died = sum(life["died"] for life in summary["lives"])
        longest = max(life["seconds"] for life in summary["lives"])
        lines.append(f"{counted(died, 'rank')} died and the job continued, each time within {longest:.2f} s")
    lines += figure_lines
    if summary["skipped_steps"]:
        lines.append(f"loss scale {summary['loss_scale']:g} at the end")
    if "tokens_reason" in summary:
        lines.append(f"{summary['tokens_reason']}: no speed was measured")
    if summary["prefetch_hits"] is not None:
        gathers = summary["prefetch_hits"] + summary["prefetch_misses"]
        lines.append(
            f"prefetch: {summary['prefetch_hits']:.1f} of {gathers:.0f} gathers a step were complete when needed; "
            f"starting and waiting for gathers took {summary['prefetch_exposed_s'] * 1e3:.1f} ms a step"
        )
    lines += [
        *figures.describe_utilisation(summary),
        *figures.describe_consensus(summary),
        *figures.describe_stragglers(summary),
        *step_meters.describe_router(summary),
        f"run directory {summary['run_dir']}",
    ]
    return "\n".join(lines)


def catalogue_lines(directory: Path, recipe: Recipe) -> list[str]:
    """Return a list of text lines with the measurements of the run in ``directory``, or [a line with the error]."""
    external = ExternalData(planned_steps=recipe.run.steps, costs=partial(electricity_figures, recipe.energy))
    try:
        with regular.damage(directory, regular.FIGURES):
            return run_figures.lines(run_data.read(directory, external))
    except HpcdistError as error:
        return [f"no figures: {error}"]
