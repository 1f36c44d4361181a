"""Models of pure JAX functions, trained on a few ranks, and by plain JAX and optax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from harness import trainings
from hpcdist.comm.communicator import Communicator
from hpcdist.models.model import Model
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import own_samples

Batch = tuple[np.ndarray, np.ndarray]
OPTIMIZER = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}

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
    """Return losses (samples, context)."""
    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


def mean_loss(logits: Any, targets: Any) -> Any:
    return token_losses(logits, targets).mean()


def gpt(rng: np.random.Generator, layers: int = 2, dtype: str = "float32") -> tuple[list[Any], list[Any]]:
    """Return the functions of a small GPT, and random params without special values."""

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
    """Return losses (samples, columns)."""
    return (y - targets) ** 2


def mlp(rng: np.random.Generator, dtype: str = "float32", depth: int = 1) -> tuple[list[Any], list[Any]]:
    """Return a model that compiles quickly: ``depth`` equal stages between two linear stages."""
    widths = [(3, HIDDEN), *[(HIDDEN, HIDDEN)] * depth, (HIDDEN, 2)]
    params = [{"w": rng.standard_normal(shape) * 0.4, "b": rng.standard_normal(shape[1]) * 0.4} for shape in widths]
    return [linear, *[active] * depth, linear], jax.tree_util.tree_map(lambda leaf: leaf.astype(dtype), params)


def rows(rng: np.random.Generator, samples: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets for `mlp`."""
    return rng.standard_normal((samples, 3)).astype(dtype), rng.standard_normal((samples, 2)).astype(dtype)


def tokens(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets (samples, context)."""
    drawn = rng.integers(0, VOCABULARY, (samples, CONTEXT + 1))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


def compose(functions: list[Any], params: list[Any], x: Any) -> Any:
    """Apply the functions one after the other, without hpcdist."""
    for function, local_parameters in zip(functions, params, strict=True):
        x = function(local_parameters, x)
    return x


@dataclass
class JaxTraining:
    """The losses of the steps, and all tensors by name after them."""

    losses: list[float]
    tensors: dict[str, np.ndarray]
    trainer: Trainer | None = None


def trainer_of(comm: Communicator, model: Model, samples: int, keys: dict[str, Any]) -> Trainer:
    """Return the trainer of ``model`` under the recipe ``keys``, for steps of ``samples`` samples. Collective."""
    settings = {
        "model.kind": "mlp",
        "precision.mode": model.dtype.name,
        "run.global_batch": samples,
        "run.steps": 100,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **keys,
    }
    return trainings.trainer_of(comm, settings, model=model)


def step(trainer: Trainer, number: int, batch: Batch) -> float:
    """Make a step, counted from 1, on the local share of ``batch``. Return the loss. Collective."""
    local_slice = own_samples(trainer.recipe, trainer.data_axis, number - 1, trainer.shares).slice
    return trainer.step(number, trainer.cut((batch[0][local_slice], batch[1][local_slice])), np.zeros(2)).loss


def train(comm: Communicator, build: Callable[[], Model], batches: list[Batch], keys: dict[str, Any]) -> JaxTraining:
    """Make a step for each of ``batches``. Every rank builds a separate model. Collective."""
    trainer = trainer_of(comm, build(), len(batches[0][0]), keys)
    losses = [step(trainer, number, batch) for number, batch in enumerate(batches, start=1)]
    whole = {
        tensor: values.reshape(trainer.model.layout.by_key[tensor].spec.shape)
        for (kind, tensor), values in trainings.state(trainer).items()
        if kind == "parameters"
    }
    trainer.close()
    return JaxTraining(losses, whole, trainer)


def train_plain(params: Any, loss: Callable[[Any, Batch], Any], batches: list[Batch]) -> tuple[list[float], Any]:
    """Train with jax.value_and_grad and optax on one process. Return the losses and the final params."""
    local_data = OPTIMIZER
    matrices = jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params)
    update = optax.adamw(
        local_data["learning_rate"],
        b1=local_data["beta1"],
        b2=local_data["beta2"],
        eps=local_data["epsilon"],
        weight_decay=local_data["weight_decay"],
        mask=matrices,
    )
    moments, losses = update.init(params), []
    compute = jax.jit(jax.value_and_grad(loss))
    for batch in batches:
        value, gradient = compute(params, batch)
        change, moments = update.update(gradient, moments, params)
        params = optax.apply_updates(params, change)
        losses.append(float(value))
    return losses, params
