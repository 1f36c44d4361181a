"""The gpt of a benchmark of steps as pure functions of JAX."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step_plan import Shape, token_type
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.model import Model

ONE_THREAD: Final = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
EPSILON: Final = 1e-5


def begin(threads: int) -> None:
    """Load JAX, with one thread where ``threads`` is 1, else as many as it likes. Raises MissingCapabilityError."""
    if threads == 1:  # it looks when it is loaded
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    try:
        import jax  # noqa: F401
    except ImportError as error:
        raise MissingCapabilityError(f"JAX is not installed: pip install 'hpcdist[jax]' ({error})") from error


def wrapped(shape: Shape, model: Model, store: FlatStore) -> Model:
    """Return the gpt with the parameters of ``store``, through `hpcdist.adapters.jax` (local)."""
    from hpcdist.adapters.jax import wrap

    block = partial(_block, heads=shape.heads)
    functions: list[Callable[..., Any]] = [_embed, *[block] * shape.layers, _head]
    tokens = np.zeros((1, shape.context), token_type(shape))
    return wrap(functions, _params(model, store), _losses, example=(tokens, tokens))


def _params(model: Model, store: FlatStore) -> list[dict[str, np.ndarray]]:
    """Return the tensors of each stage by name; matrices are (inputs, outputs), as is usual there."""
    found: list[dict[str, np.ndarray]] = [{} for _ in model.stages]
    for segment in model.layout.segments:
        values, name = np.array(store.view(segment.key)), segment.spec.name
        if name.endswith(".weight") and segment.spec.layer:
            values = np.ascontiguousarray(values.reshape(-1, values.shape[-1]).T)
        found[segment.spec.layer][name] = values if segment.spec.adapted else values.reshape(-1)
    return found


def _embed(params: Any, tokens: Any) -> Any:
    return params["tokens.weight"][tokens] + params["positions.weight"]


def _block(params: Any, x: Any, *, heads: int) -> Any:
    import jax
    import jax.numpy as jnp

    batch, context, hidden = x.shape
    qkv = _linear(params, "qkv", _norm(params, "norm1", x)).reshape(batch, context, 3, heads, hidden // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + _linear(params, "projection", mixed)
    wide = jax.nn.gelu(_linear(params, "up", _norm(params, "norm2", x)), approximate=True)
    return x + _linear(params, "down", wide)


def _head(params: Any, x: Any) -> Any:
    return _norm(params, "norm", x) @ params["head.weight"]


def _norm(params: Any, name: str, x: Any) -> Any:
    import jax

    x = x - x.mean(-1, keepdims=True)
    normal = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return normal * params[f"{name}.scale"] + params[f"{name}.bias"]


def _linear(params: Any, name: str, x: Any) -> Any:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def _losses(logits: Any, targets: Any) -> Any:
    """Return the loss of each token."""
    import jax
    import jax.numpy as jnp

    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen
