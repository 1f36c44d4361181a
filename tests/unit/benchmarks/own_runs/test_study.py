"""The study of our own runs: plans compared with made-up measurements, on one host and between hosts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.own_runs import between_hosts, fits, pin, report, study, trainings
from hpcdist.bench import calibration as calibrate_run
from hpcdist.bench.device_speed import (
    OPERATIONS,
    BusySeconds,
    CalibratedMachine,
    CalibrationPoints,
    CollectivePoint,
    LinkPoint,
    MovePoint,
    ProductPoint,
    sizes,
)
from hpcdist.cli.plan import calibrate
from hpcdist.planner.cluster import toml_file

ONLY = "allreduce, ring"


def machine_points(hosts, ranks):
    """Return points of a machine with 20 GFLOP/s, 10 GB/s, 1 GB/s links inside and 100 MB/s links between hosts."""

    def busy(seconds):
        return BusySeconds(seconds, seconds, 0.01)

    rates = {"node": 1e9} if ranks > 1 else {}
    rates |= {"network": 1e8} if hosts > 1 else {}
    inside = [("node", ranks)] if ranks > 1 else []
    groups = inside + ([("network", hosts * ranks)] if hosts > 1 else [])
    lengths = sizes(1 << 10, 16 << 20, per_octave=1)
    return CalibrationPoints(
        machine=CalibratedMachine(
            device="core of a test", on="cpu", hosts=hosts, ranks_per_host=ranks, devices_per_host=8, threads=1,
            memory_bytes=1 << 30, host_memory_bytes=8 << 30, blas="a blas", mpi_library="a library",
        ),
        products={
            "float32": tuple(ProductPoint(n, n, n, busy(2 * n**3 / 2e10 + 1e-6)) for n in (16, 64, 256, 1024, 2048))
        },
        moves=(MovePoint("add", 3 << 26, busy((3 << 26) / 1e10)),),
        models=(),
        links=tuple(
            LinkPoint(level, 2, size, busy(2e-6 + size / rate)) for level, rate in rates.items() for size in lengths
        ),
        collectives=tuple(
            CollectivePoint(operation, algorithm, level, count, size, 9e-6 + 2 * size / rates[level])
            for level, count in groups
            for operation in OPERATIONS
            for algorithm in ("auto", "ring", "hierarchical")
            for size in lengths
        ),
        seconds=1.0,
    )  # fmt: skip


def planned_measurements(rows, off):
    """Return the measurements that the workstation's plan predicts, changed by the share ``off``."""
    base = toml_file.read("workstation")
    results = []
    for row in rows:
        plan = report.estimate(row, base)
        peak = plan.memory.bytes - plan.memory.terms["reserved"]
        results.append(
            {
                "name": row.name, "step_s": [plan.step_s * (1 + off), plan.step_s * (1 + off)], "bubble": [0.1, 0.1],
                "sent_bytes": 1000, "unknown_calls": 0, "peak_bytes": [0.5 * peak, peak], "peak_by_kind": [[1] * 7] * 2,
            }
        )  # fmt: skip
    return results


def play_ranks(line, hosts, ranks):
    """Play the ranks of the command ``line``."""

    def option_value(name):
        return Path(line[list(line).index(name) + 1])

    if "calibrate" in line:
        calibrate.write_files(
            machine_points(hosts, ranks), option_value("-o"), option_value("--points"), "workstation", "here", {}
        )
        return
    path, _, _, place, *names = line[list(line).index("benchmarks.own_runs.worker") + 1 :]
    rows = trainings.chosen_rows(hosts * ranks, names, hosts=place == "hosts")
    Path(path).write_text(json.dumps({"library": "a library", "rows": planned_measurements(rows, 0.0)}))


