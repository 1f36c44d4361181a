"""Steps of a GPT over the context axis and the data axis, alternating in one process, with the same tokens.

    python -m benchmarks context
    python -m benchmarks context --context 4096 --steps 8 --output context.h5 --anonymous
    python -m benchmarks context --memory --ranks 4 --samples 1

"x data" is the step time relative to the data axis in the same round. "sent" is the bytes of a rank's messages in a
step; "activations" is a rank's bytes in the ledger. "uneven" is the compute time of the slowest rank relative to the
mean, less 1.

--memory times nothing. The peak of activations of N times longer samples on N ranks must be at most 1.1 times the peak
of ``--context`` tokens on one rank. Then the memory of each process is capped (RLIMIT_DATA) at twice the peak of a ring
rank: a step of the long samples must fit on N ranks and fail on one.
"""

import argparse
import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from benchmarks.training.turns import ratios  # noqa: F401 - of the study
from hpcdist.comm.start import Session
from hpcdist.reporting.table import aligned

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-context", 2, "training/2026-11-28-context.h5"
SMALL = {"context": 512, "steps": 4}

CONTENDERS: Final = ("data", "ring", "all_to_all")  # the first is the base
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 4096, "samples": 2, "steps": 8, "memory": False}
GOAL: Final = 1.1  # limit of a rank's activations, relative to one rank with as many tokens per rank
MMAP_THRESHOLD: Final = -3  # parameter of glibc's mallopt: larger allocations get a separate mapping
T = TypeVar("T")


def keys_of(name: str, ranks: int) -> dict[str, Any]:
    context_keys: Mapping[str, Any] = {"parallel.context": ranks, "parallel.context_method": name}
    return {"communication.algorithm": "ring", **({} if name == "data" else context_keys)}


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    if chosen.memory:
        return measure_memory(chosen, session)
    contenders = {name: keys_of(name, session.comm.size) for name in CONTENDERS}
    return turns.measured(chosen, session, contenders)


def measure_memory(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the memory peaks, and whether the long samples fit under a cap. Collective."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # freed memory is returned and does not count under the cap
    comm, long = session.comm, argparse.Namespace(**vars(chosen))
    long.context *= comm.size

    def alone(call: Callable[[Session], T]) -> T:
        return comm.broadcast_object(call(harness.alone()) if comm.rank == 0 else None)  # type: ignore[no-any-return]

    short_keys, long_keys = (turns.gpt_keys(sizes, **{"run.global_batch": chosen.samples}) for sizes in (chosen, long))
    context_keys = {name: {**long_keys, **keys_of(name, comm.size)} for name in CONTENDERS[1:]}
    peaks = [
        alone(lambda solo_session: turns.peaks(solo_session, short_keys)),
        *(turns.peaks(session, keys) for keys in context_keys.values()),
    ]
    gc.collect()
    cap = 2 * round(peaks[1][1])
    fits = [
        alone(lambda solo_session: turns.fits(solo_session, long_keys, cap)),
        *(turns.fits(session, keys, cap) for keys in context_keys.values()),
    ]
    about = {
        "context": chosen.context,
        "ranks": comm.size,
        "cap_bytes": cap,
        "contenders": "; ".join(["one rank", *context_keys]),
    }
    dims = {"peak_bytes": "contenders, (activations, all)", "fits": "contenders, with the long samples under the cap"}
    return Results({"peak_bytes": np.array(peaks), "fits": np.array(fits, np.float64)}, dims, about)


def lines(results: Results) -> Sequence[str]:
    if "fits" in results.arrays:
        return _memory_lines(results)
    step_s, waits_s = results.arrays["time_s"].swapaxes(0, 1)
    computes_s = np.median(step_s - waits_s, axis=-1)
    uneven = computes_s.max(axis=1) / computes_s.mean(axis=1) - 1
    more = {**turns.megabytes(results, "sent", "activations"), "uneven": [f"{value:.1%}" for value in uneven]}
    return harness.time_table(turns.slowest(results), results.names(), more=more)


def _memory_lines(results: Results) -> list[str]:
    about, peaks = results.attributes, results.arrays["peak_bytes"]
    tokens, ranks, cap = int(about["context"]), int(about["ranks"]), about["cap_bytes"] / 1e6
    rows = [["", "tokens a sample", "activations MB", "x one rank", "all MB"]]
    for name, (activations, everything), length in zip(
        results.names(), peaks, [tokens, *[ranks * tokens] * (len(peaks) - 1)], strict=True
    ):
        cells = f"{activations / 1e6:.1f}", f"{activations / peaks[0, 0]:.3f}", f"{everything / 1e6:.1f}"
        rows.append([name, f"{length:,}", *cells])
    ends = [
        f"{name}: {'a step' if fits else 'MemoryError'}"
        for name, fits in zip(results.names(), results.arrays["fits"], strict=True)
    ]
    return [*aligned(rows), f"{ranks * tokens:,} tokens, {cap:.0f} MB more for each process: {', '.join(ends)}"]


def failures(results: Results) -> Sequence[str]:
    if "fits" not in results.arrays:
        return ()
    (one, *peaks), (alone, *together) = results.arrays["peak_bytes"][:, 0], results.arrays["fits"]
    named = zip(results.names()[1:], peaks, strict=True)
    missed = [
        f"{name} has {peak / one:.3f} of the activations of one rank" for name, peak in named if peak > GOAL * one
    ]
    if alone or not together[0]:
        missed.append("under the cap, a step must fit on all ranks but not on one")
    return missed
