"""A small transformer and other models of pure functions of JAX, and their plain twins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, CONTEXT, HIDDEN, HEADS = 17, 6, 12, 3


def norm(params: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]


def embed(params: Any, tokens: Any) -> Any:
    return params["table"][tokens] + params["positions"]


def block(params: Any, x: Any) -> Any:
    samples, context, hidden = x.shape
    qkv = norm(params["norm1"], x) @ params["qkv"]["kernel"] + params["qkv"]["bias"]
    q, k, v = jnp.moveaxis(qkv.reshape(samples, context, 3, HEADS, hidden // HEADS), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(hidden // HEADS).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((context, context), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = x + mixed @ params["projection"]["kernel"] + params["projection"]["bias"]
    wide = jax.nn.gelu(norm(params["norm2"], x) @ params["up"]["kernel"] + params["up"]["bias"])
    return x + wide @ params["down"]["kernel"] + params["down"]["bias"]


def head(params: Any, x: Any) -> Any:
    return norm(params["norm"], x) @ params["kernel"]


def tied_head(params: Any, x: Any) -> Any:
    return norm(params["norm"], x) @ params["table"].T


def token_losses(logits: Any, targets: Any) -> Any:
    """Losses (samples, context)."""
    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


def mean_loss(logits: Any, targets: Any) -> Any:
    return token_losses(logits, targets).mean()


def gpt(rng: np.random.Generator, layers: int = 2, dtype: str = "float32") -> tuple[list[Any], list[Any]]:
    """The functions of a small GPT, and params drawn at random: none is at a special value."""

    def draw(*shape: int, around: float = 0.0) -> Any:
        return jnp.asarray(around + 0.2 * rng.standard_normal(shape), dtype)

    def dense(inputs: int, outputs: int) -> dict[str, Any]:
        return {"kernel": draw(inputs, outputs), "bias": draw(outputs)}

    def scales() -> dict[str, Any]:
        return {"scale": draw(HIDDEN, around=1.0), "bias": draw(HIDDEN)}

    blocks = [
        {
            "norm1": scales(),
            "qkv": dense(HIDDEN, 3 * HIDDEN),
            "projection": dense(HIDDEN, HIDDEN),
            "norm2": scales(),
            "up": dense(HIDDEN, 4 * HIDDEN),
            "down": dense(4 * HIDDEN, HIDDEN),
        }
        for _ in range(layers)
    ]
    first = {"table": draw(VOCABULARY, HIDDEN), "positions": draw(CONTEXT, HIDDEN)}
    last = {"norm": scales(), "kernel": draw(HIDDEN, VOCABULARY)}
    return [embed, *[block] * layers, head], [first, *blocks, last]


def linear(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def active(params: Any, x: Any) -> Any:
    return x + jnp.tanh(linear(params, x))


def squares(y: Any, targets: Any) -> Any:
    """Losses (samples, columns)."""
    return (y - targets) ** 2


def mlp(rng: np.random.Generator, dtype: str = "float32", depth: int = 1) -> tuple[list[Any], list[Any]]:
    """A model that is compiled in no time: ``depth`` equal stages between two linear ones."""
    widths = [(3, HIDDEN), *[(HIDDEN, HIDDEN)] * depth, (HIDDEN, 2)]
    params = [{"w": rng.standard_normal(shape) * 0.4, "b": rng.standard_normal(shape[1]) * 0.4} for shape in widths]
    return [linear, *[active] * depth, linear], jax.tree_util.tree_map(lambda leaf: leaf.astype(dtype), params)


def rows(rng: np.random.Generator, samples: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets for `mlp`."""
    return rng.standard_normal((samples, 3)).astype(dtype), rng.standard_normal((samples, 2)).astype(dtype)


def tokens(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (samples, context)."""
    drawn = rng.integers(0, VOCABULARY, (samples, CONTEXT + 1))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


def composed(functions: list[Any], params: list[Any], x: Any) -> Any:
    """The plain twin: one function after the other."""
    for function, own in zip(functions, params, strict=True):
        x = function(own, x)
    return x
