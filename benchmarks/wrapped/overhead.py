"""Cost of the Python layer of the backend hpcdist: an all_reduce of eight bytes beside the collective below it.

    python -m benchmarks wrapped.overhead
    python -m benchmarks wrapped.overhead --rounds 400 --output overhead.h5 --anonymous

"collective" is `hpcdist.collectives.dispatch.allreduce` by the algorithm that the backend takes for this size, on the
memory of the same tensor, without the flight recorder. The others are calls of `torch.distributed.all_reduce`: with the
recorder, as every program has it, without, asynchronous and waited for at once, and over gloo in the same processes. In
each round every contender makes the same number of calls, from a barrier on; a time is that of the slowest rank over
the calls. "more us" is the difference to the collective in the same round. Needs the extra `torch`.
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
from hpcdist.comm.events import NULL_SINK, EventSink
from hpcdist.comm.start import Session

SCHEMA, RANKS = "hpcdist-benchmark-process-group-overhead", 2
COMMITTED = "wrapped/2026-11-28-overhead.h5"
SMALL, WORSE = {"rounds": 40}, 1.5
BASE, RECORDED, GLOO = "collective", "all_reduce", "gloo"
MOST_S: Final = 25e-6  # more than the collective
OPTIONS: Final = {"rounds": 200, "calls": 200}  # calls of a turn
lines = harness.overhead_table


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of all contenders. Collective."""
    import torch
    import torch.distributed as dist

    import hpcdist.torch

    if session.comm.size == 1:
        sys.exit("one rank has nothing to reduce; choose --ranks 2")
    dist.init_process_group(hpcdist.torch.NAME)
    group = dist.group.WORLD
    assert isinstance(group, hpcdist.torch.Group)
    comm, gloo, recorder = group.comm, dist.new_group(backend="gloo"), group.comm.events
    tensor = torch.zeros(2)
    array = tensor.numpy()
    algorithm = algorithm_for(comm, array)

    def turn(call: Callable[[], object], sink: EventSink) -> Callable[[], float]:
        return harness.repeated(call, chosen.calls, session.comm, lambda: setattr(comm, "events", sink))

    contenders = {
        BASE: turn(lambda: dispatch.allreduce(comm, array, algorithm), NULL_SINK),
        RECORDED: turn(lambda: dist.all_reduce(tensor), recorder),
        f"{RECORDED}, not recorded": turn(lambda: dist.all_reduce(tensor), NULL_SINK),
        f"{RECORDED}, asynchronous": turn(lambda: dist.all_reduce(tensor, async_op=True).wait(), recorder),
        GLOO: turn(lambda: dist.all_reduce(tensor, group=gloo), NULL_SINK),
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
    """Return what is wrong with the goal: a call takes at most 25 us more than the collective."""
    beyond = float(harness.beyond_first(results)[results.names().index(RECORDED)])
    return [] if beyond <= MOST_S else [f"{RECORDED} takes {1e6 * beyond:.1f} us more than the collective, not 25"]
