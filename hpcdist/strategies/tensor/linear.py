"""The two linears of a parallel part: the first cut by outputs, the second by inputs."""

from hpcdist.arrays.backend import Array, namespace
from hpcdist.models.linear import (
    add_to_rows,
    affine,
    as_matrix,
    gradient_of_bias,
    gradient_of_input,
    gradient_of_weight,
)
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.strategies.tensor.borders import Borders


class ColumnLinear:
    """``y = x weight^T + bias`` for the own outputs of all tokens. Collective over the tensor axis."""

    def __init__(self, borders: Borders) -> None:
        self.borders = borders
        self.weight_reads = ("whole",) if borders.by_rows else ("x",)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved) -> Array:
        """Return y (..., own outputs) of all tokens for what this rank has of x (..., inputs)."""
        saved.keep(f"{prefix}.x", x)
        return affine(parameters, prefix, self.borders.enter(x, saved), saved)

    def backward(
        self,
        parameters: Parameters,
        gradients: Gradients,
        prefix: str,
        dy: Array,
        saved: Saved,
        input_gradient: bool = True,
    ) -> Array | None:
        """Write or add the gradients of the own outputs; return what this rank has of dx, a scratch array."""
        whole = self.borders.enter(saved[f"{prefix}.x"], saved)
        _weight_gradients(parameters, gradients, prefix, dy, whole, saved)
        return self._input_gradient(parameters, prefix, dy, saved) if input_gradient else None

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return what this rank has of dx, and keep what `backward_weight` needs."""
        if self.borders.by_rows:
            whole = self.borders.enter(saved[f"{prefix}.x"], saved)
            saved.empty(f"{prefix}.whole", whole.shape, whole.dtype)[...] = whole
        return self._input_gradient(parameters, prefix, dy, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Write or add the gradients of the own outputs (local)."""
        _weight_gradients(parameters, gradients, prefix, dy, saved[f"{prefix}.{self.weight_reads[0]}"], saved)

    def _input_gradient(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        return self.borders.enter_backward(gradient_of_input(parameters, prefix, dy, saved), saved)


class RowLinear:
    """``y = x weight^T + bias`` from the own inputs of all tokens. Collective over the tensor axis.

    The bias is added once, after the sum over the ranks.
    """

    def __init__(self, borders: Borders) -> None:
        self.borders = borders
        self.weight_reads = ("x", "whole") if borders.by_rows else ("x",)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved) -> Array:
        """Return what this rank has of y (..., outputs) for the own inputs x (..., inputs) of all tokens."""
        weight = as_matrix(parameters[f"{prefix}.weight"])
        outputs, inputs = weight.shape
        saved.keep(f"{prefix}.x", x)
        partial = self.borders.partial((*x.shape[:-1], outputs), x.dtype, f"{prefix}.y", saved)
        namespace(x).matmul(x.reshape(-1, inputs), weight.T, out=partial.reshape(-1, outputs))
        y = self.borders.leave(partial, f"{prefix}.y", saved)
        bias = parameters.get(f"{prefix}.bias")
        if bias is not None:
            add_to_rows(y.reshape(-1, outputs), bias)
        return y

    def backward(
        self,
        parameters: Parameters,
        gradients: Gradients,
        prefix: str,
        dy: Array,
        saved: Saved,
        input_gradient: bool = True,
    ) -> Array | None:
        """Write or add the gradients of the own inputs and, of the tokens of dy, of the bias; return dx of all tokens.

        dx is a scratch array.
        """
        whole = self.borders.leave_backward(dy, saved)
        if f"{prefix}.bias" in parameters:
            gradient_of_bias(gradients, prefix, dy)
        gradient_of_weight(gradients, prefix, whole, saved[f"{prefix}.x"], saved)
        return gradient_of_input(parameters, prefix, whole, saved) if input_gradient else None

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx of all tokens, and keep what `backward_weight` needs."""
        whole = self.borders.leave_backward(dy, saved)
        if self.borders.by_rows:
            saved.empty(f"{prefix}.whole", whole.shape, whole.dtype)[...] = whole
        return gradient_of_input(parameters, prefix, whole, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Write or add the gradients of the own inputs and, of the tokens of dy, of the bias (local)."""
        if f"{prefix}.bias" in parameters:
            gradient_of_bias(gradients, prefix, dy)
        whole = saved[f"{prefix}.whole"] if self.borders.by_rows else dy
        gradient_of_weight(gradients, prefix, whole, saved[f"{prefix}.x"], saved)


def _weight_gradients(
    parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, x: Array, saved: Saved
) -> None:
    gradient_of_weight(gradients, prefix, dy, x, saved)
    if f"{prefix}.bias" in parameters:
        gradient_of_bias(gradients, prefix, dy)
