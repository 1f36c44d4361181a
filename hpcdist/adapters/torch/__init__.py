"""PyTorch modules as models of hpcdist: parameters stay `torch.nn.Parameter` objects, in the memory of the run.

Floor 3.5, inside adapters: imports models, arrays and errors; loads torch when it is needed. `modules` finds stages and
binds their parameters, `stage` is forward, backward and loss, `recipe` translates an optimizer.
Begin with `model.wrap` and `recipe.recipe_of`.
"""

from hpcdist.adapters.torch.model import load, recipe_of, wrap

__all__ = ["load", "recipe_of", "wrap"]
