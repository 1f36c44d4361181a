"""Jobs as a user starts them: processes that share a GPU, with MPI staged through the host, against the CPU."""

import json
import os
import sys
from pathlib import Path

import h5py
import pytest

from harness import jobs
from harness.inputs import write_text
from hpcdist.comm.launch import mpirun
from hpcdist.errors import HpcdistError

CLONE = Path(__file__).parents[2]
SETTINGS = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "data.context=16",
    "run.steps=20",
    "run.global_batch=8",
]
LAYOUTS = {
    "allreduce": ["communication.algorithm=ring"],
    "node-shared": ["communication.algorithm=node_shared"],
    "zero3": ["parallel.strategy=zero3"],
    "pipeline": ["parallel.pipeline=2", "parallel.microbatches=4"],
    "zb-v": ["parallel.pipeline=2", "parallel.microbatches=4", "parallel.schedule=zb-v", "model.dropout=0.1"],
    "measured stages": ["parallel.pipeline=2", "parallel.microbatches=4", "parallel.partition=measured"],
    "tensor": ["parallel.tensor=2", "model.dropout=0.1"],
    "tensor by rows": ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.microbatches=2"],
    "servers that work": ["parallel.strategy=parameter_server", "parameter_server.placement=colocated"],
}


def hpcdist(*words):
    """Run hpcdist and return what it printed on stdout."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = jobs.hpcdist(*words, env=environment)
    assert done.returncode == 0, f"hpcdist {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_on_one_gpu_have_the_losses_of_the_cpu(layout, tmp_path, rng):
    try:
        mpirun.find()
    except HpcdistError as error:
        pytest.skip(str(error))
    text = write_text(tmp_path / "text.txt", rng)
    results = {}
    for on in ("cpu", "gpu"):
        keys = [*SETTINGS, *LAYOUTS[layout], f"data.path={text}", f"run.device={on}"]
        options = [word for key in keys for word in ("--set", key)]
        out = hpcdist("run", "-n", "2", "train", "--json", "--out", str(tmp_path / on), *options)
        results[on] = json.loads(out.splitlines()[-1])
    for name in ("train_loss", "val_loss"):
        assert results["gpu"][name] == pytest.approx(results["cpu"][name], rel=1e-3)
    assert "val_loss" in hpcdist("evaluate", str(tmp_path / "gpu"))
    assert hpcdist("sample", str(tmp_path / "gpu"), "--tokens", "4", "--prompt", "ab")


def test_gpu_pipelines_and_tensor_ranks_are_measured(tmp_path, rng):
    try:
        mpirun.find()
    except HpcdistError as error:
        pytest.skip(str(error))
    small = [*SETTINGS, f"data.path={write_text(tmp_path / 'text.txt', rng)}", "parallel.microbatches=4"]
    keys = [key for key in small if not key.startswith("run.steps")]
    line = [sys.executable, "-m", "benchmarks", "gpu.pipeline", "--set", *keys, "--steps", "2"]
    line += ["-o", str(tmp_path / "measured.h5")]
    done = jobs.run(line, cwd=CLONE)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    with h5py.File(tmp_path / "measured.h5") as file:
        assert {"one rank", "1f1b", "zb-h1", "tensor", "1f1b, dropout"} <= file.keys()
