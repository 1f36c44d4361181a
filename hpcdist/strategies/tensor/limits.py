"""Which models can be cut over a tensor axis. Light: recipes ask before anything is loaded."""

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import TRANSFORMERS, ModelConfig


def check(config: ModelConfig, ranks: int, context: int, sequence_parallel: bool) -> None:
    """Raise ConfigurationError for a model that cannot be cut over ``ranks`` (local)."""
    if ranks == 1:
        return
    if config.kind not in TRANSFORMERS:
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.kind = {config.kind!r} is not built in this version: set it to 1, "
            f"or train a {' or an '.join(TRANSFORMERS)}"
        )
    if config.kv_heads and config.kv_heads % ranks:
        divisors = [count for count in range(1, config.kv_heads + 1) if config.kv_heads % count == 0]
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.kv_heads = {config.kv_heads}: every rank takes as many of them, "
            f"with the queries that share them; choose one of {divisors} ranks, or a multiple of {ranks} heads"
        )
    if config.heads % ranks:
        divisors = [count for count in range(1, config.heads + 1) if config.heads % count == 0]
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.heads = {config.heads}: every rank takes as many heads; choose one "
            f"of {divisors} ranks, or a multiple of {ranks} heads"
        )
    for name, key, size in (
        ("a row of the embedding", "model.vocabulary", config.vocabulary),
        ("a column of the feed-forward", "model.feed_forward", config.inner),
        *((("a token of a sample", "data.context", context),) if sequence_parallel else ()),
    ):
        if size < ranks:
            raise ConfigurationError(
                f"parallel.tensor = {ranks} with {key} = {size}: each rank needs at least {name}; use at most {size} "
                "tensor ranks"
            )
