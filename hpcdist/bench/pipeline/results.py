"""Request and results file of a benchmark of pipelines: schedules, micro-batches, model; every operation's time.

`cases` are the schedules and numbers of micro-batches to measure. The file is HDF5, with the time of every operation of
every step:

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

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.hdf5 import files
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, check_schedule
from hpcdist.strategies.schedule.operations import Kind, Operation, StagePlacement

CONTENDERS: Final = tuple(name for name, schedule in SCHEDULES.items() if schedule.pipelines)
SCHEMA: Final = "hpcdist.pipeline"
VERSION: Final = 1
CASES: Final = "cases"
_NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")
_WIDE: Final = {
    "step_s": "from a barrier to the end of the step",
    "ideal_s": "the same for the whole model on this rank alone, while the others do the same",
    "span_s": "from the first pass to the end of the last",
    "busy_s": "forward and backward passes",
    "idle_s": "receives within the span",
}
_FIGURES: Final = ("simulated", "simulated_makespan", "closed", "message_s")


@dataclass(frozen=True)
class PipelineShape:
    """Shape of a gpt, and the samples of a micro-batch; a step has as many of them as it has micro-batches."""

    layers: int
    hidden: int
    context: int
    samples: int
    vocabulary: int = 256

    @property
    def heads(self) -> int:
        """Number of attention heads: of 64 elements each, where the width allows it."""
        return max(1, self.hidden // 64) if self.hidden % 64 == 0 else 1


@dataclass(frozen=True)
class PipelineCase:
    """One schedule with so many micro-batches, ``chunks`` on each of ``ranks``."""

    schedule: str
    microbatches: int
    ranks: int
    chunks: int
    shape: PipelineShape

    @property
    def id(self) -> str:
        """Name of its group in a file: the same for the same case."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{self.schedule}-{self.microbatches}-{self.ranks}-{digest}"


@dataclass(frozen=True)
class PipelineRequest:
    """Request of the caller; ``steps`` are those of each case that are kept, ``warmup`` those before."""

    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    ranks: int
    chunks: int
    shape: PipelineShape
    steps: int
    warmup: int
    seed: int = 0


def cases(wanted: PipelineRequest) -> tuple[list[PipelineCase], dict[str, str]]:
    """Return the cases by number of micro-batches, and why others are left out (local)."""
    possible, left_out = [], {}
    units = wanted.shape.layers + 2
    for microbatches in wanted.microbatches:
        for name in wanted.schedules:
            try:
                chunks = check_schedule(
                    name, wanted.ranks, microbatches, wanted.chunks if SCHEDULES[name].most is None else 1
                )
                if units < wanted.ranks * chunks:
                    raise ConfigurationError(
                        f"the model has {units} units (its layers, what is before and what is behind them) for "
                        f"{wanted.ranks} x {chunks} chunks; give it more --layers"
                    )
            except ConfigurationError as error:
                left_out[f"{name}, {microbatches} micro-batches"] = str(error)
            else:
                possible.append(PipelineCase(name, microbatches, wanted.ranks, chunks, wanted.shape))
    return possible, left_out


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the schedules of these names, all for none. Raises UsageError."""
    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--schedule {name!r} is unknown; choose from {', '.join(CONTENDERS)}")
    return tuple(name for name in CONTENDERS if not names or name in names)


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


def append(path: Path, cases: Sequence[MeasuredCase], provenance: Mapping[str, Any]) -> None:
    """Put ``cases`` into the file at ``path``, made with ``provenance`` when missing. Raises StorageError."""
    new = not path.exists()
    with files.edit(path, SCHEMA, VERSION) as file:
        if new:
            file.attrs.update({**provenance, "NX_class": "NXroot"})
            file.create_group(CASES).attrs["NX_class"] = "NXentry"
        for case in cases:
            if case.case.id in file[CASES]:
                del file[CASES][case.case.id]
            _write(file[CASES].create_group(case.case.id), case)


def _write(group: Any, measured: MeasuredCase) -> None:
    case = asdict(measured.case)
    group.attrs.update({**{name: value for name, value in case.items() if name != "shape"}, **case["shape"]})
    group.attrs.update({name: math.nan if (value := getattr(measured, name)) is None else value for name in _FIGURES})
    group.attrs.update({"NX_class": "NXdata", "signal": "step_s", "axes": ["step", "rank"]})
    steps, ranks = measured.step_s.shape
    for name, count in (("step", steps), ("rank", ranks), ("unit", len(measured.unit_s))):
        group.create_dataset(name, data=np.arange(count)).make_scale(name)
    for name, meaning in _WIDE.items():
        dataset = group.create_dataset(name, data=getattr(measured, name))
        dataset.attrs.update({"units": "s", "long_name": meaning})
        for dim, scale in zip(dataset.dims, ("step", "rank"), strict=True):
            dim.attach_scale(group[scale])
    replayed = group.create_dataset("replayed", data=measured.replayed)
    replayed.attrs.update({"units": "1", "long_name": "bubble simulated with the times of each pass of this step"})
    by_rank = group.create_dataset("simulated_by_rank", data=measured.simulated_by_rank)
    by_rank.attrs.update({"units": "1", "long_name": "simulated bubble of the span of each rank"})
    by_rank.dims[0].attach_scale(group["rank"])
    group.create_dataset("unit_s", data=measured.unit_s).attrs.update(
        {"units": "s", "long_name": "forward, backward, gradient of the input, gradients of the weights"}
    )
    group.create_dataset("units_of_chunk", data=[len(chunk) for chunk in measured.placement.chunks])
    group.create_dataset("rank_of_chunk", data=measured.placement.ranks)
    for rank, steps_of_rank in enumerate(measured.operations):
        own = group.create_group(f"rank-{rank}")
        own.create_dataset("kind", data=[op.kind.value for op in steps_of_rank])
        for name in ("microbatch", "unit"):
            own.create_dataset(name, data=[getattr(op, name) for op in steps_of_rank])
        spans = own.create_dataset("span_s", data=measured.spans_s[rank], compression="gzip", shuffle=True)
        spans.attrs.update({"units": "s", "long_name": "begin and end, from the first rank's barrier on"})


@dataclass(frozen=True)
class PipelineResults:
    """Contents of a results file; cases by number of micro-batches, then in the order in which they were measured."""

    provenance: Mapping[str, Any]
    cases: tuple[MeasuredCase, ...]


def read(path: Path) -> PipelineResults:
    """Read a results file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            provenance = {name: _plain(value) for name, value in file.attrs.items() if name not in _NOT_PROVENANCE}
            cases = [_read(group) for group in file[CASES].values()]
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    return PipelineResults(
        provenance, tuple(sorted(cases, key=lambda measured: (measured.case.microbatches, measured.case.schedule)))
    )


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
