"""Rows of tokens sent to the experts of other ranks and back: shared memory of the node compared with MPI's Alltoallv.

    python -m benchmarks experts.rows
    python -m benchmarks experts.rows --ranks 4 --output rows.h5 --anonymous

"node memory" and "messages" are the exchange of a mixture of experts after packing by expert: the ranks exchange row
counts, send rows to the experts' ranks, sort rows by expert, and return the results. "Alltoallv" is two calls of MPI
only. A size is the float32 bytes of a rank's rows. Loads are even, so no expert is lent to another rank. "x Alltoallv"
below 1 is faster.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.node.flow import PublishedMemory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.models.arena import Arena
from hpcdist.models.experts.mixture import StayingRows
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import format_bytes
from hpcdist.strategies.expert.axis import ExpertAxis
from hpcdist.strategies.expert.model import TravellingRows
from hpcdist.strategies.expert.shared import TENSORS, SharedRows
from hpcdist.strategies.schedule.step import NanFinder
from hpcdist.strategies.tensor.axis import NODE_SHARED

SCHEMA, RANKS = "hpcdist-benchmark-expert-rows", 2
COMMITTED = "training/2026-11-28-expert-rows-2-ranks.h5"
SMALL = {"bytes": [1 << 20, 16 << 20], "rounds": 10}
NAMES: Final = ("node memory", "messages", "Alltoallv")
OPTIONS: Final = {"bytes": [1 << 20, 4 << 20, 16 << 20, 64 << 20], "hidden": 256, "experts": 8, "rounds": 30}


def round_trip(travel: StayingRows, tokens: np.ndarray, starts: np.ndarray, comm: Communicator) -> Callable[[], float]:
    """Return a function that sends ``tokens`` out and back, and returns the seconds without filling the buffers."""
    nothing = np.zeros((1, 1, 1), np.float32)
    parameters, arena = dict.fromkeys(TENSORS, nothing), Arena()

    def run() -> float:
        saved = arena.saved(0)
        comm.barrier()
        begin = time.perf_counter()
        rows = travel.send_buffer(starts, tokens, parameters, saved)
        fill_s = harness.seconds(lambda: np.copyto(rows, tokens))
        received, _ = travel.send_out(rows, starts, parameters, saved)()
        results = travel.result_buffer("results", received.shape, received.dtype, saved)
        fill_s += harness.seconds(lambda: np.copyto(results, received))
        back = travel.bring_back(results, "back", saved)
        spent = time.perf_counter() - begin - fill_s
        if not np.array_equal(back, tokens):
            raise SystemExit(f"{type(travel).__name__} returned wrong rows")
        saved.release()
        return spent

    return run


def two_calls(tokens: np.ndarray, counts: np.ndarray, comm: Communicator) -> Callable[[], float]:
    """Return a timed pair of Alltoallv calls, out and back; ``counts`` (ranks, ranks) are rows between all ranks."""
    width, rank = tokens.shape[1], comm.rank
    sent, received = (_ranges(row_counts * width) for row_counts in (counts[rank], counts[:, rank]))
    remote, back = np.empty(received[-1].stop, np.float32), np.empty_like(tokens).reshape(-1)

    def calls() -> None:
        collectives.all_to_all(comm, tokens.reshape(-1), remote, sent, received, "native")
        collectives.all_to_all(comm, remote, back, received, sent, "native")

    return lambda: harness.seconds(calls, comm)


def _ranges(counts: np.ndarray) -> list[Range]:
    ends = [0, *np.cumsum(counts).tolist()]
    return [Range(start, stop) for start, stop in pairwise(ends)]


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    if comm.size == 1 or chosen.experts % comm.size:
        sys.exit("at least 2 ranks with equal numbers of experts are needed; choose --ranks 2")
    times = []
    for nbytes in chosen.bytes:
        count = nbytes // (4 * chosen.hidden)
        starts = np.arange(chosen.experts + 1) * count // chosen.experts
        tokens = np.random.default_rng(comm.rank).standard_normal((count, chosen.hidden), np.float32)
        memory = PublishedMemory(comm, chosen.experts + 1)
        calls = {
            "node memory": SharedRows(ExpertAxis(comm, NODE_SHARED, NanFinder()), memory),
            "messages": TravellingRows(ExpertAxis(comm, "native", NanFinder())),
        }
        runs = {name: round_trip(travel, tokens, starts, comm) for name, travel in calls.items()}
        runs["Alltoallv"] = two_calls(
            tokens, np.tile(np.diff(starts[:: chosen.experts // comm.size]), (comm.size, 1)), comm
        )
        times.append(harness.of_ranks(comm, harness.alternate(runs, chosen.rounds)).max(axis=2))
    arrays = {"time_s": np.array(times), "bytes": np.array(chosen.bytes)}
    about = {"contenders": ";".join(NAMES), "ranks": comm.size, "hidden": chosen.hidden, "experts": chosen.experts}
    return Results(arrays, {"time_s": "bytes, contenders, rounds", "bytes": "bytes"}, about)


def ratios(results: Results) -> harness.Ratios:
    return {
        f"{name} {format_bytes(nbytes)}": rows[index] / rows[-1]
        for nbytes, rows in zip(results.arrays["bytes"].tolist(), results.arrays["time_s"], strict=True)
        for index, name in enumerate(NAMES[:-1])
    }


def lines(results: Results) -> Sequence[str]:
    table = [("rows", *(f"{name}, us" for name in NAMES), *(f"{name} x Alltoallv" for name in NAMES[:-1]))]
    both = ratios(results)
    for nbytes, rows in zip(results.arrays["bytes"].tolist(), results.arrays["time_s"], strict=True):
        size, medians = format_bytes(nbytes), [f"{1e6 * median:,.0f}" for median in np.median(rows, axis=1)]
        apart = ["{:.2f} ({:.2f} to {:.2f})".format(*harness.interval(both[f"{name} {size}"])) for name in NAMES[:-1]]
        table.append((size, *medians, *apart))
    return aligned(table)
