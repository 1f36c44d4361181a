"""A decoder-only transformer (Radford et al. 2019): learned positions, pre-norm blocks, tanh GELU, causal attention.

Layers: 0 embeds, 1..L are blocks, L + 1 is the last norm and the head. Activations are (batch, context, hidden).
"""

import math
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.dropout import DOWN, EMBEDDING, PROJECTION, countable
from hpcdist.models.operations import Operations
from hpcdist.models.stage import Gradients, Parameters, Saved, Stage, StreamOf

DEVIATION: Final = 0.02  # of initial weights, as in GPT-2


def stages(config: ModelConfig, context: int) -> tuple[Stage, ...]:
    """Return the stages of a GPT for at most ``context`` tokens a sample."""
    if context < 1:
        raise ConfigurationError(f"data.context is {context}; a gpt needs at least 1 token of context")
    if config.dropout and not countable(config.heads * context, context):
        raise ConfigurationError(
            f"model.dropout = {config.dropout} with model.heads = {config.heads} and data.context = {context}: a "
            "sample has more probabilities of attention than the random numbers can be counted for; use fewer heads, a "
            "shorter context, or model.dropout = 0"
        )
    blocks = (Block(layer, config, context) for layer in range(1, config.layers + 1))
    return (Embed(config, context), *blocks, Head(config, context))


def _draw(parameters: Parameters, spec: TensorSpec, rng_of: StreamOf, deviation: float) -> None:
    parameters[spec.name][...] = rng_of(spec).standard_normal(spec.shape) * deviation


def _norm(layer: int, name: str, hidden: int) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(layer, f"{name}.scale", (hidden,), False), TensorSpec(layer, f"{name}.bias", (hidden,), False)


def _column(layer: int, name: str, inputs: int, *outputs: int) -> tuple[TensorSpec, TensorSpec]:
    """Return weight and bias that tensor parallelism cuts by outputs, along the last dim of those."""
    last = len(outputs) - 1
    return (
        TensorSpec(layer, f"{name}.weight", (*outputs, inputs), cut=last),
        TensorSpec(layer, f"{name}.bias", outputs, False, cut=last),
    )


def _row(layer: int, name: str, inputs: int, outputs: int) -> tuple[TensorSpec, TensorSpec]:
    """Return a weight that tensor parallelism cuts by inputs, and a bias that all ranks have."""
    return (
        TensorSpec(layer, f"{name}.weight", (outputs, inputs), cut=1),
        TensorSpec(layer, f"{name}.bias", (outputs,), False),
    )


