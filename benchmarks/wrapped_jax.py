"""A model of JAX trained by this library, against the same step as one compiled function of JAX and optax.

    OMP_NUM_THREADS=1 python benchmarks/wrapped_jax.py --output wrapped-jax.h5 --anonymous
    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/wrapped_jax.py

A GPT (by default 4 layers, hidden 256, 4 heads, context 256, batch 8, vocabulary 256, AdamW), from the same values and
on the same batches, one thread a rank. "jax" is `jax.jit` of loss, gradient and update with donated buffers; it has no
second rank, so with several it is left out. "products", "everything" and "nothing" are wrapped, and say what a stage
keeps from its forward for its backward. In each round every contender makes one step, in an order that is drawn anew;
medians over the rounds are printed, by the clock and in CPU seconds (which other work on the machine does not change),
and all times go to the file. Losses of all contenders are compared, to 1e-4, after the last step.

"copies" are the bytes that went in and out of JAX in a step, in parameters: what is read where it lies is not counted.
"kept" are bytes between forward and backward, of all stages. Needs the extra `reference`.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.adapters.jax import model as adapter
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import own_samples
from hpcdist.training.recipe import recipe as recipes

KEEPS: Final = ("products", "everything", "nothing")
OPTIMIZER: Final = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
SIZES: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "batch": 8, "vocabulary": 256}
ONE_THREAD: Final = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
AGREE: Final = 1e-4
Step = Callable[[tuple[np.ndarray, np.ndarray]], float]


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20, help="how often each contender has its turn (default 20)")
    parser.add_argument("--strategy", default="allreduce", help="how ranks train together (default allreduce)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # numpy's BLAS has read it by now
        parser.error("set OMP_NUM_THREADS=1: one thread each is compared")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()  # JAX is not loaded yet
    return chosen


def gpt(sizes: argparse.Namespace) -> tuple[list[Any], list[Any], Callable[[Any, Any], Any]]:
    """Return the stages of a GPT as pure functions, their params, and the loss of each token."""
    import jax
    import jax.numpy as jnp

    rng, hidden, heads = np.random.default_rng(0), sizes.hidden, sizes.heads

    def norm(params: Any, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]

    def dense(params: Any, x: Any) -> Any:
        return x @ params["kernel"] + params["bias"]

    def embed(params: Any, tokens: Any) -> Any:
        return params["table"][tokens] + params["positions"]

    def block(params: Any, x: Any) -> Any:
        batch, context, _ = x.shape
        qkv = dense(params["qkv"], norm(params["norm1"], x)).reshape(batch, context, 3, heads, hidden // heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(params["projection"], mixed)
        return x + dense(params["down"], jax.nn.gelu(dense(params["up"], norm(params["norm2"], x))))

    def head(params: Any, x: Any) -> Any:
        return norm(params["norm"], x) @ params["kernel"]

    def loss(logits: Any, targets: Any) -> Any:
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - chosen

    def draw(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    def layer(inputs: int, outputs: int) -> dict[str, Any]:
        return {"kernel": draw(inputs, outputs), "bias": np.zeros(outputs, np.float32)}

    def scales() -> dict[str, Any]:
        return {"scale": np.ones(hidden, np.float32), "bias": np.zeros(hidden, np.float32)}

    def one_block() -> dict[str, Any]:
        linears = {"qkv": (1, 3), "projection": (1, 1), "up": (1, 4), "down": (4, 1)}
        drawn = {name: layer(inputs * hidden, outputs * hidden) for name, (inputs, outputs) in linears.items()}
        return {**drawn, "norm1": scales(), "norm2": scales()}

    first = {"table": draw(sizes.vocabulary, hidden), "positions": draw(sizes.context, hidden)}
    last = {"norm": scales(), "kernel": draw(hidden, sizes.vocabulary)}
    return [embed, *[block] * sizes.layers, head], [first, *(one_block() for _ in range(sizes.layers)), last], loss


def plain(stages: list[Any], params: list[Any], loss: Callable[[Any, Any], Any]) -> Step:
    """Return the step as a user of JAX writes it."""
    import jax
    import optax

    def whole(params: Any, x: Any, targets: Any) -> Any:
        for stage, own in zip(stages, params, strict=True):
            x = stage(own, x)
        return loss(x, targets).mean()

    own = OPTIMIZER
    adamw = optax.adamw(
        own["learning_rate"],
        b1=own["beta1"],
        b2=own["beta2"],
        eps=own["epsilon"],
        weight_decay=own["weight_decay"],
        mask=jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params),
    )

    def update(params: Any, moments: Any, x: Any, targets: Any) -> Any:
        value, gradient = jax.value_and_grad(whole)(params, x, targets)
        change, moments = adamw.update(gradient, moments, params)
        return optax.apply_updates(params, change), moments, value

    compiled = jax.jit(update, donate_argnums=(0, 1))
    state = [jax.tree_util.tree_map(jax.numpy.array, params)]
    state.append(adamw.init(state[0]))

    def step(batch: tuple[np.ndarray, np.ndarray]) -> float:
        state[0], state[1], value = compiled(*state, *batch)
        return float(value)

    return step


def wrapped(session: start.Session, options: argparse.Namespace, gpt: Any, keep: str) -> tuple[Step, Any]:
    """Return the step of this library, and the model. Collective over the world."""
    stages, params, loss = gpt
    shape = (options.batch, options.context)
    example = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    model = adapter.wrap(stages, params, loss, example=example, keep=keep)
    keys: dict[str, Any] = {
        "model.kind": "mlp",
        "parallel.strategy": options.strategy,
        "run.global_batch": options.batch,
        "run.steps": 10**6,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
    }
    recipe = recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {}).recipe
    trainer: Trainer = assemble(session, recipe, script_model=model)
    made = [0]

    def step(batch: tuple[np.ndarray, np.ndarray]) -> float:
        own = own_samples(recipe, trainer.data_axis, made[0], trainer.shares).slice
        made[0] += 1
        return trainer.step(made[0], trainer.cut((batch[0][own], batch[1][own])), np.zeros(0)).loss

    return step, model


def measure(session: start.Session, steps: dict[str, Step], options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return (rounds, clock and CPU) seconds by contender; those of the slowest rank, on rank 0. Collective."""
    rng = np.random.default_rng(1)  # the same on every rank
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(-2, options.rounds):  # two rounds to compile and to warm up
        tokens = rng.integers(0, options.vocabulary, (options.batch, options.context + 1), np.int32)
        losses: dict[str, float] = {}
        for name in rng.permutation(list(steps)):
            session.comm.barrier()
            began, worked = time.perf_counter(), time.process_time()
            losses[name] = steps[name]((tokens[:, :-1], tokens[:, 1:]))
            spent = time.perf_counter() - began, time.process_time() - worked
            if turn >= 0:
                own[name].append(spent)
    if max(losses.values()) - min(losses.values()) > AGREE * abs(min(losses.values())):
        sys.exit(f"the losses differ: {losses}")
    everybody = session.comm.allgather_object(own)
    return {name: np.max([times[name] for times in everybody], axis=0) for name in steps}


