"""Forward and backward of a stage as two compiled functions, and what the first keeps for the second.

``jax.vjp`` gives a function back whose arrays (residuals) are all that its backward needs. Of these a stage keeps what
depends on its input only; parameters, the input itself and what follows from parameters alone are given to the backward
again, from where they are then. So parameters may be freed, or move, between the two passes, and a gathered layer
(ZeRO-3) is not kept alive by its own residuals. ``keep`` says which of the rest are kept:

    products    results of matrix products and convolutions, but for products of a batch of matrices (as the scores of
                attention: context x context); the backward computes those, and what is elementwise, again
    everything  all that the backward would otherwise compute again
    nothing     nothing: the backward computes the forward again
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.adapters.jax_arrays import library, part

KEEPS: Final = ("products", "everything", "nothing")
# (parameter leaves, x, draw) -> y. The draw is None, or (seed, step, first sample) as unsigned integers of 32 bits.
Compute = Callable[[Sequence[Any], Any, Any], Any]


@dataclass(frozen=True)
class Passes:
    """The compiled passes of a stage for one shape of input.

    ``forward(leaves, x, draw)`` returns (y, kept), ``backward(leaves, x, draw, kept, dy)`` the gradients of the leaves,
    and that of x, or None. ``unused`` are the indices of leaves that y does not depend on. ``kept_bytes`` is the size
    of what lies between the two.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    output: Any  # shape and dtype of y
    unused: tuple[int, ...]
    kept_bytes: int


def build(compute: Compute, leaves: Sequence[Any], x: Any, draw: Any, *, input_gradient: bool, keep: str) -> Passes:
    """Return the passes of ``compute`` for arguments of these shapes and types (`jax.ShapeDtypeStruct`)."""
    jax = library()
    policies = jax.checkpoint_policies
    policy = {
        "products": _is_product,
        "everything": policies.everything_saveable,
        "nothing": policies.nothing_saveable,
    }[keep]
    found: dict[str, Any] = {}

    def traced(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        def run(leaves: Sequence[Any], x: Any) -> Any:
            return compute(leaves, x, draw)

        # Both passes are compiled apart: what is computed again in the second has no twin there to be merged with.
        again = jax.checkpoint(run, policy=policy, prevent_cse=False)
        if input_gradient:
            y, back = jax.vjp(again, leaves, x)
        else:
            y, back = jax.vjp(lambda leaves: again(leaves, x), leaves)
        residuals, found["tree"] = jax.tree_util.tree_flatten(back)
        return y, residuals

    closed, (output, residuals) = jax.make_jaxpr(traced, return_shape=True)(list(leaves), x, draw)
    whole = part("extend.core").jaxpr_as_fun(closed)
    kept = _of_input(closed, len(leaves))

    def outputs(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        return whole(*leaves, x, *jax.tree_util.tree_leaves(draw))

    def forward(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        y, *values = outputs(leaves, x, draw)
        return y, [values[index] for index in kept]

    def backward(leaves: Sequence[Any], x: Any, draw: Any, held: Sequence[Any], dy: Any) -> Any:
        _, *values = outputs(leaves, x, draw)  # the compiler leaves out what is overwritten here
        for index, value in zip(kept, held, strict=True):
            values[index] = value
        gradients = jax.tree_util.tree_unflatten(found["tree"], values)(dy)
        return gradients if input_gradient else (*gradients, None)

    sizes = [residuals[index] for index in kept]
    after, (own, _) = jax.make_jaxpr(backward, return_shape=True)(list(leaves), x, draw, sizes, output)
    return Passes(
        forward=jax.jit(forward),
        backward=jax.jit(backward),
        output=output,
        unused=tuple(index for index in range(len(own)) if not _uses(after, index)[-1]),
        kept_bytes=sum(value.size * value.dtype.itemsize for value in sizes),
    )


def _is_product(primitive: Any, *_: Any, **parameters: Any) -> bool:
    if primitive.name == "dot_general":
        _, batch = parameters["dimension_numbers"]
        return not any(batch)
    return bool(primitive.name == "conv_general_dilated")


def _of_input(closed: Any, leaves: int) -> list[int]:
    """Return which residuals, outputs 1, 2, ... of a forward, depend on its input and are not the input itself."""
    x = closed.jaxpr.invars[leaves]
    found: list[int] = []
    seen: list[Any] = [x]
    for index, var in enumerate(closed.jaxpr.outvars[1:]):
        # One that comes twice is kept once more; jit gives both the same memory.
        if not any(var is other for other in seen[:1]) and _uses(closed, index + 1)[leaves]:
            found.append(index)
    return found


def _uses(closed: Any, output: int) -> list[bool]:
    """Return which inputs one output of a traced function depends on."""
    count = len(closed.jaxpr.outvars)
    wanted = [index == output for index in range(count)]
    _, used = part("interpreters.partial_eval").dce_jaxpr(closed.jaxpr, wanted)
    return list(used)
