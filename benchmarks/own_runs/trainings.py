"""Trainings that are measured and predicted: none of them calibrates anything.

What the planner's constants are fitted to is in CALIBRATION: steps of other models, on one rank each, and products,
copies, messages and collectives by themselves.
"""

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
    """A training: ``keys`` are those of its recipe."""

    name: str
    ranks: int
    keys: Mapping[str, Any]

    @property
    def pipeline(self) -> bool:
        """Whether it has a bubble."""
        return bool(self.keys.get("parallel.pipeline", 1) > 1)

    @property
    def counted(self) -> bool:
        """Whether all it sends are messages of ours, whose bytes are known; else ranks share memory, too."""
        return self.keys.get("communication.algorithm", "auto") in ("ring", "hierarchical") or self.ranks == 1


def _row(name: str, ranks: int, model: str, batch: int, **keys: Any) -> Row:
    own = {key.replace("__", "."): value for key, value in keys.items()}
    degrees = own.get("parallel.pipeline", 1) * own.get("parallel.tensor", 1)
    return Row(
        f"{name}, {model}, {batch}",
        ranks,
        {**COMMON, **MODELS[model], "run.global_batch": batch, "parallel.data": ranks // degrees, **own},
    )


def chosen_rows(ranks: int, names: Sequence[str], *, hosts: bool = False) -> tuple[Row, ...]:
    """Return the trainings whose names begin with one of ``names`` (none: all), of one host or ``hosts``."""
    every = between() if hosts else rows(ranks)
    return tuple(row for row in every if not names or row.name.startswith(tuple(names)))


def rows(ranks: int) -> tuple[Row, ...]:
    """Return the trainings on so many ranks of one host."""
    found = _alone() if ranks == 1 else _together(ranks)
    assert len({row.name for row in found}) == len(found)
    return tuple(found)


def between() -> tuple[Row, ...]:
    """Return the trainings on one rank of each of two hosts, whose link is slow."""
    found = []
    for model in MODELS:
        for strategy, algorithm in (
            ("allreduce", "ring"),
            ("allreduce", "hierarchical"),
            ("zero1", "ring"),
            ("zero3", "ring"),
        ):
            keys = {"parallel__strategy": strategy, "communication__algorithm": algorithm}
            found.append(_row(f"{strategy}, {algorithm}", 2, model, 8, **keys))
    return tuple(found)


def _alone() -> list[Row]:
    found = []
    for model, batch in (("small", 2), ("small", 8), ("large", 4), ("large", 8)):
        found.append(_row("one rank", 1, model, batch))
    for model in MODELS:
        found.append(_row("accumulating 4", 1, model, 8, parallel__microbatches=4))
        found.append(_row("recomputing", 1, model, 8, parallel__recompute=True))
    return found


def _together(ranks: int) -> list[Row]:
    ring = {"communication__algorithm": "ring"}
    found = [
        _row(f"{strategy}, ring", ranks, model, batch, parallel__strategy=strategy, **ring)
        for model, batch in (("small", 8), ("large", 8), ("small", 16))
        for strategy in ("allreduce", "zero1", "zero2", "zero3")
    ]
    for model in MODELS:
        chosen = ("allreduce", "zero3")
        found += [_row(f"{name}, auto", ranks, model, 8, parallel__strategy=name) for name in chosen]
        served = {"parallel__strategy": "parameter_server", "parameter_server__placement": "colocated"}
        found.append(_row("parameter server", ranks, model, 8, **served))
        pipeline: dict[str, Any] = {"parallel__pipeline": ranks, **ring}
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
            keys = {**pipeline, "parallel__schedule": schedule, "parallel__chunks": chunks}
            found.append(_row(schedule, ranks, model, 8, parallel__microbatches=4, **keys))
        again = {**pipeline, "parallel__schedule": "1f1b", "parallel__recompute": True}
        found.append(_row("1f1b, recomputing", ranks, model, 8, parallel__microbatches=4, **again))
        tensor: dict[str, Any] = {"parallel__tensor": ranks, **ring}
        if MODELS[model]["model.heads"] % ranks == 0:
            found.append(_row("tensor", ranks, model, 8, **tensor))
            found.append(_row("tensor, by tokens", ranks, model, 8, **tensor, parallel__sequence_parallel=True))
    return found
