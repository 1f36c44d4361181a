"""The ``[data]``, ``[precision]`` and ``[run]`` sections of a recipe. Light: imports nothing but the errors."""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

MODES: Final = ("float32", "float64")
SHARES: Final = ("even", "measured")
UNBUILT_MODES: Final = ("float16", "bfloat16")
DEVICES: Final = ("cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on.

    ``path`` names a text file, a directory of them, tokens (uint8, uint16 or uint32) in a .npy file or in the dataset
    ``tokens`` of an HDF5 file, or, for an mlp, an HDF5 file with datasets ``x`` and ``y``. Empty, it is the source text
    of the Python standard library on this machine. ``context`` is the number of tokens that the model sees at once.
    The last ``validation_fraction`` of the data is kept for validation, at least one sample of it; 0 keeps none.

    ``shares`` says how the samples of a batch are shared over the replicas: evenly, or by the speed measured in the
    steps before, so that all are done at the same time. The batch is the same, and so are losses and weights up to
    rounding.
    """

    path: str = ""
    context: int = 128
    validation_fraction: float = 0.05
    shares: str = "even"

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ConfigurationError(f"data.context = {self.context}; it must be at least 1")
        if not 0 <= self.validation_fraction <= 0.5:
            raise ConfigurationError(
                f"data.validation_fraction = {self.validation_fraction}; it must be between 0 and 0.5"
            )
        if self.shares not in SHARES:
            raise ConfigurationError(f"data.shares = {self.shares!r}; choose one of {', '.join(SHARES)}")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The type of parameters, gradients and activations."""

    mode: str = "float32"

    def __post_init__(self) -> None:
        if self.mode in UNBUILT_MODES:
            raise ConfigurationError(
                f"precision.mode = {self.mode!r} is known, but not built in this version; "
                f"choose one of {', '.join(MODES)}"
            )
        if self.mode not in MODES:
            raise ConfigurationError(f"precision.mode = {self.mode!r}; choose one of {', '.join(MODES)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run is, what a step is, and what is looked at on the way.

    A step takes ``global_batch`` samples, whatever the number of ranks; ``seed`` decides the initial parameters and the
    order of the samples. Replicas are compared every ``sentinel_every_steps`` steps (0: not). The validation loss is
    taken over ``validation_samples`` samples spread evenly over the validation data (0: all of them). A log gets a line
    every ``log_every_s`` seconds.

    ``logical_shards`` is the deterministic mode: a step is cut into that many equal parts, whose gradients and losses
    are summed in an order of their own, so that losses and weights have the same bits on any number of ranks up to it.
    0: sums follow the ranks.
    """

    steps: int = 1000
    global_batch: int = 16
    seed: int = 0
    device: str = "cpu"
    sentinel_every_steps: int = 100
    validation_samples: int = 1024
    log_every_s: float = 5.0
    logical_shards: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("global_batch", 1), ("seed", 0), ("sentinel_every_steps", 0)):
            self._at_least(name, least)
        self._at_least("validation_samples", 0)
        if self.device not in DEVICES:
            raise ConfigurationError(f"run.device = {self.device!r}; choose one of {', '.join(DEVICES)}")
        if not (math.isfinite(self.log_every_s) and self.log_every_s >= 0):
            raise ConfigurationError(f"run.log_every_s = {self.log_every_s}; it must be finite and at least 0")
        self._check_logical_shards()

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
