"""Results file of a benchmark of pipelines: HDF5, with the time of every operation of every step.

    /                            provenance
    /cases/<id>                  schedule, microbatches, ranks, chunks, shape of the model; simulated, closed, message_s
        step, rank, unit         scales
        step_s, ideal_s, span_s, busy_s, idle_s     (step, rank)
        replayed                 (step,)
        simulated_by_rank        (rank,)
        unit_s                   (unit, forward backward input weight)
        units_of_chunk, rank_of_chunk               (chunk,)
        rank-<r>/kind, microbatch, unit             (operation,)
        rank-<r>/span_s          (step, operation, begin and end)

Cases are appended when they have been measured, all or nothing (`hpcdist.hdf5.files.edit`): a process that is killed
loses those under way.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.pipeline.plan import PipelineCase, PipelineShape
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.placement import StagePlacement

SCHEMA: Final = "hpcdist.pipeline"
VERSION: Final = 1
CASES: Final = "cases"
_NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")


@dataclass(frozen=True)
class MeasuredCase:
    """A case; arrays are (step, rank). ``spans_s``, by rank, are (step, operation, begin and end).

    ``ideal_s`` is a step of the same work on each rank alone. A span is from the first to the last pass of a rank; of
    it ``busy_s`` is computing and ``idle_s`` waiting in receives. ``unit_s`` are the seconds that the simulator was fed
    with, 0 for passes that the schedule has not; ``simulated`` is the bubble of the longest stage, and
    ``simulated_by_rank`` that of each; ``closed`` is None where there is no closed form.
    """

    case: PipelineCase
    placement: StagePlacement
    operations: list[list[Operation]]
    step_s: np.ndarray
    ideal_s: np.ndarray
    span_s: np.ndarray
    busy_s: np.ndarray
    idle_s: np.ndarray
    spans_s: list[np.ndarray]
    replayed: np.ndarray
    simulated_by_rank: np.ndarray
    simulated: float
    simulated_makespan: float
    closed: float | None
    unit_s: np.ndarray
    message_s: float


_WIDE: Final = {
    "step_s": "from a barrier to the end of the step",
    "ideal_s": "the same for the whole model on this rank alone, while the others do the same",
    "span_s": "from the first pass to the end of the last",
    "busy_s": "forward and backward passes",
    "idle_s": "receives within the span",
}
_FIGURES: Final = ("simulated", "simulated_makespan", "closed", "message_s")


def append(path: Path, found: Sequence[MeasuredCase], provenance: Mapping[str, Any]) -> None:
    """Put ``found`` into the file at ``path``, made with ``provenance`` when missing. Raises StorageError."""
    new = not path.exists()
    with files.edit(path, SCHEMA, VERSION) as file:
        if new:
            file.attrs.update({**provenance, "NX_class": "NXroot"})
            file.create_group(CASES).attrs["NX_class"] = "NXentry"
        for one in found:
            if one.case.id in file[CASES]:
                del file[CASES][one.case.id]
            _write(file[CASES].create_group(one.case.id), one)


def _write(group: Any, one: MeasuredCase) -> None:
    case = asdict(one.case)
    group.attrs.update({**{name: value for name, value in case.items() if name != "shape"}, **case["shape"]})
    group.attrs.update({name: math.nan if (value := getattr(one, name)) is None else value for name in _FIGURES})
    group.attrs.update({"NX_class": "NXdata", "signal": "step_s", "axes": ["step", "rank"]})
    steps, ranks = one.step_s.shape
    for name, count in (("step", steps), ("rank", ranks), ("unit", len(one.unit_s))):
        group.create_dataset(name, data=np.arange(count)).make_scale(name)
    for name, meaning in _WIDE.items():
        dataset = group.create_dataset(name, data=getattr(one, name))
        dataset.attrs.update({"units": "s", "long_name": meaning})
        for dim, scale in zip(dataset.dims, ("step", "rank"), strict=True):
            dim.attach_scale(group[scale])
    replayed = group.create_dataset("replayed", data=one.replayed)
    replayed.attrs.update({"units": "1", "long_name": "bubble simulated with the times of each pass of this step"})
    by_rank = group.create_dataset("simulated_by_rank", data=one.simulated_by_rank)
    by_rank.attrs.update({"units": "1", "long_name": "simulated bubble of the span of each rank"})
    by_rank.dims[0].attach_scale(group["rank"])
    group.create_dataset("unit_s", data=one.unit_s).attrs.update(
        {"units": "s", "long_name": "forward, backward, gradient of the input, gradients of the weights"}
    )
    group.create_dataset("units_of_chunk", data=[len(chunk) for chunk in one.placement.chunks])
    group.create_dataset("rank_of_chunk", data=one.placement.ranks)
    for rank, steps_of_rank in enumerate(one.operations):
        own = group.create_group(f"rank-{rank}")
        own.create_dataset("kind", data=[op.kind.value for op in steps_of_rank])
        for name in ("microbatch", "unit"):
            own.create_dataset(name, data=[getattr(op, name) for op in steps_of_rank])
        spans = own.create_dataset("span_s", data=one.spans_s[rank], compression="gzip", shuffle=True)
        spans.attrs.update({"units": "s", "long_name": "begin and end, from the first rank's barrier on"})


@dataclass(frozen=True)
class PipelineResults:
    """A results file in memory; cases by number of micro-batches, then in the order in which they were measured."""

    provenance: Mapping[str, Any]
    cases: tuple[MeasuredCase, ...]


def read(path: Path) -> PipelineResults:
    """Read a results file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            provenance = {name: _plain(value) for name, value in file.attrs.items() if name not in _NOT_PROVENANCE}
            found = [_read(group) for group in file[CASES].values()]
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    return PipelineResults(provenance, tuple(sorted(found, key=lambda one: (one.case.microbatches, one.case.schedule))))


def _read(group: Any) -> MeasuredCase:
    about = {name: _plain(value) for name, value in group.attrs.items()}
    shape = PipelineShape(**{name: about[name] for name in ("layers", "hidden", "context", "samples", "vocabulary")})
    case = PipelineCase(about["schedule"], about["microbatches"], about["ranks"], about["chunks"], shape)
    ends = np.cumsum(group["units_of_chunk"][...]).tolist()
    chunks = tuple(range(first, stop) for first, stop in zip([0, *ends], ends, strict=False))
    rows = [group[f"rank-{rank}"] for rank in range(case.ranks)]
    return MeasuredCase(
        case=case,
        placement=StagePlacement(chunks, tuple(group["rank_of_chunk"][...].tolist())),
        operations=[_operations(row) for row in rows],
        spans_s=[row["span_s"][...] for row in rows],
        step_s=group["step_s"][...],
        ideal_s=group["ideal_s"][...],
        span_s=group["span_s"][...],
        busy_s=group["busy_s"][...],
        idle_s=group["idle_s"][...],
        replayed=group["replayed"][...],
        unit_s=group["unit_s"][...],
        simulated_by_rank=group["simulated_by_rank"][...],
        simulated=about["simulated"],
        simulated_makespan=about["simulated_makespan"],
        closed=None if math.isnan(about["closed"]) else about["closed"],
        message_s=about["message_s"],
    )


def _operations(row: Any) -> list[Operation]:
    columns = row["kind"].asstr()[...], row["microbatch"][...].tolist(), row["unit"][...].tolist()
    return [Operation(Kind(kind), microbatch, unit) for kind, microbatch, unit in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
