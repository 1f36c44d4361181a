"""Cost of the Python layer of the backend hpcdist: an 8-byte all_reduce, compared with the collective inside it.

    python -m benchmarks wrapped.overhead
    python -m benchmarks wrapped.overhead --rounds 400 --output overhead.h5 --anonymous

"collective" is `hpcdist.collectives.dispatch.allreduce` on the tensor's memory, with the algorithm that the backend
chooses for this size and without the flight recorder. The others call `torch.distributed.all_reduce`: with the recorder
(the default), without it, asynchronously with an immediate wait, and over gloo. In each round every contender makes the
same number of calls after a barrier; the slowest rank's time counts. "more us" is the extra time over the collective in
the same round. Needs the extra `torch`.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Final

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.collectives import dispatch
from hpcdist.collectives.arrays import algorithm_for
from hpcdist.comm.start import Session
from hpcdist.comm.transport import NULL_SINK, EventSink

SCHEMA, RANKS = "hpcdist-benchmark-process-group-overhead", 2
COMMITTED = "wrapped/2026-11-28-overhead.h5"
SMALL, WORSE = {"rounds": 40}, 1.5
BASE, RECORDED, GLOO = "collective", "all_reduce", "gloo"
MOST_S: Final = 25e-6  # largest extra time over the collective
OPTIONS: Final = {"rounds": 200, "calls": 200}  # calls: per contender and round
lines = harness.overhead_table


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    import torch
    import torch.distributed as dist

    import hpcdist.torch

    if session.comm.size == 1:
        sys.exit("an allreduce needs at least 2 ranks; choose --ranks 2")
    dist.init_process_group(hpcdist.torch.NAME)
    group = dist.group.WORLD
    assert isinstance(group, hpcdist.torch.Group)
    comm, gloo, recorder = group.comm, dist.new_group(backend="gloo"), group.comm.events
    tensor = torch.zeros(2)
    array = tensor.numpy()
    algorithm = algorithm_for(comm, array)

    def timed_calls(call: Callable[[], object], sink: EventSink) -> Callable[[], float]:
        return harness.repeated(call, chosen.calls, session.comm, lambda: setattr(comm, "events", sink))

    contenders = {
        BASE: timed_calls(lambda: dispatch.allreduce(comm, array, algorithm), NULL_SINK),
        RECORDED: timed_calls(lambda: dist.all_reduce(tensor), recorder),
        f"{RECORDED}, not recorded": timed_calls(lambda: dist.all_reduce(tensor), NULL_SINK),
        f"{RECORDED}, asynchronous": timed_calls(lambda: dist.all_reduce(tensor, async_op=True).wait(), recorder),
        GLOO: timed_calls(lambda: dist.all_reduce(tensor, group=gloo), NULL_SINK),
    }
    gc.disable()
    values = harness.alternate(contenders, chosen.rounds)
    gc.enable()
    comm.events = recorder
    times = harness.of_ranks(session.comm, values)
    dist.destroy_process_group()
    about = {"contenders": ";".join(values), "bytes": 8, "algorithm": algorithm, "torch": str(torch.__version__)}
    return Results({"time_s": times}, {"time_s": "contenders, rounds, ranks"}, about)


def failures(results: Results) -> list[str]:
    beyond = float(harness.beyond_first(results)[results.names().index(RECORDED)])
    return [] if beyond <= MOST_S else [f"{RECORDED} takes {1e6 * beyond:.1f} us more than the collective; limit 25"]
