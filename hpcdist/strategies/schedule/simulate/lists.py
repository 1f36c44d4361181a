"""Simulated program of operation lists of a pipeline: one entry for each operation that the executor runs.

The verifier proves the same lists. A receive waits for its message; what is neither a pass nor a message takes no time.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.strategies.schedule.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate.program import CODES, RECV, SEND, WORK, Program, StepCosts
from hpcdist.strategies.schedule.verify.deadlock import RECEIVES, SENDS


def program(lists: Sequence[Sequence[Operation]], placement: StagePlacement, costs: StepCosts) -> Program:
    """Return the program of the ``lists`` of all ranks of a pipeline (local)."""
    chunk_of = {unit: number for number, units in enumerate(placement.chunks) for unit in units}
    messages: dict[object, int] = {}  # numbered by the first of their two ends
    links: dict[int, int] = {}
    rows: list[tuple[int, int, float, int, int, int]] = []
    for rank, steps in enumerate(lists):
        for op in steps:
            code, target, seconds, work, chunk = WORK, -1, 0.0, programs.OTHER, -1
            if op.kind in CODES:
                chunk, work = chunk_of[op.unit], CODES[op.kind]
                seconds = costs.rows[work][op.unit]
                work = programs.AGAIN if op.recompute else work
            elif op.kind in SENDS or op.kind in RECEIVES:
                sends, chunk = op.kind in SENDS, chunk_of[op.unit]
                kind = op.kind if sends else RECEIVES[op.kind][0]
                before = op.unit - 1 if op.source < 0 else op.source
                target = messages.setdefault((kind, op.microbatch, op.unit, before), len(messages))
                code = SEND if sends else RECV
                if sends:
                    other = placement.rank_of(op.unit if kind is Kind.SEND_ACTIVATION else before)
                    links[target] = rank * len(lists) + other
            rows.append((code, target, seconds, work, op.microbatch, chunk))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    code_of, target_of, seconds_of, work_of, microbatch_of, chunks_of = columns
    return Program(
        starts=np.cumsum([0, *map(len, lists)]),
        code=np.array(code_of, np.int8),
        target=np.array(target_of, np.int64),
        seconds=np.array(seconds_of, np.float64),
        work=np.array(work_of, np.int8),
        microbatch=np.array(microbatch_of, np.int64),
        chunk=np.array(chunks_of, np.int64),
        links=np.array([links.get(number, 0) for number in range(len(messages))], np.int64),
        link=costs.link,
    )
