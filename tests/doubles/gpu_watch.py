"""Looks on while ranks train on a GPU: what each step hands to messages, transfers and waits for, against what it must.

A step brings to the host the batch's losses, all at once, a norm, and what the message layer stages; between two
messages nobody waits.
"""

import threading
from collections import Counter
from itertools import pairwise
from types import ModuleType

from gpu_runs import Trained

from hpcdist.strategies.schedule.observers import phase_of
from hpcdist.strategies.schedule.operations import Kind

BOTH_WAYS = ("broadcast", "allreduce", "reduce_scatter", "all_gather")
TO_HOST = ("send", "isend", "sendrecv", "all_to_all", *BOTH_WAYS)
TO_DEVICE = ("recv", "irecv", "sendrecv", "all_to_all", *BOTH_WAYS)

STAGED, INSIDE = "a staged allreduce", 1


class Watch:
    """Looks on one rank: messages of parameters, gradients and activations, and transfers, of each step."""

    def __init__(self, gpu: ModuleType, pointers: bool) -> None:
        self._gpu, self._pointers, self._name = gpu, pointers, threading.current_thread().name
        self._messages: Counter[str] = Counter()
        self._staged = False  # inside an allreduce that brings its buffer to the host as a whole
        self.steps: list[tuple[Counter[tuple[str, str]], Counter[str]]] = []

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        if dtype == "float32" and op.endswith("_allreduce") and not self._pointers:
            self._messages[STAGED] += 1
            self._staged = True
            return INSIDE
        if (
            dtype == "float32" and op in (*TO_HOST, *TO_DEVICE) and not self._staged
        ):  # what ranks agree on is float64, on the host
            self._messages[op] += 1
            assert not (self._pointers and self._gpu.LOG.kernels_pending()), f"{op} begins while kernels write"
        return 0

    def end(self, token: int) -> None:
        if token == INSIDE:
            self._staged = False

    def before_step(self) -> None:
        self._messages.clear()
        self._before = self._gpu.LOG.sites(self._name)

    def after_step(self) -> None:
        self.steps.append((self._gpu.LOG.sites(self._name) - self._before, Counter(self._messages)))


def expected_sites(gpu: ModuleType, run: Trained, messages: Counter[str], pointers: bool) -> Counter[tuple[str, str]]:
    """What a step of one rank transfers and waits for, and where."""
    trainer = run.trainer
    samples = len(range(trainer.recipe.run.global_batch)[trainer.data_axis.rank :: trainer.data_axis.size])
    last, context = len(trainer.model.stages) - 1, trainer.context
    normed = any(op.kind is Kind.APPLY for op in trainer.operations) and context.parts  # be they counted or watched
    forwards = [op for op in trainer.operations if op.kind is Kind.FORWARD and op.unit == last]
    phases = [phase_of(op.kind) for op in trainer.operations]
    to_host = sum(messages[op] for op in TO_HOST)
    to_device = sum(messages[op] for op in TO_DEVICE)
    both = sum(messages[op] for op in BOTH_WAYS)
    return Counter(
        {
            (gpu.H2D, "source.place"): 2,
            (gpu.D2H, "stages.losses"): int(any(op.microbatch < samples for op in forwards)),
            (gpu.D2H, "norms.sum_of_squares"): int(bool(normed)),
            (gpu.D2H, "base.partial_norms"): sum(op.kind is Kind.NORMS for op in trainer.operations),
            (gpu.D2H, "handover.outgoing"): 0 if pointers else to_host - both,
            (gpu.D2H, "handover.both"): 0 if pointers else both,
            (gpu.H2D, "handover._copy_back"): 0 if pointers else to_device,
            (gpu.SYNCHRONISE, "handover.outgoing"): to_host - both,
            (gpu.SYNCHRONISE, "handover.incoming"): to_device if pointers else 0,
            (gpu.SYNCHRONISE, "handover.both"): 0 if pointers else both,
            (gpu.D2H, "staging._fill"): messages[STAGED],
            (gpu.SYNCHRONISE, "staging.staged_allreduce"): messages[STAGED],
            (gpu.H2D, "staging.staged_allreduce"): messages[STAGED],
            (gpu.SYNCHRONISE, "observers.done"): 1 + sum(a != b for a, b in pairwise(phases)),
        }
    )
