"""Results file of a benchmark of training steps: every phase of every step, and the batches of tokens.

It is HDF5:

/                            provenance, shape of the model, parameters and operations of a sample
/phases                      names of the phases
/matmul_flops_per_s/<library> (turn, rank), operations a second of the fastest product of square matrices
/left_out                    attributes: why a contender did not take part
/cases/<n>                   name; activation_bytes, activation_closed_bytes: NaN where not known
    step_s, cpu_s            (step, rank)
    phase_s                  (step, rank, phase): NaN where it is not measured apart
    loss                     (step), those before the timed ones included
    operations               names of kinds and ways, operation_s (operation, step)
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from hpcdist.bench import output_file
from hpcdist.bench.output_file import ResultsFormat, SampleColumn
from hpcdist.bench.step.request import PHASES, StepRequest, StepShape

FORMAT: Final = ResultsFormat("hpcdist.step", 1)
CHOICES: Final = 4  # of successors of each token: a text that can be learnt
_SEPARATOR: Final = " | "
_RATES: Final = SampleColumn("fastest product of square float32 matrices, by turn and rank", units="1/s")


@dataclass(frozen=True)
class StepSample:
    """Measurements of a step on one rank, from a barrier to its end.

    ``loss`` is the mean over the tokens of the whole batch, or of this rank's (``own_loss``). ``phases`` has seconds by
    the names of `hpcdist.bench.step.request.PHASES`; what is missing was not told apart.
    """

    loss: float
    own_loss: bool
    step_s: float
    cpu_s: float
    phases: Mapping[str, float]


def token_type(shape: StepShape) -> "np.dtype[Any]":
    """Return the smallest integers that all tokens fit in."""
    return np.min_scalar_type(shape.vocabulary - 1)


def batches(wanted: StepRequest, steps: int) -> Iterator[np.ndarray]:
    """Yield the tokens (ranks samples, context + 1) of so many steps: the same on every rank.

    Each token is followed by one of `CHOICES` others, so that losses fall as they do in a training.
    """
    shape = wanted.shape
    draw = np.random.default_rng([wanted.seed, 1])
    successors: np.ndarray = draw.integers(0, shape.vocabulary, (shape.vocabulary, CHOICES))
    samples = wanted.ranks * shape.samples
    for _ in range(steps):
        tokens = np.empty((samples, shape.context + 1), token_type(shape))
        tokens[:, 0] = draw.integers(0, shape.vocabulary, samples)
        taken: np.ndarray = draw.integers(0, CHOICES, (samples, shape.context + 1))
        for place in range(1, shape.context + 1):
            tokens[:, place] = successors[tokens[:, place - 1], taken[:, place]]
        yield tokens


@dataclass(frozen=True)
class StepCase:
    """One contender. Times are (step, rank), phases (step, rank, phase); what was not measured is NaN or None.

    ``operation_s`` are the seconds, in a step, of each kind of operation and way (forward, backward, step) on rank 0.
    """

    name: str
    step_s: Annotated[np.ndarray, SampleColumn("from a barrier to the end of the step")]
    cpu_s: Annotated[np.ndarray, SampleColumn("time of the processor in it, all threads of the rank")]
    phase_s: Annotated[np.ndarray, SampleColumn("its phases, by /phases")]
    loss: Annotated[np.ndarray, SampleColumn("mean over the batch", units="nats")]
    operation_s: Mapping[tuple[str, str], np.ndarray]
    activation_bytes: float | None
    activation_closed_bytes: float | None


@dataclass(frozen=True)
class StepResults:
    """Contents of a results file."""

    provenance: Mapping[str, Any]
    shape: StepShape
    matmul_flops_per_s: Mapping[str, np.ndarray]
    cases: tuple[StepCase, ...]
    left_out: Mapping[str, str]


def write(path: Path, results: StepResults) -> None:
    """Write a new file, as a whole or not at all. Raises StorageError."""
    with FORMAT.edit(path, {**results.provenance, **asdict(results.shape)}) as file:
        file.create_dataset("phases", data=list(PHASES))
        file.create_group("left_out").attrs.update(results.left_out)
        rates = {library: (rate, _RATES) for library, rate in results.matmul_flops_per_s.items()}
        output_file.write_samples(file.create_group("matmul_flops_per_s"), rates)
        for number, case in enumerate(results.cases):
            group = file.create_group(f"cases/{number}")
            output_file.write_record(group, case)
            if case.operation_s:
                group.create_dataset("operations", data=[_SEPARATOR.join(key) for key in case.operation_s])
                taken = group.create_dataset("operation_s", data=np.stack(list(case.operation_s.values())))
                taken.attrs.update({"units": "s", "long_name": "in a step timed operation by operation, on rank 0"})