class Embed:
    """Tokens (batch, context) to activations: token embedding plus learned position."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        self.layer = 0
        self.tied: dict[str, str] = {}
        self.context, self.dropout = context, config.dropout
        self._output = (context, config.hidden)
        self._specs = (
            TensorSpec(0, "tokens.weight", (config.vocabulary, config.hidden), cut=0),
            TensorSpec(0, "positions.weight", (context, config.hidden)),
        )

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the two tables."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return (samples, context, hidden)."""
        return samples, *self._output

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw both tables."""
        for spec in self._specs:
            _draw(parameters, spec, rng_of, DEVIATION)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return (batch, context, hidden) for integer tokens x (batch, context), of any context up to the table's."""
        context = x.shape[1]
        if context > self.context:
            raise UsageError(f"got {context} tokens of context, the model has {self.context} positions; pass the last")
        y = operations.embed.forward(parameters, "tokens", x, saved)
        y = operations.positions.forward(parameters, "positions", y, context, saved)
        return operations.dropout.forward(y, self.dropout, EMBEDDING, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> None:
        """Write the gradients of both tables; tokens have none."""
        dy = operations.dropout.backward(dy, self.dropout, EMBEDDING, saved)
        operations.embed.backward(gradients, "tokens", dy, saved)
        operations.positions.backward(gradients, "positions", dy, saved)


class Block:
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, layer: int, config: ModelConfig, context: int) -> None:
        self.layer = layer
        self.tied: dict[str, str] = {}
        self._output = (context, config.hidden)
        self.head_size, self.dropout = config.hidden // config.heads, config.dropout
        self._residual_deviation = DEVIATION / math.sqrt(2 * config.layers)
        hidden = config.hidden
        self._specs = (
            *_norm(layer, "norm1", hidden),
            *_column(layer, "qkv", hidden, 3, hidden),  # query, key, value: each is cut by heads
            *_row(layer, "projection", hidden, hidden),
            *_norm(layer, "norm2", hidden),
            *_column(layer, "up", hidden, 4 * hidden),
            *_row(layer, "down", 4 * hidden, hidden),
        )

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the twelve specs of the block."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return (samples, context, hidden)."""
        return samples, *self._output

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the weights, those that end in the residual smaller; norms start as the identity."""
        for spec in self._specs:
            if spec.name.endswith(".weight"):
                residual = spec.name.startswith(("projection", "down"))
                _draw(parameters, spec, rng_of, self._residual_deviation if residual else DEVIATION)
            else:
                parameters[spec.name][...] = 1 if spec.name.endswith(".scale") else 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return (batch, context, hidden); x stays unchanged."""
        normal = operations.norm.forward(parameters, "norm1", x, saved)
        qkv = operations.linear_column.forward(parameters, "qkv", normal, saved)
        mixed = operations.attention.forward(qkv, self.head_size, saved, dropout=self.dropout)
        middle = operations.linear_row.forward(parameters, "projection", mixed, saved)
        middle = operations.dropout.forward(middle, self.dropout, PROJECTION, saved)
        middle += x
        normal = operations.norm.forward(parameters, "norm2", middle, saved)
        wide = operations.linear_column.forward(parameters, "up", normal, saved)
        active = operations.activation.forward(wide, "gelu", saved)
        y = operations.linear_row.forward(parameters, "down", active, saved)
        y = operations.dropout.forward(y, self.dropout, DOWN, saved)
        y += middle
        return y

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        """Write the gradients; return dx in the memory of dy, which runs along the residual."""
        branch = operations.dropout.backward(dy, self.dropout, DOWN, saved)
        d = operations.linear_row.backward(parameters, gradients, "down", branch, saved)
        assert d is not None
        d = operations.activation.backward(d, saved)
        d = operations.linear_column.backward(parameters, gradients, "up", d, saved)
        assert d is not None
        dy = operations.norm.backward(parameters, gradients, "norm2", d, saved, residual=dy)
        branch = operations.dropout.backward(dy, self.dropout, PROJECTION, saved)
        d = operations.linear_row.backward(parameters, gradients, "projection", branch, saved)
        assert d is not None
        d = operations.attention.backward(d, saved)
        d = operations.linear_column.backward(parameters, gradients, "qkv", d, saved)
        assert d is not None
        return operations.norm.backward(parameters, gradients, "norm1", d, saved, residual=dy)


class Head:
    """The last norm and the matrix to logits, which may be the table of token embeddings."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        self.layer = config.layers + 1
        self._output = (context, config.vocabulary)
        self.tied = {"head.weight": "0.tokens.weight"} if config.tied else {}
        head = TensorSpec(self.layer, "head.weight", (config.vocabulary, config.hidden), cut=0)
        self._specs = (*_norm(self.layer, "norm", config.hidden), *(() if config.tied else (head,)))

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the norm, and of the head unless it is tied."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return (samples, context, vocabulary)."""
        return samples, *self._output

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the head unless it is tied; the norm starts as the identity."""
        parameters["norm.scale"][...] = 1
        parameters["norm.bias"][...] = 0
        for spec in self._specs:
            if spec.name == "head.weight":
                _draw(parameters, spec, rng_of, DEVIATION)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return logits (batch, context, vocabulary); x stays unchanged."""
        normal = operations.norm.forward(parameters, "norm", x, saved)
        return operations.linear_column.forward(parameters, "head", normal, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        """Write the gradients; return dx (batch, context, hidden)."""
        d = operations.linear_column.backward(parameters, gradients, "head", dy, saved)
        assert d is not None
        return operations.norm.backward(parameters, gradients, "norm", d, saved)
