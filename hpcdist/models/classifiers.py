"""Classifiers: a multi-layer perceptron, and a small convolutional network (channels last).

A convnet has 3 x 3 convolutions (as in He et al. 2016), each followed by a norm over the channels of a pixel and an
activation. Gradients do not depend on the split of a batch.
"""

import math
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers.convolution import SIZE, convolve, convolve_backward, output_side
from hpcdist.models.layers.dropout import HIDDEN
from hpcdist.models.stage import (
    DeclaredStage,
    Gradients,
    Operations,
    Parameters,
    Saved,
    Stage,
    StreamOf,
    draw_normal,
    norm_specs,
)


def mlp_stages(config: ModelConfig, features: int, classes: int) -> tuple[Stage, ...]:
    """Return the stages of an mlp with ``features`` inputs: the hidden layers, and a head with ``classes`` logits."""
    if features < 1 or classes < 1:
        raise ConfigurationError(
            f"the data has {features} features and {classes} classes; an mlp needs at least 1 of each: check data.path"
        )
    widths = [features] + [config.hidden] * config.layers + [classes]
    last = config.layers
    return tuple(
        Dense(layer, widths[layer], widths[layer + 1], "" if layer == last else config.activation, config.dropout)
        for layer in range(last + 1)
    )


def as_fractions(x: Array, dtype: np.dtype[Any], saved: Saved) -> Array:
    """Return x converted to ``dtype``, in an array of ``saved``. Integers are divided by the maximum of their dtype."""
    if x.dtype == dtype:
        return x
    fractions = saved.empty("fractions", x.shape, dtype)
    fractions[...] = x
    if np.issubdtype(x.dtype, np.integer):
        fractions /= dtype.type(np.iinfo(x.dtype).max)
    return fractions


