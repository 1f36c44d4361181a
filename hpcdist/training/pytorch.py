"""What a script of PyTorch needs, in one import: `hpcdist.training.script.Training` and `hpcdist.adapters.torch`."""

from hpcdist.adapters.torch import load, recipe_of, wrap
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
