"""PyTorch modules as models of hpcdist: parameters stay `torch.nn.Parameter` objects, in the memory of the run.

Floor 3.5, inside adapters: imports models, arrays and errors; loads torch when it is needed. `modules` finds stages and
binds their parameters, `stage` is forward, backward and loss, `arrays` shares memory between the libraries.
`attention` has what a module calls whose samples are cut over context ranks. Begin with `model.wrap` and
`model.recipe_of`, which translates an optimizer of PyTorch.
"""

from hpcdist.adapters.torch.attention import context_attention, context_positions
from hpcdist.adapters.torch.model import load, recipe_of, wrap

__all__ = ["context_attention", "context_positions", "load", "recipe_of", "wrap"]
