"""PyTorch modules as models of hpcdist: parameters stay `torch.nn.Parameter` objects, in memory of the run.

Begin with `model.wrap` and `model.recipe_of`, which translates a PyTorch optimizer.
"""

from hpcdist.adapters.torch.attention import context_attention, context_positions
from hpcdist.adapters.torch.model import load, recipe_of, wrap

__all__ = ["context_attention", "context_positions", "load", "recipe_of", "wrap"]
