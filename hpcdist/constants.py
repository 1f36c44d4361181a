"""Constants that packages of several floors share. Floor 0: imports nothing of hpcdist."""

from pathlib import Path
from typing import Final

# Files in a run directory.
RECIPE_FILE: Final = "recipe.toml"
METRICS_FILE: Final = "metrics.h5"
USAGE_FILE: Final = "usage.json"  # energy of all starts
PROGRESS_FILE: Final = "progress.json"  # the newest checkpoint of a script with a format of its own
STOP_FILE: Final = "stop"  # its existence stops the run

# Ends of a start in the run's journal.
FINISHED: Final = "finished"
STOPPED: Final = "stopped"  # by a stop request, after a save
SCRIPT: Final = "script"  # strategy in the metrics of a script over the backend of torch.distributed

# Tables of energy samples in `METRICS_FILE`.
ENERGY_GROUP: Final = "energy"
ENERGY_SAMPLES: Final = f"{ENERGY_GROUP}/samples"
ENERGY_SOURCES: Final = f"{ENERGY_GROUP}/sources"
ENERGY_COLUMNS: Final = ("t_mono_ns", "session", "node", "source", "energy_mj")

# Environment variables and system files.
SETTINGS_PREFIX: Final = "HPCDIST_SET__"  # of variables that set recipe keys
VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SHARED_MEMORY: Final = Path("/dev/shm")

# Values.
PRECISIONS: Final = ("float32", "float64", "bfloat16", "float16")  # dtypes of parameters
HALVES: Final = ("bfloat16", "float16")
DEADLINE_S: Final = 300.0  # default timeout of a communication
NS_PER_S: Final = 10**9
J_PER_KWH: Final = 3.6e6
