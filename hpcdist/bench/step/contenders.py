"""Contenders from other frameworks: the GPT as a PyTorch module, its training in PyTorch, and the GPT in JAX.

torch and jax are imported when a contender starts.
"""

import functools
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step.request import COMPILED, StepShape
from hpcdist.bench.step.results import StepSample, token_type
from hpcdist.bench.timing import begin_torch_group
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.config import EPSILON
from hpcdist.models.model import Model
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig


def load_torch() -> Any:
    """Import and return the module torch. Raises MissingCapabilityError if PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingCapabilityError(f"PyTorch is not installed: pip install 'hpcdist[torch]' ({error})") from error
    return torch


@functools.cache
def _modules() -> tuple[Any, Any]:
    nn = load_torch().nn

    class Embed(nn.Module):  # type: ignore[name-defined]
        def __init__(self, shape: StepShape) -> None:
            super().__init__()
            self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
            self.positions = nn.Embedding(shape.context, shape.hidden)

        def forward(self, tokens: Any) -> Any:
            return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self, shape: StepShape) -> None:
            super().__init__()
            hidden, self.heads = shape.hidden, shape.heads
            self.norm1, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
            self.projection, self.norm2 = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            batch, context, hidden = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, hidden // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(mixed.transpose(1, 2).reshape(batch, context, hidden))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    return Embed, Block


def torch_twin(shape: StepShape, model: Model, store: FlatStore) -> Any:
    """Return a PyTorch module equivalent to the GPT ``model``, with a copy of the parameters in ``store``. Local."""
    torch = load_torch()
    nn, (embed, block) = torch.nn, _modules()
    layers = {"norm": nn.LayerNorm(shape.hidden), "head": nn.Linear(shape.hidden, shape.vocabulary, bias=False)}
    head = nn.Sequential(OrderedDict(layers))
    twin = nn.Sequential(embed(shape), *(block(shape) for _ in range(shape.layers)), head)
    shapes = {key: value.shape for key, value in twin.state_dict().items()}
    state = {}
    for segment in model.layout.segments:
        stem, _, name = segment.key.rpartition(".")
        key = f"{stem}.{'weight' if name == 'scale' else name}"
        # PyTorch has a single matrix for query, key and value.
        state[key] = torch.tensor(np.array(store.view(segment.key))).reshape(shapes[key])
    twin.load_state_dict(state)
    return twin


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean cross-entropy loss of ``logits``. ``targets``: token ids of shape (batch, context)."""
    return load_torch().nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchRun:
    """Training of a PyTorch ``module`` with DistributedDataParallel. Construction is collective over ``comm``."""

    def __init__(
        self, comm: Communicator, name: str, module: Any, optimizer: OptimizerConfig, total_steps: int
    ) -> None:
        torch = load_torch()
        self.name, self._config, self._total, self._number = name, optimizer, total_steps, 0
        self._parameters = list(module.parameters())
        matrices = [tensor for tensor in self._parameters if tensor.ndim > 1]
        vectors = [tensor for tensor in self._parameters if tensor.ndim <= 1]
        decay = optimizer.weight_decay
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = optimizer.beta1, optimizer.beta2
        # fused=True is the fastest implementation of AdamW in PyTorch.
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=optimizer.epsilon, fused=True)
        if comm.size > 1:
            module = torch.nn.parallel.DistributedDataParallel(module)
        self._module = torch.compile(module) if name == COMPILED else module

    def step(self, x: np.ndarray, targets: np.ndarray, barrier_comm: Communicator) -> StepSample:
        """Run a training step after a barrier on ``barrier_comm``. Return durations and this rank's loss. Collective.

        ``x``: input token ids of this rank. ``targets``: token ids to predict.
        """
        torch = load_torch()
        wide_x, wide_targets = (torch.from_numpy(array.astype(np.int64)) for array in (x, targets))
        self._number += 1
        for group in self._optimizer.param_groups:
            group["lr"] = rates.learning_rate(self._config, self._number, self._total)
        barrier_comm.barrier()
        cpu_s, times_s = time.process_time(), [time.perf_counter()]
        self._optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self._module(wide_x), wide_targets)
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm)
        times_s.append(time.perf_counter())
        self._optimizer.step()
        loss_value = float(loss.detach())
        times_s.append(time.perf_counter())
        cpu_s = time.process_time() - cpu_s
        # "backward" includes the communication of DistributedDataParallel.
        phases = dict(zip(("forward", "backward", "clipping", "update"), np.diff(times_s).tolist(), strict=True))
        return StepSample(loss=loss_value, own_loss=True, step_s=times_s[-1] - times_s[0], cpu_s=cpu_s, phases=phases)


def begin_torch(comm: Communicator, folder: Path, threads: int) -> None:
    """Set PyTorch's number of threads and start the process group. Call once per process. Collective over ``comm``."""
    load_torch().set_num_threads(threads)
    if comm.size > 1:
        begin_torch_group(comm, folder)


def try_compile() -> None:
    """Compile and call a small function with torch.compile. Raises RuntimeError if torch.compile does not work."""
    torch = load_torch()
    torch.compile(lambda x: (x * x + x).sum())(torch.ones(8, requires_grad=True)).backward()


def torch_product(side: int) -> Callable[[], float]:
    """Return a function that multiplies two ``side`` x ``side`` matrices in PyTorch and returns the seconds used."""
    torch = load_torch()
    a, b = torch.randn(2, side, side)
    product = torch.empty(side, side)

    def multiply() -> float:
        begin_s = time.perf_counter()
        torch.matmul(a, b, out=product)
        return time.perf_counter() - begin_s

    return multiply


def begin_jax(threads: int) -> None:
    """Import JAX. If ``threads`` is 1, limit JAX to one thread. Raises MissingCapabilityError without JAX."""
    if threads == 1:  # JAX reads XLA_FLAGS when it is imported
        one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one_thread}".strip()
    try:
        import jax  # noqa: F401
    except ImportError as error:
        raise MissingCapabilityError(f"JAX is not installed: pip install 'hpcdist[jax]' ({error})") from error


def wrapped_jax(shape: StepShape, model: Model, store: FlatStore) -> Model:
    """Return an hpcdist model that runs the GPT ``model`` in JAX, with a copy of the parameters in ``store``. Local."""
    from hpcdist.adapters.jax.model import wrap

    block = partial(_block, heads=shape.heads)
    functions: list[Callable[..., Any]] = [_embed, *[block] * shape.layers, _head]
    tokens = np.zeros((1, shape.context), token_type(shape))
    return wrap(functions, _params(model, store), _losses, example=(tokens, tokens))


def _params(model: Model, store: FlatStore) -> list[dict[str, np.ndarray]]:
    tensors: list[dict[str, np.ndarray]] = [{} for _ in model.stages]
    for segment in model.layout.segments:
        values, name = np.array(store.view(segment.key)), segment.spec.name
        if name.endswith(".weight") and segment.spec.layer:
            values = np.ascontiguousarray(values.reshape(-1, values.shape[-1]).T)  # (inputs, outputs) in JAX
        tensors[segment.spec.layer][name] = values if segment.spec.adapted else values.reshape(-1)
    return tensors


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
    import jax
    import jax.numpy as jnp

    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen
