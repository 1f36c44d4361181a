"""The page of a run: complete for any missing data, and no text of a hostile run becomes markup."""

import html.parser
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.cli.runs.report import report as command
from hpcdist.comm.record.spans import Spans
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.hdf5 import files
from hpcdist.reporting import plotting as style
from hpcdist.telemetry.metrics import observations, run_figures, step_metrics
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
from hpcdist.telemetry.page import document, history, run_data
from hpcdist.telemetry.page.run_data import CheckpointEntry, ExternalData, RecipeSetting, TextSample

S = 10**9
SECTIONS = (
    "summary", "learning", "speed", "step", "resources", "energy", "checkpoints", "events", "text", "recipe",
    "environment", "measurement",
)  # fmt: skip
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp; $\\frac{1}{2}$ \u202e\x00\x1b]"


class Reader(html.parser.HTMLParser):
    """The content that a browser would show: elements, their attributes, and texts."""

    VOID = frozenset({"meta", "br", "col"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open, self.attributes = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "elements nest"

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def visible_text(self):
        return " ".join(" ".join(self.texts).split())

    def values(self, name):
        return [value for _, key, value in self.attributes if key == name]


def parse_page(text):
    result = Reader(text)
    assert result.open == []
    ids = result.values("id")
    assert len(ids) == len(set(ids)), "ids are unique"
    assert [one for one in ids if one in SECTIONS] == list(SECTIONS)
    assert {"script", "img", "iframe", "object", "link", "base", "form"}.isdisjoint(result.elements)
    for key in ("href", "xlink:href", "src", "action"):
        for value in result.values(key):
            assert value.startswith(("#", "data:image/png;base64,")), value
            assert not value.startswith("#") or value[1:] in ids, value
    assert all(not name.startswith("on") for _, name, _ in result.attributes)
    assert "http" not in re.sub(r'(xmlns(:xlink)?="http://www.w3.org/[^"]*"|http-equiv)', "", text)
    return result


def write(path, steps=60, ranks=2, attributes=None, resume=None, scale=1.0, **more):
    lines = {"unigram_nats": 3.1, "bigram_nats": 2.48, "hosts": "n1,n2", "mpi_library": "Open MPI v5, etc"}
    with MetricsWriter(path / "metrics.h5", ranks, resume, attributes=lines | (attributes or {})) as writer:
        for step in range((resume or 0) + 1, steps + 1):
            times = np.random.default_rng(step).random((3, ranks)) + 0.1
            times[0, -1] *= scale
            wide = dict(zip(step_metrics.PER_RANK, (times.sum(axis=0), *times, np.full(ranks, 4096.0)), strict=True))
            writer.append(step=step, loss=5.0 / step**0.5, learning_rate=0.01 / step, tokens=512, **wide)
        writer.evaluation(steps, 1.5)
        writer.include(lambda file, session: observations.append(file, session, more.get("events", ())))
    return path


def starts(path, *ends, deaths=0):
    now = time.time()
    rows = [
        {"began": now - 100 * (len(ends) - n), "seen": now - 5, "end": end, "deaths": deaths}
        for n, end in enumerate(ends)
    ]
    (path / "starts.json").write_text(json.dumps(rows))


def event(kind, step, **values):
    return SimpleNamespace(kind=kind, step=step, time_ns=step * 100 * S, values=values)


def spans(path, rank, world, step=7, scale=1):
    (path / "recorder").mkdir(exist_ok=True)
    output = Spans(path / f"recorder/rank-{rank:05d}.spans", rank, world)
    for number in (step - 1, step, step + 1):
        at = number * 100 * 10**6
        output.add("data", "wait for data", number, at, at + 2 * 10**6)
        output.add("compute", "FORWARD", number, at + 2 * 10**6, at + 30 * 10**6 * scale, 0)
        output.add("compute", "BACKWARD", number, at + 30 * 10**6 * scale, at + 70 * 10**6, 0)
        output.add("communication", "REDUCE", number, at + 70 * 10**6, at + 90 * 10**6)
        output.add("step", "step", number, at, at + 95 * 10**6)
    output.close()


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "mine"
    path.mkdir()
    rows = [
        event("begin", 0, world_ranks=2),
        event("memory", 1, **{"memory_bytes[parameters]": 2.0**20, "memory_bytes[activations]": 3 * 2.0**20}),
        event("collectives", 2, **{"collective_seconds_total[ring]": 2.0, "collective_bytes_total[ring]": 2048.0}),
        event("anomaly", 40, text="step 40: loss 9.1, far above"),
    ]
    write(path, events=rows)
    starts(path, "finished")
    for rank in range(2):
        spans(path, rank, 2)
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are left empty, because drawing takes most of the time of tests that check texts."""
    monkeypatch.setattr(style, "draw_svg", lambda key, draw, size=None: '<svg viewBox="0 0 1 1"></svg>')


def make_page(path, external=None):
    return document.make_page(run_data.read(path, external))


@pytest.mark.usefixtures("undrawn")
def test_moved_bytes_are_reported_by_kind(run_dir):
    """A page with a table in MiB does not claim that nothing was sent, nor blame a setting that was not used."""
    with MetricsWriter(run_dir / "metrics.h5", 2, resume_step=60) as writer:
        writer.describe(bytes_messages_per_step=0, bytes_shared_per_step=3 << 20, bytes_unknown_per_step=1 << 10)
    output = parse_page(make_page(run_dir)).visible_text
    note = "a rank: 3.0 MiB through shared memory, 1.0 KiB by the MPI library, plus traffic"
    assert "Moved a step" in output and note in output and "Sent a step" not in output
    assert "communication.algorithm = native" not in output


def test_complete_page_has_all_sections(run_dir):
    external = ExternalData(
        settings=[RecipeSetting("run.steps", "60", "1000"), RecipeSetting("run.seed", "0", "0")],
        planned_steps=60,
        checkpoints=[CheckpointEntry("step-60", 60, "complete", "2026-01-01T00:00:00+00:00", 5 << 20)],
        sample=TextSample("def main():\n    pass", "def ", ""),
    )
    result = parse_page(make_page(run_dir, external))
    loss = np.mean([5.0 / step**0.5 for step in range(41, 61)])
    for expected in (
        "mine", "finished", "after 60 of 60 steps", f"{loss:.4f} nats",
        "entropies of the data: unigram 3.100, bigram 2.480",
        "tokens/s", "Straggler score", "4.0 KiB", "4.0 MiB", "step 40: loss 9.1, far above", "start 1: finished",
        "5.0 MiB", "main():", "run.steps", "1000", "1 key as by default", "Open MPI v5, etc", "ring", "2.0 KiB",
        "Step 8, of median length", "Pale: backward",
    ):  # fmt: skip
        assert expected in result.visible_text, expected
    charts = [value for tag, key, value in result.attributes if (tag, key) == ("svg", "aria-label")]
    assert len(charts) == 9 and all(len(alt) > 20 for alt in charts), "every chart says what it shows"
    assert {value for tag, key, value in result.attributes if (tag, key) == ("svg", "role")} == {"img"}
    headings = [tag for tag in result.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1" and headings.count("h1") == 1 and headings.count("h2") == len(SECTIONS)
    links = [value for tag, key, value in result.attributes if (tag, key) == ("a", "href")]
    assert links[: len(SECTIONS)] == [f"#{name}" for name in SECTIONS] and set(links[len(SECTIONS) :]) == {"#missing"}
    head = result.visible_text.partition("Summary")[0]
    assert "trained model reached a validation loss of 1.5000 nats after 60 steps on 2 ranks at " in head
    assert "None: skipped steps, unexpected ends, requeues, survived deaths." in result.visible_text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("unit", ["nats", ""])
def test_page_of_a_model_without_tokens_has_no_text_sample_and_no_nats(tmp_path, undrawn, unit):
    page = make_page(write(tmp_path, attributes={"loss_unit": unit}))
    assert ("Text sample" in page) == ("in nats a token" in page) == (unit == "nats")


def test_content_policy_forbids_all_requests(run_dir):
    text = make_page(run_dir)
    assert "default-src &#x27;none&#x27;" in text.partition("<style>")[0]
    assert "url(" not in text.partition("<style>")[2].partition("</style>")[0], "nor does the style sheet"


@pytest.mark.usefixtures("undrawn")
def test_missing_measurements_are_reported_with_the_reason(run_dir):
    (run_dir / "usage.json").write_text(json.dumps({"joules": {"reason": "no source can be read: rapl: permission"}}))
    output = parse_page(make_page(run_dir)).visible_text
    report = output.partition("Not measured, and why")[2]
    for name in ("Energy", "Power", "Utilisation", "Peak memory"):
        assert name in report or name == "Peak memory"
    assert output.count("no source can be read: rapl: permission") == 1 and "rapl: permission" in report
    assert "0 J" not in output and "nan" not in output.lower().replace("nanosec", "")


@pytest.mark.full
def test_energy_is_shown_by_phase_and_source(run_dir):
    phases = {"training": {"joules": 7200.0, "seconds": 60.0}, "checkpoint": {"joules": None, "seconds": 2.0}}
    parts = {"compute": {"joules": 5000.0, "seconds": 40.0, "error_j": 1.0}}
    kept = {"by_kind": {"gpu": 3600.0, "cpu": 3600.0}, "phases": phases, "reason": None}
    (run_dir / "usage.json").write_text(json.dumps({"since_step": 0, "joules": kept, "activities": parts}))
    with files.edit(run_dir / "metrics.h5", step_metrics.SCHEMA, step_metrics.VERSION) as file:
        file.attrs["j_per_step"] = 102.4
    accounts = {"facility_kwh": 0.003, "pue": 1.5, "emissions_g": 3.25, "carbon_g_per_kwh": 300.0}
    accounts |= {"carbon_source": "the grid", "carbon_date": "2025"}
    asked = []
    output = parse_page(
        make_page(run_dir, ExternalData(costs=lambda *report: asked.append(report) or accounts))
    ).visible_text
    assert asked == [(7200.0, 62.0)]
    for expected in (
        "7.2 kJ", "gpu 3.6 kJ, cpu 3.6 kJ", "0.003 kWh", "with 1.5 as PUE", "200 mJ", "3.25 g CO2e",
        "300 g/kWh (the grid, 2025)", "of it compute 40.0 s 5 kJ",
    ):  # fmt: skip
        assert expected in output, expected
    assert re.search(r"checkpoint 2\.0 s not measured", output)


def test_texts_of_a_hostile_run_are_escaped(tmp_path):
    path = tmp_path / re.sub(r"[/\x00]", "", HOSTILE)
    path.mkdir()
    attributes = dict.fromkeys(("hosts", "mpi_library", "git_commit", "energy_reason", "site", "chaos"), HOSTILE)
    attributes = {name: value.replace("\x00", "") for name, value in attributes.items()}
    rows = [event("memory", 1, **{f"memory_bytes[{HOSTILE[:40]}]": 5.0}), event("anomaly", 2, text=HOSTILE)]
    write(path, steps=3, attributes=attributes, events=rows)
    starts(path, HOSTILE)
    (path / "jobs.jsonl").write_text(json.dumps({"time": HOSTILE, "event": HOSTILE, "job": HOSTILE, "how": HOSTILE}))
    (path / "usage.json").write_text(
        json.dumps({"joules": {"by_kind": {HOSTILE: 5.0}, "phases": {HOSTILE: {"joules": 3}}}})
    )
    for rank in range(2):
        spans(path, rank, 2)
    external = ExternalData(
        settings=[RecipeSetting(HOSTILE, HOSTILE, "")],
        checkpoints=[CheckpointEntry(HOSTILE, 3, HOSTILE, HOSTILE, 5, HOSTILE)],
        sample=TextSample(HOSTILE + "text", HOSTILE, ""),
    )
    text = make_page(path, external)
    assert parse_page(text).visible_text.count("<script>alert(1)</script>") > 10, "it is all there, as text"
    assert not re.search("[\x00-\x08\x0e-\x1f\u202e]", text)


@pytest.mark.usefixtures("undrawn")
def test_hostile_reason_is_escaped(run_dir):
    result = parse_page(
        make_page(
            run_dir,
            ExternalData(settings_reason=HOSTILE, checkpoints_reason=HOSTILE, sample=TextSample(reason=HOSTILE)),
        )
    )
    assert result.visible_text.count("onerror=alert(2)") == 3


@pytest.mark.parametrize("rows", (False, True))
def test_page_of_a_run_that_failed_in_its_first_step(tmp_path, rows):
    (tmp_path / "recipe.toml").write_text("")
    if rows:
        write(tmp_path, steps=0)
    starts(tmp_path, "")
    result = parse_page(make_page(tmp_path))
    assert "no step was completed" in result.visible_text and "svg" not in result.elements


def test_page_of_one_step_and_one_rank(tmp_path):
    write(tmp_path, steps=1, ranks=1)
    output = parse_page(make_page(tmp_path)).visible_text
    assert "one rank: there is nothing to compare" in output and "not known" in output


def test_directory_without_a_run_is_rejected(tmp_path):
    with pytest.raises(StorageError, match="is not the directory of a run"):
        run_data.read(tmp_path)
    (tmp_path / "metrics.h5").write_bytes(b"nothing of ours" * 100)
    with pytest.raises(StorageError, match="HDF5"):
        run_data.read(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_truncated_side_files_are_omitted_or_reported(run_dir):
    for name in ("starts.json", "usage.json", "jobs.jsonl", "journal.jsonl"):
        (run_dir / name).write_bytes(b'[{"began": 1, "seen"\xff')
    for path in (run_dir / "recorder").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    (run_dir / "recorder/rank-00000.rec").write_bytes(b"HPCDREC\0" + b"\xff" * 500)
    result = parse_page(make_page(run_dir))
    assert "too short" in result.visible_text and history.UNKNOWN in result.visible_text
    (run_dir / "usage.json").write_text("[" * 100_000)
    (run_dir / "starts.json").write_text(
        json.dumps([{"began": 1e300, "seen": 2e300, "end": 3, "deaths": "x"}, 5, None])
    )
    assert history.UNKNOWN in parse_page(make_page(run_dir)).visible_text


@pytest.mark.parametrize(
    ("ends", "kind"),
    ((("",), "under way"), (("finished",), "finished"), (("", "stopped"), "stopped"), (("", "finished"), "finished")),
)
def test_page_reports_the_state_of_the_run(run_dir, ends, kind):
    starts(run_dir, *ends, deaths=1)
    result = run_data.read(run_dir)
    assert result.state.kind == kind
    texts = [one.text for one in result.events if one.kind == "start"]
    assert len(texts) == len(ends) and all("1 death survived" in text for text in texts)
    assert ("unexpectedly" in texts[0]) == (len(ends) > 1)
    later = run_data.read(run_dir, now_ns=time.time_ns() + 3600 * S)
    assert later.state.kind == (history.KILLED if kind == "under way" else kind)
    figures = run_figures.RUN.jsonable([later])[0]
    assert (figures["starts"], figures["unexpected_ends"]) == (len(ends), ends.count(""))
    assert figures["survived_deaths"] == len(ends)


def test_resumes_are_marked_in_old_files_without_step_times(tmp_path):
    write(tmp_path, steps=60)
    write(tmp_path, steps=90, resume=40)
    starts(tmp_path, "stopped", "finished")
    with files.edit(tmp_path / "metrics.h5", step_metrics.SCHEMA, step_metrics.VERSION) as file:
        steps = file["steps"]
        steps.attrs["columns"] = [name for name in steps.attrs["columns"] if name != "step_s"]
        del steps["step_s"]
    result = run_data.read(tmp_path)
    assert result.sessions == [41]
    assert [(one.step, one.text.split(":")[0]) for one in result.events] == [(0, "start 1"), (40, "start 2")]
    output = parse_page(document.make_page(result)).visible_text
    assert "Vertical lines: 1 resume." in output and "a file of the first version" in output


@pytest.mark.usefixtures("undrawn")
def test_straggler_is_shown(tmp_path):
    write(tmp_path, ranks=5, scale=3.0)
    result = run_data.read(tmp_path)
    assert result.figures["slowest_rank"] == 4 and result.figures["imbalance"] > 1.5
    assert "rank 4 over the median rank" in parse_page(document.make_page(result)).visible_text


def test_sampled_part_of_a_large_run_is_reported(run_dir, monkeypatch):
    monkeypatch.setattr("hpcdist.hdf5.datasets.CHUNK_BYTES", 4 * 8 * 2)
    large = run_dir.parent / "large"
    large.mkdir()
    write(large, steps=3000)
    read = run_data.side_tables.read
    monkeypatch.setattr(run_data.side_tables, "read", lambda path: read(path, 500 * 2 * 8))
    assert re.search(r"From \d{3} of 3,000 steps, spread evenly", parse_page(make_page(large)).visible_text)


def test_ids_of_different_charts_do_not_collide(rng):
    values = rng.normal(size=(2, 30))

    def picture(axes):
        axes.plot(*values, "o-", color=style.BLUE, label='id="x" style="fill: #0072b2" <b>')
        axes.legend()

    first, second = style.draw_svg("one", picture), style.draw_svg("two", picture)
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    assert set(re.findall(r'href="#([^"]*)"', first)) <= ids[0]
    assert "var(--c0)" in first and "<b>" not in first and "font-family" not in first
    assert first.startswith("<svg") and "<style" not in first and "<metadata" not in first


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(command, [str(one) for one in arguments])


@pytest.mark.usefixtures("undrawn")
def test_command_writes_one_file(run_dir, tmp_path):
    (run_dir / "recipe.toml").write_text('[run]\nsteps = 60\n\n[model]\nkind = "gpt"\n')
    file = tmp_path / "out.html"
    file.write_text("old")
    done = run(run_dir, "--html", file, "--no-sample")
    assert done.exit_code == 0, done.output
    assert str(file) in done.output
    output = parse_page(file.read_text()).visible_text
    assert (
        "Other than the defaults (1)" in output
        and "after 60 of 60 steps" in output
        and "no sample was asked for" in output
    )
    assert [one.name for one in tmp_path.iterdir() if "new" in one.name] == []


@pytest.mark.usefixtures("undrawn")
def test_run_without_checkpoint_has_no_text_sample(run_dir, tmp_path):
    run(run_dir, "--html", tmp_path / "out.html")
    assert "No sample: the run has no checkpoint yet" in parse_page((tmp_path / "out.html").read_text()).visible_text


@pytest.mark.usefixtures("undrawn")
def test_unreadable_recipe_is_reported(run_dir, tmp_path):
    (run_dir / "recipe.toml").write_text("[run]\nstepz = 5\n")
    run(run_dir, "--html", tmp_path / "out.html", "--no-sample")
    assert "The recipe cannot be read" in parse_page((tmp_path / "out.html").read_text()).visible_text


@pytest.mark.usefixtures("undrawn")
def test_json_and_page_can_be_written_together(run_dir, tmp_path):
    done = run(run_dir, "--html", tmp_path / "out.html", "--no-sample", "--json")
    assert json.loads(done.output)["steps"] == 60 and (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        (["--no-sample"], UsageError, "need --html"),
        (["--sample-prompt", "x"], UsageError, "need --html"),
        (["--html", "x.html", "--no-sample", "--sample-prompt", "x"], UsageError, "exclude each other"),
        (["--html", "x.html", "--sample-prompt", ""], UsageError, "is empty"),
        (["--html", "/nowhere/x.html", "--no-sample"], StorageError, "cannot be written"),
    ),
)
@pytest.mark.usefixtures("undrawn")
def test_invalid_options_are_rejected(run_dir, arguments, error, message):
    done = run(run_dir, *arguments)
    assert isinstance(done.exception, error) and message in str(done.exception)


def test_missing_matplotlib_error_names_the_extra(run_dir, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(run_dir, "--html", tmp_path / "x.html")
    assert isinstance(done.exception, MissingCapabilityError) and "analysis" in str(done.exception)
    assert not (tmp_path / "x.html").exists()
