"""Published trainings beside the planner: closed forms are exact, throughput is near, and what is committed holds."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.planner import calibration, predictions, report, tables, validation
from harness.marks import cases
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.planner.estimate import ZERO3_RATIOS
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.transformer import describe

RESULT = harness.RESULTS / validation.COMMITTED
CUT = (
    "1T, zero2, data 64",
    "1T, zero1, data 256",
    "1T, zero2, data 256",
    "128B, zero2, data 1024",
    "1T, zero1, data 1024",
    "1T, zero2, data 1024",
)


@pytest.fixture(scope="module")
def known():
    return tables.tables()


@pytest.fixture(scope="module")
def found(known):
    return [one for table in known.values() for one in predictions.compared(table)]


def test_every_table_names_its_source_and_what_confirmed_it(known):
    assert len(known) == 11
    for table in known.values():
        assert ("arXiv:" in table.source or "nv-adlr.github.io" in table.source) and table.confirmed and table.assumed
    assert known["gpipe"].unmodelled


def test_rows_of_calibration_and_of_tests_are_apart(known):
    roles = {(table.key, row.name): row.role for table in known.values() for row in table.rows}
    chosen = {name for (key, name), role in roles.items() if role == "calibration" and key == "megatron_sc21_table1"}
    assert chosen == {"1.7B on 32", "18.4B on 256", "1008B on 3072"}
    shared = {name for (key, name), role in roles.items() if role == "shared" and key == "korthikanti_table5"}
    assert shared == {"22B, full", "22B, selective + sequence"}


def test_no_test_row_is_of_a_run_whose_parts_calibrate(known):
    """Stages and blocks were profiled in runs that other tables of the same paper have whole steps of."""

    def run(row):
        return known[row.table].source.split(",")[0], row.shape, row.layout.tensor, row.layout.microbatch

    rows = [row for table in known.values() for row in table.rows]
    chosen = {run(row) for row in rows if row.role == "calibration"}
    assert [row.name for row in rows if row.role == "test" and run(row) in chosen] == []
    shared = [row for row in rows if row.role == "shared"]
    assert len(shared) == 18 + 2 and all(run(row) in chosen for row in shared)


def test_layouts_of_a_table_use_as_many_devices_as_it_says(known):
    for key in ("megatron_sc21_table1", "megatron_sc21_table2", "llama3_table4"):
        for row in known[key].rows:
            assert row.layout.devices == int(row.name.split(" on ")[1].split(",")[0])
            assert row.global_batch % (row.layout.data * row.layout.microbatch) == 0


@pytest.mark.full
def test_closed_forms_agree_to_the_last_printed_digit(found):
    closed = [one for one in found if one.kind == "closed"]
    assert len(closed) == 54 + 10 + 1 + 9 + 4
    assert [one.row for one in closed if not one.exact] == []


def test_bubbles_of_profiled_stages_agree_to_the_last_printed_digit(found):
    bubbles = [one for one in found if one.kind == "bubble"]
    assert [one.row for one in bubbles if one.role == "test" and not one.exact] == []
    # Megatron's interleaved schedule warms up otherwise than ours.
    assert all(abs(one.predicted - one.published) < 0.004 for one in bubbles if one.role == "extra")


def test_memory_is_within_a_twentieth(found):
    memory = [one for one in found if (one.kind, one.role) == ("memory", "test")]
    assert len(memory) == 36
    assert max(abs(one.error) for one in memory) < 0.05


def test_what_ran_fits_into_memory_and_what_did_not_does_not(known):
    def fits(row):
        cluster = predictions.cluster_of(row.cluster)
        return memory(describe(row.shape, row.name), row.layout, cluster, row.global_batch).fits

    ran = ("megatron_sc21_table1", "megatron_sc21_table2", "megatron_v1", "korthikanti_table5", "zero_bubble_table4")
    rows = [row for key in ran for row in known[key].rows if row.role != "extra"]
    assert len(rows) == 10 + 6 + 4 + 9 + 36 and all(map(fits, rows))
    # One block of it was measured: without recomputation the whole model has no room (arXiv:2205.05198, section 6.1).
    blocks = {row.name: fits(row) for row in known["korthikanti_table4"].rows}
    assert not blocks["no recomputation"] and not blocks["sequence parallel"] and blocks["selective + sequence"]


def test_throughput_is_within_a_tenth_mostly_and_within_a_fifth_always(found):
    result = report.summary(found)
    whole, shared = result["all, throughput, test"], result["all, throughput, shared"]
    assert (whole["rows"], shared["rows"]) == (45, 20)
    for one in (whole, shared):
        assert one["near"] >= 0.8 * one["rows"]
        assert one["far"] == one["rows"]


def test_the_sign_of_errors_is_told(found):
    rows = [one for one in found if one.kind == "throughput" and one.role in ("test", "shared")]
    both = sum(one.error for one in rows) / len(rows)
    fast = sum(one.error > 0 for one in rows)
    said = list(report.said(report.summary(found)))[-1]
    assert f"the mean is {both:+.1%}, {fast} of 65 are predicted faster" in said
    slow = [replace(one, predicted=0.9 * one.published) for one in rows if one.quantity != "step_s"]
    assert report.summary(slow)["all, throughput, shared"]["fast"] == 0
    assert report.summary(slow)["all, throughput, shared"]["signed"] == pytest.approx(-0.1)


def test_so_it_is_for_every_paper_alone(found):
    papers = {name: one for name, one in report.summary(found).items() if name.endswith(", throughput, test")}
    assert len(papers) > 2
    for name, one in papers.items():
        assert one["far"] == one["rows"] and one["mean"] < 0.1, name


def test_strong_scaling_has_the_published_shape(found):
    series = {name: (role, one, other) for name, role, one, other in report.shapes(found)}
    assert {name: role for name, (role, _, _) in series.items()} == {
        "175B, PTD-P": "test",
        "530B, PTD-P": "test",
        "175B, ZeRO-3": "extra",
        "530B, ZeRO-3": "extra",
    }
    for role, published, predicted in series.values():
        assert predicted == sorted(predicted, reverse=True), "more devices, less of each"
        if role == "test":
            assert predicted == pytest.approx(published, rel=0.05)
    # Sharded parameters lose much more than tensors and pipelines do, as published.
    assert series["175B, ZeRO-3"][2][-1] < 0.5 < 0.9 < series["175B, PTD-P"][2][-1]


def test_zero3_is_as_far_off_as_is_told(found):
    """Where ZeRO-3 is planned or discussed the reader is told how much too fast it is."""
    errors = [one.error for one in found if one.series.endswith("ZeRO-3")]
    assert len(errors) == 6
    assert pytest.approx((1 + min(errors), 1 + np.median(errors), 1 + max(errors)), abs=0.01) == ZERO3_RATIOS
    told = f"{min(errors) * 100:.0f} to {max(errors) * 100:.0f} %"
    for name in ("benchmarks/architectures/study.py", "hpcdist/planner/time/exchange.py"):
        path = harness.ROOT / name
        assert told in " ".join(path.read_text(encoding="utf-8").split()), path


def test_what_is_committed_is_what_the_command_finds(found):
    kept = report.read(RESULT)
    assert [(one.table, one.row, one.quantity) for one in kept] == [(o.table, o.row, o.quantity) for o in found]
    for one, other in zip(kept, found, strict=True):
        assert one.predicted == pytest.approx(other.predicted, rel=0.01), f"{one}: run `python -m benchmarks planner`"
    assert [one.role for one in kept] == [one.role for one in found]
    whole, now = (report.summary(each)["all, throughput, test"] for each in (kept, found))
    assert whole["far"] == now["far"] == whole["rows"]
    assert whole["mean"] == pytest.approx(now["mean"], abs=0.005)


def test_the_shipped_constants_are_those_that_the_calibration_rows_choose(known, monkeypatch):
    shipped = predictions.cluster_of("a100-selene").device.memory_share
    monkeypatch.setattr(calibration, "SHARES", (shipped - 0.12, shipped, shipped + 0.12))
    monkeypatch.setattr(calibration, "FACTORS", (0.92, 1.0, 1.08))
    layers = {key: known[key] for key in ("korthikanti_table4", "megatron_sc21_table1", "zero_bubble_table6")}
    best = min(calibration.points(layers, "a100-selene"), key=lambda point: point.score)
    assert (best.share, best.factor) == (shipped, 1.0)
    assert best.score < 0.03


def test_errors_count_speed_and_seconds_alike():
    rate = predictions.Compared(
        table="t",
        row="r",
        quantity="tflops",
        role="test",
        kind="throughput",
        published=100.0,
        predicted=110.0,
        unit=1.0,
    )
    seconds = replace(rate, quantity="step_s", published=1.1, predicted=1.0)
    assert rate.error == pytest.approx(0.1) and seconds.error == pytest.approx(0.1)
    assert tables.unit_of("41.3") == 0.1 and tables.unit_of("137") == 1.0


@cases(
    "predicted, rounded, cut",
    (41.25, True, False),
    (41.35, True, False),
    (41.38, False, True),  # 41.3 if cut
    (41.41, False, False),
    (41.22, False, False),  # 41.2 both ways, though less than a unit away
    (41.2, False, False),
)
def test_digits_agree_where_they_are_printed_alike(predicted, rounded, cut):
    one = predictions.Compared(
        table="t",
        row="r",
        quantity="states_gb",
        role="test",
        kind="closed",
        published=41.3,
        predicted=predicted,
        unit=0.1,
    )
    assert (one.rounded, one.cut, one.exact) == (rounded, cut, rounded or cut)
    assert replace(one, predicted=predicted, slack=0.2).rounded, "what it is made of was rounded by more"


def test_what_is_cut_and_not_rounded_is_named(found, known):
    cut = [one for one in found if one.kind in ("closed", "bubble") and one.cut]
    assert [(one.table, one.row) for one in cut if one.role == "test"] == [("zero_table1", row) for row in CUT]
    told = "\n".join(report.lines(found, known))
    assert all(one.row in told for one in cut) and "cut off, not rounded: " in told


def test_a_role_that_is_none_is_refused(tmp_path):
    text = (tables.FOLDER / "megatron_v1.toml").read_text(encoding="utf-8")
    (tmp_path / "megatron_v1.toml").write_text(text.replace('role = "test"', 'role = "tuned"', 1), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"2\.0B on 2 V100: role 'tuned'; choose one of calibration, shared, test, extra"
    ):
        tables.tables(tmp_path)
    (tmp_path / "megatron_v1.toml").write_text(text.replace("2.0B on 2", "1.2B on 1", 1), encoding="utf-8")
    with pytest.raises(ValueError, match="rows have the same name"):
        tables.tables(tmp_path)


def test_a_file_holds_all_that_was_compared(found, tmp_path):
    path = tmp_path / "compared.h5"
    report.write(path, found, {"created_utc": "now"})
    for one, other in zip(report.read(path), found, strict=True):
        assert math.isnan(one.tflops) == math.isnan(other.tflops)
        assert replace(one, tflops=0.0) == replace(other, tflops=0.0)
    with pytest.raises(StorageError):
        report.write(path, found, {})


def test_lines_tell_all_tables(found, known):
    text = "\n".join([*report.lines(found, known), *report.said(report.summary(found))])
    assert all(table.title in text for table in known.values())
    assert "closed forms exact: 78 of 78" in text and "54 closed forms agree" in text
    assert "not modelled: AmoebaNet" in text


def test_a_goal_that_is_missed_ends_with_1(found, monkeypatch, capsys):
    """Of the comparisons as they are none is missed; then one row is 25 % off, a fifth of them 12 %, a digit wrong."""

    def ends_with(changed):
        monkeypatch.setattr(validation, "compared", lambda table: [one for one in changed if one.table == table.key])
        code, output = harness.run(validation, "planner", []), capsys.readouterr()
        assert code == (1 if output.err else 0) and "closed forms exact" in output.out
        return output.err

    assert ends_with(found) == ""
    speeds = [one for one in found if (one.kind, one.role, one.quantity) == ("throughput", "test", "tflops")]
    first = replace(speeds[0], predicted=1.25 * speeds[0].published)
    said = ends_with([first if one is speeds[0] else one for one in found])
    assert "rows within 20%, wanted all; 25.0%" in said and "10%" not in said
    rows = [one for one in found if (one.kind, one.role) == ("throughput", "test")]
    many = {id(one): replace(one, predicted=1.12 * one.published) for one in rows if one.quantity != "step_s"}
    said = ends_with([many.get(id(one), one) for one in found])
    assert "within 10%, wanted 80% of them" in said and "20%" not in said
    for kind in ("closed", "bubble"):
        one = next(one for one in found if (one.kind, one.role) == (kind, "test"))
        wrong = replace(one, predicted=one.published + 3 * one.unit)
        said = ends_with([wrong if other is one else other for other in found])
        assert f"closed forms ({kind}) are not exact" in said


def test_one_table_alone_has_its_own_goals(found):
    extra = [one for one in found if one.table == "llama3_table4"]
    assert extra and report.missed(report.summary(extra)) == ()


def test_the_picture_is_a_picture(found, known, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "picture.png", found, known)
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[analysis\]"):
        report.plot(tmp_path / "other.png", found, known)
