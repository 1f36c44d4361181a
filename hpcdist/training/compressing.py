"""Which keys of a recipe go with compressed gradients: what does not is refused, with what to change."""

from typing import TYPE_CHECKING, Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed import config
from hpcdist.strategies.compressed.config import LOW_RANK, OPTIMIZING
from hpcdist.strategies.zero.config import STAGES
from hpcdist.training.config import written

if TYPE_CHECKING:
    from hpcdist.training.recipe import Recipe

STRATEGIES: Final = ("allreduce", "parameter_server", *STAGES)  # whose gradients can be compressed
_WHY_NOT: Final = {
    "gossip": "its replicas exchange parameters, and no sum of gradients",
    "local_sgd": "its replicas exchange parameters, and no sum of gradients",
}


def refuse(recipe: "Recipe") -> None:
    """Raise ConfigurationError for keys that do not go with ``communication.compression``."""
    name = recipe.communication.compression
    _refuse_parameters(recipe)
    if name == "none":
        return
    asked = f"communication.compression = {name!r}"
    strategy = recipe.parallel.strategy
    if name in OPTIMIZING:
        config.check_momentum_compressor(
            name, recipe.compression, recipe.optimizer, strategy=strategy, mode=recipe.precision.mode
        )
    if strategy not in STRATEGIES:
        raise ConfigurationError(
            f"{asked} with parallel.strategy = {strategy!r}: {_WHY_NOT.get(strategy, 'not built in this version')}; "
            f"choose one of {', '.join(STRATEGIES)}, or set it to 'none'"
        )
    if strategy in STAGES:
        for each in recipe.compression.candidates if name == "auto" else (name,):
            recipe.zero.check_compressed(each)
    if strategy == "parameter_server":
        across = recipe.compression.across_nodes
        recipe.parameter_server.check_compressed(name, recipe.communication.algorithm, across_nodes=across)
    for key, given, only, why in (
        ("communication.overlap", recipe.communication.overlap, "none", "is not built in this version"),
        ("communication.delayed", recipe.communication.delayed, False, "is not built in this version"),
        ("run.logical_shards", recipe.run.logical_shards, 0, "would make bits depend on which ranks lose what"),
        (
            "run.noise_scale_every_steps",
            recipe.run.noise_scale_every_steps,
            0,
            "would count what compression loses as noise of the data",
        ),
        ("run.recompute_every_steps", recipe.run.recompute_every_steps, 0, "is not built in this version"),
        ("run.suspicious_factor", recipe.run.suspicious_factor, 0.0, "is not built in this version"),
        (
            "parallel.sequence_parallel",
            recipe.parallel.sequence_parallel,
            False,
            "would compress parts of gradients that are summed over the tensor axis only later",
        ),
        ("precision.mode", "float64" if recipe.precision.mode == "float64" else "float32", "float32", _FLOAT64),
    ):
        if given != only:
            raise ConfigurationError(
                f"{asked} with {key} = {written(given)} {why}; set {key} = {written(only)}, or "
                "communication.compression = 'none'"
            )
    meant = recipe.compression.candidates if name == "auto" else (name,)
    if recipe.parallel.tensor > 1 and set(meant) & set(LOW_RANK):
        raise ConfigurationError(
            f"{asked} with parallel.tensor = {recipe.parallel.tensor}: its factors are of whole tensors, and each rank "
            "has a part; choose another compressor, or parallel.tensor = 1"
        )


_FLOAT64: Final = "is not built in this version: what is encoded is float32"


def _refuse_parameters(recipe: "Recipe") -> None:
    """Raise ConfigurationError for keys that do not go with ``compression.parameters``."""
    way = recipe.compression.parameters
    if way == "none":
        return
    recipe.zero.check_compressed_parameters(way, recipe.parallel.strategy)
    for key, given, only, why in (
        ("communication.overlap", recipe.communication.overlap, "none", "is not built in this version"),
        ("run.logical_shards", recipe.run.logical_shards, 0, "would round weights where the ranks cut them"),
        ("precision.mode", "float64" if recipe.precision.mode == "float64" else "float32", "float32", _FLOAT64),
    ):
        if given != only:
            raise ConfigurationError(
                f"compression.parameters = {way!r} with {key} = {written(given)} {why}; set {key} = {written(only)}, "
                "or compression.parameters = 'none'"
            )
    if recipe.precision.mode in ("float16", "bfloat16") and way in ("float16", "bfloat16"):
        raise ConfigurationError(
            f"compression.parameters = {way!r} with precision.mode = {recipe.precision.mode!r}: what is gathered has "
            "16 bits already; choose int8 or int4, or set it to 'none'"
        )
