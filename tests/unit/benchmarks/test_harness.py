"""The harness of the studies: alternating order, ratios with intervals, results files, and regression checks."""

from types import ModuleType

import h5py
import numpy as np
import pytest

from benchmarks import __main__ as studies
from benchmarks import harness
from benchmarks.harness import Results
from harness import pages
from hpcdist.errors import STORAGE


def study(slow=1.0, **more):
    """Return a study of two contenders. The second takes twice as long, times ``slow``."""
    module = ModuleType("study", "A study of a test.\n\nMore of it.")

    def measure(options, session):
        times = np.array([[1.0, 2.0, 1.5], [2.0, 4.0, 3.0]])[:, : options.rounds]
        times[1] *= slow
        return Results({"time_s": times}, {"time_s": "contenders, rounds"}, {"contenders": "base;other"})

    vars(module).update({"SCHEMA": "hpcdist-benchmark-test", "OPTIONS": {"rounds": 3}, "measure": measure} | more)
    return module


def test_contenders_alternate_in_random_order_without_warm_up():
    calls = []
    begun = []

    def call(name):
        calls.append(name)
        return len(calls)

    contenders = {name: lambda name=name: call(name) for name in "abc"}
    values = harness.alternate(contenders, 20, warm_up=2, begin=lambda: begun.append(len(calls)))
    assert begun == list(range(0, 66, 3)) and all(len(local_data) == 20 for local_data in values.values())
    rounds = [tuple(calls[at : at + 3]) for at in range(0, 66, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(set(rounds)) > 1
    assert min(min(local_data) for local_data in values.values()) == 7


def test_interval_contains_median_and_narrows_with_samples():
    rng = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        median, low, high = harness.interval(rng.normal(5.0, 1.0, count))
        assert low <= median <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def test_results_are_printed_and_written(tmp_path, capsys):
    file = tmp_path / "study.h5"
    assert harness.run(study(), "study", ["-o", str(file), "--anonymous"]) == 0
    assert "x base" in (output := capsys.readouterr().out) and "2.000 to 2.000" in output
    with h5py.File(file) as written:
        assert written.attrs["contenders"] == "base;other" and "git_commit" in written.attrs
        assert "hosts" not in written.attrs and written["time_s"].attrs["dims"] == "contenders, rounds"
    assert harness.run(study(), "study", ["-o", str(file)]) == STORAGE
    assert "exists" in capsys.readouterr().err


def test_check_detects_a_regression(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert harness.run(study(), "study", ["-o", str(tmp_path / "study.h5")]) == 0
    more = {"COMMITTED": "study.h5", "SMALL": {"rounds": 2}, "WORSE": 1.2}
    for slow, code in ((1.0, 0), (0.5, 0), (1.19, 0), (1.21, 1), (float("nan"), 1)):
        assert harness.run(study(slow, **more), "study", ["--check"]) == code
        assert ("WORSE than 1.2" in capsys.readouterr().out) == bool(code)


def test_check_without_a_committed_result_is_rejected(capsys):
    with pytest.raises(SystemExit):
        harness.run(study(NO_CHECK="it takes a night"), "study", ["--check"])
    assert "--check: it takes a night" in capsys.readouterr().err


def test_missed_goal_exits_with_1(capsys):
    assert harness.run(study(failures=lambda results: ["it is slow"]), "study", []) == 1
    assert "missed: it is slow" in capsys.readouterr().err


def test_every_study_is_listed(capsys):
    assert studies.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(studies.STUDIES)
    with pytest.raises(SystemExit, match="'none': choose a study from architectures"):
        studies.main(["none"])


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_committed_result_has_finite_ratios(name):
    result = harness.Study.of(pytest.importorskip(f"benchmarks.{studies.STUDIES[name]}"))
    if result.committed:
        file = f"benchmarks/results/{result.committed}"
        assert (harness.ROOT / file).is_file(), f"python -m benchmarks {name} -o {file} --anonymous"
        page = (harness.RESULTS.parent / "README.md").read_text()
        assert pages.rows_of_file(page, result.committed), f"a row of benchmarks/README.md names {result.committed}"
        ratios = result.ratios(harness.committed(result))
        assert ratios and all(np.isfinite(np.median(samples)) for samples in ratios.values())
