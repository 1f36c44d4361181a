"""Results file of the benchmark of training steps: the time of every phase of every step. Also the token batches.

The file is HDF5:

/                             provenance, shape of the model, number of parameters, flops per sample
/phases                       names of the phases
/matmul_flops_per_s/<library> (turn, rank): speed of the fastest product of square matrices
/left_out                     attributes: the reason for each contender that was left out
/cases/<n>                    name; activation_bytes, activation_closed_bytes: NaN if unknown
    step_s, cpu_s             (step, rank)
    phase_s                   (step, rank, phase): NaN if the phase is not measured separately
    loss                      (step), including the warm-up steps
    operations                kind and pass of each operation; operation_s (operation, step)
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
CHOICES: Final = 4  # possible successors of each token, which a model can learn
_RATES: Final = SampleColumn("fastest product of square float32 matrices, by turn and rank", units="1/s")


@dataclass(frozen=True)
class StepSample:
    """Measurements of a training step on one rank."""

    loss: float
    own_loss: bool  # the loss is the mean over this rank's samples, not over the global batch
    step_s: float
    cpu_s: float
    phases: Mapping[str, float]  # seconds by phase; phases that are not measured separately are missing


def token_type(shape: StepShape) -> "np.dtype[Any]":
    """Return the smallest unsigned integer dtype that holds every token id of the model ``shape``."""
    return np.min_scalar_type(shape.vocabulary - 1)


def batches(request: StepRequest, steps: int) -> Iterator[np.ndarray]:
    """Yield ``steps`` global batches of random tokens: arrays (ranks * samples, context + 1), equal on all ranks."""
    # A token has `CHOICES` possible successors, so that the loss falls as in real training.
    shape = request.shape
    rng = np.random.default_rng([request.seed, 1])
    successors: np.ndarray = rng.integers(0, shape.vocabulary, (shape.vocabulary, CHOICES))
    samples = request.ranks * shape.samples
    for _ in range(steps):
        tokens = np.empty((samples, shape.context + 1), token_type(shape))
        tokens[:, 0] = rng.integers(0, shape.vocabulary, samples)
        choices: np.ndarray = rng.integers(0, CHOICES, (samples, shape.context + 1))
        for index in range(1, shape.context + 1):
            tokens[:, index] = successors[tokens[:, index - 1], choices[:, index]]
        yield tokens


@dataclass(frozen=True)
class StepCase:
    """Measurements of one implementation: arrays (step, rank), (step, rank, phase) or (step). NaN: not measured."""

    name: str
    step_s: Annotated[np.ndarray, SampleColumn("time from a barrier to the end of the step")]
    cpu_s: Annotated[np.ndarray, SampleColumn("CPU time of the step, all threads of the rank")]
    phase_s: Annotated[np.ndarray, SampleColumn("time of each phase in /phases")]
    loss: Annotated[np.ndarray, SampleColumn("mean loss of the batch", units="nats")]
    operation_s: Mapping[tuple[str, str], np.ndarray]  # seconds per profiled step on rank 0, by (kind, pass)
    activation_bytes: float | None  # measured peak of the activations
    activation_closed_bytes: float | None  # the same peak by a formula


@dataclass(frozen=True)
class StepResults:
    """Contents of a results file of the benchmark of training steps."""

    provenance: Mapping[str, Any]
    shape: StepShape
    matmul_flops_per_s: Mapping[str, np.ndarray]
    cases: tuple[StepCase, ...]
    left_out: Mapping[str, str]


def write(path: Path, results: StepResults) -> None:
    """Write ``results`` atomically to the new file ``path``. Raises StorageError."""
    with FORMAT.edit(path, {**results.provenance, **asdict(results.shape)}) as file:
        file.create_dataset("phases", data=list(PHASES))
        file.create_group("left_out").attrs.update(results.left_out)
        rates = {library: (rate, _RATES) for library, rate in results.matmul_flops_per_s.items()}
        output_file.write_samples(file.create_group("matmul_flops_per_s"), rates)
        for number, case in enumerate(results.cases):
            group = file.create_group(f"cases/{number}")
            output_file.write_record(group, case)
            if case.operation_s:
                group.create_dataset("operations", data=[" | ".join(key) for key in case.operation_s])
                seconds = group.create_dataset("operation_s", data=np.stack(list(case.operation_s.values())))
                seconds.attrs.update({"units": "s", "long_name": "time per profiled step on rank 0"})
