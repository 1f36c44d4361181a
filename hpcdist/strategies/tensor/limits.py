"""Which models can be cut over a tensor axis. Light: recipes ask before anything is loaded."""

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig


def check(config: ModelConfig, ranks: int, context: int, sequence_parallel: bool) -> None:
    """Raise ConfigurationError for a model that cannot be cut over ``ranks`` (local)."""
    if ranks == 1:
        return
    if config.kind != "gpt":
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.kind = {config.kind!r} is not built in this version: set it to 1, "
            "or train a gpt"
        )
    if config.heads % ranks:
        divisors = [count for count in range(1, config.heads + 1) if config.heads % count == 0]
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.heads = {config.heads}: every rank takes as many heads; choose one "
            f"of {divisors} ranks, or a multiple of {ranks} heads"
        )
    for name, key, size in (
        ("a row of the embedding", "model.vocabulary", config.vocabulary),
        *((("a token of a sample", "data.context", context),) if sequence_parallel else ()),
    ):
        if size < ranks:
            raise ConfigurationError(
                f"parallel.tensor = {ranks} with {key} = {size}: each rank needs at least {name}; use at most {size} "
                "tensor ranks"
            )
