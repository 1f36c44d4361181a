"""Request of a benchmark of pipelines: schedules, numbers of micro-batches and a model; the cases that can be measured.

Light: no array, no file, so that `hpcdist bench pipeline --list` loads none.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, check_schedule

CONTENDERS: Final = tuple(name for name, schedule in SCHEDULES.items() if schedule.pipelines)


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
