"""The ``[data]``, ``[precision]``, ``[run]`` and ``[survival]`` sections of a recipe.

Frozen dataclasses with their defaults and the checks of single values. Light: imports nothing but the errors and the
arithmetic of batch sizes.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.errors import ConfigurationError, DataError
from hpcdist.optim.rates import BatchSchedule, staged_batches

MODES: Final = ("float32", "float64", "bfloat16", "float16")
HALVES: Final = ("bfloat16", "float16")
ACTIVATIONS: Final = ("float32", "working")
WITH_HALVES: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")
SHARES: Final = ("even", "measured")
DIGESTS: Final = ("whole", "probes")
DEVICES: Final = ("cpu", "gpu")


def written(value: Any) -> str:
    """Return ``value`` as messages quote it: true and false as a recipe has them, the rest as Python has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section ``[data]``: the data that is trained on.

    ``path`` names a text file, a directory of them, tokens (uint8, uint16 or uint32) in a .npy file or in the dataset
    ``tokens`` of an HDF5 file, or, for an mlp or a convnet, an HDF5 file with datasets ``x`` (rows, ...), pictures as
    (rows, height, width) or with channels last, and ``y``. Empty, it is the source text of the Python standard library
    on this machine. ``context`` is the number of tokens that the model sees at once.
    The last ``validation_fraction`` of the data is kept for validation, at least one sample of it; 0 keeps none.

    ``shares`` says how the samples of a batch are shared over the replicas: evenly, or by the speed measured in the
    steps before, so that all are done at the same time. The batch is the same, and so are losses and weights up to
    rounding.

    ``staged`` is where each node has a copy of ``path``, as batch jobs make one: it is read in its place.

    ``digest`` says how a resume knows that the data is what it was: "whole", by a digest of all of it, which is read
    once for each state of the files, or "probes", by 64 samples at even distances, between which a change is not seen.
    """

    path: str = ""
    staged: str = ""
    context: int = 128
    validation_fraction: float = 0.05
    shares: str = "even"
    digest: str = "whole"

    def __post_init__(self) -> None:
        if self.staged and not self.path:
            raise ConfigurationError(f"data.staged = {self.staged!r}: data.path, of which it is a copy, is empty")
        if self.context < 1:
            raise ConfigurationError(f"data.context = {self.context}; it must be at least 1")
        if not 0 <= self.validation_fraction <= 0.5:
            raise ConfigurationError(
                f"data.validation_fraction = {self.validation_fraction}; it must be between 0 and 0.5"
            )
        if self.digest not in DIGESTS:
            raise ConfigurationError(f"data.digest = {self.digest!r}; choose one of {', '.join(DIGESTS)}")
        if self.shares not in SHARES:
            raise ConfigurationError(f"data.shares = {self.shares!r}; choose one of {', '.join(SHARES)}")

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
    itself, with sums, norms and losses in float32; a step then has one micro-batch, whose gradient is rounded once.
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
        if self.mode not in MODES:
            raise ConfigurationError(f"precision.mode = {self.mode!r}; choose one of {', '.join(MODES)}")
        if self.activations not in ACTIVATIONS:
            raise ConfigurationError(
                f"precision.activations = {self.activations!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.activations == "working" and self.working is None:
            raise ConfigurationError(
                f"precision.activations = 'working' with precision.mode = {self.mode!r}: there are no working copies; "
                f"choose a mode of {' and '.join(HALVES)}, or leave it out"
            )
        if self.loss_scale and not (1.0 <= self.loss_scale <= 2.0**24 and math.frexp(self.loss_scale)[0] == 0.5):
            raise ConfigurationError(
                f"precision.loss_scale = {self.loss_scale}; it must be 0 (dynamic) or a power of two from 1 to 2^24, "
                "so that it rounds nothing"
            )
        if not (2.0**-24 <= self.minimum_scale <= 2.0**16 and math.frexp(self.minimum_scale)[0] == 0.5):
            raise ConfigurationError(
                f"precision.minimum_scale = {self.minimum_scale}; it must be a power of two from 2^-24 to 2^16, with "
                "which a run begins"
            )
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"precision.{name} = {getattr(self, name)}; it must be at least 1")
        for name in ("loss_scale", "growth_interval", "hysteresis", "minimum_scale"):
            value, default = getattr(self, name), getattr(PrecisionConfig, name)
            if value != default and self.mode != "float16":
                raise ConfigurationError(
                    f"precision.{name} = {value} has no effect with precision.mode = {self.mode!r}; remove it, or "
                    "choose the mode 'float16'"
                )
            if value != default and self.loss_scale and name != "loss_scale":
                raise ConfigurationError(
                    f"precision.{name} = {value} has no effect with precision.loss_scale = {self.loss_scale}, which "
                    "stays as it is; remove one of them"
                )

    def check_beside(
        self, strategy: str, others: Mapping[str, tuple[Any, Any]], stages: Mapping[str, tuple[Any, Any]]
    ) -> None:
        """Raise ConfigurationError where 16-bit working copies do not go with the rest of a recipe.

        ``others`` are keys with the value that each has, and the only one that goes with 16 bits; ``stages`` are those
        of stages that compute in the 16-bit type.
        """
        if self.working is None:
            return
        built = f"precision.mode = {self.mode!r} is not built in this version"
        if strategy not in WITH_HALVES:
            raise ConfigurationError(
                f"parallel.strategy = {strategy!r} with {built}; choose {', '.join(WITH_HALVES)}, or the mode 'float32'"
            )
        for key, (value, only) in others.items():
            if value != only:
                raise ConfigurationError(
                    f"{key} = {written(value)} with {built}; set {key} = {written(only)}, or precision.mode = 'float32'"
                )
        for key, (value, only) in stages.items():
            if self.activations == "working" and value != only:
                raise ConfigurationError(
                    f"{key} = {written(value)} with precision.activations = 'working' is not built in this version; "
                    f"precision.mode = {self.mode!r} is, with precision.activations = 'float32': set that, or {key} = "
                    f"{written(only)}"
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Section ``[run]``: the length of a run, the batch of a step, and the measurements on the way.

    A step takes ``global_batch`` samples, whatever the number of ranks; ``seed`` decides the initial parameters and the
    order of the samples. Replicas are compared every ``sentinel_every_steps`` steps and before each save (0: not), and
    what a script brings to the ranks of one replica as often, and in its first steps. The validation loss is taken over
    ``validation_samples`` samples spread evenly over the validation data (0: all of them). A log gets a line every
    ``log_every_s`` seconds.

    With ``batch_warmup`` the first steps take fewer samples: for each stage it has the sample at which the stage ends,
    and the samples of a step in it, as in [6400, 16, 32000, 64]. See `hpcdist.optim.rates`.

    ``logical_shards`` is the deterministic mode: a step is cut into that many equal parts, whose gradients and losses
    are summed in an order of their own, so that losses and weights have the same bits on any number of ranks up to it.
    0: sums follow the ranks.

    Every ``recompute_every_steps`` steps, and where the gradient norm or the loss is more than ``suspicious_factor``
    times its median over the last 50 steps, a step is computed again before its update: other bits are a silent fault
    (0: never).

    Every ``noise_scale_every_steps`` steps the gradient noise scale is measured (0: never): see
    `hpcdist.optim.rates`.

    A run begins with the parameters of the checkpoint, or of the run, in ``init_from``; "": with drawn ones.
    ``allow_partial``: tensors that it lacks, or has in another shape, are drawn.
    """

    steps: int = 1000
    global_batch: int = 16
    seed: int = 0
    device: str = "cpu"
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
        for name, least in (("steps", 1), ("global_batch", 1), ("seed", 0), ("sentinel_every_steps", 0)):
            self._at_least(name, least)
        self._at_least("validation_samples", 0)
        if self.device not in DEVICES:
            raise ConfigurationError(f"run.device = {self.device!r}; choose one of {', '.join(DEVICES)}")
        if not (math.isfinite(self.log_every_s) and self.log_every_s >= 0):
            raise ConfigurationError(f"run.log_every_s = {self.log_every_s}; it must be finite and at least 0")
        if self.allow_partial and not self.init_from:
            raise ConfigurationError(
                "run.allow_partial = true has no effect where all parameters are drawn; name a checkpoint with "
                "run.init_from (--init-from), or set it to false"
            )
        self._check_logical_shards()
        assert self.batches.final  # or it raises
        self._at_least("recompute_every_steps", 0)
        self._at_least("noise_scale_every_steps", 0)
        if self.suspicious_factor and not (math.isfinite(self.suspicious_factor) and self.suspicious_factor > 1):
            raise ConfigurationError(
                f"run.suspicious_factor = {self.suspicious_factor}; it must be finite and above 1, such as 5, or 0 to "
                "suspect nothing"
            )

    @property
    def batches(self) -> BatchSchedule:
        """The samples of each step."""
        return staged_batches(self.global_batch, self.batch_warmup)

    @property
    def recomputes(self) -> bool:
        """Whether a step may be computed again."""
        return self.suspicious_factor > 0 or self.recompute_every_steps > 0

    def _check_logical_shards(self) -> None:
        self._at_least("logical_shards", 0)
        if self.logical_shards and self.global_batch % self.logical_shards:
            raise ConfigurationError(
                f"run.global_batch = {self.global_batch} does not divide into run.logical_shards = "
                f"{self.logical_shards} equal parts; choose a multiple of {self.logical_shards} samples, or a divisor "
                f"of {self.global_batch} for the shards"
            )
        if self.logical_shards and self.device != "cpu":
            raise ConfigurationError(
                f"run.logical_shards = {self.logical_shards} with run.device = {self.device!r}: a GPU adds up rows of "
                "embeddings in an order of its own; set run.device = 'cpu', or run.logical_shards = 0"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise ConfigurationError(f"run.{name} = {value}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig:
    """Section ``[survival]``: how a job of `hpcdist run --survive` outlives its ranks; without that it has no effect.

    Where ranks have parts of the state, each keeps a copy of its own, and its partner another, renewed every
    ``every_steps`` steps: so many steps are repeated after a death at the most. They are compared with their digests
    every ``check_every_steps`` steps (0: when they are needed). With fewer than ``least_ranks`` left the job ends, to
    be started again from its newest checkpoint.
    """

    every_steps: int = 1
    check_every_steps: int = 0
    least_ranks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 1), ("check_every_steps", 0), ("least_ranks", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"survival.{name} = {getattr(self, name)}; it must be at least {least}")
