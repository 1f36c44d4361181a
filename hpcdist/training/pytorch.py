"""Public names for PyTorch scripts: one import path, which is part of the public API."""

from hpcdist.adapters.torch.model import load, recipe_of, wrap
from hpcdist.training.script import Training

__all__ = ["Training", "load", "recipe_of", "wrap"]