class Dense(DeclaredStage):
    """Layer of an mlp: linear layer, activation and dropout. The last layer is only linear."""

    def __init__(self, layer: int, inputs: int, outputs: int, activation: str, dropout: float) -> None:
        self.activation, self.dropout = activation, dropout if activation else 0.0
        weight = TensorSpec(layer, "linear.weight", (outputs, inputs))
        super().__init__(layer, (weight, TensorSpec(layer, "linear.bias", (outputs,), False)), (outputs,))

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Set the bias to 0, and the weight to random numbers from ``rng_of(spec)`` (He et al. 2015)."""
        weight = self._specs[0]
        gain = 2.0 if self.activation else 1.0
        draws = rng_of(weight).standard_normal(weight.shape)
        parameters[weight.name][...] = draws * math.sqrt(gain / weight.shape[1])
        parameters["linear.bias"][...] = 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output of shape (batch, outputs) for integers or floats x of shape (batch, inputs)."""
        x = as_fractions(x, parameters["linear.weight"].dtype, saved)
        y = operations.linear_column.forward(parameters, "linear", x, saved)
        if self.activation:
            y = operations.activation.forward(y, self.activation, saved)
        return operations.dropout.forward(y, self.dropout, HIDDEN, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        d = operations.dropout.backward(dy, self.dropout, HIDDEN, saved)
        d = operations.activation.backward(d, saved) if self.activation else d
        if self.layer > 0:
            return operations.linear_column.backward(parameters, gradients, "linear", d, saved)
        operations.linear_column.backward_weight(parameters, gradients, "linear", d, saved)
        return None


def convnet_stages(config: ModelConfig, height: int, width: int, channels: int, classes: int) -> tuple[Stage, ...]:
    """Return the stages of a convnet: the convolutions, and a head that outputs ``classes`` logits.

    ``height``, ``width``, ``channels``: shape of an input picture.
    """
    if min(height, width, channels, classes) < 1:
        raise ConfigurationError(
            f"the data has {height} x {width} pixels, {channels} channels and {classes} classes; for a convnet, each "
            "number must be at least 1: use an HDF5 file with datasets x (rows, height, width, channels) and y"
        )
    shape = height, width, channels
    stages: list[Stage] = []
    for layer in range(config.layers):
        # Layers 3, 5, 7, ... double the channels and halve the resolution if it is above 1.
        halves = layer > 0 and layer % 2 == 0
        convolution = Convolution(layer, config, shape, config.hidden << layer // 2, 2 if halves else 1)
        stages.append(convolution)
        shape = convolution.shape
    return (*stages, PoolingHead(config, shape, classes))


class Convolution(DeclaredStage):
    """Layer of a convnet: convolution, norm and activation."""

    def __init__(
        self, layer: int, config: ModelConfig, picture: tuple[int, int, int], outputs: int, stride: int
    ) -> None:
        self.activation, self.norm, self.stride = config.activation, config.norm, stride
        self.epsilon = config.norm_epsilon
        height, width, inputs = self.picture = picture
        self.shape = output_side(height, stride), output_side(width, stride), outputs
        specs = (
            TensorSpec(layer, "convolution.weight", (outputs, SIZE, SIZE, inputs)),
            TensorSpec(layer, "convolution.bias", (outputs,), False),
            *norm_specs(layer, "norm", outputs, config.norm),
        )
        super().__init__(layer, specs, self.shape)

    def input_shape(self, samples: int) -> tuple[int, ...]:
        """Return the input shape for ``samples`` samples: (samples, height, width, input channels)."""
        return samples, *self.picture

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Set weights to random numbers from ``rng_of(spec)`` (He et al. 2015), norm scales to 1 and biases to 0."""
        for spec in self._specs:
            if spec.adapted:
                draw_normal(parameters, spec, rng_of, math.sqrt(2.0 * spec.shape[0] / spec.size))
            else:
                parameters[spec.name][...] = 1 if spec.name.endswith(".scale") else 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output for pictures x. Both have the shape (batch, height, width, channels)."""
        if self.layer == 0:
            if x[0:1].size != math.prod(self.picture) and len(x):
                raise UsageError(
                    f"got pictures of shape {x.shape[1:]}, expected {self.picture} (height, width, channels)"
                )
            # The first layer also accepts integers, and x of shape (batch, height * width * channels).
            x = as_fractions(x, parameters["convolution.weight"].dtype, saved).reshape(-1, *self.picture)
        y = convolve(parameters, "convolution", x, self.stride, saved)
        normal = operations.norm.forward(parameters, "norm", y, saved, kind=self.norm, epsilon=self.epsilon)
        return operations.activation.forward(normal, self.activation, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        d = operations.activation.backward(dy, saved)
        d = operations.norm.backward(parameters, gradients, "norm", d, saved, None)
        return convolve_backward(parameters, gradients, "convolution", d, saved, wants_dx=self.layer > 0)


class PoolingHead(DeclaredStage):
    """Head of a convnet: mean over all pixels, dropout, and a linear layer that outputs logits."""

    def __init__(self, config: ModelConfig, picture: tuple[int, int, int], classes: int) -> None:
        self.dropout, layer = config.dropout, config.layers
        weight = TensorSpec(layer, "head.weight", (classes, picture[2]))
        super().__init__(layer, (weight, TensorSpec(layer, "head.bias", (classes,), False)), (classes,))

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        draw_normal(parameters, self._specs[0], rng_of, 1.0 / math.sqrt(self._specs[0].shape[1]))
        parameters["head.bias"][...] = 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        samples, height, width, channels = x.shape
        mean = saved.empty("mean", (samples, channels), x.dtype)
        x.reshape(samples, height * width, channels).mean(axis=1, out=mean)
        saved.keep("shape", x.shape)
        mean = operations.dropout.forward(mean, self.dropout, HIDDEN, saved)
        return operations.linear_column.forward(parameters, "head", mean, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        d = operations.linear_column.backward(parameters, gradients, "head", dy, saved)
        d = operations.dropout.backward(d, self.dropout, HIDDEN, saved)
        samples, height, width, channels = saved["shape"]
        dx = saved.scratch("convnet.dx", (samples, height, width, channels), d.dtype)
        dx[...] = (d * d.dtype.type(1.0 / (height * width)))[:, None, None, :]
        return dx
