"""Trainings that are measured and predicted. The planner is calibrated on other models and operations: CALIBRATION."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CALIBRATION: Final = (
    "products of matrices, copies, messages and collectives over sizes, and steps of two-layer gpts 128 and 256 wide "
    "on one rank each: `hpcdist plan calibrate`"
)
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "small": {"model.layers": 6, "model.hidden": 192, "model.heads": 3, "data.context": 128},
    "large": {"model.layers": 4, "model.hidden": 384, "model.heads": 6, "data.context": 128},
}
COMMON: Final = {"model.vocabulary": 256, "optimizer.name": "adamw", "run.steps": 1000}


@dataclass(frozen=True)
class Row:
    """A training and its recipe keys."""

    name: str
    ranks: int
    keys: Mapping[str, Any]

    @property
    def pipeline(self) -> bool:
        return bool(self.keys.get("parallel.pipeline", 1) > 1)

    @property
    def counted(self) -> bool:
        """True if all traffic is by messages of hpcdist, so its bytes are known."""
        return self.keys.get("communication.algorithm", "auto") in ("ring", "hierarchical") or self.ranks == 1


def _row(name: str, ranks: int, model: str, batch: int, **keys: Any) -> Row:
    row_keys = {key.replace("__", "."): value for key, value in keys.items()}
    degrees = row_keys.get("parallel.pipeline", 1) * row_keys.get("parallel.tensor", 1)
    return Row(
        f"{name}, {model}, {batch}",
        ranks,
        {**COMMON, **MODELS[model], "run.global_batch": batch, "parallel.data": ranks // degrees, **row_keys},
    )


def chosen_rows(ranks: int, names: Sequence[str], *, hosts: bool = False) -> tuple[Row, ...]:
    """Return the trainings whose names begin with one of ``names`` (default: all), on one host or two ``hosts``."""
    all_rows = between() if hosts else rows(ranks)
    return tuple(row for row in all_rows if not names or row.name.startswith(tuple(names)))


def rows(ranks: int) -> tuple[Row, ...]:
    result = _alone() if ranks == 1 else _together(ranks)
    assert len({row.name for row in result}) == len(result)
    return tuple(result)


def between() -> tuple[Row, ...]:
    results = []
    for model in MODELS:
        for strategy, algorithm in (
            ("allreduce", "ring"),
            ("allreduce", "hierarchical"),
            ("zero1", "ring"),
            ("zero3", "ring"),
        ):
            keys = {"parallel__strategy": strategy, "communication__algorithm": algorithm}
            results.append(_row(f"{strategy}, {algorithm}", 2, model, 8, **keys))
    return tuple(results)


def _alone() -> list[Row]:
    results = []
    for model, batch in (("small", 2), ("small", 8), ("large", 4), ("large", 8)):
        results.append(_row("one rank", 1, model, batch))
    for model in MODELS:
        results.append(_row("accumulating 4", 1, model, 8, parallel__microbatches=4))
        results.append(_row("recomputing", 1, model, 8, parallel__recompute=True))
    return results


def _together(ranks: int) -> list[Row]:
    ring = {"communication__algorithm": "ring"}
    results = [
        _row(f"{strategy}, ring", ranks, model, batch, parallel__strategy=strategy, **ring)
        for model, batch in (("small", 8), ("large", 8), ("small", 16))
        for strategy in ("allreduce", "zero1", "zero2", "zero3")
    ]
    for model in MODELS:
        chosen = ("allreduce", "zero3")
        results += [_row(f"{name}, auto", ranks, model, 8, parallel__strategy=name) for name in chosen]
        server_keys = {"parallel__strategy": "parameter_server", "parameter_server__placement": "colocated"}
        results.append(_row("parameter server", ranks, model, 8, **server_keys))
        pipeline: dict[str, Any] = {"parallel__pipeline": ranks, **ring}
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
            keys = {**pipeline, "parallel__schedule": schedule, "parallel__chunks": chunks}
            results.append(_row(schedule, ranks, model, 8, parallel__microbatches=4, **keys))
        recompute_keys = {**pipeline, "parallel__schedule": "1f1b", "parallel__recompute": True}
        results.append(_row("1f1b, recomputing", ranks, model, 8, parallel__microbatches=4, **recompute_keys))
        tensor: dict[str, Any] = {"parallel__tensor": ranks, **ring}
        if MODELS[model]["model.heads"] % ranks == 0:
            results.append(_row("tensor", ranks, model, 8, **tensor))
            results.append(_row("tensor, by tokens", ranks, model, 8, **tensor, parallel__sequence_parallel=True))
    return results