class Hosts:
    """A replacement for the network namespaces, without real namespaces."""

    def __init__(self, count, rate, burst):
        self.count = count

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def command(self, launcher, ranks, line, extra):
        return [str(ranks), *line]

    def environment(self, launcher):
        return {}

    def run(self, line, environment, limit_s):
        play_ranks(line, self.count, int(line[0]))
        return SimpleNamespace(returncode=0, stdout="")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The study with played ranks and hosts. It returns its exit code."""
    monkeypatch.setattr(study, "launched", lambda ranks, program: play_ranks(program, 1, ranks))
    monkeypatch.setattr(between_hosts.network, "Hosts", Hosts)
    monkeypatch.setattr("hpcdist.comm.launch.mpirun.find", lambda: SimpleNamespace(vendor="none"))
    return lambda *options: harness.run(study, "own_runs", ["-o", str(tmp_path / "own"), "--only", ONLY, *options])


def test_rows_of_one_host_and_several_hosts_are_written(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "GOALS", {"step": 1e9, "memory": 1e9})
    assert run("--ranks", "2", "--hosts") == 0
    with h5py.File(tmp_path / "own.h5") as file:
        trainings = file.attrs["trainings"].split("; ")
        here, there = ([one for one in trainings if one.startswith(where)] for where in ("one host: ", "2 hosts, "))
        assert (len(here), len(there)) == (3, 2)
        assert len(here) + len(there) == len(trainings) == file["step_s"].shape[0]
        assert list(file.attrs["ranks"]) == [2] * 5
        assert np.all(file["predicted_s"][:] > 0)
        assert file["predicted_s"][3] > file["predicted_s"][0] + 0.15  # 11 MB over a link of 100 MB/s, and back
        times = file.attrs["times"].split("; ")
        assert len(times) == len(file["times"])
        assert {one.rpartition(", ")[2] for one in times} == {"unseen", "formula"}
        assert any(one.startswith("2 hosts, 1gbit, 2 ranks each, hierarchical allreduce") for one in times)
        assert 'name = "here"' in file.attrs["cluster"]
    assert toml_file.read(str(tmp_path / "own-cluster.toml")).name == "here"
    stdout = capsys.readouterr().out
    assert "2 hosts, 1gbit" in stdout
    assert "alpha-beta at unseen sizes: " in stdout
    assert "measured with 2 of 8 devices of a node" in stdout


def test_missed_goal_exits_with_1_after_writing_results(run, tmp_path, capsys):
    assert run("--ranks", "2") == 1
    assert "missed: step within 15%" in capsys.readouterr().err
    assert (tmp_path / "own.h5").exists()


def test_unknown_training_is_rejected_before_measuring(monkeypatch):
    monkeypatch.setattr(study, "launched", lambda *given: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="begins with nothing"):
        harness.run(study, "own_runs", ["--only", "nothing"])


def test_every_row_must_meet_both_goals():
    base = toml_file.read("workstation")
    rows = [row for row in trainings.rows(2) if row.name.startswith(ONLY)]

    def compare_rows(off):
        return [report.compared(row, one, base) for row, one in zip(rows, planned_measurements(rows, off), strict=True)]

    good = compare_rows(0.10)
    assert report.missed(good) == []
    slow = compare_rows(0.30)[:1]
    (output,) = report.missed([*good, *slow])
    assert output.startswith(f"step within 15% in 1 of {len(good) + 1} trainings")
    assert "-23.1%" in output
    small = replace(good[0], peak_bytes=good[0].peak_bytes / 1.06)
    assert report.missed([*good, small])[0].startswith("memory within 5% in 1 of")
    unknown = replace(good[0], step_s=np.array([np.nan]))
    assert report.missed([unknown])[0].startswith("step within 15% in 1 of 1")


def test_sizes_within_the_goal_are_counted():
    def time(predicted_s):
        return fits.Time("one host", "message, node", "unseen", 1024.0, 1.0, predicted_s)

    assert "alpha-beta at unseen sizes: 2 of 3 within 20%" in fits.table([time(1.1), time(0.85), time(1.3)])


def test_fit_of_machine_points_predicts_its_times(tmp_path):
    path = tmp_path / "points.h5"
    calibrate_run.write_points(path, machine_points(2, 2), {})
    result = fits.unseen(path, "here")
    assert {one.what for one in result} >= {"message, node", "message, network", "ring allreduce, network, 4 ranks"}
    assert max(abs(one.error) for one in result) < 0.02


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0], 2, [0, 0]), ([0, 1], 1, [0]), ([0, 1], 2, [0, 1]), ([2, 5], 4, [2, 2, 5, 5]), ([0, 1, 2, 3], 2, [0, 1])],
)
def test_ranks_are_pinned_to_separate_cores_of_their_host(cores, ranks, expected):
    for rank, size in pin.RANKS:
        results = [pin.core(cores, {rank: str(number), size: str(ranks)}) for number in range(ranks)]
        assert results == expected
    assert pin.core(cores, {}) == cores[0]
