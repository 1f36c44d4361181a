"""Merging the results of a sweep's parts gives the file of one process, in any order and any number of times."""

import itertools
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from harness.jobs import call_command
from hpcdist.bench.sweep import merge, results, series
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.series import SeriesLimits
from hpcdist.bench.sweep.trial import FAILED, OK, PHASES, TrialOutcome, TrialSample
from hpcdist.errors import STORAGE, USAGE, StorageError, UsageError
from hpcdist.hdf5 import files

NAMES = ("a", "bad", "c d", "é")
TRIALS = [
    SweepTrial(f"id-{name}-{ranks}", name, ranks, {}, f"[run]\nseed = {ranks}\n") for name in NAMES for ranks in (2, 1)
]
ORIGIN = {"created_utc": "2026-01-01T00:00:00+00:00", "git_commit": "abc", "numpy_version": "2", "hosts": "n1"}
SUMMARY = {"tokens_per_s": 10.5, "strategy": "ring", "val_loss": None, "peak_bytes": {"gradients": 7}, "whole": True}


def outcome_of(of, repeat=0, started="2026-01-01T00:00:01+00:00"):
    """Return the outcome of a trial's repeat, the same at every call."""
    if of.name == "bad":
        return TrialOutcome(FAILED, started, 1.0, 1, "exit code 1", "tail\nof stderr")
    rng = np.random.default_rng([of.ranks, repeat, len(of.name), ord(of.name[0])])
    samples = {
        "iteration": TrialSample(np.arange(1, 5), "1", "steps"),
        "step_s": TrialSample(rng.random((4, of.ranks)), "s", ""),
    }
    samples |= dict.fromkeys((*PHASES, "sent_bytes"), samples["step_s"])
    samples |= {"tokens": TrialSample(np.full(4, 8), "1", "tokens")}
    samples["loss"] = TrialSample(rng.random(4).astype(np.float32), "1", "loss")
    return TrialOutcome(OK, started, 2.0, 0, summary=SUMMARY, samples=samples, mpi_library="MPI 1")


def measure(path, only=None, repeats=2, origin=ORIGIN, make=outcome_of):
    """Run the whole sweep, or one trial, into the file at ``path``."""
    items = series.plan(TRIALS, repeats, path, False, only)
    count = itertools.count()
    repeat_of = {number: item.repeat for number, item in enumerate(item for item in items if not item.status)}
    series.run(items, path, lambda of, _: make(of, repeat_of[next(count)]), SeriesLimits(60.0), origin, lambda _: None)
    return path


def file_content(path):
    """Return the content of an HDF5 file: attributes, values and dimension scales."""

    def plain_value(value):
        return repr(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)

    actual = {}
    with h5py.File(path) as file:

        def visit(name, member):
            for key, value in member.attrs.items():
                if key not in ("DIMENSION_LIST", "REFERENCE_LIST"):
                    actual[name, key] = plain_value(value)
            if isinstance(member, h5py.Dataset):
                actual[name, "values"] = (str(member.dtype), member.shape, member[...].tobytes())
                actual[name, "scales"] = [[scale.name for scale in dim.values()] for dim in member.dims]

        visit("/", file)
        file.visititems(visit)
    return actual


@pytest.fixture(scope="module")
def measured_parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return [measure(folder / f"{at}.h5", at) for at in range(len(TRIALS))]


@pytest.fixture
def parts(measured_parts, tmp_path):
    """Copies of the parts, which a test may change."""
    return [Path(shutil.copy(part, tmp_path)) for part in measured_parts]


@pytest.mark.full
def test_merged_parts_equal_the_file_of_one_process(tmp_path, parts):
    whole = file_content(measure(tmp_path / "whole.h5"))
    output = tmp_path / "all.h5"
    result = merge.merge(output, parts)
    assert (result.ok, result.failed, result.differences) == (12, 4, ())
    assert file_content(output) == whole and len(whole) > 300
    assert [each.name for each in results.read(output).configurations] == [*NAMES, *NAMES], "expected the sweep's order"
    backwards = tmp_path / "backwards.h5"
    for part in reversed(parts):
        merge.merge(backwards, [part])
    assert file_content(backwards) == whole
    with h5py.File(output) as file:
        step_s = file["trials/id-a-2/repeat-0/step_s"]
        assert [dim[0].name.rpartition("/")[2] for dim in step_s.dims] == ["iteration", "rank"]


def test_repeated_merge_changes_no_byte(tmp_path, parts):
    output = tmp_path / "all.h5"
    merge.merge(output, parts)
    before, at = output.read_bytes(), output.stat().st_mtime_ns
    merge.merge(output, parts)
    merge.merge(output, [parts[3], output, parts[3]])
    assert (output.read_bytes(), output.stat().st_mtime_ns) == (before, at)
    measure(output, repeats=2)
    assert output.stat().st_mtime_ns == at, "a sweep must find no trial left to run"


