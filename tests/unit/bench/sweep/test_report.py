"""The report of a sweep: its figures compared with numpy, and no values without a measurement."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist import __version__
from hpcdist.bench.sweep import report, results
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.cli.runs.report import report as command
from hpcdist.comm.record.timing import BytesMoved
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError

STEPS = 40
VERSIONS = sorted([__version__, "99.0"])


def make_outcome(rng, ranks, *, rate, counted=True, energy_j=None):
    samples = {"step_s": rng.random((STEPS, ranks)), "sent_bytes": np.floor(1e6 * rng.random((STEPS, ranks)))}
    samples["step_s"][0] = 100.0  # compilation
    samples["step_s"][3, 0] = np.nan
    if not counted:
        samples["sent_bytes"][7, 1] = np.nan
    summary = {"tokens_per_s": rate, "train_loss": rate / 1000, "val_loss": 2.0, "peak_bytes_total": 2**20 + rate}
    summary |= {f"bytes_moved_per_step.{way}": 1e6 + rate for way in BytesMoved._fields} if counted else {}
    summary |= {} if energy_j is None else {"energy_j": energy_j}
    summary |= {} if counted else {"bytes_sent_per_step": None, "bytes_sent_reason": "the library does not tell"}
    kept = {name: TrialSample(values, "1", "") for name, values in samples.items()}
    kept["iteration"] = TrialSample(np.arange(STEPS), "1", "")
    return TrialOutcome(OK, "", 1.0, 0, summary=summary, samples=kept), samples


@pytest.fixture
def sweep_file(tmp_path, rng):
    """A results file, with good repeats of three configurations, a failed one of zero, and one that only failed."""
    path, raw = tmp_path / "results.h5", {}
    results.prepare(path, {"git_commit": "c1", "processor": "A CPU", "cores": "2"})

    def append_trial(position, name, ranks, repeat, outcome, commit="c1"):
        results.append(path, SweepTrial(f"{name}{ranks}", name, ranks, {}, ""), position, repeat, outcome, commit)

    for repeat, rate in enumerate((1000.0, 3000.0, 1500.0)):
        outcome, raw[repeat] = make_outcome(rng, 2, rate=rate, energy_j=10.0 * rate)
        append_trial(0, "ring", 2, repeat, outcome)
    append_trial(1, "native", 2, 0, make_outcome(rng, 2, rate=500.0, counted=False)[0])
    append_trial(2, "zero | 1", 4, 0, make_outcome(rng, 4, rate=700.0)[0])
    append_trial(2, "zero | 1", 4, 1, TrialOutcome(FAILED, "", 1.0, 1, "exit code 1: boom"))
    append_trial(3, "lost", 4, 0, TrialOutcome(FAILED, "", 1.0, 78, "exit code 78: gone"), commit="c2")
    return path, raw


def row_of(path, name):
    return next(row for row in report.rows(results.read(path)) if row.name == name)


def test_figures_match_numpy(sweep_file):
    path, raw = sweep_file
    ring = row_of(path, "ring")
    assert ring.tokens_per_s == {"median": 1500.0, "min": 1000.0, "max": 3000.0}
    slowest = np.concatenate([np.nanmax(samples["step_s"][1:], axis=1) for samples in raw.values()])
    assert ring.step_s == {
        "median": np.median(slowest),
        "p95": np.percentile(slowest, 95),
        "p99": np.percentile(slowest, 99),
    }
    sent = np.concatenate([samples["sent_bytes"].max(axis=1) for samples in raw.values()])
    assert ring.bytes_sent_per_step == np.median(sent) and ring.bytes_moved_per_step == 3 * (1e6 + 1500)
    assert ring.peak_bytes == 2**20 + 3000
    assert (ring.train_loss, ring.val_loss, ring.energy_j) == (1.5, 2.0, 15000.0)
    assert (ring.ok, ring.failed, ring.status, ring.reasons) == (3, 0, "3 ok", {})


def test_missing_measurement_is_none_with_a_reason(sweep_file):
    native, zero, lost = (row_of(sweep_file[0], name) for name in ("native", "zero | 1", "lost"))
    assert native.bytes_sent_per_step is native.bytes_moved_per_step is native.energy_j is None
    assert native.reasons["bytes_sent_per_step"] == "the library does not tell"
    assert "no such figure" in native.reasons["energy_j"]
    assert zero.status == "1 ok, 1 failed" and zero.tokens_per_s["median"] == 700.0
    assert zero.reasons["failed"] == "exit code 1: boom"
    assert (lost.status, lost.reasons) == ("1 failed", {"failed": "exit code 78: gone"})
    figures = ("tokens_per_s", "step_s", "bytes_sent_per_step", "peak_bytes", "train_loss", "val_loss", "energy_j")
    assert [getattr(lost, name) for name in figures] == [None] * len(figures)


def test_peak_memory_is_unknown_if_a_part_is_unknown(tmp_path, rng):
    outcome, _ = make_outcome(rng, 2, rate=1.0)
    outcome.summary["peak_bytes_total"] = None
    results.prepare(tmp_path / "r.h5", {})
    results.append(tmp_path / "r.h5", SweepTrial("a", "a", 2, {}, ""), 0, 0, outcome, "")
    assert row_of(tmp_path / "r.h5", "a").peak_bytes is None


def test_table(sweep_file):
    output = CliRunner().invoke(command, [str(sweep_file[0])], catch_exceptions=False).output
    lines = output.splitlines()
    assert "A CPU" in output and "c1" in output
    at = next(n for n, line in enumerate(lines) if line.startswith("configuration"))
    rows = lines[at + 1 : at + 5]
    assert [line.split()[0] for line in rows] == ["ring", "native", "zero", "lost"]
    assert "1,500 [1,000-3,000]" in rows[0] and rows[0].endswith("3 ok")
    assert rows[3].split() == ["lost", "4", "-", "-", "-", "-", "-", "-", "1", "failed"]
    assert "no MB moved a step (max over ranks) of native (2): the library does not tell" in lines
    assert "zero | 1 (4): exit code 1: boom" in lines
    assert any(line.startswith("measured at 2 commits") for line in lines)
    assert "MB moved a step (max over ranks)" in lines[at] and " 3.005 " in rows[0]
    assert "versions of hpcdist" not in output


def test_table_of_a_script_shows_samples_and_marks_uncounted_activations(tmp_path, rng):
    outcome, _ = make_outcome(rng, 2, rate=1.0)
    outcome.summary.update(speed_unit="samples", counts_activations=False)
    results.prepare(tmp_path / "r.h5", {})
    results.append(tmp_path / "r.h5", SweepTrial("a", "a", 2, {}, ""), 0, 0, outcome, "")
    output = CliRunner().invoke(command, [str(tmp_path / "r.h5")], catch_exceptions=False).output
    assert " 1 [1-1] samples/s " in output and " 1.0 + activations " in output and "tokens/s" not in output


def test_report_warns_about_two_hpcdist_versions(sweep_file, monkeypatch):
    monkeypatch.setattr(results, "__version__", "99.0")
    results.append(
        sweep_file[0], SweepTrial("new", "new", 2, {}, ""), 9, 0, TrialOutcome(FAILED, "", 1.0, 1, "no"), "c1"
    )
    output = report.text(sweep_file[0], results.read(sweep_file[0]))
    assert f"measured with 2 versions of hpcdist, which may differ in speed: {', '.join(VERSIONS)}" in output


def test_markdown(sweep_file):
    output = CliRunner().invoke(command, [str(sweep_file[0]), "--markdown"], catch_exceptions=False).output
    lines = output.splitlines()
    assert {line.replace("\\|", "").count("|") for line in lines[:6]} == {len(report.ROWS.figures) + 1}
    assert lines[2].startswith("| ring | 2 | 1,500 [1,000-3,000] tokens/s |") and "zero \\| 1" in lines[4]


def test_json(sweep_file):
    output = CliRunner().invoke(command, [str(sweep_file[0]), "--json"], catch_exceptions=False).output
    assert "NaN" not in output
    document = json.loads(output)
    assert document["results"] == str(sweep_file[0]) and document["provenance"]["processor"] == "A CPU"
    ring, native, _, lost = document["configurations"]
    assert ring["tokens_per_s"]["median"] == 1500.0 and ring["status"] == "3 ok" and ring["id"] == "ring2"
    assert native["bytes_sent_per_step"] is None and native["reasons"]["bytes_sent_per_step"]
    assert lost["step_s"] is None


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.full_except("png")
def test_plot(sweep_file, ending):
    pytest.importorskip("matplotlib")
    picture = sweep_file[0].with_name(f"bars.{ending}")
    CliRunner().invoke(command, [str(sweep_file[0]), "--plot", str(picture)], catch_exceptions=False)
    assert picture.stat().st_size > 5000
    if ending == "svg":
        text = picture.read_text()
        assert all(f">{name}<" in text for name in ("ring", "4 ranks", "fastest")) and ">lost<" not in text


def test_configurations_on_several_rank_counts_become_curves(tmp_path, rng):
    path = tmp_path / "results.h5"
    results.prepare(path, {})
    for position, (name, ranks, rate) in enumerate(
        (("ring", 4, 3000.0), ("ring", 1, 1000.0), ("ring", 2, 1800.0), ("alone", 2, 900.0))
    ):
        outcome = make_outcome(rng, ranks, rate=rate)[0]
        results.append(path, SweepTrial(f"{name}{ranks}", name, ranks, {}, ""), position, 0, outcome, "c1")
    curves = report.scaling(report.rows(results.read(path)))
    assert {name: [row.ranks for row in rows] for name, rows in curves.items()} == {"ring": [1, 2, 4]}
    assert report.efficiency(curves["ring"]) == [1.0, 0.9, 0.75]
    pytest.importorskip("matplotlib")
    report.plot(results.read(path), tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert ">efficiency<" in drawn and ">peak MiB a rank<" in drawn


def test_plot_errors_are_clear(sweep_file, tmp_path, monkeypatch):
    read = results.read(sweep_file[0])
    with pytest.raises(UsageError, match="choose a file name extension"):
        report.plot(read, tmp_path / "bars.nonsense")
    with pytest.raises(StorageError, match="cannot be written"):
        report.plot(read, tmp_path / "missing" / "bars.png")
    results.prepare(tmp_path / "empty.h5", {})
    assert "no trial has ended yet" in report.text(tmp_path / "empty.h5", results.read(tmp_path / "empty.h5"))
    with pytest.raises(UsageError, match="nothing to plot"):
        report.plot(results.read(tmp_path / "empty.h5"), tmp_path / "bars.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingCapabilityError, match="analysis"):
        report.plot(read, tmp_path / "bars.png")


def test_conflicting_output_options_are_rejected(sweep_file, tmp_path):
    for arguments in ([str(tmp_path), "--markdown"], [str(sweep_file[0]), "--markdown", "--json"]):
        assert isinstance(CliRunner().invoke(command, arguments).exception, UsageError)
    (tmp_path / "notes.txt").write_text("no HDF5")
    assert isinstance(CliRunner().invoke(command, [str(tmp_path / "notes.txt")]).exception, StorageError)


def test_wrong_path_error_names_the_expected_path(tmp_path):
    (tmp_path / "metrics.h5").touch()
    missing, part = (CliRunner().invoke(command, [str(tmp_path / name)]).exception for name in ("none", "metrics.h5"))
    assert isinstance(missing, StorageError) and "does not exist; give the directory" in str(missing)
    assert isinstance(part, UsageError) and f"hpcdist report {tmp_path}" in str(part)


@pytest.fixture
def rates_file(tmp_path, rng):
    """A results file of two strategies with four learning rates each. The smallest loss is at rate 3e-3 of ring."""
    path = tmp_path / "rates.h5"
    results.prepare(path, {})
    for position, (name, rate) in enumerate((name, rate) for name in ("ring", "tree") for rate in (3e-2, 3e-3, 1e-3)):
        outcome = make_outcome(rng, 2, rate=1000.0)[0]
        outcome.summary["val_loss"] = 2.0 + abs(np.log10(rate / 4e-3)) + (name == "tree")
        recipe = f'[parallel]\nstrategy = "{name}"\n\n[optimizer]\nlearning_rate = {rate}\n\n[run]\nsteps = 5\n'
        results.append(path, SweepTrial(f"{name}{rate}", name, 2, {}, recipe), position, 0, outcome, "c1")
    return path


def test_plot_of_one_numeric_axis_shows_the_loss_over_it(rates_file):
    pytest.importorskip("matplotlib")
    read = results.read(rates_file)
    axis = report.swept(read, report.rows(read))
    assert (axis.key, axis.loss) == ("optimizer.learning_rate", "val_loss")
    assert axis.values["ring0.003"] == 3e-3 and axis.labels["tree0.003"] == "tree"
    report.plot(read, rates_file.with_suffix(".svg"))
    drawn = rates_file.with_suffix(".svg").read_text()
    for text in ("optimizer.learning_rate", "validation loss", "ring", "tree", "best", "0.003: 2.1249"):
        assert f">{text}<" in drawn, text


def test_key_that_does_not_change_the_loss_is_no_axis(rates_file):
    read = results.read(rates_file)
    rows = [replace(row, val_loss=2.0) for row in report.rows(read)]
    assert report.swept(read, rows) is None


def test_configuration_without_a_loss_is_left_out_of_the_axis(rates_file):
    read = results.read(rates_file)
    first, *rows = report.rows(read)
    axis = report.swept(read, [replace(first, val_loss=None, train_loss=None), *rows])
    assert (axis.key, axis.loss) == ("optimizer.learning_rate", "val_loss")


def test_sweep_without_a_single_numeric_axis_has_none(sweep_file, rates_file, rng):
    assert report.swept(results.read(sweep_file[0]), report.rows(results.read(sweep_file[0]))[:3]) is None
    recipe = "[optimizer]\nlearning_rate = 0.1\n\n[run]\nsteps = 7\n"
    trial = SweepTrial("both", "both", 2, {}, recipe)
    results.append(rates_file, trial, 9, 0, make_outcome(rng, 2, rate=1.0)[0], "c1")
    assert report.swept(results.read(rates_file), report.rows(results.read(rates_file))) is None


def test_sweep_becomes_a_page_and_csv(sweep_file, tmp_path):
    pytest.importorskip("matplotlib")
    path, file = sweep_file[0], tmp_path / "sweep.html"
    output = CliRunner().invoke(command, [str(path), "--html", str(file)], catch_exceptions=False).output
    page = file.read_text()
    assert str(file) in output and page.count("<svg") == 1 and "zero | 1 (4): exit code 1: boom" in page
    assert "<script" not in page and "A CPU" not in page
    lines = CliRunner().invoke(command, [str(path), "--to", "csv"], catch_exceptions=False).output.splitlines()
    assert lines[0].startswith("name,ranks,tokens_per_s,step_s,") and lines[1].startswith("ring,2,1500.0,")
    wrong = CliRunner().invoke(command, [str(path), "--to", "wandb"]).exception
    assert isinstance(wrong, UsageError) and "--to exports runs" in str(wrong)
