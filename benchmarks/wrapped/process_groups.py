"""Backend hpcdist of torch.distributed compared with gloo: collectives by size, and steps of DDP and FSDP2.

    python -m benchmarks wrapped.process_groups --output process-groups.h5 --anonymous
    python -m benchmarks wrapped.process_groups --where cuda --operations all_reduce --steps ddp --output on-a-gpu.h5

Both backends are groups of the same processes, on float32 tensors in host memory, with one thread per rank. A size is
the buffer of an allreduce, the output of an all-gather, or the input of a reduce-scatter or all-to-all. Steps train the
GPT of `wrapped.torch` on the same batches; the losses must agree to 1e-6 in every round. The steps called "unsent" send
nothing: their backend copies only this rank's data, so no backend can be faster. `--where cuda` uses GPU tensors (exit
code 69 without a GPU); `--base nccl` replaces gloo. Needs the extra `torch`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.wrapped.torch import OPTIMIZER, SIZES, built, divided
from hpcdist.bench.step import contenders
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import format_bytes

SCHEMA, RANKS = "hpcdist-benchmark-process-groups", 2
COMMITTED = "wrapped/2026-11-27-process-groups-2-ranks.h5"
SMALL = {"rounds": 6}
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
STEPS: Final = ("ddp", "fsdp2")
BYTES: Final = [8, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
LEAST: Final = {"all_reduce": 8}  # smallest measured size; 1 MiB for other operations
BASES: Final = {"gloo": "hpcdist;gloo", "nccl": "hpcdist;nccl"}  # contenders
UNSENT: Final = "unsent"
WHERE: Final = {"cpu": "", "cuda": ""}
OPTIONS: Final = {
    **SIZES,
    "rounds": 20,
    "bytes": BYTES,
    "operations": OPERATIONS,
    "steps": STEPS,
    "where": WHERE,
    "base": BASES,
}
AGREE: Final = 1e-6
MOVED: Final = 8 << 20  # bytes of the repetitions in one timed interval


def collective(name: str, nbytes: int, group: Any, ranks: int, where: str) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    whole = torch.ones(max(nbytes // 4 // ranks * ranks, 2), device=where)
    shard = torch.ones(max(whole.numel() // ranks, 1), device=where)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    other = torch.empty_like(whole)
    if where == "cpu":
        return calls[name]

    def call() -> None:
        calls[name]()
        torch.cuda.synchronize()

    return call


def register_unsent() -> None:
    """Register the backend UNSENT of torch.distributed, whose collectives copy only this rank's data. Local."""
    import torch.distributed as dist

    import hpcdist.torch

    class Unsent(hpcdist.torch.Group):
        def allreduce(self, tensors: Any, *_: Any) -> Any:
            return self.submit(lambda: None, tensors, UNSENT)

        def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
            def run() -> None:
                for output, tensor in zip(outputs, inputs, strict=True):
                    for row in output.view(self.size(), -1):
                        if row.data_ptr() != tensor.data_ptr():
                            row.copy_(tensor.view(-1))

            return self.submit(run, outputs, UNSENT)

        def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
            def run() -> None:
                for output, tensor in zip(outputs, inputs, strict=True):
                    output.view(-1).copy_(tensor.view(self.size(), -1)[self.rank()])

            return self.submit(run, outputs, UNSENT)

        _allgather_base = all_gather_single = lambda self, output, tensor, *_: self.all_gather_single_coalesced(
            [output], [tensor]
        )
        _reduce_scatter_base = reduce_scatter_single = lambda self, output, tensor, *_: (
            self.reduce_scatter_single_coalesced([output], [tensor])
        )

    def create(backend: Any, options: Any) -> Any:
        world = dist.group.WORLD
        assert isinstance(world, hpcdist.torch.Group)
        return Unsent(world.comm.dup(UNSENT), hpcdist.torch.Options())

    dist.Backend.register_backend(UNSENT, create, extended_api=True, devices=["cpu"])


