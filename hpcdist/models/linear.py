"""Dense layers: matrix products of the array library, written straight into their destination."""

from hpcdist.arrays.backend import Array, namespace
from hpcdist.models.stage import Gradients, Parameters, Saved


class LocalLinear:
    """``y = x weight^T + bias`` with weight (..., inputs) and bias (...): all dims but the last count outputs."""

    weight_reads = ("x",)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved) -> Array:
        """Return y (..., outputs) for contiguous x (..., inputs)."""
        weight = as_matrix(parameters[f"{prefix}.weight"])
        outputs, inputs = weight.shape
        y = saved.empty(f"{prefix}.y", (*x.shape[:-1], outputs), x.dtype)
        saved.keep(f"{prefix}.x", x)
        rows = y.reshape(-1, outputs)
        namespace(x).matmul(x.reshape(-1, inputs), weight.T, out=rows)
        bias = parameters.get(f"{prefix}.bias")
        if bias is not None:
            rows += bias.reshape(-1)
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
        """Write or add the gradients of weight and bias; return dx in the scratch that all linears share."""
        self.backward_weight(parameters, gradients, prefix, dy, saved)
        return self.backward_input(parameters, prefix, dy, saved) if input_gradient else None

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx in the scratch that all linears share."""
        xp = namespace(dy)
        weight = as_matrix(parameters[f"{prefix}.weight"])
        outputs, inputs = weight.shape
        dx = saved.scratch("linear.dx", (*dy.shape[:-1], inputs), dy.dtype)
        assert not xp.may_share_memory(dx, dy), f"{prefix} follows a linear without an operation between them"
        xp.matmul(dy.reshape(-1, outputs), weight, out=dx.reshape(-1, inputs))
        return dx

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Write or add the gradients of weight and bias."""
        xp = namespace(dy)
        whole, add = gradients.into(f"{prefix}.weight")
        into = as_matrix(whole)
        outputs, inputs = into.shape
        rows, x = dy.reshape(-1, outputs), saved[f"{prefix}.x"].reshape(-1, inputs)
        if add:
            once = saved.scratch("linear.dweight", into.shape, into.dtype)
            into += xp.matmul(rows.T, x, out=once)
        else:
            xp.matmul(rows.T, x, out=into)
        if f"{prefix}.bias" in parameters:
            into, add = gradients.into(f"{prefix}.bias")
            column_sums(rows, into.reshape(-1), add)


def as_matrix(weight: Array) -> Array:
    """View ``weight`` (..., inputs) as (outputs, inputs)."""
    return weight.reshape(-1, weight.shape[-1])


def column_sums(rows: Array, into: Array, add: bool) -> None:
    """Write or add the sums of ``rows`` (n, columns) to ``into`` (columns,)."""
    # A product with ones is twice as fast as a reduction over the slow dim, and sums in blocks, so rounds less.
    xp = namespace(rows)
    ones = xp.ones((1, rows.shape[0]), rows.dtype)  # (1, n): cupy 13 takes no vector together with `out`
    if add:
        into += xp.matmul(ones, rows)[0]
    else:
        xp.matmul(ones, rows, out=into[None, :])
