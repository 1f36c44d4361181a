"""The results of a benchmark of checkpoints: one HDF5 file with the time of every round on every rank.

/                               provenance; ranks, tensors, seed, writers, file system
/<bytes>/contenders/<name>      write_s, read_cache_s, read_disk_s (round, rank)
/<bytes>/beside                 plain_s, saving_s, beside_s, saves_s, where a save in the background was measured
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.checkpoint import Samples
from hpcdist.bench.checkpoint_beside import Steps
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.checkpoint_benchmark"
VERSION: Final = 2


def write(path: Path, found: Mapping[int, tuple[Sequence[Samples], Steps | None]], about: Mapping[str, Any]) -> None:
    """Write a new file of what was ``found`` for each number of bytes. Raises StorageError."""
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**about, "NX_class": "NXroot"})
        for nbytes, (contenders, beside) in found.items():
            for one in contenders:
                _contender(file.create_group(f"{nbytes}/contenders/{one.name}"), one)
            if beside is not None:
                group = file.create_group(f"{nbytes}/beside")
                for name, values in asdict(beside).items():
                    group.create_dataset(name, data=np.array(values)).attrs["units"] = "s"


def _contender(group: Any, one: Samples) -> None:
    group.attrs.update({"NX_class": "NXdata", "signal": "write_s", "axes": ["round", "rank"]})
    rounds, ranks = one.write_s.shape
    group.create_dataset("round", data=np.arange(rounds)).make_scale("round")
    group.create_dataset("rank", data=np.arange(ranks)).make_scale("rank")
    times = {"write_s": (one.write_s, "until all is on the disk")}
    times |= {f"read_{name}_s": (values, "until all is in memory") for name, values in one.reads_s.items()}
    for name, (values, meaning) in times.items():
        dataset = group.create_dataset(name, data=values)
        dataset.attrs.update({"units": "s", "long_name": f"from a barrier {meaning}"})
        dataset.dims[0].attach_scale(group["round"])
        dataset.dims[1].attach_scale(group["rank"])
