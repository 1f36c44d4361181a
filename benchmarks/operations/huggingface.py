"""Import and export of a Hugging Face directory, relative to plain files, under any layout.

    python -m benchmarks huggingface --ranks 2 --layouts zero3 "pipeline 2"
    srun -n 4 python -m benchmarks huggingface --bytes 4G --directory /lustre/scratch/me/test -o huggingface.h5

    hpcdist      "import": all ranks read their elements of the directory; "export": all ranks write the directory, with
                 fsync and the commit by a rename
    plain files  one file per rank with the same number of bytes, in blocks of 16 MiB; the writes end with fsync

A time starts at a barrier, and the slowest rank counts. Imports read from the disk: the kernel is asked to drop the
files from the page cache. The import of the export must equal the exported parameters bit by bit. "x hpcdist" is the
time of the plain files relative to hpcdist in the same round: above 1 means that hpcdist is faster.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.operations.checkpoint import check_space, drop_from_cache, make_state, plain_files
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.bench.output_file import check_on_all_ranks
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.convert.huggingface_export import ExportPlan, ExportWriter
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.checkpoint.stripe import file_system
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.table import aligned
from hpcdist.reporting.units import format_bytes, parse_bytes
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes

SCHEMA, RANKS, NO_CHECK = "hpcdist-benchmark-huggingface", 2, "no result is committed"
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "allreduce": {},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
    "pipeline 2": {"parallel.pipeline": 2},
    "tensor 2": {"parallel.tensor": 2},
    "context 2": {"parallel.context": 2},
    "tensor 2, zero2": {"parallel.tensor": 2, "parallel.strategy": "zero2"},
    "pipeline 2, tensor 2": {"parallel.pipeline": 2, "parallel.tensor": 2},
    "context 2, zero3": {"parallel.context": 2, "parallel.strategy": "zero3"},
}
OPTIONS: Final = {"bytes": "1G", "rounds": 5, "layouts": tuple(LAYOUTS), "directory": ""}
FIGURES: Final = ("export", "import")
WAYS: Final = ("hpcdist", "plain files")
HIDDEN: Final = 1024
