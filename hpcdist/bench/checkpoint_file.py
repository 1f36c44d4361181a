"""The results of a benchmark of checkpoints: one HDF5 file with the time of every round on every rank.

/                       provenance; bytes, ranks, tensors, cached, seed, writers, file system
/contenders/<name>      write_s, read_s (round, rank)
/beside                 plain_s, saving_s, beside_s, saves_s, where a save in the background was measured
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
VERSION: Final = 1


def write(path: Path, found: Sequence[Samples], beside: Steps | None, about: Mapping[str, Any]) -> None:
    """Write a new file. Raises StorageError."""
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**about, "NX_class": "NXroot"})
        for one in found:
            group = file.create_group(f"contenders/{one.name}")
            group.attrs.update({"NX_class": "NXdata", "signal": "write_s", "axes": ["round", "rank"]})
            rounds, ranks = one.write_s.shape
            group.create_dataset("round", data=np.arange(rounds)).make_scale("round")
            group.create_dataset("rank", data=np.arange(ranks)).make_scale("rank")
            for name, meaning in (("write_s", "until all is on the disk"), ("read_s", "until all is in memory")):
                dataset = group.create_dataset(name, data=getattr(one, name))
                dataset.attrs.update({"units": "s", "long_name": f"from a barrier {meaning}"})
                dataset.dims[0].attach_scale(group["round"])
                dataset.dims[1].attach_scale(group["rank"])
        if beside is not None:
            group = file.create_group("beside")
            for name, values in asdict(beside).items():
                group.create_dataset(name, data=np.array(values)).attrs["units"] = "s"
