r"""Training steps with and without overlap of communication and computation, alternating in one run.

    python -m benchmarks overlap
    python -m benchmarks overlap --hidden 256 --samples 8 --output overlap.h5 --anonymous
    python -m benchmarks overlap --strategies allreduce zero1 zero2 zero3 --algorithm node_shared \
        --hidden 256 --context 256 --samples 4 --bucket-bytes 4194304 --steps 10

"none" reduces each bucket of gradients before it goes on; "thread" and "poll" are the kinds of communication.overlap;
"delayed" reduces during the whole next step. For ZeRO, "+k" prefetches k units. Contenders with the same strategy and
algorithm must have bitwise equal weights.

"x none" is the step time relative to "none" in the same round. "exposed" is the mean time in which a rank only
communicates or waits. "hidden" is 1 - exposed / exposed of "none". "of the thread" is the local view of a rank, as in a
run's summary: 1 - (time to start and wait) / (busy time of the thread).
"""

import argparse
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.training import turns
from benchmarks.training.turns import ratios  # noqa: F401 - of the study
from hpcdist import collectives
from hpcdist.comm.start import Session
from hpcdist.strategies.data.config import STAGES

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-overlap", 2, "training/2026-11-21-overlap.h5"
SMALL = {"steps": 8}

OPTIONS: Final = {"layers": 4, "hidden": 384, "context": 64, "samples": 2, "bucket_bytes": 1 << 20, "steps": 30}
OPTIONS |= {"ahead": [1, 2]}  # units that zero3 prefetches


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithm", default="ring", choices=sorted(collectives.ALLREDUCE))
    parser.add_argument("--strategies", nargs="+", default=["allreduce"], choices=["allreduce", *STAGES])


def contenders(chosen: argparse.Namespace, threads: bool) -> dict[str, dict[str, Any]]:
    """Return the recipe keys of the contenders, "none" first; ``threads``: MPI supports calls by several threads."""

    def keys(strategy: str, overlap: str = "none", algorithm: str = "", **more: Any) -> dict[str, Any]:
        common = {"communication.overlap": overlap, "communication.algorithm": algorithm or chosen.algorithm}
        common |= {"communication.bucket_bytes": chosen.bucket_bytes} if strategy == "allreduce" else {}
        return {
            "parallel.strategy": strategy, **common, **{key.replace("__", "."): value for key, value in more.items()}
        }  # fmt: skip

    made: dict[str, dict[str, Any]] = {}
    engines = [*(["thread"] if threads else []), *(["poll"] if chosen.algorithm == "ring" else [])]
    for strategy in chosen.strategies:
        prefix = "" if strategy == "allreduce" else f"{strategy} "
        made[f"{prefix}none"] = keys(strategy)
        if strategy == "allreduce":
            made |= {"thread": keys(strategy, "thread")} if threads else {}
            made["poll"] = keys(strategy, "poll", "ring")
            made |= {"delayed": keys(strategy, "thread", communication__delayed=True)} if threads else {}
            continue
        made |= {f"{prefix}{engine}": keys(strategy, engine) for engine in engines}
        for ahead in chosen.ahead if strategy == "zero3" else ():
            made |= {f"{prefix}{engine} +{ahead}": keys(strategy, engine, zero__prefetch=ahead) for engine in engines}
    return made


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    if comm.size == 1:
        raise SystemExit("a gradient exchange needs at least 2 ranks; choose --ranks 2")
    keys = contenders(chosen, comm.supports("thread_multiple"))
    common = turns.gpt_keys(chosen, **{"run.global_batch": chosen.samples * comm.size})
    trainings, times = turns.measure(session, keys, common, chosen.steps)
    groups: dict[str, Hashable] = {
        name: (settings["parallel.strategy"], settings["communication.algorithm"], "communication.delayed" in settings)
        for name, settings in keys.items()
    }
    turns.check_bits(comm.rank, trainings, groups)
    for training in trainings.values():
        training.close()
    about = {"ranks": comm.size, "contenders": ",".join(trainings)}
    return Results({"time_s": times}, {"time_s": f"contenders, ({', '.join(turns.FIGURES)}), ranks, steps"}, about)


def lines(results: Results) -> Sequence[str]:
    times = results.arrays["time_s"]
    exposed_s = np.median(times[:, 1].mean(axis=1), axis=1)
    with np.errstate(invalid="ignore"):
        hidden_share = 1 - times[:, 2].sum(axis=(1, 2)) / times[:, 3].sum(axis=(1, 2))
    more = {
        "exposed ms": [f"{1e3 * value:.1f}" for value in exposed_s],
        "hidden": [f"{1 - value / exposed_s[0]:.1%}" for value in exposed_s],
        "of the thread": [f"{value:.1%}" if np.isfinite(value) else "-" for value in hidden_share],
    }
    return harness.time_table(turns.slowest(results), results.names(), more=more)
