"""The points of a calibration as an HDF5 file: what was measured, before anything was fitted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.calibrate_points import Busy, Points
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.calibration"
VERSION: Final = 1


def write(path: Path, found: Points, provenance: Mapping[str, Any]) -> None:
    """Write a new file, as a whole or not at all. Raises StorageError."""
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**provenance, **asdict(found.machine), "measured_in_s": found.seconds, "NX_class": "NXroot"})
        file.attrs["busy"] = found.busy
        for dtype, points in found.products.items():
            _table(
                file.create_group(f"products/{dtype}"),
                {"m": [one.m for one in points], "k": [one.k for one in points], "n": [one.n for one in points]},
                [one.seconds for one in points],
            )
        _table(
            file.create_group("moves"),
            {"operation": [one.operation for one in found.moves], "bytes": [one.nbytes for one in found.moves]},
            [one.seconds for one in found.moves],
        )
        for number, model in enumerate(found.models):
            group = file.create_group(f"models/{number}")
            shape = {name: value for name, value in asdict(model.config).items() if value is not None}
            group.attrs.update({**shape, "context": model.context, "samples": model.samples})
            group.attrs.update({"parameters": model.parameters, "operations": model.operations})
            rows = [(one.kind, way, getattr(one, way)) for one in model.kinds for way in ("forward", "backward")]
            rows += [("norm", "step", model.norm), ("update", "step", model.update), ("all", "step", model.step)]
            _table(group, {"kind": [row[0] for row in rows], "way": [row[1] for row in rows]}, [row[2] for row in rows])
        _table(
            file.create_group("messages"),
            {name: [getattr(one, name) for one in found.links] for name in ("level", "nbytes", "border")},
            [one.seconds for one in found.links],
        )
        names = ("operation", "algorithm", "level", "ranks", "nbytes", "border")
        _table(
            file.create_group("collectives"),
            {name: [getattr(one, name) for one in found.collectives] for name in names},
            [Busy(one.seconds, one.seconds) for one in found.collectives],
        )


def _table(group: Any, columns: Mapping[str, Sequence[Any]], seconds: Sequence[Busy]) -> None:
    """Write columns of one length, the seconds (rows, one rank at work or all), and their spread, NaN if not kept."""
    for name, values in columns.items():
        group.create_dataset(
            name, data=np.array(values, dtype=object if values and isinstance(values[0], str) else None)
        )
    times = np.array([one[:2] for one in seconds], np.float64).reshape(len(seconds), 2)
    spread = [np.nan if one.spread is None else one.spread for one in seconds]
    group.create_dataset("spread", data=np.array(spread, np.float64)).attrs["units"] = "1"
    group.create_dataset("seconds", data=times).attrs.update(
        {"units": "s", "columns": "one rank of a node, all of them"}
    )
