"""The ``[compression]`` section of a recipe, and the limits of compressors that replace an optimizer's momentum.

Light: reads recipes only, imports nothing but the errors and the optimizer's configuration. Which compressor is used
is ``communication.compression``; these keys say how. `check_momentum_compressor` refuses keys that do not go with DGC
or 1-bit Adam.
"""

from dataclasses import dataclass, fields
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.optim.config import OptimizerConfig

QUANTISED: Final = ("float16", "bfloat16", "int8", "int4", "adaptive", "qsgd", "sign")
SPARSE: Final = ("topk", "randomk")
SUMMED: Final = ("randomk",)  # of SPARSE: payloads of all ranks have the same indices, and are summed as they are
LOW_RANK: Final = ("powersgd",)
COMPRESSORS: Final = (*QUANTISED, *SPARSE, *LOW_RANK)
OPTIMIZING: Final = ("dgc", "onebit")  # exchanges of their own: they take the place of an optimizer's momentum
PARAMETERS: Final = ("none", "float16", "bfloat16", "int8", "int4")
# Which compressors read a key, of the keys that not all of them read.
_READ_BY: Final = {
    "error_feedback": COMPRESSORS,
    "density": ("topk", "randomk", "dgc"),
    "rank": LOW_RANK,
    "bits": ("qsgd",),
    "candidates": ("auto",),
}


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Section ``[compression]``: options of the compressor that ``communication.compression`` names.

    With ``error_feedback`` what a compressor loses of a gradient is added to the next one. The first ``warmup_steps``
    updates are not compressed; of dgc they are the steps in which the density falls to the one asked for, of onebit
    those in which the variance is measured. With ``across_nodes`` the ranks of a node sum in float32, and only what
    leaves the node is compressed. ``density`` is the share of elements that is sent, ``rank`` that of the factors of
    powersgd, ``bits`` those of a code of qsgd. ``auto`` measures ``candidates`` against no compression and takes the
    fastest. ``parameters`` is how zero3 sends what it gathers: "int8" is qwZ of ZeRO++.
    """

    error_feedback: bool = True
    warmup_steps: int = 0
    across_nodes: bool = False
    density: float = 0.01
    rank: int = 4
    bits: int = 8
    candidates: tuple[str, ...] = ("int8",)
    parameters: str = "none"

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigurationError(f"compression.warmup_steps = {self.warmup_steps}; it must be at least 0")
        if not 0 < self.density <= 1:
            raise ConfigurationError(
                f"compression.density = {self.density}: the share of elements to send is above 0 and at most 1, e.g. "
                "0.01"
            )
        if self.rank < 1:
            raise ConfigurationError(f"compression.rank = {self.rank}; the factors of powersgd have at least 1 column")
        if self.bits not in (2, 4, 8):
            raise ConfigurationError(f"compression.bits = {self.bits}; qsgd has codes of 2, 4 or 8 bits")
        if not self.candidates or len(set(self.candidates)) < len(self.candidates):
            raise ConfigurationError(
                f"compression.candidates = {list(self.candidates)}: name one compressor or more, each once"
            )
        for name in self.candidates:
            if name not in COMPRESSORS:
                raise ConfigurationError(
                    f"compression.candidates: {name!r} is none; choose among {', '.join(COMPRESSORS)}"
                )
        if self.parameters not in PARAMETERS:
            raise ConfigurationError(
                f"compression.parameters = {self.parameters!r}; choose one of {', '.join(PARAMETERS)}"
            )

    def check_beside(self, compression: str) -> None:
        """Raise ConfigurationError for keys that ``communication.compression`` would ignore (local)."""
        meant = self.candidates if compression == "auto" else (compression,)
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if value == item.default or item.name == "parameters":
                continue
            if item.name == "across_nodes" and self.parameters != "none":
                continue
            readers = _READ_BY.get(item.name, (*COMPRESSORS, *OPTIMIZING, "auto"))
            if compression not in readers and not set(meant) & set(readers):
                written = str(value).lower() if isinstance(value, bool) else repr(value)
                raise ConfigurationError(
                    f"compression.{item.name} = {written} has no effect with communication.compression = "
                    f"{compression!r}; remove it, or choose one of {', '.join(readers)}"
                )
        if "qsgd" in meant and self.error_feedback and self.bits < 8:
            raise ConfigurationError(
                f"compression.bits = {self.bits} with compression.error_feedback = true: qsgd then loses more than "
                "there is, and what is fed back would grow without bound; set compression.error_feedback = false "
                "(it is unbiased), or compression.bits = 8"
            )


MOMENTUM_STRATEGY: Final = "allreduce"
MOMENTUM_OPTIMIZERS: Final = {"dgc": "sgd", "onebit": "adamw"}
_NO_NORM: Final = "divides by the norm of the summed gradient, which nobody has"
_WHOLE: Final = "has no sum of a node in the momentum that each rank keeps; not built in this version"
_WIDE: Final = "would round what ranks step by to 16 bits, and no feedback makes up for that; not built in this version"


def check_momentum_compressor(
    name: str, config: CompressionConfig, optimizer: OptimizerConfig, *, strategy: str, mode: str
) -> None:
    """Raise ConfigurationError for keys that do not go with ``name``, one of `OPTIMIZER`; ``mode``: the precision."""
    asked = f"communication.compression = {name!r}"
    if strategy != MOMENTUM_STRATEGY:
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: each rank steps all of the model by a momentum that all "
            f"send; set parallel.strategy = {MOMENTUM_STRATEGY!r}, or communication.compression = 'none'"
        )
    for key, given, only, why in (
        (
            "optimizer.name",
            optimizer.name,
            MOMENTUM_OPTIMIZERS[name],
            "takes the place of the momentum of another optimizer",
        ),
        ("optimizer.normalize_gradient", optimizer.normalize_gradient, False, _NO_NORM),
        ("optimizer.bias_correction", optimizer.bias_correction, True, "always corrects the moments"),
        ("compression.across_nodes", config.across_nodes, False, _WHOLE),
        ("precision.mode", mode if mode in ("float16", "bfloat16") else "float32", "float32", _WIDE),
    ):
        if given != only:
            raise ConfigurationError(
                f"{asked} with {key} = {_written(given)} {why}; set {key} = {_written(only)}, or "
                "communication.compression = 'none'"
            )
    if name == "onebit" and config.warmup_steps < 1:
        raise ConfigurationError(
            f"{asked} with compression.warmup_steps = 0: the variance that is frozen is measured in them; set as many "
            "as the warm-up of the learning rate has at least, e.g. a fifth of run.steps"
        )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
