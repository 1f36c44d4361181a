"""Dense layers: matrix products of the array library, written straight into their destination."""

from hpcdist.arrays.backend import Array, namespace
from hpcdist.models.stage import Gradients, Parameters, Saved


class LocalLinear:
    """``y = x weight^T + bias`` with weight (..., inputs) and bias (...): all dims but the last count outputs."""

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
        xp = namespace(dy)
        weight = as_matrix(parameters[f"{prefix}.weight"])
        outputs, inputs = weight.shape
        x = saved[f"{prefix}.x"]
        rows = dy.reshape(-1, outputs)
        whole, add = gradients.into(f"{prefix}.weight")
        into = as_matrix(whole)
        if add:
            once = saved.scratch("linear.dweight", weight.shape, weight.dtype)
            into += xp.matmul(rows.T, x.reshape(-1, inputs), out=once)
        else:
            xp.matmul(rows.T, x.reshape(-1, inputs), out=into)
        if f"{prefix}.bias" in parameters:
            into, add = gradients.into(f"{prefix}.bias")
            column_sums(rows, into.reshape(-1), add)
        if not input_gradient:
            return None
        dx = saved.scratch("linear.dx", x.shape, dy.dtype)
        assert not xp.may_share_memory(dx, dy), f"{prefix} follows a linear without an operation between them"
        xp.matmul(rows, weight, out=dx.reshape(-1, inputs))
        return dx


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
