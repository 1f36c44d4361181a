"""Results file of a benchmark of pipelines: the time of every operation of every step.

It is HDF5:

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

Cases are appended when they have been measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from hpcdist.bench import output_file
from hpcdist.bench.output_file import ResultsFormat, SampleColumn
from hpcdist.bench.pipeline.request import PipelineCase
from hpcdist.strategies.schedule.operations import Kind, Operation, StagePlacement

FORMAT: Final = ResultsFormat("hpcdist.pipeline", 1, "cases")


@dataclass(frozen=True)
class MeasuredCase:
    """Measurements of a case; arrays are (step, rank). ``spans_s``, by rank, are (step, operation, begin and end).

    ``ideal_s`` is a step of the same work on each rank alone. A span is from the first to the last pass of a rank; of
    it ``busy_s`` is computing and ``idle_s`` waiting in receives. ``unit_s`` are the seconds that the simulator was fed
    with, 0 for passes that the schedule has not; ``simulated`` is the bubble of the longest stage, and
    ``simulated_by_rank`` that of each; ``closed`` is None where there is no closed form.
    """

    case: PipelineCase
    placement: StagePlacement
    operations: list[list[Operation]]
    step_s: Annotated[np.ndarray, SampleColumn("from a barrier to the end of the step", "step", "rank")]
    ideal_s: Annotated[np.ndarray, SampleColumn("the same, for the whole model on each rank alone", "step", "rank")]
    span_s: Annotated[np.ndarray, SampleColumn("from the first pass to the end of the last", "step", "rank")]
    busy_s: Annotated[np.ndarray, SampleColumn("forward and backward passes", "step", "rank")]
    idle_s: Annotated[np.ndarray, SampleColumn("receives within the span", "step", "rank")]
    spans_s: list[np.ndarray]
    replayed: Annotated[np.ndarray, SampleColumn("bubble simulated with each pass of this step", "step", units="1")]
    simulated_by_rank: Annotated[np.ndarray, SampleColumn("simulated bubble of a rank's span", "rank", units="1")]
    simulated: float
    simulated_makespan: float
    closed: float | None
    unit_s: Annotated[np.ndarray, SampleColumn("forward, backward, input and weight gradients", "unit")]
    message_s: float


@dataclass(frozen=True)
class PipelineResults:
    """Contents of a results file; cases by number of micro-batches, then in the order in which they were measured."""

    provenance: Mapping[str, Any]
    cases: tuple[MeasuredCase, ...]


def append(path: Path, cases: Sequence[MeasuredCase], provenance: Mapping[str, Any]) -> None:
    """Put ``cases`` into the file at ``path``, made with ``provenance`` when missing. Raises StorageError."""
    with FORMAT.edit(path, provenance) as groups:
        for measured in cases:
            if measured.case.id in groups:
                del groups[measured.case.id]
            _write(groups.create_group(measured.case.id), measured)


def _write(group: Any, measured: MeasuredCase) -> None:
    output_file.write_record(group, measured)
    group.create_dataset("units_of_chunk", data=[len(chunk) for chunk in measured.placement.chunks])
    group.create_dataset("rank_of_chunk", data=measured.placement.ranks)
    for rank, steps_of_rank in enumerate(measured.operations):
        own = group.create_group(f"rank-{rank}")
        own.create_dataset("kind", data=[op.kind.value for op in steps_of_rank])
        for name in ("microbatch", "unit"):
            own.create_dataset(name, data=[getattr(op, name) for op in steps_of_rank])
        spans = own.create_dataset("span_s", data=measured.spans_s[rank], compression="gzip", shuffle=True)
        spans.attrs.update({"units": "s", "long_name": "begin and end, from the first rank's barrier on"})


def read(path: Path) -> PipelineResults:
    """Read a results file. Raises StorageError."""
    with FORMAT.read(path) as (provenance, groups):
        cases = [_read(group) for group in groups.values()]
    return PipelineResults(
        provenance, tuple(sorted(cases, key=lambda measured: (measured.case.microbatches, measured.case.schedule)))
    )


def _read(group: Any) -> MeasuredCase:
    ends = np.cumsum(group["units_of_chunk"][...]).tolist()
    chunks = tuple(range(first, stop) for first, stop in zip([0, *ends], ends, strict=False))
    rows = [group[f"rank-{rank}"] for rank in range(int(group.attrs["ranks"]))]
    return output_file.read_record(
        group,
        MeasuredCase,
        placement=StagePlacement(chunks, tuple(group["rank_of_chunk"][...].tolist())),
        operations=[_operations(row) for row in rows],
        spans_s=[row["span_s"][...] for row in rows],
    )


def _operations(row: Any) -> list[Operation]:
    columns = row["kind"].asstr()[...], row["microbatch"][...].tolist(), row["unit"][...].tolist()
    return [Operation(Kind(kind), microbatch, unit) for kind, microbatch, unit in zip(*columns, strict=True)]
