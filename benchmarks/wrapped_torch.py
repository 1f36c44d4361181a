"""A model of PyTorch trained by this library, beside PyTorch's own ways to train it on as many ranks.

    OMP_NUM_THREADS=1 python benchmarks/wrapped_torch.py
    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/wrapped_torch.py --output wrapped-torch.h5 --anonymous

A GPT (by default 4 layers, hidden 256, 4 heads, context 256, 8 samples a rank, vocabulary 256, AdamW), from the same
values and on the same batches, one thread a rank. On one rank "eager" is a plain script; on several, "ddp" is
DistributedDataParallel and "fsdp2" is `fully_shard` of each block, over gloo. "allreduce", "zero1" and "zero3" are the
same modules, wrapped. In each round every contender makes one step, in an order that is drawn anew; medians over the
rounds of the slowest rank are printed, by the clock and in CPU seconds (which other work on the machine does not
change), and all times go to the file. Losses of all contenders are compared, to 1e-4, in every round.

Needs the extra `torch`.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpcdist.adapters.torch import model as adapter
from hpcdist.bench import output_file
from hpcdist.comm import start
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import own_samples
from hpcdist.training.recipe import recipe as recipes

WRAPPED: Final = ("allreduce", "zero1", "zero3")
OPTIMIZER: Final = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
SIZES: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "batch": 8, "vocabulary": 256}
AGREE: Final = 1e-4
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[Batch], float]


class Embed(nn.Module):
    """Tokens (batch, context) to (batch, context, hidden)."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.context, sizes.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of both rows."""
        return self.tokens(tokens) + self.positions.weight


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        hidden, self.heads = sizes.hidden, sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, context, hidden)."""
        batch, context, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, context, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """The last norm and logits (batch, context, vocabulary)."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.logits(self.norm(x))


def gpt(sizes: argparse.Namespace) -> nn.Sequential:
    """Return the model, with the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(Embed(sizes), *(Block(sizes) for _ in range(sizes.layers)), Head(sizes))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20, help="how often each contender has its turn (default 20)")
    parser.add_argument("--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # numpy's BLAS has read it by now
        parser.error("set OMP_NUM_THREADS=1: one thread each is compared")
    torch.set_num_threads(1)
    return chosen


def plain(name: str, session: start.Session, sizes: argparse.Namespace) -> Step:
    """Return the step of a script of PyTorch's own. Collective over the world."""
    module: nn.Module = gpt(sizes)
    if name == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    elif name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (session.comm.size,))
        for stage in module:  # type: ignore[attr-defined]
            fully_shard(stage, mesh=mesh)
        fully_shard(module, mesh=mesh)
    own = OPTIMIZER
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": own["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=own["learning_rate"], betas=(own["beta1"], own["beta2"]), eps=own["epsilon"], fused=True
    )
    rank, ranks = session.comm.rank, session.comm.size

    def step(batch: Batch) -> float:
        x, y = (torch.from_numpy(np.array_split(values, ranks)[rank].astype(np.int64)) for values in batch)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def wrapped(name: str, session: start.Session, sizes: argparse.Namespace) -> Step:
    """Return the step of this library under the strategy ``name``. Collective over the world."""
    example = np.zeros((1, sizes.context), np.int64)
    model = adapter.wrap(gpt(sizes), loss_of, example=example, tokens_per_sample=sizes.context)
    keys: dict[str, Any] = {
        "model.kind": "mlp",
        "parallel.strategy": name,
        "run.global_batch": sizes.batch * session.comm.size,
        "run.steps": 10**6,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
    }
    recipe = recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {}).recipe
    trainer: Trainer = assemble(session, recipe, script_model=model)
    made = [0]

    def step(batch: Batch) -> float:
        own = own_samples(recipe, trainer.data_axis, made[0], trainer.shares).slice
        made[0] += 1
        return trainer.step(made[0], trainer.cut((batch[0][own], batch[1][own])), np.zeros(0)).loss

    return step


def measure(session: start.Session, steps: dict[str, Step], options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return (rounds, clock and CPU) seconds by contender, of the slowest rank. Collective."""
    rng, comm = np.random.default_rng(1), session.comm  # the same on every rank
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(-2, options.rounds):  # two rounds to compile and to warm up
        tokens = rng.integers(0, options.vocabulary, (options.batch * comm.size, options.context + 1), np.int32)
        losses: dict[str, float] = {}
        for name in rng.permutation(list(steps)):
            comm.barrier()
            began, worked = time.perf_counter(), time.process_time()
            loss = steps[name]((tokens[:, :-1], tokens[:, 1:]))
            spent = time.perf_counter() - began, time.process_time() - worked
            # PyTorch's is that of the own samples.
            losses[name] = loss if name in WRAPPED else float(np.mean(comm.allgather_object(loss)))
            if turn >= 0:
                own[name].append(spent)
        if max(losses.values()) - min(losses.values()) > AGREE * abs(min(losses.values())):
            sys.exit(f"the losses of round {turn} differ: {losses}")
    everybody = comm.allgather_object(own)
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
            "ranks": session.comm.size,
            "torch": str(torch.__version__),
            **{name: getattr(options, name) for name in SIZES},
        },
        {"time_s": {"dims": "contenders, rounds, (clock, CPU)"}},
        schema="hpcdist-benchmark-wrapped-torch",
        version=1,
    )


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    session = start.start()
    output_file.exit_unless_writable(session, options.output)
    ranks = session.comm.size
    folder = session.comm.broadcast_object(tempfile.mkdtemp())
    if ranks > 1:
        meeting = f"file://{folder}/ranks"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=session.comm.rank, world_size=ranks)
    theirs = ("eager",) if ranks == 1 else ("ddp", "fsdp2")
    steps = {name: plain(name, session, options) for name in theirs}
    steps |= {name: wrapped(name, session, options) for name in WRAPPED[: 1 if ranks == 1 else None]}
    times = measure(session, steps, options)
    if session.comm.rank == 0:
        base, tokens = times[theirs[0]], options.batch * options.context * ranks
        for name, table in times.items():
            clock, cpu = (statistics.median(column) for column in table.T)
            ratio = [float(np.median(base[:, kind] / table[:, kind])) for kind in (0, 1)]
            print(
                f"{name:10} {clock * 1e3:8.1f} ms ({ratio[0]:.3f}x {theirs[0]}), {cpu * 1e3:8.1f} ms of CPU "
                f"({ratio[1]:.3f}x), {tokens / clock:8.0f} tokens/s"
            )
        if options.output is not None:
            save(options.output, times, session, options)
    if ranks > 1:
        torch.distributed.destroy_process_group()
    session.leave(0)


if __name__ == "__main__":
    main()
