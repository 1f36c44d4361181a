"""A transformer in which every token sees all others, trained to say tokens that were masked (Devlin et al. 2018).

Its stages are those of `hpcdist.models.gpt`, with the same options. A sample has as many targets as `predictions` says;
the other places of its targets hold `hpcdist.models.tokens.IGNORED`. `hpcdist.training.data` decides what is masked.
"""

from typing import Final

from hpcdist.models.config import ModelConfig
from hpcdist.models.gpt import transformer
from hpcdist.models.stage import Stage

MASKED_PERCENT: Final = 15  # of the tokens of a sample


def stages(config: ModelConfig, context: int) -> tuple[Stage, ...]:
    """Return the stages of an encoder for at most ``context`` tokens a sample."""
    return transformer(config, context, causal=False)


def predictions(context: int) -> int:
    """Return how many tokens of a sample of ``context`` tokens are to be said: 15 % of them, rounded, at least one."""
    return max(1, (MASKED_PERCENT * context + 50) // 100)
