"""Steps of DDP over hosts with slow links: over hpcdist, over gloo, and with hpcdist's own trainer. Root only.

    python -m benchmarks hosts.torch
    python -m benchmarks hosts.torch --batch 2 --output hosts-torch.h5 --anonymous

`benchmarks hosts` describes the hosts; each has one rank. All contenders train the GPT of `wrapped.torch` from the same
values, alternating in one run:

    raw         TCP streams with the bytes that an allreduce of the gradients must send on each link
    compute     a DDP step without its allreduce
    trainer     the same modules, wrapped, with hpcdist's allreduce
    ddp         DistributedDataParallel over the backend hpcdist, and over gloo
    all_reduce  an allreduce of a buffer as large as the gradients, over both backends

The larger of raw and compute is a lower bound of the step time. "of bound" is the bound divided by the time. The goal
is that DDP over hpcdist reaches 0.95 of the trainer's speed. The byte counters of the links must show that the data
crossed the wire; otherwise the run fails. Needs the extra `torch`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.hosts import hierarchical as wires
from benchmarks.hosts.cluster import Hosts, tuned
from benchmarks.wrapped import process_groups
from benchmarks.wrapped import torch as wrapped
from hpcdist.bench.step import contenders
from hpcdist.comm.launch import mpirun
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned

SCHEMA, COMMITTED = "hpcdist-benchmark-hosts-torch", "hosts/2026-11-27-hosts-torch.h5"
SMALL = {"rounds": 5}
OPTIONS: Final = {**wrapped.SIZES, "batch": 1, "hosts": 2, "rate": "1gbit", "rounds": 20}
RAW, COMPUTE, TRAINER, DDP, DDP_GLOO = "raw", "compute", "trainer", "ddp", "ddp over gloo"
REDUCE, REDUCE_GLOO = "all_reduce", "all_reduce over gloo"
LOCAL: Final = (RAW, COMPUTE)
GOAL: Final = 0.95  # least speed of DDP, relative to the trainer


def timed(session: Session, chosen: argparse.Namespace) -> dict[str, Any]:
    """Time each contender (slowest rank, seconds), and count its sent bytes (busiest host). Collective."""
    import torch
    import torch.distributed as dist

    from hpcdist.adapters.torch.model import wrap

    torch.set_num_threads(1)
    comm, wire = session.comm, wires.Wire(session.comm)
    os.environ["MASTER_ADDR"] = comm.broadcast_object(wires.own_address())
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("hpcdist")
    groups = {"": dist.group.WORLD, " over gloo": dist.new_group(backend="gloo")}
    shape, model, store = wrapped.built(chosen)
    twins = {name: contenders.torch_twin(shape, model, store) for name in (TRAINER, DDP, DDP_GLOO, COMPUTE)}
    gradient = torch.ones(sum(parameter.numel() for parameter in twins[DDP].parameters()))
    payload = 2 * (comm.size - 1) * gradient.nbytes // comm.size
    rng, batch = np.random.default_rng(1), list[np.ndarray]()
    example = np.zeros((1, shape.context), np.int64)
    wrapped_model = wrap(twins[TRAINER], contenders.cross_entropy, example=example, tokens_per_sample=shape.context)
    train_step = wrapped.step_of(session, chosen, wrapped_model, "allreduce")
    runs: dict[str, Callable[[], Any]] = {RAW: lambda: wire.stream(payload), TRAINER: lambda: train_step(tuple(batch))}  # type: ignore[arg-type]

    def tensors() -> list[Any]:
        rows = slice(comm.rank * chosen.batch, (comm.rank + 1) * chosen.batch)
        return [torch.from_numpy(values[rows].astype(np.int64)) for values in batch]

    def add_step(name: str, group: Any, ranks: int) -> None:
        step = process_groups.step_of("ddp", twins[name], group, ranks)
        runs[name] = lambda: step(tensors())

    alone = dist.new_group([comm.rank], use_local_synchronization=True)
    add_step(COMPUTE, alone, 1)
    for ending, group in groups.items():
        add_step(f"{DDP}{ending}", group, comm.size)
        runs[f"{REDUCE}{ending}"] = lambda group=group: dist.all_reduce(gradient, dist.ReduceOp.MAX, group)

    def begin() -> None:
        tokens = rng.integers(0, chosen.vocabulary, (chosen.batch * comm.size, chosen.context + 1), np.int32)
        batch[:] = [tokens[:, :-1], tokens[:, 1:]]

    def timed_call(name: str) -> list[float]:
        wire.stream(wires.DRAIN_BYTES)
        comm.barrier()
        sent, started = wires.sent_on_wire(), time.perf_counter()
        runs[name]()
        figures = [time.perf_counter() - started, wires.sent_on_wire() - sent]
        return [float(value) for value in np.max(comm.allgather_object(figures), axis=0)]

    calls = {name: lambda name=name: timed_call(name) for name in runs}
    values = np.array(list(harness.alternate(calls, chosen.rounds, begin=begin).values()))
    dist.destroy_process_group()
    times, sent = values[..., 0].tolist(), np.median(values[..., 1], axis=1).tolist()
    return {"names": list(runs), "times": times, "sent": sent, "payload": payload, "torch": str(torch.__version__)}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    harness.at_least(chosen, hosts=2, rounds=1)
    launcher, request = mpirun.find(), {name: getattr(chosen, name) for name in OPTIONS}
    with Hosts(chosen.hosts, chosen.rate) as hosts:
        result = hosts.results(launcher, 1, __spec__.name, request, tuned(launcher))
    about = {"contenders": ";".join(result["names"]), "payload_bytes": result["payload"], "torch": result["torch"]}
    about |= {"mpi_library": result["library"]}
    arrays = {"time_s": np.array(result["times"]), "sent_bytes": np.array(result["sent"])}
    return Results(arrays, {"time_s": "contenders, rounds", "sent_bytes": "contenders"}, about)


def _rows(results: Results) -> dict[str, np.ndarray]:
    return dict(zip(results.names(), results.arrays["time_s"], strict=True))


def ratios(results: Results) -> harness.Ratios:
    rows = _rows(results)
    pairs = [(DDP, TRAINER), (DDP, DDP_GLOO), (REDUCE, RAW), (REDUCE, REDUCE_GLOO)]
    return {f"{name} / {base}": rows[name] / rows[base] for name, base in pairs}


def lines(results: Results) -> Sequence[str]:
    rows, payload = _rows(results), int(results.attributes["payload_bytes"])
    table = [("", "ms", "quartiles", "of bound", "interval", f"of {payload} bytes")]
    for (name, times), sent in zip(rows.items(), results.arrays["sent_bytes"], strict=True):
        low, middle, high = np.percentile(1e3 * times, [25, 50, 75])
        bound = rows[RAW] if name.startswith(REDUCE) else np.maximum(rows[RAW], rows[COMPUTE])
        share, least, most = harness.interval(bound / times)
        bound_cells = ("", "") if name in LOCAL else (f"{share:.3f}", f"{least:.3f} to {most:.3f}")
        table.append((name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}", *bound_cells, f"{sent / payload:.3f}"))
    shown_ratios = [f"{name} {median:.3f} ({low:.3f} to {high:.3f})" for name, (median, low, high) in _medians(results)]
    return [str(results.attributes["mpi_library"]), *aligned(table), *shown_ratios]


def _medians(results: Results) -> list[tuple[str, tuple[float, float, float]]]:
    return [(name, harness.interval(samples)) for name, samples in ratios(results).items()]


def failures(results: Results) -> list[str]:
    least = 0.98 * int(results.attributes["payload_bytes"])
    sent = dict(zip(results.names(), results.arrays["sent_bytes"], strict=True))
    missed = [f"{name} sent fewer bytes on the wire than necessary" for name in sent if sent[name] < least]
    missed = [text for text in missed if not text.startswith(COMPUTE)]
    reached = 1 / dict(_medians(results))[f"{DDP} / {TRAINER}"][0]
    if reached < GOAL:
        missed.append(f"{DDP} reaches {reached:.3f} of the trainer's speed, less than {GOAL}")
    return missed


def work(words: str, result: str) -> None:
    import hpcdist.torch

    world = hpcdist.init()
    figures = timed(world.session, argparse.Namespace(**json.loads(words)))
    if world.rank == 0:
        Path(result).write_text(json.dumps(figures | {"library": world.library}))
    world.exit(0)


if __name__ == "__main__":
    work(*sys.argv[1:])
