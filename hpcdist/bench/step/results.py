"""Request and results file of a benchmark of training steps: gpt, data, contenders; every phase of every step.

The file is HDF5:

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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import files


@dataclass(frozen=True)
class StepSample:
    """Measurements of a step on one rank, from a barrier to its end.

    ``loss`` is the mean over the tokens of the whole batch, or of this rank's (``own_loss``). ``phases`` has seconds by
    the names of `hpcdist.bench.step.results.PHASES`; what is missing was not told apart.
    """

    loss: float
    own_loss: bool
    step_s: float
    cpu_s: float
    phases: Mapping[str, float]


# name -> what it is
OURS: Final = "hpcdist"
RECOMPUTING: Final = "hpcdist, recomputing"
WRAPPED_TORCH: Final = "wrapped PyTorch"
WRAPPED_JAX: Final = "wrapped JAX"
EAGER: Final = "PyTorch eager"
COMPILED: Final = "torch.compile"
CONTENDERS: Final = {
    OURS: "the built-in model; several ranks reduce gradients by the algorithm that shares memory, where they can",
    RECOMPUTING: "the same, which keeps the input of a block and computes the rest of it again in backward",
    WRAPPED_TORCH: "the PyTorch model through hpcdist.adapters.torch.model, trained as the built-in one",
    WRAPPED_JAX: "the same model as functions of JAX, through hpcdist.adapters.jax.model",
    EAGER: "the PyTorch model as one trains it in PyTorch: AdamW (fused), clipping; several ranks by DDP over gloo",
    COMPILED: "the same behind torch.compile",
}
PHASES: Final = ("forward", "backward", "communication", "clipping", "update")
COMPARED: Final = 100  # steps over which losses have to agree
SAME: Final = 1e-4  # relative
CHOICES: Final = 4  # of successors of each token: a text that can be learnt


@dataclass(frozen=True)
class StepShape:
    """Shape of a gpt, and the samples of each rank in a step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    context: int = 256
    samples: int = 8
    vocabulary: int = 256


@dataclass(frozen=True)
class StepRequest:
    """Request of the caller; ``steps`` are timed, after ``warmup`` that are only compared."""

    shape: StepShape
    names: tuple[str, ...]
    ranks: int
    steps: int
    warmup: int
    profiled: int
    seed: int = 0
    threads: int = 1

    @property
    def every(self) -> int:
        """Steps of a contender that are not profiled."""
        return self.steps + self.warmup


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the contenders of these names, all for none. Raises UsageError."""
    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--only {name!r} is unknown; choose from {', '.join(map(repr, CONTENDERS))}")
    return tuple(name for name in CONTENDERS if not names or name in names)


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


SCHEMA: Final = "hpcdist.step"
VERSION: Final = 1
_SEPARATOR: Final = " | "
_NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")
_BYTES: Final = ("activation_bytes", "activation_closed_bytes")


@dataclass(frozen=True)
class StepCase:
    """One contender. Times are (step, rank), phases (step, rank, phase); what was not measured is NaN or None.

    ``operation_s`` are the seconds, in a step, of each kind of operation and way (forward, backward, step) on rank 0.
    """

    name: str
    step_s: np.ndarray
    cpu_s: np.ndarray
    phase_s: np.ndarray
    loss: np.ndarray
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
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**results.provenance, **asdict(results.shape), "NX_class": "NXroot"})
        file.create_dataset("phases", data=list(PHASES))
        file.create_group("left_out").attrs.update(results.left_out)
        for library, rate in results.matmul_flops_per_s.items():
            file.create_dataset(f"matmul_flops_per_s/{library}", data=rate).attrs.update(
                {"units": "1/s", "long_name": "fastest product of square float32 matrices, by turn and rank"}
            )
        for number, case in enumerate(results.cases):
            _write(file.create_group(f"cases/{number}"), case)


def _write(group: Any, case: StepCase) -> None:
    sizes = {name: math.nan if (value := getattr(case, name)) is None else value for name in _BYTES}
    group.attrs.update({"name": case.name, **sizes, "NX_class": "NXdata", "signal": "step_s"})
    for name, meaning in (
        ("step_s", "from a barrier to the end of the step"),
        ("cpu_s", "time of the processor in it, all threads of the rank"),
        ("phase_s", "its phases, by /phases"),
    ):
        group.create_dataset(name, data=getattr(case, name)).attrs.update({"units": "s", "long_name": meaning})
    group.create_dataset("loss", data=case.loss).attrs.update({"units": "nats", "long_name": "mean over the batch"})
    names = [_SEPARATOR.join(key) for key in case.operation_s]
    if names:
        group.create_dataset("operations", data=names)
        taken = group.create_dataset("operation_s", data=np.stack(list(case.operation_s.values())))
        taken.attrs.update({"units": "s", "long_name": "in a step that is timed operation by operation, on rank 0"})


def read(path: Path) -> StepResults:
    """Read a results file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            about = {name: _plain(value) for name, value in file.attrs.items() if name not in _NOT_PROVENANCE}
            shape = StepShape(**{field.name: about.pop(field.name) for field in fields(StepShape)})
            cases = tuple(_read(file[f"cases/{number}"]) for number in range(len(file["cases"])))
            rates = {name: dataset[...] for name, dataset in file["matmul_flops_per_s"].items()}
            left_out = {name: str(why) for name, why in file["left_out"].attrs.items()}
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    return StepResults(about, shape, rates, cases, left_out)


def _read(group: Any) -> StepCase:
    names = group["operations"].asstr()[...].tolist() if "operations" in group else []
    keys = [tuple(name.split(_SEPARATOR)) for name in names]
    sizes = {name: None if math.isnan(value := float(group.attrs[name])) else value for name in _BYTES}
    return StepCase(
        name=str(group.attrs["name"]),
        step_s=group["step_s"][...],
        cpu_s=group["cpu_s"][...],
        phase_s=group["phase_s"][...],
        loss=group["loss"][...],
        operation_s={(kind, way): group["operation_s"][number] for number, (kind, way) in enumerate(keys)},
        activation_bytes=sizes["activation_bytes"],
        activation_closed_bytes=sizes["activation_closed_bytes"],
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