def save(path: Path, times: dict[str, np.ndarray], session: start.Session, options: argparse.Namespace) -> None:
    """Write ``times`` and where they come from."""
    from hpcdist.hdf5 import files
    from hpcdist.telemetry.provenance import provenance

    files.write_contiguous(
        path,
        {"time_s": np.stack(list(times.values()))},
        {
            **provenance(mpi_library=session.library, hosts=[session.place.host], anonymous=options.anonymous),
            "contenders": ";".join(times),
            "strategy": options.strategy,
            "ranks": session.comm.size,
            **{name: getattr(options, name) for name in SIZES},
        },
        {"time_s": {"dims": "contenders, rounds, (clock, CPU)"}},
        schema="hpcdist-benchmark-wrapped-jax",
        version=1,
    )


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    made = gpt(options)
    steps: dict[str, Step] = {"jax": plain(*made)} if session.comm.size == 1 else {}
    models = {}
    for keep in KEEPS:
        steps[keep], models[keep] = wrapped(session, options, made, keep)
    times = measure(session, steps, options)
    if session.comm.rank == 0:
        clock, cpu = ({name: statistics.median(table[:, kind]) for name, table in times.items()} for kind in (0, 1))
        base = cpu[next(iter(steps))]
        for name in steps:
            line = f"{name:12} {clock[name] * 1e3:8.1f} ms, {cpu[name] * 1e3:8.1f} ms of CPU ({base / cpu[name]:.2f}x)"
            if name in models:
                model, made_steps = models[name], options.rounds + 2
                traffic, samples = model.traffic, -(-options.batch // session.comm.size)
                size = 4 * model.layout.parameters * made_steps
                kept = sum(stage.kept_bytes(samples) for stage in model.stages)
                line += f", copies in {traffic.copied_in_bytes / size:.2f}, out {traffic.copied_out_bytes / size:.2f}"
                line += f", kept {kept / 1e6:.1f} MB"
            print(line)
        if options.output is not None:
            save(options.output, times, session, options)
    session.leave(0)


if __name__ == "__main__":
    main()
