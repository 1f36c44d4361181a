"""Contenders outside of hpcdist: the gpt in PyTorch, trained there phase by phase, and as pure functions of JAX.

torch and jax are loaded when a contender begins.
"""

import functools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step.request import COMPILED, StepShape
from hpcdist.bench.step.results import StepSample, token_type
from hpcdist.bench.timing import begin_torch_group
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.model import Model
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig

_NAMES: Final = {"scale": "weight"}  # of tensors: ours -> PyTorch's


def load_torch() -> Any:
    """Return the library. Raises MissingCapabilityError."""
    try:
        import torch as library
    except ImportError as error:
        raise MissingCapabilityError(f"PyTorch is not installed: pip install 'hpcdist[torch]' ({error})") from error
    return library


@functools.cache
def _modules() -> tuple[Any, Any, Any]:
    """Return the classes of the first, a middle and the last stage."""
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

    class Head(nn.Module):  # type: ignore[name-defined]
        def __init__(self, shape: StepShape) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(x))

    return Embed, Block, Head


def torch_twin(shape: StepShape, model: Model, store: FlatStore) -> Any:
    """Return the gpt as an ``nn.Sequential`` of its stages, with the parameters of ``store`` (local)."""
    library = load_torch()
    embed, block, head = _modules()
    twin = library.nn.Sequential(embed(shape), *(block(shape) for _ in range(shape.layers)), head(shape))
    shapes = {key: value.shape for key, value in twin.state_dict().items()}
    state = {}
    for segment in model.layout.segments:
        stem, _, last = segment.key.rpartition(".")
        key = f"{stem}.{_NAMES.get(last, last)}"
        # Query, key and value are one matrix there.
        state[key] = library.tensor(np.array(store.view(segment.key))).reshape(shapes[key])
    twin.load_state_dict(state)
    return twin


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean over all tokens of logits (batch, context, vocabulary)."""
    return load_torch().nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchRun:
    """The twin in training; replicas of several ranks by DistributedDataParallel. Building one is collective."""

    def __init__(
        self,
        comm: Communicator,
        name: str,
        shape: StepShape,
        model: Model,
        store: FlatStore,
        optimizer: OptimizerConfig,
        total_steps: int,
    ) -> None:
        library = load_torch()
        self.name, self._config, self._total, self._number = name, optimizer, total_steps, 0
        module = torch_twin(shape, model, store)
        self._parameters = list(module.parameters())
        adapted = [parameter for parameter in self._parameters if parameter.ndim > 1]
        rest = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        groups = [{"params": adapted, "weight_decay": optimizer.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        betas = optimizer.beta1, optimizer.beta2
        # The quickest of its implementations.
        self._optimizer = library.optim.AdamW(groups, lr=0.0, betas=betas, eps=optimizer.epsilon, fused=True)
        if comm.size > 1:
            module = library.nn.parallel.DistributedDataParallel(module)
        self._module = library.compile(module) if name == COMPILED else module

    def step(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> StepSample:
        """Make a step on this rank's samples, from a barrier on. Collective over ``together``."""
        library = load_torch()
        wide_x, wide_targets = (library.from_numpy(array.astype(np.int64)) for array in (x, targets))
        self._number += 1
        for group in self._optimizer.param_groups:
            group["lr"] = rates.learning_rate(self._config, self._number, self._total)
        together.barrier()
        cpu_s, times_s = time.process_time(), [time.perf_counter()]
        self._optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self._module(wide_x), wide_targets)
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        library.nn.utils.clip_grad_norm_(self._parameters, self._config.clip_norm)
        times_s.append(time.perf_counter())
        self._optimizer.step()
        loss_value = float(loss.detach())
        times_s.append(time.perf_counter())
        cpu_s = time.process_time() - cpu_s
        forward, backward, clipping, update = np.diff(times_s).tolist()
        # What DDP communicates is in its backward.
        phases = {"forward": forward, "backward": backward, "clipping": clipping, "update": update}
        return StepSample(loss=loss_value, own_loss=True, step_s=times_s[-1] - times_s[0], cpu_s=cpu_s, phases=phases)


def begin_torch(comm: Communicator, folder: Path, threads: int) -> None:
    """Let PyTorch use so many threads, and its ranks find each other in ``folder``. Collective, once in a process.

    Every rank has to have PyTorch: one that raises here leaves the others waiting.
    """
    load_torch().set_num_threads(threads)
    if comm.size > 1:
        begin_torch_group(comm, folder)


def try_compile() -> None:
    """Compile a function and call it. Raises RuntimeError where there is no compiler for it, or no support."""
    library = load_torch()
    value = library.ones(8, requires_grad=True)
    library.compile(lambda x: (x * x + x).sum())(value).backward()


def torch_product(side: int) -> Callable[[], float]:
    """Return what multiplies float32 matrices (side, side) once in PyTorch, and returns the seconds."""
    library = load_torch()
    a, b = library.randn(2, side, side)
    into = library.empty(side, side)

    def multiply() -> float:
        begin_s = time.perf_counter()
        library.matmul(a, b, out=into)
        return time.perf_counter() - begin_s

    return multiply


ONE_THREAD: Final = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
EPSILON: Final = 1e-5


def begin_jax(threads: int) -> None:
    """Load JAX, with one thread where ``threads`` is 1, else as many as it likes. Raises MissingCapabilityError."""
    if threads == 1:  # it looks when it is loaded
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    try:
        import jax  # noqa: F401
    except ImportError as error:
        raise MissingCapabilityError(f"JAX is not installed: pip install 'hpcdist[jax]' ({error})") from error


def wrapped_jax(shape: StepShape, model: Model, store: FlatStore) -> Model:
    """Return the gpt with the parameters of ``store``, through `hpcdist.adapters.jax.model` (local)."""
    from hpcdist.adapters.jax.model import wrap

    block = partial(_block, heads=shape.heads)
    functions: list[Callable[..., Any]] = [_embed, *[block] * shape.layers, _head]
    tokens = np.zeros((1, shape.context), token_type(shape))
    return wrap(functions, _params(model, store), _losses, example=(tokens, tokens))


def _params(model: Model, store: FlatStore) -> list[dict[str, np.ndarray]]:
    """Return the tensors of each stage by name; matrices are (inputs, outputs), as is usual there."""
    tensors: list[dict[str, np.ndarray]] = [{} for _ in model.stages]
    for segment in model.layout.segments:
        values, name = np.array(store.view(segment.key)), segment.spec.name
        if name.endswith(".weight") and segment.spec.layer:
            values = np.ascontiguousarray(values.reshape(-1, values.shape[-1]).T)
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
    """Return the loss of each token."""
    import jax
    import jax.numpy as jnp

    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen
