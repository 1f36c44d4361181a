"""A multi-layer perceptron that classifies: hidden layers of one width, then a linear head."""

import math
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.dropout import HIDDEN
from hpcdist.models.operations import Operations
from hpcdist.models.stage import Gradients, Parameters, Saved, Stage, StreamOf


def stages(config: ModelConfig, features: int, classes: int) -> tuple[Stage, ...]:
    """Return ``config.layers`` hidden layers and a head, from ``features`` numbers a sample to ``classes`` logits."""
    if features < 1 or classes < 1:
        raise ConfigurationError(
            f"the data has {features} features and {classes} classes; an mlp needs at least one of each"
        )
    widths = [features] + [config.hidden] * config.layers + [classes]
    last = config.layers
    return tuple(
        Dense(layer, widths[layer], widths[layer + 1], "" if layer == last else config.activation, config.dropout)
        for layer in range(last + 1)
    )


def as_fractions(x: Array, dtype: np.dtype[Any], saved: Saved) -> Array:
    """Return data in ``dtype``: integers become [0, 1] by the range of their type, kept as "fractions"."""
    if x.dtype == dtype:
        return x
    fractions = saved.empty("fractions", x.shape, dtype)
    fractions[...] = x
    if np.issubdtype(x.dtype, np.integer):
        fractions /= dtype.type(np.iinfo(x.dtype).max)
    return fractions


class Dense:
    """A linear layer, its activation, and dropout behind that; the last layer has neither."""

    def __init__(self, layer: int, inputs: int, outputs: int, activation: str, dropout: float) -> None:
        self.layer = layer
        self.tied: dict[str, str] = {}
        self.activation = activation
        self.dropout = dropout if activation else 0.0
        self._specs = (
            TensorSpec(layer, "linear.weight", (outputs, inputs)),
            TensorSpec(layer, "linear.bias", (outputs,), False),
        )

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of weight and bias."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return (samples, outputs)."""
        return samples, self._specs[1].shape[0]

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the weight so that variances persist through the layers (He et al. 2015); zero the bias."""
        weight = self._specs[0]
        gain = 2.0 if self.activation else 1.0
        draws = rng_of(weight).standard_normal(weight.shape)
        parameters[weight.name][...] = draws * math.sqrt(gain / weight.shape[1])
        parameters["linear.bias"][...] = 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return (batch, outputs) for x (batch, inputs). Integer features of the first layer become [0, 1] by dtype."""
        x = as_fractions(x, parameters["linear.weight"].dtype, saved)
        y = operations.linear_column.forward(parameters, "linear", x, saved)
        if self.activation:
            y = operations.activation.forward(y, self.activation, saved)
        return operations.dropout.forward(y, self.dropout, HIDDEN, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Write the gradients; return dx, None in the first layer."""
        d = operations.dropout.backward(dy, self.dropout, HIDDEN, saved)
        d = operations.activation.backward(d, saved) if self.activation else d
        return operations.linear_column.backward(
            parameters, gradients, "linear", d, saved, input_gradient=self.layer > 0
        )
