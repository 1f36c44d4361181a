"""Names for a PyTorch script in one import: `hpcdist.training.script.Training` and `hpcdist.adapters.torch`."""

from hpcdist.adapters.torch.model import load, wrap
from hpcdist.adapters.torch.recipe import recipe_of
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