def test_provenance_of_parts_is_joined_and_reported(tmp_path):
    later = ORIGIN | {"created_utc": "2026-01-02T00:00:00+00:00", "hosts": "n2", "slurm_job_id": "7"}
    first = measure(tmp_path / "0.h5", 0, origin=later)
    second = measure(tmp_path / "1.h5", 1, origin=ORIGIN | {"numpy_version": "2.1", "slurm_job_id": "8"})
    output = tmp_path / "all.h5"
    for _ in range(2):
        assert merge.merge(output, [first, second]).differences == ("numpy_version: 2 | 2.1",)
    assert results.read(output).provenance == {
        **ORIGIN, "hosts": "n1,n2", "numpy_version": "2 | 2.1", "slurm_job_id": "7 | 8"
    }  # fmt: skip


def test_different_commits_are_rejected_without_mixed(tmp_path):
    first = measure(tmp_path / "0.h5", 0)
    second = measure(tmp_path / "1.h5", 1, origin=ORIGIN | {"git_commit": "def"})
    output = tmp_path / "all.h5"
    with pytest.raises(UsageError, match=r"different commits.*abc \| def.*--mixed"):
        merge.merge(output, [first, second])
    assert not output.exists()
    merge.merge(output, [first, second], mixed=True)
    result = results.read(output).configurations
    assert {repeat.git_commit for each in result for repeat in each.repeats} == {"abc", "def"}


@pytest.mark.full
def test_good_result_wins_and_later_failure_wins(tmp_path, parts):
    def make_failure(reason, started):
        return lambda of, _: TrialOutcome(FAILED, started, 1.0, 1, reason)

    early = measure(tmp_path / "early.h5", 0, make=make_failure("early", "2026-01-01T00:00:00+00:00"))
    late = measure(tmp_path / "late.h5", 0, make=make_failure("late", "2026-01-03T00:00:00+00:00"))
    for number, order in enumerate(itertools.permutations([early, late])):
        output = tmp_path / f"failed-{number}.h5"
        for part in order:
            merge.merge(output, [part])
        assert results.read(output).configurations[0].repeats[0].reason == "late"
    for number, order in enumerate(itertools.permutations([early, parts[0], late])):
        output = tmp_path / f"good-{number}.h5"
        merge.merge(output, order[:1])
        assert merge.merge(output, order[1:]).ok == 2
        assert results.read(output).configurations[0].repeats[0].status == OK


def test_two_good_results_of_one_trial_are_rejected(tmp_path, parts):
    other = measure(tmp_path / "other.h5", 0, make=lambda of, repeat: outcome_of(of, repeat + 7))
    output = tmp_path / "all.h5"
    merge.merge(output, parts[:1])
    before = output.read_bytes()
    with pytest.raises(UsageError, match=r"all\.h5 and .*other\.h5.*repeat-0 of trial id-a-2"):
        merge.merge(output, [parts[1], other])
    assert output.read_bytes() == before


def test_same_id_with_another_name_is_rejected(tmp_path, parts):
    with files.edit(parts[0], results.SCHEMA, results.VERSION) as file:
        file["trials/id-a-2"].attrs["name"] = "other"
    clone = measure(tmp_path / "clone.h5", 0)
    with pytest.raises(UsageError, match=r"the name 'other' in .*0\.h5 and 'a' in .*clone\.h5"):
        merge.merge(tmp_path / "all.h5", [parts[0], clone])


def test_merge_keeps_the_lower_position(tmp_path, parts):
    with files.edit(parts[0], results.SCHEMA, results.VERSION) as file:
        file["trials/id-a-2"].attrs["position"] = 5
    output = tmp_path / "all.h5"
    merge.merge(output, [parts[0]])
    merge.merge(output, [measure(tmp_path / "again.h5", 0)])
    with h5py.File(output) as file:
        assert file["trials/id-a-2"].attrs["position"] == 0


def test_missing_files_are_named_and_nothing_is_written(tmp_path, parts):
    with pytest.raises(StorageError, match=r"8\.h5, .*9\.h5: no such file"):
        merge.merge(tmp_path / "all.h5", [parts[0], tmp_path / "8.h5", tmp_path / "9.h5"])
    assert not (tmp_path / "all.h5").exists()


def run_hpcdist(capsys, *arguments):
    return call_command(capsys, *arguments)


@pytest.mark.full
def test_merge_command(tmp_path, parts, capsys):
    output = tmp_path / "all.h5"
    code, out, text = run_hpcdist(capsys, "bench", "merge", "-o", output, *parts)
    assert (code, out) == (0, "") and "12 ok, 4 failed" in text
    code, out, _ = run_hpcdist(capsys, "report", output)
    assert code == 0 and all(name in out for name in NAMES)
    assert run_hpcdist(capsys, "bench", "merge", "-o", output)[0] == USAGE
    with results.locked(output):
        code, _, text = run_hpcdist(capsys, "bench", "merge", "-o", output, *parts)
    assert code == STORAGE and "another sweep writes" in text
    (tmp_path / "text.h5").write_text("no HDF5")
    assert run_hpcdist(capsys, "bench", "merge", "-o", output, tmp_path / "text.h5")[0] == STORAGE
    assert run_hpcdist(capsys, "bench", "merge", "-o", tmp_path / "none" / "all.h5", *parts)[0] == STORAGE
    assert not list(tmp_path.glob("*.lock"))
