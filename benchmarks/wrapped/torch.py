"""A PyTorch model sharded by hpcdist, compared with DDP and FSDP2 on as many ranks.

    python -m benchmarks wrapped.torch --output wrapped-torch.h5 --anonymous

All contenders train a GPT with AdamW from the same values on the same batches, with one thread per rank. "ddp" is
DistributedDataParallel, and "fsdp2" is `fully_shard` of each block, over gloo. "allreduce", "zero1" and "zero3" are the
same modules, wrapped. Losses must agree to 1e-4 in every round. The tables are of wall time and of CPU seconds, which
do not depend on other load. For one rank use `hpcdist bench step`. Needs the extra `torch`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training.turns import texts
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step import contenders
from hpcdist.bench.step.request import StepShape
from hpcdist.comm.start import Session
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import own_samples
from hpcdist.training.recipe import recipe as recipes

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-wrapped-torch", 2, "wrapped/2026-11-22-wrapped-torch-2-ranks.h5"
SMALL = {"rounds": 6}
WRAPPED: Final = ("allreduce", "zero1", "zero3")
OPTIMIZER: Final = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
SIZES: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "batch": 8, "vocabulary": 256}
OPTIONS: Final = {**SIZES, "rounds": 20}
AGREE: Final = 1e-4  # largest relative difference of the losses in a round
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[Batch], float]  # trains on a batch of all ranks, and returns the mean loss


def divided(name: str, module: Any, group: Any, where: str = "cpu") -> Any:
    if name == "ddp":
        return contenders.load_torch().nn.parallel.DistributedDataParallel(module, process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, where)
    for stage in module:
        fully_shard(stage, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def plain(name: str, session: Session, twin: Callable[[], Any]) -> Step:
    torch, config = contenders.load_torch(), OPTIMIZER
    module = divided(name, twin(), torch.distributed.group.WORLD)
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=config["learning_rate"], betas=(config["beta1"], config["beta2"]), eps=config["epsilon"], fused=True
    )
    rank, ranks = session.comm.rank, session.comm.size

    def step(batch: Batch) -> float:
        x, y = (torch.from_numpy(np.array_split(values, ranks)[rank].astype(np.int64)) for values in batch)
        optimizer.zero_grad(set_to_none=True)
        loss = contenders.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        return float(np.mean(session.comm.allgather_object(float(loss.detach()))))

    return step


def built(chosen: argparse.Namespace) -> tuple[StepShape, Model, FlatStore]:
    sizes = {name: getattr(chosen, name) for name in SIZES if name != "batch"}
    shape = StepShape(samples=chosen.batch, **sizes)
    config = ModelConfig(**{name: value for name, value in sizes.items() if name != "context"})
    model = models.build(config, "float32", context=shape.context)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, seed=0)
    return shape, model, store


def step_of(session: Session, chosen: argparse.Namespace, model: Model, strategy: str) -> Step:
    """Return hpcdist's training step under ``strategy``. Collective over the world."""
    keys: dict[str, Any] = {
        "model.kind": "mlp",
        "parallel.strategy": strategy,
        "run.global_batch": chosen.batch * session.comm.size,
        "run.steps": 10**6,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
    }
    recipe = recipes.load(None, texts(keys), {}).recipe
    trainer: Trainer = assemble(session, recipe, script_model=model)
    count = [0]

    def step(batch: Batch) -> float:
        local_slice = own_samples(recipe, trainer.data_axis, count[0], trainer.shares).slice
        count[0] += 1
        return trainer.step(count[0], trainer.cut((batch[0][local_slice], batch[1][local_slice])), np.zeros(0)).loss

    return step


def timed(session: Session, steps: Mapping[str, Step], chosen: argparse.Namespace) -> np.ndarray:
    """Time all steps: (contenders, rounds, (clock, CPU)) seconds of the slowest rank. Collective."""
    rng, comm = np.random.default_rng(1), session.comm  # the same tokens on every rank
    losses: dict[str, float] = {}
    tokens = np.zeros(0)

    def begin() -> None:
        nonlocal tokens
        if losses and max(losses.values()) - min(losses.values()) > AGREE * abs(min(losses.values())):
            sys.exit(f"the losses differ: {losses}")
        tokens = rng.integers(0, chosen.vocabulary, (chosen.batch * comm.size, chosen.context + 1), np.int32)

    def timed_step(name: str) -> tuple[float, float]:
        def step() -> None:
            losses[name] = steps[name]((tokens[:, :-1], tokens[:, 1:]))

        cpu_start = time.process_time()
        clock_s = harness.seconds(step, comm)
        return clock_s, time.process_time() - cpu_start

    calls = {name: lambda name=name: timed_step(name) for name in steps}
    times = harness.of_ranks(comm, harness.alternate(calls, chosen.rounds, begin=begin)).max(axis=2)
    begin()
    return times


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    from hpcdist.adapters.torch.model import wrap

    comm = session.comm
    if comm.size == 1:
        sys.exit("a sharded step needs at least 2 ranks; choose --ranks 2, or use `hpcdist bench step` for one rank")
    contenders.begin_torch(comm, Path(comm.broadcast_object(tempfile.mkdtemp())), threads=1)
    shape, model, store = built(chosen)

    def twin() -> Any:
        return contenders.torch_twin(shape, model, store)

    def wrapped() -> Model:
        example = np.zeros((1, shape.context), np.int64)
        return wrap(twin(), contenders.cross_entropy, example=example, tokens_per_sample=shape.context)

    steps = {name: plain(name, session, twin) for name in ("ddp", "fsdp2")}
    steps |= {name: step_of(session, chosen, wrapped(), name) for name in WRAPPED}
    times = timed(session, steps, chosen)
    torch = contenders.load_torch()
    torch.distributed.destroy_process_group()
    about = {"contenders": ";".join(steps), "ranks": comm.size, "torch": str(torch.__version__)}
    return Results({"time_s": times}, {"time_s": "contenders, rounds, (clock, CPU)"}, about)


def ratios(results: Results) -> harness.Ratios:
    return harness.over_base(results.arrays["time_s"][..., 1], results.names())


def lines(results: Results) -> Sequence[str]:
    times, names = results.arrays["time_s"], results.names()
    by_clock, by_cpu = (harness.time_table(times[..., kind], names) for kind in (0, 1))
    return ["by the clock", *by_clock, "CPU seconds", *by_cpu]
