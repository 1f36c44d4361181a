"""Cost of the Python layer of hpcdist.torch: an 8-byte all_reduce, compared with its collective, and metrics of a step.

    python -m benchmarks wrapped.overhead
    python -m benchmarks wrapped.overhead --rounds 400 --output overhead.h5 --anonymous

"collective" is `hpcdist.collectives.dispatch.allreduce` on the tensor's memory, with the algorithm that the backend
chooses for this size and without the flight recorder. The others call `torch.distributed.all_reduce`: with the recorder
(the default), without it, asynchronously with an immediate wait, and over gloo. In each round every contender makes the
same number of calls after a barrier; the slowest rank's time counts. "more us" is the extra time over the collective in
the same round. "log" is `hpcdist.torch.log` in a run directory, with the loss as a tensor, the samples, the learning
rate and three further values. A thread of rank 0 writes the rows. "phase" is an empty `hpcdist.torch.phase`. Needs the
extra `torch`.
"""

import argparse
import gc
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.collectives import dispatch
from hpcdist.collectives.arrays import algorithm_for
from hpcdist.comm.start import Session
from hpcdist.comm.transport import NULL_SINK, EventSink
from hpcdist.training.recipe import recipe as recipes

SCHEMA, RANKS = "hpcdist-benchmark-process-group-overhead", 2
COMMITTED = "wrapped/2026-11-30-overhead.h5"
SMALL, WORSE = {"rounds": 40}, 1.5
BASE, RECORDED, GLOO, LOG, PHASE = "collective", "all_reduce", "gloo", "log", "phase"
MOST_S: Final = {RECORDED: 17e-6, LOG: 50e-6}  # largest extra time over the collective
OPTIONS: Final = {"rounds": 200, "calls": 200}  # calls: per contender and round
lines = harness.overhead_table


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    import torch
    import torch.distributed as dist

    import hpcdist.torch
    from hpcdist.torch import activity, metrics

    if session.comm.size == 1:
        sys.exit("an allreduce needs at least 2 ranks; choose --ranks 2")
    dist.init_process_group(hpcdist.torch.NAME)
    group = dist.group.WORLD
    assert isinstance(group, hpcdist.torch.Group)
    comm, gloo, recorder = group.comm, dist.new_group(backend="gloo"), group.comm.events
    tensor = torch.zeros(2)
    array = tensor.numpy()
    algorithm = algorithm_for(comm, array)
    folder = tempfile.TemporaryDirectory()
    metrics.begin(hpcdist.init(), Path(folder.name) / "run", recipes.load().recipe)
    activities = activity.current()  # recorded only for the contenders with metrics
    steps, loss = itertools.count(1), torch.ones(())

    def log() -> None:
        metrics.log(next(steps), loss=loss, samples=8, learning_rate=1e-3, accuracy=0.5, norm=1.0, scale=2.0)

    def phase() -> None:
        with metrics.phase("update"):
            pass

    def timed_calls(call: Callable[[], object], sink: EventSink, metrics: bool = False) -> Callable[[], float]:
        def begin() -> None:
            comm.events = sink
            activity.set_current(activities if metrics else None)

        return harness.repeated(call, chosen.calls, session.comm, begin)

    contenders = {
        BASE: timed_calls(lambda: dispatch.allreduce(comm, array, algorithm), NULL_SINK),
        RECORDED: timed_calls(lambda: dist.all_reduce(tensor), recorder),
        f"{RECORDED}, not recorded": timed_calls(lambda: dist.all_reduce(tensor), NULL_SINK),
        f"{RECORDED}, asynchronous": timed_calls(lambda: dist.all_reduce(tensor, async_op=True).wait(), recorder),
        f"{RECORDED}, with metrics": timed_calls(lambda: dist.all_reduce(tensor), recorder, metrics=True),
        GLOO: timed_calls(lambda: dist.all_reduce(tensor, group=gloo), NULL_SINK),
        LOG: timed_calls(log, recorder, metrics=True),
        PHASE: timed_calls(phase, recorder, metrics=True),
    }
    gc.disable()
    values = harness.alternate(contenders, chosen.rounds)
    gc.enable()
    activity.set_current(activities)
    metrics.end()
    comm.events = recorder
    times = harness.of_ranks(session.comm, values)
    dist.destroy_process_group()
    folder.cleanup()
    about = {"contenders": ";".join(values), "bytes": 8, "algorithm": algorithm, "torch": str(torch.__version__)}
    return Results({"time_s": times}, {"time_s": "contenders, rounds, ranks"}, about)


def failures(results: Results) -> list[str]:
    beyond = dict(zip(results.names(), harness.beyond_first(results), strict=True))
    return [
        f"{name} takes {1e6 * beyond[name]:.1f} us more than the collective; limit {1e6 * most_s:.0f}"
        for name, most_s in MOST_S.items()
        if beyond[name] > most_s
    ]
