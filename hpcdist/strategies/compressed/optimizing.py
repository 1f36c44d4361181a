"""What goes with the compressors that take the place of an optimizer's momentum. Light: reads recipes only."""

from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.compressed.config import CompressionConfig

STRATEGY: Final = "allreduce"
OPTIMIZER: Final = {"dgc": "sgd", "onebit": "adamw"}
_NO_NORM: Final = "divides by the norm of the summed gradient, which nobody has"
_WHOLE: Final = "has no sum of a node in the momentum that each rank keeps; not built in this version"
_WIDE: Final = "would round what ranks step by to 16 bits, and no feedback makes up for that; not built in this version"


def check(name: str, config: CompressionConfig, optimizer: OptimizerConfig, *, strategy: str, mode: str) -> None:
    """Raise ConfigurationError for keys that do not go with ``name``, one of `OPTIMIZER`; ``mode``: the precision."""
    asked = f"communication.compression = {name!r}"
    if strategy != STRATEGY:
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: each rank steps all of the model by a momentum that all "
            f"send; set parallel.strategy = {STRATEGY!r}, or communication.compression = 'none'"
        )
    for key, given, only, why in (
        ("optimizer.name", optimizer.name, OPTIMIZER[name], "takes the place of the momentum of another optimizer"),
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
