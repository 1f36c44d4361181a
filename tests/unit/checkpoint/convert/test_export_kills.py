"""SIGKILL at random times while a directory is exported again and again: the old one, the new one, or none remains.

10 kills, or HPCDIST_TEST_KILLS if it is set. Two ranks write each export together, in one step of a checkpoint.
"""

import os
import subprocess
import sys

import pytest

from harness.jobs import LIMIT_S

KILLS = int(os.environ.get("HPCDIST_TEST_KILLS", "10"))

DRIVER = """
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hpcdist import models
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.convert.huggingface_export import CheckpointExport, ExportPlan
from hpcdist.checkpoint.two_phase import SavePlan, save_planned
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.core.exchange import pieces_of

folder, chance = Path(sys.argv[1]), random.Random(sys.argv[3])
keys = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
config = ModelConfig(layers=2, hidden=32, vocabulary=301, **keys)
layout = models.build(config, context=16).layout
target = folder / "out"
plan = ExportPlan(target, config, 16, replace=True, shard_bytes=20_000)


def write(comm, first, background):
    store = FlatStore(layout, np.dtype(np.float32))
    saver = BackgroundCheckpoints(comm)
    for step in range(first, first + 10_000):
        store.array[...] = step
        saved = SavePlan(folder / "checkpoints", step, 2, {}, {}, 1, export=CheckpointExport(plan))
        pieces = pieces_of({"parameters": store}, [split(store.size, 2, 4)[comm.rank]])
        if background:
            saver.begin(saved, pieces, "rank")
        else:
            save_planned(saved, pieces, comm, "rank")


def exported_step():
    if not target.exists():
        return 0
    with HuggingFaceDirectory(target) as directory:
        values = []
        for tensor in directory.tensors:
            array = np.empty(tensor.shape, np.float32)
            directory.fill([Piece.whole("parameters", tensor.name, array)])
            values += [array.min(), array.max()]
    assert len(set(values)) == 1, values
    return int(values[0])


steps = [0]
for kill in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        run_threads(2, lambda comm: write(comm, steps[-1] + 1, kill % 2))
    end = time.monotonic() + 0.5 * chance.random()
    while time.monotonic() < end:
        assert target.exists() or steps[-1] == 0, "the old directory vanished"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    steps.append(exported_step())
    assert steps[-1] >= steps[-2], steps
print(len(set(steps)))
"""


@pytest.mark.timeout(3600)
def test_killed_exports_leave_a_whole_directory_or_none(tmp_path, rng):
    arguments = [str(tmp_path), str(KILLS), str(rng.integers(1 << 30))]
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, timeout=LIMIT_S + 2 * KILLS
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > KILLS // 3, "few exports were complete before their kill"
