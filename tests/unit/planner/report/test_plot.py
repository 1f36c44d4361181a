"""The plot of a plan contains all of its terms, whatever their number."""

import sys
from dataclasses import replace

import pytest

from harness.made_plans import CLUSTER, ESTIMATE, MEMORY
from hpcdist import errors
from hpcdist.planner.report import plot
from hpcdist.planner.report.plot import TIMELINE, PlannedTimeline, TimelineBar
from hpcdist.reporting import plotting

PNG = b"\x89PNG\r\n\x1a\n"


def passes(stages, count, seconds=1.0):
    """Return a step of ``stages`` stages, each with ``count`` forwards and backwards, an exchange and an update."""
    bars = []
    for stage in range(stages):
        for number in range(count):
            begin = stage + 3 * number * seconds
            bars += [TimelineBar(stage, "forward", begin, begin + seconds, number)]
            bars += [TimelineBar(stage, "backward", begin + seconds, begin + 3 * seconds, number)]
        end = stage + 3 * count * seconds
        bars += [TimelineBar(stage, "exchange", end - 1, end + 1), TimelineBar(stage, "update", end + 1, end + 2)]
    return PlannedTimeline(stages=stages, bars=tuple(bars), end_s=max(bar.end_s for bar in bars))


@pytest.fixture
def draw_figure(tmp_path, monkeypatch):
    """A function that draws a plan and returns the figure and the file."""
    pytest.importorskip("matplotlib")
    figures = []
    save = plotting.save
    monkeypatch.setattr(plotting, "save", lambda figure, file: (figures.append(figure), save(figure, file)))

    def draw(result=ESTIMATE, timeline=None, name="plan.png"):
        plot.draw(result, timeline or passes(2, 3), "model", CLUSTER, tmp_path / name)
        return figures[-1], tmp_path / name

    return draw


def words(axis):
    return " ".join([axis.get_title(loc="left"), *(text.get_text() for text in axis.get_legend().get_texts())])


def test_memory_step_and_timeline_are_drawn(draw_figure):
    figure, file = draw_figure()
    assert file.read_bytes().startswith(PNG)
    memory, step, timeline = figure.axes
    assert "68.0 GB (63.3 GiB) of 85.9 GB (80.0 GiB), fits" in words(memory)
    assert "optimizer 30.0 GB" in words(memory) and "scratch" not in words(memory)
    assert "10.0 s, MFU 33.3 %, HFU 40.0 %" in words(step) and "bubble 2.00 s" in words(step)
    assert "forward" in words(timeline) and "exchange" in words(timeline) and "weights" not in words(timeline)
    assert "64 = data 4 x pipeline 2 x tensor 8 x context 1" in figure.get_suptitle()


def test_memory_bars_have_the_length_of_their_terms(draw_figure):
    memory = draw_figure()[0].axes[0]
    assert [bar.get_width() for bar in memory.patches] == [size / 1e9 for size in MEMORY.terms.values() if size]
    assert memory.lines[0].get_xdata()[0] == pytest.approx(MEMORY.limit_bytes / 1e9)


def test_bars_of_a_plan_that_does_not_fit_exceed_the_limit(draw_figure):
    figure, _ = draw_figure(replace(ESTIMATE, memory=replace(MEMORY, limit_bytes=30e9)))
    memory = figure.axes[0]
    assert "DOES NOT FIT" in memory.get_title(loc="left")
    assert memory.get_xlim()[1] > 68 and memory.lines[0].get_xdata()[0] == pytest.approx(30)


def test_long_step_shows_its_beginning_and_its_end(draw_figure):
    long = passes(2, 400)
    axes = draw_figure(timeline=long)[0].axes[2:]
    (begin, part), (late, end) = (axis.get_xlim() for axis in axes)
    assert begin == 0 and end == pytest.approx(long.end_s) and part == pytest.approx(end - late)
    assert part < 0.2 * end
    assert "of which the first and the last" in axes[0].get_title(loc="left")


def test_deep_pipeline_is_drawn_until_it_is_full(draw_figure):
    late = TimelineBar(0, "backward", 300.0, 302.0, 0)
    long = passes(2, 400)
    axes = draw_figure(timeline=replace(long, bars=(*long.bars, late)))[0].axes[2:]
    assert axes[0].get_xlim()[1] == pytest.approx(1.1 * 302.0)
    later = TimelineBar(0, "backward", 900.0, 902.0, 0)
    whole = draw_figure(timeline=replace(long, bars=(*long.bars, later)))[0].axes[2:]
    assert len(whole) == 1 and whole[0].get_xlim()[1] == pytest.approx(long.end_s)


@pytest.mark.full
def test_only_some_of_very_many_stages_are_drawn(draw_figure):
    figure, _ = draw_figure(timeline=passes(100, 2))
    shown = [int(label.get_text()) for label in figure.axes[2].get_yticklabels()]
    assert len(shown) <= 32 and shown[0] == 0 and shown[-1] == 99


def test_every_timeline_kind_has_a_colour(draw_figure):
    bars = tuple(TimelineBar(0, kind, float(place), place + 1.0) for place, kind in enumerate(TIMELINE))
    assert len({style.colour for style in TIMELINE.values()}) == len(TIMELINE)
    timeline = draw_figure(timeline=PlannedTimeline(stages=1, bars=bars, end_s=float(len(TIMELINE))))[0].axes[2]
    assert len(timeline.get_legend().get_texts()) == len(TIMELINE)


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".PNG"])
@pytest.mark.full_except(".svg")
def test_other_picture_formats_are_written(suffix, draw_figure):
    assert draw_figure(name=f"plan{suffix}")[1].stat().st_size > 1000


@pytest.mark.parametrize(("name", "error"), [("plan.xls", errors.UsageError), ("plan", errors.UsageError)])
def test_unknown_picture_suffix_is_rejected(name, error, tmp_path):
    with pytest.raises(error, match="choose a file name extension from .*png"):
        plotting.check_plot(tmp_path / name)


def test_missing_picture_directory_is_rejected(tmp_path):
    with pytest.raises(errors.StorageError, match="is not a directory"):
        plotting.check_plot(tmp_path / "nowhere" / "plan.png")


def test_unwritable_picture_raises_storage_error(tmp_path, draw_figure):
    (tmp_path / "plan.png").mkdir()
    with pytest.raises(errors.StorageError, match="cannot be written"):
        draw_figure()


def test_missing_matplotlib_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(errors.MissingCapabilityError, match=r"hpcdist\[analysis\]"):
        plotting.check_plot(tmp_path / "plan.png")
