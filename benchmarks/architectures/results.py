"""HDF5 file with the results of the architectures study.

/         provenance, and the cluster file as text
/points   the fastest layout that fits, for each scenario, architecture and number of devices
/stops    the count at which scaling stops, and the reason, for each scenario and architecture
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.architectures.scaling import PARTS, Found, said
from benchmarks.harness import columns_of
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column

SCHEMA, VERSION = "hpcdist.benchmark.architectures", 1
POINTS: Final = (
    Column("point", "i4", "1", "number of the row"),
    Column("scenario", "S16", "1", "model, cluster and batch: attributes of the group scenarios"),
    Column("architecture", "S16", "1", "its name"),
    Column("devices", "i4", "1", "all of them, servers included"),
    Column("samples", "i8", "1", "of a step"),
    Column("reason", "S40", "1", "why there is no layout; empty where there is one"),
    Column("layout", "S120", "1", "of the fastest that fits"),
    Column("step_s", "f8", "s", "a step without saves and failures"),
    Column("slowdown", "f8", "1", "wall time over steps: saves, failures, restarts"),
    Column("mtbf_s", "f8", "s", "between two failures of the job"),
    Column("goodput", "f8", "1/s", "samples a second, saves and failures included"),
    Column("energy_j", "f8", "J", "a sample, saves and failures included, with hosts, network and cooling"),
    Column("sent_bytes", "f8", "By", "of a device that computes, in a step"),
    Column("server_bytes", "f8", "By", "of a dedicated server, in a step; 0 without"),
    Column("memory_bytes", "f8", "By", "of the fullest device"),
    Column("states_bytes", "f8", "By", "of it, parameters, gradients and optimizer"),
    Column("least_bytes", "f8", "By", "of the layout that needs least, whether it fits or not"),
    Column("mfu", "f8", "1", "operations of the model over the peak of all that compute"),
    *(Column(f"{part}_s", "f8", "s", "device-seconds a sample") for part in PARTS),
)
STOPS: Final = (
    Column("stop", "i4", "1", "number of the row"),
    Column("scenario", "S16", "1", "as above"),
    Column("architecture", "S16", "1", "as above"),
    Column("first", "i4", "1", "devices from which on there is a layout; 0: none"),
    Column("last", "i4", "1", "last devices to which doubling gave 1.5 times the goodput"),
    Column("half", "i4", "1", "last devices with half of the ideal goodput a device"),
    Column("best", "i4", "1", "devices with the most goodput"),
    Column("reason", "S40", "1", "of what there is more after `last`; empty at the end of the range"),
    Column("share", "f8", "1", "of the growth that the reason has"),
    Column("lost", "S40", "1", "what takes most behind `half`; empty at the end of the range"),
)


def points(result: Sequence[Found]) -> dict[str, np.ndarray]:
    rows = [
        _row(outcome.scenario.name, name, point)
        for outcome in result
        for name, line in outcome.points.items()
        for point in line
    ]
    return columns_of(POINTS, [{"point": number, **row} for number, row in enumerate(rows)])


def write(path: Path, result: Sequence[Found], provenance: Mapping[str, Any], cluster: str) -> None:
    """Write a new file. Raises StorageError."""
    stops = [
        {"scenario": outcome.scenario.name, "architecture": name, **stop._asdict()}
        for outcome in result
        for name, stop in outcome.stops.items()
    ]
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**provenance, "cluster": cluster})
        for outcome in result:
            file.require_group(f"scenarios/{outcome.scenario.name}").attrs["title"] = outcome.scenario.title
        for name, columns, rows in (
            ("points", POINTS, points(result)),
            ("stops", STOPS, columns_of(STOPS, [{"stop": number, **row} for number, row in enumerate(stops)])),
        ):
            datasets.create(file, name, columns)
            datasets.extend(file, name, rows)


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the table of points. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        return datasets.read(file, "points")


def _row(scenario: str, architecture: str, point: Any) -> dict[str, Any]:
    row = {
        "scenario": scenario,
        "architecture": architecture,
        "devices": point.devices,
        "samples": point.samples,
        "reason": point.reason,
        "layout": "",
        "goodput": point.goodput,
        "server_bytes": point.server_bytes,
        "least_bytes": point.least_bytes,
    }
    estimate = point.estimate
    if estimate is not None:
        row |= {
            "layout": said(estimate.layout),
            "step_s": estimate.step_s,
            "slowdown": estimate.run.slowdown,
            "mtbf_s": estimate.run.mtbf_s,
            "energy_j": point.joules,
            "sent_bytes": point.sent_bytes,
            "memory_bytes": estimate.memory.bytes,
            "states_bytes": point.states_bytes,
            "mfu": estimate.mfu,
        }
    return row | {f"{part}_s": seconds for part, seconds in point.losses.items()}
