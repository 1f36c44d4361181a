"""Silent data corruption check: recompute suspicious steps, or every n-th, before the update.

A recomputed step has the same bits unless the hardware errs (Dixit et al., arXiv:2102.11245). If the bits differ, a
third computation decides. Ranks are faulty if their local losses or gradients, before any exchange, differ between
computations. On pipeline or tensor axes, several ranks may be named as faulty. Cost: one hash pass (xxh3) over the
gradients in each step that may be recomputed.
"""

import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from hpcdist.arrays import backend
from hpcdist.checkpoint.shard import blocks_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DivergenceError
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.schedule.step import RecomputeVerdict, RunningStep, StepObserver, StepResult

MEDIAN_STEPS: Final = 50  # number of steps in the median
LEAST_STEPS: Final = 10  # number of steps before a step can be suspicious


@dataclass(frozen=True)
class ComputationDigest:
    """Two hashes of one computation of a step: of the local losses and gradients, and of the sums over all ranks."""

    own: bytes
    summed: bytes


class SdcCheck(StepObserver):
    """Step observer that recomputes every n-th step and suspicious steps, to detect silent data corruption."""

    # A loss or gradient norm above ``factor`` times the median is suspicious. 0 disables either check. With
    # ``skips_overflow``, non-finite gradients are not suspicious. Construction is local.
    def __init__(
        self, comm: Communicator, exchange: Exchange, *, factor: float, every_steps: int, skips_overflow: bool
    ) -> None:
        self._comm, self._exchange, self._skips_overflow = comm, exchange, skips_overflow
        self._factor, self._every_steps = factor, every_steps
        self._norms: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._losses: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._step, self._digest = 0, xxhash.xxh3_128()
        self._suspects: set[int] = set()  # suspected ranks of the last recomputation

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        if self._factor or self._is_due(step.number):
            values = None if op.range is None else step.gradients_in(op.range)
            if values is not None:
                self._begin(step)
                self._digest.update(backend.to_host(values).view(np.uint8).data)

    def _is_due(self, step: int) -> bool:
        return bool(self._every_steps) and step % self._every_steps == 0

    def _begin(self, step: RunningStep) -> None:
        if self._step != step.number:
            self._step, self._digest = step.number, xxhash.xxh3_128()

    def agreed(self, step: RunningStep) -> None:
        """Recompute ``step`` if a periodic check is due or its results are suspicious, and compare. Collective.

        If the results differ, a third computation decides. Raises DivergenceError if all three results differ, or if a
        rank computes wrong results in two checks in a row.
        """
        outcome = step.outcome
        suspicion = self._suspicion(outcome)
        if suspicion or self._is_due(step.number):
            before, seconds = time.perf_counter(), dict(outcome.seconds)
            outcome.recomputed = self._recomputed(step, suspicion)
            taken_s = time.perf_counter() - before
            outcome.seconds |= seconds  # count the recomputation as compute time
            outcome.seconds["compute_s"] += taken_s
            outcome.seconds["communication_s"] -= taken_s
        if math.isfinite(outcome.gradient_norm) and math.isfinite(outcome.loss):
            self._norms.append(outcome.gradient_norm)
            self._losses.append(outcome.loss)

    def _suspicion(self, outcome: StepResult) -> str:
        if not self._factor:
            return ""
        for name, value, history in (
            ("gradient norm", outcome.gradient_norm, self._norms),
            ("loss", outcome.loss, self._losses),
        ):
            if not math.isfinite(value):
                if name == "gradient norm" and self._skips_overflow:
                    continue  # the loss scale skips this step
                return f"{name} {value}"
            if len(history) >= LEAST_STEPS and value > self._factor * (usual := statistics.median(history)):
                return f"{name} {value:.4g}, with a median of {usual:.4g}"
        return ""

    def _recomputed(self, step: RunningStep, suspicion: str) -> RecomputeVerdict:
        first, second = self._computation(step), self._again(step)
        exchanged = self._comm.allgather_object
        others = exchanged(first.own != second.own)
        if not any(exchanged(first != second)):
            self._suspects = set()
            return RecomputeVerdict(suspicion)
        third = self._again(step)
        lost = exchanged(third.own not in (first.own, second.own))
        unsure = any(exchanged(third.summed not in (first.summed, second.summed)))
        hosts: list[str] = self._comm.allgather_object(socket.gethostname())
        suspects = {rank for rank, differs in enumerate(others) if differs}
        twice = {rank for rank, differs in enumerate(lost) if differs} or (suspects & self._suspects)
        if twice or (unsure and not suspects):
            raise DivergenceError(_refusal(step.number, sorted(twice), hosts))
        self._suspects = suspects
        return RecomputeVerdict(suspicion, tuple(sorted(suspects)), _verdict(step.number, sorted(suspects), hosts))

    def _again(self, step: RunningStep) -> ComputationDigest:
        self._digest = xxhash.xxh3_128()
        step.compute_again()
        return self._computation(step)

    def _computation(self, step: RunningStep) -> ComputationDigest:
        self._begin(step)
        self._digest.update(np.array(step.own_losses).tobytes())
        outcome = step.outcome
        sums = xxhash.xxh3_128(np.array([outcome.loss, outcome.gradient_norm]).tobytes())
        for gradients in self._exchange.applied_gradients():
            for block in blocks_of(gradients):
                sums.update(block.data)
        return ComputationDigest(self._digest.digest(), sums.digest())


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


def _verdict(step: int, suspects: Sequence[int], hosts: Sequence[str]) -> str:
    who = f"{_named(suspects, hosts)} computed" if suspects else "the exchange of gradients gave"
    return f"step {step}: a silent fault: {who} other bits than in a repetition; two of three computations agree"


def _refusal(step: int, ranks: Sequence[int], hosts: Sequence[str]) -> str:
    if not ranks:
        return (
            f"step {step}: three exchanges of the same gradients gave three results. Nothing was updated: look for a "
            "faulty network, or an allreduce of the MPI library that is not reproducible (communication.algorithm)"
        )
    return (
        f"step {step}: {_named(ranks, hosts)} computed other bits of the same step twice in a row. Nothing was "
        "updated: exclude that node, and resume from the newest checkpoint with --resume auto"
    )
