"""The end of a training: what it made of the parameters, back in the user's modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcdist.adapters.torch_arrays import library
from hpcdist.adapters.torch_modules import cuts
from hpcdist.errors import UsageError


def load(module_or_stages: Any, parameters: Mapping[str, np.ndarray]) -> None:
    """Write ``parameters``, by the names LAYER.NAME that `wrap` gave them, into the modules that were wrapped (local).

    The modules get memory of their own, so that they outlive the run: `state_dict` and forwards work as before it.
    Raises UsageError where a tensor is missing, left over or of another shape.
    """
    torch, left = library(), dict(parameters)
    for layer, cut in enumerate(cuts(module_or_stages)):
        for name, parameter in cut.own.items():
            values = left.pop(f"{layer}.{name}", None)
            if values is None:
                raise UsageError(
                    f"there is no tensor {layer}.{name}: these are parameters of other modules; give the same module, "
                    "or list of stages, that wrap was given"
                )
            if parameter.numel() and tuple(parameter.shape) != values.shape:
                raise UsageError(
                    f"{layer}.{name} has the shape {values.shape}, the module's {tuple(parameter.shape)}: these are "
                    "parameters of other modules"
                )
            parameter.data = torch.tensor(values, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None
    if left:
        raise UsageError(
            f"no module has {next(iter(left))}: these are parameters of other modules; give the same module, or list "
            "of stages, that wrap was given"
        )
