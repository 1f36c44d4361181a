"""The page of a run: whole, whatever its run lacks, and nothing of a hostile run is markup."""

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
from hpcdist.telemetry.metrics import observations, step_metrics
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
from hpcdist.telemetry.page import document, history, key_figures, run_data
from hpcdist.telemetry.page.charts import style
from hpcdist.telemetry.page.run_data import CheckpointEntry, ExternalData, RecipeSetting, TextSample

S = 10**9
SECTIONS = (
    "summary", "learning", "speed", "step", "resources", "energy", "checkpoints", "events", "text", "recipe",
    "environment", "measurement",
)  # fmt: skip
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp; $\\frac{1}{2}$ \u202e\x00\x1b]"


class Reader(html.parser.HTMLParser):
    """What a browser would see: elements, their attributes, and texts."""

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
    def said(self):
        return " ".join(" ".join(self.texts).split())

    def values(self, name):
        return [value for _, key, value in self.attributes if key == name]


def seen(text):
    found = Reader(text)
    assert found.open == []
    ids = found.values("id")
    assert len(ids) == len(set(ids)), "ids are unique"
    assert [one for one in ids if one in SECTIONS] == list(SECTIONS)
    assert {"script", "img", "iframe", "object", "link", "base", "form"}.isdisjoint(found.elements)
    for key in ("href", "xlink:href", "src", "action"):
        for value in found.values(key):
            assert value.startswith(("#", "data:image/png;base64,")), value
            assert not value.startswith("#") or value[1:] in ids, value
    assert all(not name.startswith("on") for _, name, _ in found.attributes)
    assert "http" not in re.sub(r'(xmlns(:xlink)?="http://www.w3.org/[^"]*"|http-equiv)', "", text)
    return found


def write(path, steps=60, ranks=2, attributes=None, resume=None, scale=1.0, **more):
    told = {"unigram_nats": 3.1, "bigram_nats": 2.48, "hosts": "n1,n2", "mpi_library": "Open MPI v5, etc"}
    with MetricsWriter(path / "metrics.h5", ranks, resume, attributes=told | (attributes or {})) as writer:
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
    told = Spans(path / f"recorder/rank-{rank:05d}.spans", rank, world)
    for number in (step - 1, step, step + 1):
        at = number * 100 * 10**6
        told.add("data", "wait for data", number, at, at + 2 * 10**6)
        told.add("compute", "FORWARD", number, at + 2 * 10**6, at + 30 * 10**6 * scale, 0)
        told.add("compute", "BACKWARD", number, at + 30 * 10**6 * scale, at + 70 * 10**6, 0)
        told.add("communication", "REDUCE", number, at + 70 * 10**6, at + 90 * 10**6)
        told.add("step", "step", number, at, at + 95 * 10**6)
    told.close()


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
    """Charts are empty: of a page whose texts are looked at, they are most of the time."""
    monkeypatch.setattr(style, "draw_svg", lambda key, draw, size=None: '<svg viewBox="0 0 1 1"></svg>')


def made(path, beside=None):
    return document.make_page(run_data.read(path, beside))


@pytest.mark.usefixtures("undrawn")
def test_what_was_moved_is_told_by_its_kind(run_dir):
    """A page that has a table of MiB does not say that nothing was sent, nor blame a setting that was not there."""
    with MetricsWriter(run_dir / "metrics.h5", 2, resume_step=60) as writer:
        writer.describe(bytes_messages_per_step=0, bytes_shared_per_step=3 << 20, bytes_unknown_per_step=1 << 10)
    said = seen(made(run_dir)).said
    note = "a rank: 3.0 MiB through shared memory, 1.0 KiB by the MPI library, of which"
    assert "Moved a step" in said and note in said and "Sent a step" not in said
    assert "communication.algorithm = native" not in said


