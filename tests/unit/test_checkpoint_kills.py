"""SIGKILL at random instants while checkpoints are saved without a pause: the newest valid one loads every time.

5 kills; as many as HPCDIST_TEST_KILLS says where that is set (200 take a few minutes). Each time a new process goes on
from what the killed one has left.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.restore import newest, restore

KILLS = int(os.environ.get("HPCDIST_TEST_KILLS", "5"))
LONGEST_S = 0.4  # from the first checkpoint of a process to its death
ELEMENTS = 60_000

WRITER = """
import sys
from pathlib import Path

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.checkpoint.background import Background
from hpcdist.checkpoint.restore import newest, restore
from hpcdist.checkpoint.save import Plan, make
from hpcdist.comm.threads import run_threads

run, way, elements = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def body(comm):
    part = split(elements, comm.size, 8)[comm.rank]
    state = np.zeros(part.size)
    piece = Piece("parameters", "w", (elements,), ((0, elements),), part, state)
    found, step = newest(run, comm), 0
    if found is not None:
        step = restore(found, [piece])["step"]
        assert (state == step).all(), (step, state)
    beside = Background(comm)
    while True:
        step += 1
        state[...] = step
        plan = Plan(run / "checkpoints", step, comm.size, {"step": step}, {}, 2)
        if way == "beside":
            beside.begin(plan, [piece], "rank")
        else:
            make(plan, [piece], comm, "rank" if way == "alone" else "1")
        state[...] = -1
        if comm.rank == 0:
            print(step, flush=True)


run_threads(2, body)
"""


@pytest.mark.timeout(3600 if KILLS > 20 else 300)
def test_the_newest_valid_checkpoint_loads_after_every_kill(tmp_path, rng):
    reached = 0
    for kill in range(KILLS):
        way = ("alone", "beside", "one writer")[kill % 3]
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), way, str(ELEMENTS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.stdout.readline()
        first = process.stdout.readline()  # beside the steps, the first checkpoint is complete when the second begins
        time.sleep(float(rng.random()) * LONGEST_S)
        process.send_signal(signal.SIGKILL)
        told, errors = process.communicate(timeout=60)
        assert first and process.returncode == -signal.SIGKILL, errors
        last = int([first, *told.split()][-1])
        found = newest(tmp_path)
        assert found is not None, f"kill {kill}"
        state = np.zeros(ELEMENTS)
        step = restore(found, [Piece.whole("parameters", "w", state)])["step"]
        assert (state == step).all() and found.name == f"step-{step}"
        complete = last - 1 if way == "beside" else last  # the one before the last that was begun
        assert step >= complete >= reached, f"kill {kill}: step {complete} was complete"
        reached = step
