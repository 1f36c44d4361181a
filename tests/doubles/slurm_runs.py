"""What jobs of a real Slurm have left in their run directories, and the sites that start them."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from hpcdist.batch import ledger
from hpcdist.comm.launch import mpirun
from hpcdist.telemetry.metrics import step_metrics

# How the jobs of each MPI are started: with the srun of Slurm, and with the launcher of its own.
SITES = {
    mpirun.OPEN_MPI: {
        "mpirun": "based_on = 'slurm-openmpi'\n",
        "srun": "based_on = 'slurm-openmpi'\n[launcher]\nkind = 'srun'\npmi = 'pmix'\n",
    },
    mpirun.MPICH: {"srun": "based_on = 'slurm-mpich'\n"},
}


def begun(run_dir: Path) -> list[str]:
    """Return the checkpoint from which each start of a run began."""
    return [entry.text("from") for entry in ledger.read(run_dir) if entry.event == ledger.BEGAN]


def newest(run_dir: Path) -> int:
    """Return the steps of the newest checkpoint that is complete."""
    names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    return max(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def same_bits(one: Path, two: Path) -> bool:
    """Whether two runs have had the same losses and have the same parameters."""
    losses = [step_metrics.read(run / step_metrics.METRICS_FILE).steps["loss"] for run in (one, two)]
    return np.array_equal(*losses) and tensors(one) == tensors(two)


def tensors(run: Path) -> bytes:
    """Return the parameters of a run, without the header of their file, which has times in it."""
    path = Path(f"{run}.safetensors")
    if not path.exists():
        line = [sys.executable, "-P", "-m", "hpcdist", "checkpoint", "export", str(run), str(path)]
        subprocess.run(line, check=True, timeout=120)
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]
