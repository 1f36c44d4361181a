"""The ``[data]``, ``[precision]``, ``[run]`` and ``[survival]`` sections of a recipe.

Light: imports no MPI, HDF5 or NumPy.
"""

import math
import os
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import DataError
from hpcdist.models.config import MOST_CONTEXT
from hpcdist.optim.rates import BatchSchedule, staged_batches
from hpcdist.reporting.rules import NO_EFFECT, at_least, at_most, check_section, finite, must, no_effect, one_of, rule

MODES: Final = ("float32", "float64", "bfloat16", "float16")
HALVES: Final = ("bfloat16", "float16")
ACTIVATIONS: Final = ("float32", "working")
SHARES: Final = ("even", "measured")
DIGESTS: Final = ("whole", "probes")
DEVICES: Final = ("cpu", "gpu")
MOST_SAMPLES: Final = 2**31  # per step


def _is_power_of_two(value: float, least: float, most: float) -> bool:
    return least <= value <= most and math.frexp(value)[0] == 0.5


DATA_RULES: Final = (
    rule("data.staged with data.path=", "there is no original file", "set data.path, or leave it out"),
    *at_least(1, "data.context"),
    *at_most(MOST_CONTEXT, "data.context"),
    must("data.validation_fraction", lambda share: 0 <= share <= 0.5, "it must be between 0 and 0.5"),
    one_of("data.digest", DIGESTS),
    one_of("data.shares", SHARES),
    *at_least(-1, "data.document_end"),
    no_effect("data.document_end", -1, "data.packed", [True]),
    no_effect("data.cut_documents", False, "data.packed", [True]),
)
RUN_RULES: Final = (
    *at_least(1, "run.steps", "run.global_batch"),
    *at_most(MOST_SAMPLES, "run.global_batch"),
    *at_least(0, "run.seed", "run.sentinel_every_steps", "run.validation_samples"),
    one_of("run.device", DEVICES),
    no_effect("run.cuda_graph", False, "run.device", ["gpu"]),
    finite("run.log_every_s", lambda seconds: seconds >= 0, "at least 0"),
    rule(
        "run.allow_partial with run.init_from=",
        NO_EFFECT,
        "all parameters are random; name a checkpoint with run.init_from (--init-from), or set it to false",
    ),
    *at_least(0, "run.logical_shards", "run.recompute_every_steps", "run.noise_scale_every_steps"),
    rule(
        "run.global_batch? with run.logical_shards",
        "all logical shards must have the same number of samples",
        "choose a multiple of {1} samples, or a number of shards that divides {0}",
        relation=lambda batch, shards: batch % shards,
    ),
    rule("run.logical_shards with run.device!=cpu", "a GPU sums the gradients of embedding rows in no fixed order"),
    must(
        "run.suspicious_factor",
        lambda factor: factor == 0 or (math.isfinite(factor) and factor > 1),
        "it must be 0 (off), or finite and above 1, such as 5",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section ``[data]``: the training data.

    ``keys.toml`` describes each key. ``path`` is a text file, a directory of text files, or a file of tokens: .npy, or
    the dataset ``tokens`` of an HDF5 file. For an mlp or a convnet it is an HDF5 file with datasets ``x``, of shape
    (rows, ...), and ``y``. Pictures have the shape (rows, height, width), optionally with channels.

    In packed samples, token positions restart at 0 in each document, and padding has no loss. ``digest``: "whole"
    identifies the data by a hash of all data, "probes" by a hash of evenly spaced elements.
    """

    path: str = ""
    staged: str = ""
    context: int = 128
    validation_fraction: float = 0.05
    packed: bool = False
    document_end: int = -1
    cut_documents: bool = False
    shares: str = "even"
    digest: str = "whole"

    def __post_init__(self) -> None:
        check_section(DATA_RULES, "data", self)

    def check_exists(self) -> None:
        """Raise DataError if the training data (a file or directory) does not exist. Local."""
        path = self.staged or self.path
        if self.path and not os.path.exists(path):
            key = "data.staged" if self.staged else "data.path"
            raise DataError(f"{key} = {path}: there is no such file or directory")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Section ``[precision]``: the number formats of parameters, gradients and activations.

    With a 16-bit ``mode``, parameters and gradients are stored and sent in 16 bits. Updates and checkpoints use a
    float32 master copy. ``activations``: "float32", or on a GPU "working" (16 bits, but sums, norms and losses in
    float32).

    float16 gradients are scaled by ``loss_scale``, a power of two. 0 means dynamic: the scale doubles after
    ``growth_interval`` steps without overflow, and halves after ``hysteresis`` overflows in a row. A step with overflow
    is skipped.
    """

    mode: str = "float32"
    activations: str = "float32"
    loss_scale: float = 0.0
    growth_interval: int = 2000
    hysteresis: int = 2
    minimum_scale: float = 1.0

    @property
    def computes(self) -> str:
        """Data type of updates and checkpoints: "float32" if the key ``mode`` is a 16-bit type, else ``mode``."""
        return "float32" if self.mode in HALVES else self.mode

    @property
    def stages(self) -> str:
        """Data type of the activations that pipeline stages compute and send."""
        return self.mode if self.activations == "working" else self.computes

    @property
    def working(self) -> str | None:
        """16-bit data type of stored and sent parameters and gradients, or None if ``mode`` is not a 16-bit mode."""
        return self.mode if self.mode in HALVES else None

    def __post_init__(self) -> None:
        check_section(PRECISION_RULES, "precision", self)


_SCALING: Final = ("loss_scale", "growth_interval", "hysteresis", "minimum_scale")
PRECISION_RULES: Final = (
    one_of("precision.mode", MODES),
    one_of("precision.activations", ACTIVATIONS),
    rule(
        "precision.activations=working with precision.mode!={halves}",
        "this mode has no 16-bit working copies",
        f"choose the mode {' or '.join(HALVES)}, or leave it out",
        halves=HALVES,
    ),
    must(
        "precision.loss_scale",
        lambda scale: scale == 0 or _is_power_of_two(scale, 1.0, 2.0**24),
        "it must be 0 (dynamic) or a power of two from 1 to 2^24, so that scaling is exact",
    ),
    must(
        "precision.minimum_scale",
        lambda scale: _is_power_of_two(scale, 2.0**-24, 2.0**16),
        "it must be a power of two from 2^-24 to 2^16 (the initial scale)",
    ),
    *at_least(1, "precision.growth_interval", "precision.hysteresis"),
    *(
        no_effect(f"precision.{name}", getattr(PrecisionConfig, name), f"precision.{other}", [needed])
        for other, needed, names in (("mode", "float16", _SCALING), ("loss_scale", 0, _SCALING[1:]))
        for name in names
    ),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Section ``[run]``: length, batch size, device, and the checks and measurements during a run.

    ``keys.toml`` describes each key. Replicas are compared every ``sentinel_every_steps`` steps and before each save.
    With ``logical_shards``, gradients and losses have the same bits on any number of ranks. A step is computed twice if
    its loss or gradient norm exceeds ``suspicious_factor`` times the median of the last 50 steps.
    """

    steps: int = 1000
    global_batch: int = 16
    seed: int = 0
    device: str = "cpu"
    cuda_graph: bool = False
    sentinel_every_steps: int = 100
    validation_samples: int = 1024
    log_every_s: float = 5.0
    batch_warmup: tuple[int, ...] = ()
    logical_shards: int = 0
    suspicious_factor: float = 0.0
    recompute_every_steps: int = 0
    noise_scale_every_steps: int = 0
    init_from: str = ""
    allow_partial: bool = False

    def __post_init__(self) -> None:
        check_section(RUN_RULES, "run", self)
        assert self.batches.final  # the property raises for an invalid warm-up

    @property
    def batches(self) -> BatchSchedule:
        """Schedule of the global batch size: the number of samples per step."""
        return staged_batches(self.global_batch, self.batch_warmup)

    @property
    def recomputes(self) -> bool:
        """True if some steps may be computed twice, to find silent data corruption."""
        return self.suspicious_factor > 0 or self.recompute_every_steps > 0


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig:
    """Section ``[survival]``: copies of the state in jobs of `hpcdist run --survive`. It has no effect in other jobs.

    If the state is sharded, each rank's shard is copied to the memory of this rank and of a partner rank. Otherwise,
    there are no copies. If fewer than ``least_ranks`` ranks remain, the job ends.
    """

    every_steps: int = 1
    check_every_steps: int = 0
    least_ranks: int = 1

    def __post_init__(self) -> None:
        check_section(SURVIVAL_RULES, "survival", self)


SURVIVAL_RULES: Final = (
    *at_least(1, "survival.every_steps", "survival.least_ranks"),
    *at_least(0, "survival.check_every_steps"),
)
