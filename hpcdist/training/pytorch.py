"""Public names for PyTorch scripts in one import: `Training`, `wrap`, `load`, `recipe_of`.

Collects `hpcdist.training.script.Training` and `hpcdist.adapters.torch`. The import path is part of the public API.
"""

from hpcdist.adapters.torch.model import load, recipe_of, wrap
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
