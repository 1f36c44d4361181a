"""Transformers: the decoder-only GPT (Radford et al. 2019) and the masked encoder (Devlin et al. 2018).

Layer 0 embeds, layers 1..L are blocks, layer L + 1 is the last norm and the head. Activations are (batch, context,
hidden). The encoder has no causal mask. Its samples have `masked_predictions` targets; all other targets are
`hpcdist.models.stage.IGNORED`.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers import low_rank
from hpcdist.models.layers.dropout import DOWN, EMBEDDING, PROJECTION, fits_counter
from hpcdist.models.layers.linear import LocalLinear
from hpcdist.models.layers.lora import ADAPTED_LAYERS, TARGETS, LoraConfig
from hpcdist.models.layers.norm import LocalNorm
from hpcdist.models.model import Model
from hpcdist.models.stage import (
    AttentionOptions,
    DeclaredStage,
    Gradients,
    Operations,
    Parameters,
    Saved,
    Stage,
    StreamOf,
    column_specs,
    draw_normal,
    norm_specs,
    row_specs,
)

INITIAL_DEVIATION: Final = 0.02  # of initial weights, as in GPT-2


def transformer_stages(config: ModelConfig, context: int, *, causal: bool) -> tuple[Stage, ...]:
    """Return the stages of a transformer for ``context`` tokens per sample: a GPT if ``causal``, else an encoder."""
    if context < 1:
        raise ConfigurationError(f"data.context is {context}; {config.kind} models need a context of at least 1 token")
    if config.dropout and not fits_counter(config.heads * context, context):
        raise ConfigurationError(
            f"model.dropout = {config.dropout} with model.heads = {config.heads} and data.context = {context}: a "
            "sample has too many attention probabilities for dropout; lower model.heads or data.context, or set "
            "model.dropout = 0"
        )
    blocks = (TransformerBlock(layer, config, context, causal) for layer in range(1, config.layers + 1))
    return (TokenEmbedding(config, context), *blocks, LanguageModelHead(config, context))


class TokenEmbedding(DeclaredStage):
    """First stage of a transformer: token embedding, and learned position embedding if the model has one."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        self.context, self.dropout = context, config.dropout
        self.learned = config.positions == "learned"
        tables = (
            TensorSpec(0, "tokens.weight", (config.vocabulary, config.hidden), cut=0),
            TensorSpec(0, "positions.weight", (context, config.hidden)),
        )
        super().__init__(0, tables if self.learned else tables[:1], (context, config.hidden))

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        for spec in self._specs:
            draw_normal(parameters, spec, rng_of, INITIAL_DEVIATION)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the embeddings, of shape (batch, context, hidden), of integer tokens x, of shape (batch, context)."""
        context = x.shape[1]
        if self.learned and context > self.context:
            raise UsageError(
                f"samples have {context} tokens, but the model has positions for only {self.context}; use shorter "
                "samples"
            )
        y = operations.embed.forward(parameters, "tokens", x, saved)
        if self.learned:
            y = operations.positions.forward(parameters, "positions", y, context, saved)
        return operations.dropout.forward(y, self.dropout, EMBEDDING, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> None:
        dy = operations.dropout.backward(dy, self.dropout, EMBEDDING, saved)
        if gradients.wants("tokens.weight"):
            operations.embed.backward(gradients, "tokens", dy, saved)
        if gradients.wants("positions.weight"):
            operations.positions.backward(gradients, "positions", dy, saved)


class TransformerBlock(DeclaredStage):
    """Transformer block: attention and feed-forward layer, both after a norm and inside a residual connection."""

    def __init__(self, layer: int, config: ModelConfig, context: int, causal: bool) -> None:
        self.rotation, self.dropout, self.causal = config.rotation, config.dropout, causal
        self.grouped = config.separates_query
        self.rotary, self.norm, self.activation = config.has_rotary(layer), config.norm, config.activation
        self._residual_deviation = INITIAL_DEVIATION / math.sqrt(2 * config.layers)
        hidden, width, biased = config.hidden, config.query_width, config.has_bias("qkv")
        qkv = column_specs(layer, "qkv", hidden, 3, width, bias=biased)  # query, key, value, each sharded by heads
        if self.grouped:
            qkv = column_specs(layer, "query", hidden, width, bias=biased)
            qkv += column_specs(layer, "kv", hidden, 2, config.kv_width, bias=biased)
        self.normed = config.query_key_norm == "head"
        scales = [
            TensorSpec(layer, f"{name}.scale", (config.head_width,), False, partial=True)
            for name in ("query_norm", "key_norm")
            if self.normed
        ]
        self.config, self.mixed, self.shared = config, config.experts > 0, config.shared_experts > 0
        self.window, self.epsilon = config.window_of(layer), config.norm_epsilon
        specs = (
            *norm_specs(layer, "norm1", hidden, config.norm),
            *qkv,
            *scales,
            *row_specs(layer, "projection", width, hidden, bias=config.has_bias("projection")),
            *norm_specs(layer, "norm2", hidden, config.norm),
            *_feed_forward_specs(layer, config),
        )
        super().__init__(layer, specs, (context, hidden))

    @property
    def row_inputs(self) -> dict[str, tuple[int, int]]:
        """Layers whose inputs tensor ranks divide: {prefix: (0, number of inputs)}."""
        rows = ((spec, spec.name.rpartition(".")) for spec in self._specs)
        return {
            prefix: (0, spec.shape[1])
            for spec, (prefix, _, kind) in rows
            if kind == "weight" and spec.cut == 1 and len(spec.shape) == 2
        }

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the weights from ``rng_of(spec)``. Layers before a residual sum get a smaller standard deviation."""
        for spec in self._specs:
            if spec.name.endswith(f".{low_rank.A}"):  # as Kaiming's uniform rule with a slope of sqrt(5)
                bound = spec.shape[-1] ** -0.5
                parameters[spec.name][...] = rng_of(spec).uniform(-bound, bound, spec.shape)
            elif spec.name.endswith(".weight"):
                residual = spec.name.endswith(("projection.weight", "down.weight"))
                draw_normal(parameters, spec, rng_of, self._residual_deviation if residual else INITIAL_DEVIATION)
            else:
                parameters[spec.name][...] = 1 if spec.name.endswith(".scale") else 0

    def with_adapters(self, lora: LoraConfig) -> "TransformerBlock":
        """Return a copy of this block with the tensors of the adapters that ``lora`` describes."""
        other, adapted = copy.copy(self), list[TensorSpec]()
        for weight in self._specs:
            prefix, _, kind = weight.name.rpartition(".")
            parts = weight.stacked if len(weight.shape) > 2 else 1
            targets = [names for names in ADAPTED_LAYERS.get(prefix, ()) if len(names) == parts]
            for target in targets[0] if kind == "weight" and targets else ():
                if not lora.targets or target in lora.adapted:
                    adapted += _adapter_specs(weight, f"{prefix}.{target}", lora.rank)
        dense = [spec for spec in self._specs if not spec.expert]
        other._specs = (*dense, *adapted, *self._specs[len(dense) :])
        return other

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        normal = operations.norm.forward(parameters, "norm1", x, saved, kind=self.norm, epsilon=self.epsilon)
        mixed = self._attention(parameters, normal, operations, saved)
        middle = operations.linear_row.forward(parameters, "projection", mixed, saved)
        middle = operations.dropout.forward(middle, self.dropout, PROJECTION, saved)
        normal = operations.norm.forward(
            parameters, "norm2", middle, saved, kind=self.norm, epsilon=self.epsilon, residual=x
        )  # middle += x
        y = self._feed_forward(parameters, normal, operations, saved)
        y = operations.dropout.forward(y, self.dropout, DOWN, saved)
        y += middle
        return y

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        """Compute the parameter gradients, and overwrite dy with the input gradient of the block. Return dy."""
        branch = operations.dropout.backward(dy, self.dropout, DOWN, saved)
        d = self._feed_forward_backward(parameters, gradients, branch, operations, saved)
        dy = operations.norm.backward(parameters, gradients, "norm2", d, saved, residual=dy)
        branch = operations.dropout.backward(dy, self.dropout, PROJECTION, saved)
        d = operations.linear_row.backward(parameters, gradients, "projection", branch, saved)
        d = self._attention_backward(parameters, gradients, d, operations, saved)
        return operations.norm.backward(parameters, gradients, "norm1", d, saved, residual=dy)

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        assert operations.experts is not None
        operations.experts.begin(parameters, self._no_samples(parameters), operations.activation, saved)()

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        assert operations.experts is not None
        nothing = self._no_samples(parameters)
        operations.experts.begin_backward(parameters, gradients, nothing, operations.activation, saved)()

    def _no_samples(self, parameters: Parameters) -> Array:
        scale = parameters["norm2.scale"]
        return namespace(scale).empty(self.output_shape(0), scale.dtype)

    def _feed_forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        mixture, shared = None, "shared." if self.mixed else ""
        if operations.experts is not None and self.mixed:
            mixture = operations.experts.begin(parameters, x, operations.activation, saved)
            if not self.shared:
                return mixture()
        # Shared experts compute while tokens are sent to the experts of other ranks.
        wide = operations.linear_column.forward(parameters, f"{shared}up", x, saved, biased=False)
        bias = parameters.get(f"{shared}up.bias")
        active = operations.activation.forward(
            wide, self.activation, saved, bias=None if bias is None else bias.reshape(-1)
        )
        y = operations.linear_row.forward(parameters, f"{shared}down", active, saved)
        if mixture is not None:
            y += mixture()
        return y

    def _feed_forward_backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        mixture, shared = None, "shared." if self.mixed else ""
        if operations.experts is not None and self.mixed:
            mixture = operations.experts.begin_backward(parameters, gradients, dy, operations.activation, saved)
            if not self.shared:
                return mixture()
        d = operations.linear_row.backward(parameters, gradients, f"{shared}down", dy, saved)
        d = operations.activation.backward(d, saved)
        d = operations.linear_column.backward(parameters, gradients, f"{shared}up", d, saved)
        if mixture is not None:
            d += mixture()
        return d

    def _attention(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        linear, rotary, size = operations.linear_column, operations.rotary, self.rotation.size
        options: AttentionOptions = {"dropout": self.dropout, "causal": self.causal, "window": self.window}
        if not self.grouped:
            qkv = linear.forward(parameters, "qkv", x, saved)
            if self.rotary:
                rotary.forward(qkv, self.rotation, qkv.shape[-1] // 3 * 2, saved)
            return operations.attention.forward(qkv, size, saved, **options)
        query, kv = linear.forward(parameters, "query", x, saved), linear.forward(parameters, "kv", x, saved)
        if self.normed:
            query = self._head_norm(parameters, "query_norm", query, saved)
            keys = kv[..., : kv.shape[-1] // 2]
            before = saved.empty("key_norm.keys", keys.shape, keys.dtype)
            before[...] = keys
            keys[...] = self._head_norm(parameters, "key_norm", before, saved)
        if self.rotary:
            rotary.forward(query, self.rotation, query.shape[-1], saved)
            rotary.forward(kv, self.rotation, kv.shape[-1] // 2, saved)
        options["kv"] = kv
        return operations.attention.forward(query, size, saved, **options)

    def _head_norm(self, parameters: Parameters, name: str, x: Array, saved: Saved) -> Array:
        heads = x.reshape(*x.shape[:-1], -1, self.rotation.size)
        y = LocalNorm().forward(parameters, name, heads, saved, kind="rms", epsilon=self.epsilon)
        return y.reshape(x.shape)

    def _head_norm_backward(
        self, parameters: Parameters, gradients: Gradients, name: str, dy: Array, saved: Saved
    ) -> Array:
        heads = dy.reshape(*dy.shape[:-1], -1, self.rotation.size)
        return LocalNorm().backward(parameters, gradients, name, heads, saved, None).reshape(dy.shape)

    def _attention_backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        linear, rotary = operations.linear_column, operations.rotary
        dqkv = operations.attention.backward(dy, saved)
        if not self.grouped:
            assert not isinstance(dqkv, tuple)
            if self.rotary:
                rotary.backward(dqkv, self.rotation, dqkv.shape[-1] // 3 * 2, saved)
            return linear.backward(parameters, gradients, "qkv", dqkv, saved)
        dquery, dkv = dqkv
        if self.rotary:
            rotary.backward(dquery, self.rotation, dquery.shape[-1], saved)
            rotary.backward(dkv, self.rotation, dkv.shape[-1] // 2, saved)
        if self.normed:
            dkeys = dkv[..., : dkv.shape[-1] // 2]
            after = saved.scratch("block.dkeys", dkeys.shape, dkeys.dtype)
            after[...] = dkeys
            dkeys[...] = self._head_norm_backward(parameters, gradients, "key_norm", after, saved)
            dquery = self._head_norm_backward(parameters, gradients, "query_norm", dquery, saved)
        by_query = linear.backward(parameters, gradients, "query", dquery, saved)
        from_query = saved.scratch("block.dquery", by_query.shape, by_query.dtype)
        from_query[...] = by_query  # the next linear backward overwrites the scratch array
        dx = linear.backward(parameters, gradients, "kv", dkv, saved)
        dx += from_query
        return dx


def _adapter_specs(weight: TensorSpec, name: str, rank: int) -> Iterator[TensorSpec]:
    # Of a layer whose outputs are cut, tensor ranks have the whole `a`, and compute a part of its gradient each. Of a
    # layer whose inputs are cut, this holds for `b`.
    outputs, inputs = weight.shape[-2:]
    by_inputs = weight.cut == len(weight.shape) - 1
    yield TensorSpec(
        weight.layer, f"{name}.{low_rank.A}", (rank, inputs), cut=1 if by_inputs else None, partial=not by_inputs
    )
    yield TensorSpec(
        weight.layer, f"{name}.{low_rank.B}", (outputs, rank), cut=None if by_inputs else 0, partial=by_inputs
    )


def with_adapters(model: Model, lora: LoraConfig) -> Model:
    """Return a copy of the transformer ``model`` with low-rank adapters, or ``model`` itself if the rank is 0.

    Raises ConfigurationError if a block lacks a target.
    """
    if not lora.rank:
        return model
    adapted = copy.copy(model)
    adapted.stages = tuple(
        stage.with_adapters(lora) if isinstance(stage, TransformerBlock) else stage for stage in model.stages
    )
    block = adapted.stages[1]
    assert isinstance(block, TransformerBlock)
    adapted_names = {spec.name.split(".")[1] for spec in block.tensors() if spec.name.endswith(low_rank.A)}
    if missing := [target for target in lora.adapted if target not in adapted_names]:
        raise ConfigurationError(
            f"lora.targets has {missing[0]}, but the blocks of the model have no such linear layer; choose from "
            f"{', '.join(sorted({*TARGETS} - {*missing}))}, or leave lora.targets empty"
        )
    adapters = low_rank.LowRank(lora.alpha / lora.rank, lora.dropout, model.operations.dropout, inputs=block.row_inputs)
    linear = LocalLinear(adapters)
    adapted.operations = replace(model.operations, linear_column=linear, linear_row=linear)
    return adapted


def _feed_forward_specs(layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, bias = config.hidden, config.has_bias("feed_forward")
    gated = (2,) if config.activation == "swiglu" else ()  # gates, then values
    if not config.experts:
        yield from column_specs(layer, "up", hidden, *gated, config.inner, bias=bias)
        yield from row_specs(layer, "down", config.inner, hidden, bias=bias)
        return
    if config.shared_experts:
        width = config.shared_experts * config.expert_inner
        yield from column_specs(layer, "shared.up", hidden, *gated, width, bias=bias)
        yield from row_specs(layer, "shared.down", width, hidden, bias=bias)
    count, inner = config.experts, config.expert_inner
    yield TensorSpec(layer, "router.weight", (count, hidden))
    up, down = (count, *gated, inner), (count, hidden)
    cut = len(up) - 1
    yield TensorSpec(layer, "experts.up.weight", (*up, hidden), cut=cut, stacked=count, expert=True)
    yield TensorSpec(layer, "experts.down.weight", (*down, inner), cut=2, stacked=count, expert=True)
    if bias:
        yield TensorSpec(layer, "experts.up.bias", up, False, cut=cut, stacked=count, expert=True)
        yield TensorSpec(layer, "experts.down.bias", down, False, stacked=count, expert=True)


class LanguageModelHead(DeclaredStage):
    """Last stage of a transformer: a norm, and an output matrix that may be the tied token embedding table."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        self.norm, self.epsilon, layer = config.norm, config.norm_epsilon, config.layers + 1
        norm = norm_specs(layer, "norm", config.hidden, config.norm)
        head = TensorSpec(layer, "head.weight", (config.vocabulary, config.hidden), cut=0)
        tied = {"head.weight": "0.tokens.weight"} if config.tied else {}
        super().__init__(layer, norm if config.tied else (*norm, head), (context, config.vocabulary), tied)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        for spec in self._specs:
            if spec.name == "head.weight":
                draw_normal(parameters, spec, rng_of, INITIAL_DEVIATION)
            else:
                parameters[spec.name][...] = 1 if spec.name == "norm.scale" else 0

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        normal = operations.norm.forward(parameters, "norm", x, saved, kind=self.norm, epsilon=self.epsilon)
        return operations.linear_column.forward(parameters, "head", normal, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array:
        d = operations.linear_column.backward(parameters, gradients, "head", dy, saved)
        return operations.norm.backward(parameters, gradients, "norm", d, saved, None)


MASKED_PERCENT: Final = 15  # of the tokens of a sample


def masked_predictions(context: int) -> int:
    """Return 15 % of ``context``, rounded, but at least 1: the number of masked tokens in an encoder sample."""
    return max(1, (MASKED_PERCENT * context + 50) // 100)
