"""Samples and windows in HDF5: whole numbers with units, over several starts of a run."""

import h5py
import numpy as np

from hpcdist.energy import store
from hpcdist.energy.store import NodeRows
from hpcdist.energy.windows import Window
from hpcdist.hdf5 import files

LARGE = 2**53 + 1  # a float would round it


def rows(node, samples):
    sources = [("gpu", f"GPU-{node}"), ("cpu", "package-0")]
    window = Window("training", LARGE, [1500.0, np.nan], LARGE + 9, 7_000_000_000)
    return NodeRows(node, sources, np.array(samples, np.int64).reshape(-1, 3), [window])


def test_tables_over_flushes_and_sessions(tmp_path):
    path = tmp_path / "metrics.h5"
    for session, nodes in (
        (0, [rows(0, [(LARGE, 0, LARGE + 2), (5, 1, 6)]), rows(1, [(7, 0, 8)])]),
        (0, [rows(0, [(9, 0, 10)])]),
        (1, [rows(0, [])]),
    ):
        with files.edit(path, "hpcdist.metrics", 1) as file:
            store.append(file, session, nodes)
    with h5py.File(path) as file:
        group = file["energy"]
        samples = {name: group["samples"][name][...].tolist() for name in group["samples"].attrs["columns"]}
        assert samples == {
            "t_mono_ns": [LARGE, 5, 7, 9],
            "session": [0, 0, 0, 0],
            "node": [0, 0, 1, 0],
            "source": [0, 1, 0, 0],
            "energy_mj": [LARGE + 2, 6, 8, 10],
        }
        assert group["samples/energy_mj"].dtype == np.int64
        assert [group[f"samples/{name}"].attrs["units"] for name in ("t_mono_ns", "energy_mj")] == ["ns", "mJ"]
        windows = group["windows"]
        assert windows["energy_j"].attrs["units"] == "J" and windows["own_s"][...].tolist() == [7.0] * 8
        assert windows["energy_j"][...][:2].tolist()[0] == 1.5 and np.isnan(windows["energy_j"][1])
        assert windows["phase"][0] == b"training" and windows["begin_mono_ns"][0] == LARGE
        sources = group["sources"]
        assert sources["session"][...].tolist() == [0, 0, 0, 0, 1, 1]
        assert sources["node"][...].tolist() == [0, 0, 1, 1, 0, 0]
        assert sources["name"][...].tolist()[:4] == [b"GPU-0", b"package-0", b"GPU-1", b"package-0"]
