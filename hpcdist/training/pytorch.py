"""Public names for PyTorch scripts in one import: `Training`, `wrap`, `load`, `recipe_of`.

Collects `hpcdist.training.script.Training` and the adapters of `hpcdist.adapters.torch`. Its path is part of the
public API.
"""

from hpcdist.adapters.torch.model import load, wrap
from hpcdist.adapters.torch.recipe import recipe_of
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
