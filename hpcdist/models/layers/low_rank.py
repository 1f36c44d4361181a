"""Low-rank adapters of linear layers (LoRA, Hu et al., arXiv:2106.09685): ``y += scale * drop(x) a^T b^T``.

An adapter of the layer ``PREFIX`` has the tensors ``PREFIX.TARGET.lora_a`` of shape (rank, inputs) and
``PREFIX.TARGET.lora_b`` of shape (outputs, rank). A layer that stacks several matrices, such as query, key and value,
may have one adapter for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hpcdist.arrays.backend import Array, matmul
from hpcdist.models.layers.lora import ADAPTED_LAYERS, TARGETS
from hpcdist.models.stage import DropoutOperation, Gradients, Parameters, Saved

A: Final = "lora_a"
B: Final = "lora_b"
KEPT: Final = "lora"  # in `Saved`
FIRST_SITE: Final = 1 << 27  # dropout sites of adapters: multiples of this number, far above all other sites


@dataclass(frozen=True)
class Adapter:
    """Adapter of one matrix of a linear layer, with its tensors on this rank."""

    name: str  # PREFIX.TARGET
    site: int  # of its dropout
    columns: slice  # of the layer's output
    a: Array  # (rank, inputs)
    b: Array  # (outputs, rank)


@dataclass(frozen=True)
class LowRank:
    """Adapters of all linear layers of a model. ``scale``: alpha / rank. ``rate``: dropout rate of their inputs.

    ``inputs``: {prefix: (first column on this rank, columns on all ranks)} of inputs that tensor ranks divide.
    """

    scale: float
    rate: float
    dropout: DropoutOperation
    inputs: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def forward(self, parameters: Parameters, prefix: str, x: Array, rows: Array, saved: Saved) -> None:
        """Add the outputs of the adapters for the input ``x`` to ``rows``, the output of the layer ``prefix``.

        Keep ``scale drop(x) a^T`` in ``saved``, with room for the gradient ``scale dy b``, of shape (rows, rank) each.
        """
        adapters = _adapters(parameters, prefix, rows.shape[1])
        rank = adapters[0].a.shape[0] if adapters else 0
        kept = saved.empty(f"{prefix}.{KEPT}", (len(adapters), 2, rows.shape[0], rank), x.dtype)
        for one, (inner, _) in zip(adapters, kept, strict=True):
            matmul(_rows(self._dropped(one, prefix, x, saved)), one.a.T, inner)
            inner *= inner.dtype.type(self.scale)
            product = saved.scratch("lora.y", (rows.shape[0], one.b.shape[0]), rows.dtype)
            matmul(inner, one.b.T, product)
            rows[:, one.columns] += product

    def begin_backward(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> None:
        """Keep ``scale dy b`` of each adapter in ``saved``, for the output gradient ``dy``."""
        adapters = _adapters(parameters, prefix, dy.shape[-1])
        for one, (_, inner) in zip(adapters, saved[f"{prefix}.{KEPT}"], strict=True):
            matmul(_rows(dy)[:, one.columns], one.b, inner)
            inner *= inner.dtype.type(self.scale)

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, dx: Array, saved: Saved) -> None:
        """Add the adapters' input gradients to ``dx``, for the output gradient ``dy``, after `begin_backward`."""
        adapters = _adapters(parameters, prefix, dy.shape[-1])
        for one, (_, inner) in zip(adapters, saved[f"{prefix}.{KEPT}"], strict=True):
            part = saved.scratch("lora.dx", dx.shape, dx.dtype)
            matmul(inner, one.a, _rows(part))
            self._drop(one, prefix, part, saved)
            dx += part

    def backward_weight(self, gradients: Gradients, prefix: str, dy: Array, x: Array, saved: Saved) -> None:
        """Write or add the gradients of the adapters' tensors, after `begin_backward`.

        ``x``, ``dy``: the layer's input and output gradient.
        """
        adapters = _adapters(gradients.views, prefix, dy.shape[-1])
        for one, (inner, dinner) in zip(adapters, saved[f"{prefix}.{KEPT}"], strict=True):
            inputs = _rows(self._dropped(one, prefix, x, saved))
            for name, left, right in ((B, _rows(dy)[:, one.columns], inner), (A, dinner, inputs)):
                into, add = gradients.into(f"{one.name}.{name}")
                product = saved.scratch("lora.gradient", into.shape, into.dtype) if add else into
                matmul(left.T, right, product)
                if add:
                    into += product

    def _dropped(self, one: Adapter, prefix: str, x: Array, saved: Saved) -> Array:
        if not self.rate or saved.draw is None:
            return x
        dropped = saved.scratch("lora.x", x.shape, x.dtype)
        dropped[...] = x
        self._drop(one, prefix, dropped, saved)
        return dropped

    def _drop(self, one: Adapter, prefix: str, x: Array, saved: Saved) -> None:
        if prefix not in self.inputs or not self.rate or saved.draw is None:
            self.dropout.forward(x, self.rate, one.site, saved)
            return
        first, whole = self.inputs[prefix]  # the mask of one rank with all columns
        factors = saved.scratch("lora.factors", (*x.shape[:-1], whole), x.dtype)
        factors[...] = 1
        self.dropout.forward(factors, self.rate, one.site, saved)
        x *= factors[..., first : first + x.shape[-1]]


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _adapters(parameters: Parameters, prefix: str, outputs: int) -> list[Adapter]:
    # A layer with ``outputs`` columns has one part per target.
    adapters = []
    for targets in ADAPTED_LAYERS.get(prefix, ()):
        for part, target in enumerate(targets):
            name = f"{prefix}.{target}"
            b = parameters.get(f"{name}.{B}")
            if b is not None and outputs == len(targets) * b.shape[0]:
                columns = slice(part * b.shape[0], (part + 1) * b.shape[0])
                site = FIRST_SITE * (1 + [*TARGETS].index(target))
                adapters.append(Adapter(name, site, columns, parameters[f"{name}.{A}"], b))
    return adapters