def test_a_whole_page(run_dir):
    beside = ExternalData(
        settings=[RecipeSetting("run.steps", "60", "1000"), RecipeSetting("run.seed", "0", "0")],
        planned_steps=60,
        checkpoints=[CheckpointEntry("step-60", 60, "complete", "2026-01-01T00:00:00+00:00", 5 << 20)],
        sample=TextSample("def main():\n    pass", "def ", ""),
    )
    found = seen(made(run_dir, beside))
    loss = np.mean([5.0 / step**0.5 for step in range(41, 61)])
    for expected in (
        "mine", "finished", "after 60 of 60 steps", f"{loss:.4f} nats",
        "entropies of the data: unigram 3.100, bigram 2.480",
        "tokens/s", "Straggler score", "4.0 KiB", "4.0 MiB", "step 40: loss 9.1, far above", "start 1: finished",
        "5.0 MiB", "main():", "run.steps", "1000", "1 key as by default", "Open MPI v5, etc", "ring", "2.0 KiB",
        "Step 8, of median length", "Pale: backward",
    ):  # fmt: skip
        assert expected in found.said, expected
    charts = [value for tag, key, value in found.attributes if (tag, key) == ("svg", "aria-label")]
    assert len(charts) == 9 and all(len(alt) > 20 for alt in charts), "every chart says what it shows"
    assert {value for tag, key, value in found.attributes if (tag, key) == ("svg", "role")} == {"img"}
    headings = [tag for tag in found.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1" and headings.count("h1") == 1 and headings.count("h2") == len(SECTIONS)
    assert [f"#{name}" for name in SECTIONS] == [v for t, k, v in found.attributes if (t, k) == ("a", "href")]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("unit", ["nats", ""])
def test_page_of_a_model_without_tokens_has_no_text_sample_and_no_nats(tmp_path, undrawn, unit):
    page = made(write(tmp_path, attributes={"loss_unit": unit}))
    assert ("Text sample" in page) == ("in nats a token" in page) == (unit == "nats")


def test_the_policy_forbids_the_browser_to_load_anything(run_dir):
    text = made(run_dir)
    assert "default-src &#x27;none&#x27;" in text.partition("<style>")[0]
    assert "url(" not in text.partition("<style>")[2].partition("</style>")[0], "nor does the style sheet"


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_measured_is_said_with_its_reason(run_dir):
    (run_dir / "usage.json").write_text(json.dumps({"joules": {"reason": "no source can be read: rapl: permission"}}))
    said = seen(made(run_dir)).said
    told = said.partition("Not measured, and why")[2]
    for name in ("Energy", "Power", "Utilisation", "Peak memory"):
        assert name in told or name == "Peak memory"
    assert "no source can be read: rapl: permission" in told
    assert "0 J" not in said and "nan" not in said.lower().replace("nanosec", "")


@pytest.mark.full
def test_energy_by_phase_and_source(run_dir):
    phases = {"training": {"joules": 7200.0, "seconds": 60.0}, "checkpoint": {"joules": None, "seconds": 2.0}}
    parts = {"compute": {"joules": 5000.0, "seconds": 40.0, "error_j": 1.0}}
    kept = {"by_kind": {"gpu": 3600.0, "cpu": 3600.0}, "phases": phases, "reason": None}
    (run_dir / "usage.json").write_text(json.dumps({"since_step": 0, "joules": kept, "activities": parts}))
    with files.edit(run_dir / "metrics.h5", step_metrics.SCHEMA, step_metrics.VERSION) as file:
        file.attrs["j_per_step"] = 102.4
    accounts = {"facility_kwh": 0.003, "pue": 1.5, "emissions_g": 3.25, "carbon_g_per_kwh": 300.0}
    accounts |= {"carbon_source": "the grid", "carbon_date": "2025"}
    asked = []
    said = seen(made(run_dir, ExternalData(costs=lambda *told: asked.append(told) or accounts))).said
    assert asked == [(7200.0, 62.0)]
    for expected in (
        "7.2 kJ", "gpu 3.6 kJ, cpu 3.6 kJ", "0.003 kWh", "with 1.5 as PUE", "200 mJ", "3.25 g CO2e",
        "300 g/kWh (the grid, 2025)", "of it compute 40.0 s 5 kJ",
    ):  # fmt: skip
        assert expected in said, expected
    assert re.search(r"checkpoint 2\.0 s not measured", said)


def test_nothing_of_a_hostile_run_is_markup(tmp_path):
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
    beside = ExternalData(
        settings=[RecipeSetting(HOSTILE, HOSTILE, "")],
        checkpoints=[CheckpointEntry(HOSTILE, 3, HOSTILE, HOSTILE, 5, HOSTILE)],
        sample=TextSample(HOSTILE + "text", HOSTILE, ""),
    )
    text = made(path, beside)
    assert seen(text).said.count("<script>alert(1)</script>") > 10, "it is all there, as text"
    assert not re.search("[\x00-\x08\x0e-\x1f\u202e]", text)


@pytest.mark.usefixtures("undrawn")
def test_a_reason_that_is_hostile(run_dir):
    found = seen(
        made(
            run_dir,
            ExternalData(settings_reason=HOSTILE, checkpoints_reason=HOSTILE, sample=TextSample(reason=HOSTILE)),
        )
    )
    assert found.said.count("onerror=alert(2)") == 3


@pytest.mark.parametrize("rows", (False, True))
def test_a_run_that_failed_at_its_first_step(tmp_path, rows):
    (tmp_path / "recipe.toml").write_text("")
    if rows:
        write(tmp_path, steps=0)
    starts(tmp_path, "")
    found = seen(made(tmp_path))
    assert "no step was completed" in found.said and "svg" not in found.elements


def test_a_run_of_one_step_and_one_rank(tmp_path):
    write(tmp_path, steps=1, ranks=1)
    said = seen(made(tmp_path)).said
    assert "one rank: there is nothing to compare" in said and "not known" in said


def test_a_directory_of_something_else_is_refused(tmp_path):
    with pytest.raises(StorageError, match="holds no run"):
        run_data.read(tmp_path)
    (tmp_path / "metrics.h5").write_bytes(b"nothing of ours" * 100)
    with pytest.raises(StorageError, match="HDF5"):
        run_data.read(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_truncated_files_beside_are_left_out_or_told(run_dir):
    for name in ("starts.json", "usage.json", "jobs.jsonl"):
        (run_dir / name).write_bytes(b'[{"began": 1, "seen"\xff')
    for path in (run_dir / "recorder").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    (run_dir / "recorder/rank-00000.rec").write_bytes(b"HPCDREC\0" + b"\xff" * 500)
    found = seen(made(run_dir))
    assert "too short" in found.said and history.UNKNOWN in found.said
    (run_dir / "usage.json").write_text("[" * 100_000)
    (run_dir / "starts.json").write_text(
        json.dumps([{"began": 1e300, "seen": 2e300, "end": 3, "deaths": "x"}, 5, None])
    )
    assert "an impossible time" in seen(made(run_dir)).said


@pytest.mark.parametrize(
    ("ends", "kind"),
    ((("",), "under way"), (("finished",), "finished"), (("", "stopped"), "stopped"), (("", "finished"), "finished")),
)
def test_how_it_stands(run_dir, ends, kind):
    starts(run_dir, *ends, deaths=1)
    found = run_data.read(run_dir)
    assert found.state.kind == kind
    texts = [one.text for one in found.events if one.kind == "start"]
    assert len(texts) == len(ends) and all("1 death outlived" in text for text in texts)
    assert ("nobody's wish" in texts[0]) == (len(ends) > 1)
    later = run_data.read(run_dir, now_ns=time.time_ns() + 3600 * S)
    assert later.state.kind == (history.KILLED if kind == "under way" else kind)
    told = next(one for one in key_figures.figures(later) if one.name == "Starts")
    assert told.note.startswith(f"{ends.count('')} ended by nobody's wish")


def test_resumes_are_marked_also_in_an_old_file_without_the_time_of_a_step(tmp_path):
    write(tmp_path, steps=60)
    write(tmp_path, steps=90, resume=40)
    starts(tmp_path, "stopped", "finished")
    with files.edit(tmp_path / "metrics.h5", step_metrics.SCHEMA, step_metrics.VERSION) as file:
        steps = file["steps"]
        steps.attrs["columns"] = [name for name in steps.attrs["columns"] if name != "step_s"]
        del steps["step_s"]
    found = run_data.read(tmp_path)
    assert found.sessions == [41]
    assert [(one.step, one.text.split(":")[0]) for one in found.events] == [(0, "start 1"), (40, "start 2")]
    said = seen(document.make_page(found)).said
    assert "Vertical lines: 1 resume." in said and "a file of the first version" in said


@pytest.mark.usefixtures("undrawn")
def test_a_straggler_stands_out(tmp_path):
    write(tmp_path, ranks=5, scale=3.0)
    found = run_data.read(tmp_path)
    assert found.figures["slowest_rank"] == 4 and found.figures["imbalance"] > 1.5
    assert "rank 4 over the median rank" in seen(document.make_page(found)).said


def test_of_a_large_run_the_part_is_told(run_dir, monkeypatch):
    monkeypatch.setattr("hpcdist.hdf5.datasets.CHUNK_BYTES", 4 * 8 * 2)
    large = run_dir.parent / "large"
    large.mkdir()
    write(large, steps=3000)
    read = run_data.sampling.read
    monkeypatch.setattr(run_data.sampling, "read", lambda path: read(path, 500 * 2 * 8))
    assert re.search(r"From \d{3} of 3,000 steps, spread evenly", seen(made(large)).said)


def test_ids_and_colours_of_a_drawing_belong_to_the_page(rng):
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
def test_the_command_writes_one_file(run_dir, tmp_path):
    (run_dir / "recipe.toml").write_text('[run]\nsteps = 60\n\n[model]\nkind = "gpt"\n')
    file = tmp_path / "out.html"
    file.write_text("old")
    done = run(run_dir, "--html", file, "--no-sample")
    assert done.exit_code == 0, done.output
    assert str(file) in done.output
    said = seen(file.read_text()).said
    assert (
        "Other than the defaults (1)" in said and "after 60 of 60 steps" in said and "no sample was asked for" in said
    )
    assert [one.name for one in tmp_path.iterdir() if "new" in one.name] == []


@pytest.mark.usefixtures("undrawn")
def test_no_checkpoint_no_sample(run_dir, tmp_path):
    run(run_dir, "--html", tmp_path / "out.html")
    assert "No sample: the run has no checkpoint yet" in seen((tmp_path / "out.html").read_text()).said


@pytest.mark.usefixtures("undrawn")
def test_a_recipe_that_cannot_be_read_is_told(run_dir, tmp_path):
    (run_dir / "recipe.toml").write_text("[run]\nstepz = 5\n")
    run(run_dir, "--html", tmp_path / "out.html", "--no-sample")
    assert "The recipe cannot be read" in seen((tmp_path / "out.html").read_text()).said


@pytest.mark.usefixtures("undrawn")
def test_json_beside_the_page(run_dir, tmp_path):
    done = run(run_dir, "--html", tmp_path / "out.html", "--no-sample", "--json")
    assert json.loads(done.output)["steps"] == 60 and (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    (
        (["--no-sample"], UsageError, "add --html"),
        (["--sample-prompt", "x"], UsageError, "add --html"),
        (["--html", "x.html", "--no-sample", "--sample-prompt", "x"], UsageError, "contradict"),
        (["--html", "x.html", "--sample-prompt", ""], UsageError, "is empty"),
        (["--html", "/nowhere/x.html", "--no-sample"], StorageError, "cannot be written"),
    ),
)
@pytest.mark.usefixtures("undrawn")
def test_refused(run_dir, arguments, error, said):
    done = run(run_dir, *arguments)
    assert isinstance(done.exception, error) and said in str(done.exception)


def test_without_matplotlib_it_says_what_to_install(run_dir, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(run_dir, "--html", tmp_path / "x.html")
    assert isinstance(done.exception, MissingCapabilityError) and "analysis" in str(done.exception)
    assert not (tmp_path / "x.html").exists()