def step_of(name: str, twin: Any, group: Any, ranks: int, where: str = "cpu") -> Callable[[Any], float]:
    """Return a training step of ``twin`` under DDP or FSDP2 that returns the mean loss. Collective over ``group``."""
    import torch
    import torch.distributed as dist

    module = divided(name, twin.to(where), group, where)
    optimizer = torch.optim.AdamW(module.parameters(), lr=OPTIMIZER["learning_rate"], fused=True)

    def step(batch: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = contenders.cross_entropy(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return float(total) / ranks

    return step


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    import torch
    import torch.distributed as dist

    import hpcdist.torch

    comm = session.comm
    if comm.size == 1:
        sys.exit("a collective needs at least 2 ranks; choose --ranks 2")
    if chosen.where == "cuda" and not torch.cuda.is_available():
        raise MissingCapabilityError("this PyTorch sees no GPU; install one that is built for CUDA")
    torch.set_num_threads(1)
    dist.init_process_group(hpcdist.torch.NAME)
    groups = {"hpcdist": dist.group.WORLD, chosen.base: dist.new_group(backend=chosen.base)}
    cases, calls = [], {}
    for name in chosen.operations:
        for nbytes in (size for size in chosen.bytes if size >= LEAST.get(name, 1 << 20)):
            cases.append(f"{name} {format_bytes(nbytes)}")
            repeat = int(np.clip(MOVED // nbytes, 1, 200))
            for backend, group in groups.items():
                call = collective(name, nbytes, group, comm.size, chosen.where)
                calls[backend, cases[-1]] = harness.repeated(call, repeat, comm)
    shape, model, store = built(chosen)
    rng, losses = np.random.default_rng(1), dict[tuple[str, str], float]()
    batch: list[Any] = []

    def begin() -> None:
        for name in chosen.steps:
            both = [losses.get((backend, name), 0.0) for backend in groups if backend != UNSENT]
            if abs(both[0] - both[1]) > AGREE * abs(both[1]):
                sys.exit(f"the losses of {name} differ: {both}")
        tokens = rng.integers(0, chosen.vocabulary, (comm.size, chosen.batch, chosen.context + 1))
        local_tokens = torch.from_numpy(tokens[comm.rank]).to(chosen.where)
        batch[:] = [local_tokens[:, :-1], local_tokens[:, 1:]]

    def timed_step(key: tuple[str, str], step: Callable[[Any], float]) -> Callable[[], float]:
        return harness.repeated(lambda: losses.update({key: step(batch)}), 1, comm)

    if chosen.where == "cpu" and chosen.steps:
        register_unsent()
        groups[UNSENT] = dist.new_group(backend=UNSENT)
    for name in chosen.steps:
        cases.append(f"step of {name}")
        for backend, group in groups.items():
            twin = contenders.torch_twin(shape, model, store)
            step = step_of(name, twin, group, comm.size, chosen.where)
            calls[backend, cases[-1]] = timed_step((backend, name), step)
    named = {f"{backend} {case}": call for (backend, case), call in calls.items()}
    times = harness.alternate(named, chosen.rounds, begin=begin)
    slowest = harness.of_ranks(comm, times).max(axis=2)
    begin()
    dist.destroy_process_group()
    about = {"contenders": ";".join(named), "cases": ";".join(cases), "ranks": comm.size}
    about |= {"torch": str(torch.__version__), "backends": BASES[chosen.base]}
    about["where"] = torch.cuda.get_device_name() if chosen.where == "cuda" else "cpu"
    return Results({"time_s": slowest}, {"time_s": "contenders, rounds"}, about)


def ratios(results: Results) -> harness.Ratios:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    ours, base = _backends(results)
    both = {case: rows[f"{ours} {case}"] / rows[f"{base} {case}"] for case in results.names("cases")}
    for case in results.names("cases"):
        if f"{UNSENT} {case}" in rows:
            both[f"{case}, {UNSENT}"] = rows[f"{UNSENT} {case}"] / rows[f"{base} {case}"]
    return both


def _backends(results: Results) -> list[str]:
    return str(results.attributes.get("backends", BASES["gloo"])).split(";")


def lines(results: Results) -> Sequence[str]:
    rows = dict(zip(results.names(), results.arrays["time_s"], strict=True))
    backends = _backends(results)
    table = [("", *backends, f"x {backends[1]}", "interval")]
    for case, ratio in ratios(results).items():
        median, low, high = harness.interval(ratio)
        name = case.removesuffix(f", {UNSENT}")
        pair = (backends[0] if case == name else UNSENT, backends[1])
        both = [f"{1e6 * np.median(rows[f'{backend} {name}']):,.0f} us" for backend in pair]
        table.append((case, *both, f"{median:.3f}", f"{low:.3f} to {high:.3f}"))
    return aligned(table)
