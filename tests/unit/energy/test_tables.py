"""Energy samples and windows in HDF5: integers with units, over several starts of a run."""

from dataclasses import replace

import h5py
import numpy as np

from hpcdist.energy import node_rows
from hpcdist.energy.node_rows import NodeRows, PhaseWindow
from hpcdist.energy.sampler import DrainedSamples
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import BYTES, COLUMNS
from hpcdist.hdf5 import datasets, files

LARGE = 2**53 + 1  # a float would round it


def rows(node, samples):
    gpu = SourceInfo("NVIDIA H200", 2, "instant", "gpu", note="shared by 2 ranks")
    sources = [("gpu", f"GPU-{node}", gpu), ("cpu", "package-0", SourceInfo(declared=True))]
    window = PhaseWindow("training", LARGE, [1500.0, np.nan], LARGE + 9, 7_000_000_000)
    pairs = np.array([[LARGE, 0]], np.int64)[: len(samples)]
    drained = DrainedSamples(
        np.array(samples, np.int64).reshape(-1, 3),
        np.array([(LARGE, 0, LARGE + 4)], np.int64)[: len(samples)],
        pairs,
        pairs[:, 0],
        np.arange(float(len(COLUMNS)))[None, :][: len(samples)],
    )
    return NodeRows(node, sources, drained, [window], LARGE, 0.25, 60.0)


def test_tables_are_appended_over_flushes_and_sessions(tmp_path):
    path = tmp_path / "metrics.h5"
    for session, nodes in (
        (0, [rows(0, [(LARGE, 0, LARGE + 2), (5, 1, 6)]), rows(1, [(7, 0, 8)])]),
        (0, [rows(0, [(9, 0, 10)])]),
        (1, [rows(0, [])]),
    ):
        with files.edit(path, "hpcdist.metrics", 1) as file:
            node_rows.append_rows(file, session, nodes)
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
        about = group["about"]
        assert about["declared"][...].tolist() == [0, 1] * 3 and about["ranks"][...].tolist() == [2, 0] * 3
        assert [about[name][0] for name in ("model", "power_field", "power_scope", "note")] == [
            b"NVIDIA H200",
            b"instant",
            b"gpu",
            b"shared by 2 ranks",
        ]
        assert group["powers/power_mw"][...].tolist() == [LARGE + 4] * 3 and group["powers/power_mw"].dtype == np.int64
        assert group["gaps/t_mono_ns"][...].tolist() == [LARGE] * 3
        looks = group["utilisation"]
        assert [looks[name][0] for name in COLUMNS] == list(range(len(COLUMNS)))
        assert [looks[name].attrs["units"] for name in COLUMNS] == ["By" if name in BYTES else "1" for name in COLUMNS]
        cost = group["sampler"]
        assert cost["busy_s"][...].tolist() == [0.25] * 4 and cost["lasted_s"][0] == 60 and cost["node"][1] == 1


def test_file_of_earlier_version_is_extended(tmp_path):
    path = tmp_path / "metrics.h5"
    with files.edit(path, "hpcdist.metrics", 1) as file:
        for name in ("sources", "samples", "windows"):
            node_rows.TABLES[name].create(file)
        before = {"t_mono_ns": 1, "session": 0, "node": 0, "source": 0, "energy_mj": 5}
        datasets.extend(file, "energy/samples", {name: np.array([value]) for name, value in before.items()})
        source = {"session": 0, "node": 0, "source": 0, "kind": b"gpu", "name": b"GPU-0"}
        datasets.extend(file, "energy/sources", {name: np.array([value]) for name, value in source.items()})
    with files.edit(path, "hpcdist.metrics", 1) as file:
        node_rows.append_rows(file, 1, [rows(0, [(7, 0, 8)])])
    with h5py.File(path) as file:
        assert file["energy/samples/energy_mj"][...].tolist() == [5, 8]
        assert file["energy/samples/session"][...].tolist() == [0, 1]
        assert file["energy/about/session"][...].tolist() == [1, 1] and file["energy/powers/session"][...].tolist() == [
            1
        ]


def test_source_tables_are_created_only_with_sources(tmp_path):
    path = tmp_path / "metrics.h5"
    node = rows(0, [(LARGE, 0, 1)])
    empty = replace(node.drained, samples=node.drained.samples[:0], powers=node.drained.powers[:0])
    bare = replace(node, sources=[], windows=[], drained=replace(empty, gaps=node.drained.gaps[:0]))
    with files.edit(path, "hpcdist.metrics", 1) as file:
        node_rows.append_rows(file, 0, [bare])
    with h5py.File(path) as file:
        assert sorted(file["energy"]) == ["sampler", "utilisation"] and len(file["energy/utilisation/cpu"]) == 1
    with files.edit(path, "hpcdist.metrics", 1) as file:
        node_rows.append_rows(file, 1, [node])
    with h5py.File(path) as file:
        assert sorted(file["energy"]) == sorted(node_rows.TABLES) and len(file["energy/samples/energy_mj"]) == 1
