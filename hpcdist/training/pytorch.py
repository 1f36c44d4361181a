"""What a script of PyTorch needs, in one import: `hpcdist.training.script.Training` and `hpcdist.adapters.torch`."""

from hpcdist.adapters.torch import wrap
from hpcdist.adapters.torch_recipe import recipe_of
from hpcdist.adapters.torch_state import load
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
