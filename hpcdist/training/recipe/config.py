"""The ``[data]``, ``[precision]``, ``[run]`` and ``[survival]`` sections of a recipe.

Frozen dataclasses with their defaults and the rules of single keys. Light: imports nothing but the errors, `reporting`,
the sizes of models and the arithmetic of batch sizes.
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
MOST_SAMPLES: Final = 2**31  # of a step


def _is_power_of_two(value: float, least: float, most: float) -> bool:
    return least <= value <= most and math.frexp(value)[0] == 0.5


DATA_RULES: Final = (
    rule("data.staged with data.path=", "there is nothing of which it is a copy", "set data.path, or leave it out"),
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
        "all parameters are drawn; name a checkpoint with run.init_from (--init-from), or set it to false",
    ),
    *at_least(0, "run.logical_shards", "run.recompute_every_steps", "run.noise_scale_every_steps"),
    rule(
        "run.global_batch? with run.logical_shards",
        "it does not divide into so many equal parts",
        "choose a multiple of {1} samples, or a divisor of {0} for the shards",
        relation=lambda batch, shards: batch % shards,
    ),
    rule("run.logical_shards with run.device!=cpu", "a GPU adds up rows of embeddings in an order of its own"),
    must(
        "run.suspicious_factor",
        lambda factor: factor == 0 or (math.isfinite(factor) and factor > 1),
        "it must be 0 (suspects nothing), or finite and above 1, such as 5",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section ``[data]``: the data that is trained on.

    ``keys.toml`` says what each key is. ``path`` may name a text file, a directory of them, tokens (uint8, uint16,
    uint32, int32 or int64) in a .npy file or in the dataset ``tokens`` of an HDF5 file, or, for an mlp or a convnet, an
    HDF5 file with datasets ``x`` (rows, ...), pictures as (rows, height, width) or with channels last, and ``y``.

    With measured ``shares`` the batch is the same, and so are losses and weights up to rounding. Positions in a packed
    document count from its first token, and padding has no loss. All parts of a document that is cut but the last are
    as long as a sample. A "whole" ``digest`` is made once for each state of the files; "probes" are at even distances,
    between which a change is not seen.
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
        """Raise DataError where there is nothing at the path that is read (local)."""
        path = self.staged or self.path
        if self.path and not os.path.exists(path):
            key = "data.staged" if self.staged else "data.path"
            raise DataError(f"{key} = {path}: there is no such file or directory")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Section ``[precision]``: the type of parameters and gradients.

    float32 and float64 are also that of activations and of the optimizer's state. With a 16-bit type, parameters
    and gradients are kept and sent in it; updates step a float32 master, of which checkpoints are made.
    ``activations`` is what stages compute in, and send: "float32", layer by layer, or on a GPU the "working" type
    itself, with sums, norms and losses in float32. Gradients of several micro-batches are rounded as each is added.
    bfloat16 has the range of float32; gradients in float16 are those of the loss times ``loss_scale``, a power of
    two. 0: it doubles after ``growth_interval`` steps without overflow, and halves after ``hysteresis`` overflows
    in a row, but not below ``minimum_scale``, at which 16 of them in a row end the run. A step whose gradient
    overflows is skipped.
    """

    mode: str = "float32"
    activations: str = "float32"
    loss_scale: float = 0.0
    growth_interval: int = 2000
    hysteresis: int = 2
    minimum_scale: float = 1.0

    @property
    def computes(self) -> str:
        """The type of the master parameters, which updates change and checkpoints keep."""
        return "float32" if self.mode in HALVES else self.mode

    @property
    def stages(self) -> str:
        """The type that stages compute in, and send to each other."""
        return self.mode if self.activations == "working" else self.computes

    @property
    def working(self) -> str | None:
        """The 16-bit type in which parameters and gradients are kept and sent; None in 32 and 64 bits."""
        return self.mode if self.mode in HALVES else None

    def __post_init__(self) -> None:
        check_section(PRECISION_RULES, "precision", self)


_SCALING: Final = ("loss_scale", "growth_interval", "hysteresis", "minimum_scale")
PRECISION_RULES: Final = (
    one_of("precision.mode", MODES),
    one_of("precision.activations", ACTIVATIONS),
    rule(
        "precision.activations=working with precision.mode!={halves}",
        "there are no working copies",
        f"choose a mode of {' and '.join(HALVES)}, or leave it out",
        halves=HALVES,
    ),
    must(
        "precision.loss_scale",
        lambda scale: scale == 0 or _is_power_of_two(scale, 1.0, 2.0**24),
        "it must be 0 (dynamic) or a power of two from 1 to 2^24, so that it rounds nothing",
    ),
    must(
        "precision.minimum_scale",
        lambda scale: _is_power_of_two(scale, 2.0**-24, 2.0**16),
        "it must be a power of two from 2^-24 to 2^16, with which a run begins",
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
    """Section ``[run]``: the length of a run, the batch of a step, and the measurements on the way.

    ``keys.toml`` says what each key is. Replicas are also compared before each save, and what a script brings to the
    ranks of one replica as often as they are, and in its first steps. Samples of the validation loss are spread evenly
    over the validation data. For ``batch_warmup`` and the noise scale see `hpcdist.optim.rates`.

    With ``logical_shards`` gradients and losses of equal parts of a step are summed in an order of their own; 0: sums
    follow the ranks. The median that ``suspicious_factor`` looks at is over the last 50 steps. A step is computed again
    before its update: other bits are a silent fault.
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
        assert self.batches.final  # or it raises

    @property
    def batches(self) -> BatchSchedule:
        """The samples of each step."""
        return staged_batches(self.global_batch, self.batch_warmup)

    @property
    def recomputes(self) -> bool:
        """Whether a step may be computed again."""
        return self.suspicious_factor > 0 or self.recompute_every_steps > 0


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig:
    """Section ``[survival]``: how a job of `hpcdist run --survive` outlives its ranks; without that it has no effect.

    Where ranks have parts of the state, each keeps a copy of its own, and its partner another, which are compared with
    their digests. A job that ends with fewer than ``least_ranks`` can be started again from its newest checkpoint.
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
