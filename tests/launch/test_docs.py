"""The documentation pages: their commands and programs run, and their figures match the committed results."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpcdist
from harness import pages
from harness.jobs import LIMIT_S
from hpcdist.cli import help as pages_of_help
from hpcdist.training.recipe import recipe as recipes

ROOT = Path(hpcdist.__file__).parents[1]
README = Path(__file__).parents[2] / "README.md"
STUDIES = Path(__file__).parents[2] / "benchmarks" / "README.md"
PAGES = {topic: pages_of_help.DOCS / f"{topic}.md" for topic in pages_of_help.TOPICS}


def environment():
    """Return the environment of a reader's shell, with the hpcdist under test."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return (
        os.environ
        | pages.SHORT
        | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PAGER": "cat",
            "COLUMNS": "120",
        }
    )


def shell(text, folder, options=("-e", "-u", "-o", "pipefail")):
    done = subprocess.run(
        ["bash", *options, "-c", text],
        cwd=folder,
        env=environment() | ({} if re.search(r"python|\.py", text) else pages.FEW_SAMPLES),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def check_block(block, folder):
    """Run, write or check one block of a page."""
    if block.title:
        (folder / block.title).write_text(block.text)
    elif block.language == "sh" and "norun" in block.words:
        wrong = {" ".join(call): pages.unknown(call) for call in pages.commands(block.text)}
        assert not any(wrong.values()), {call: word for call, word in wrong.items() if word}
    elif block.language == "sh":
        shell(block.text, folder)
    elif block.language == "console":
        for command, expected in pages.turns(block.text):
            shown = shell(command, folder, ["-u"])  # it may show how a command fails
            wrong = pages.difference(expected, shown.splitlines())
            assert not wrong, f"{command}: {wrong} in\n{shown}"
    elif block.language == "python":
        (folder / "example.py").write_text(block.text)
        shell("mpirun -n 2 python example.py", folder)
    elif block.language == "toml":
        fragment = folder / "fragment.toml"
        fragment.write_text(block.text)
        recipes.load(fragment)
    else:
        assert block.language == "text", f"a block of {block.language!r}: nobody checks it"


@pytest.mark.full_except("start")
@pytest.mark.parametrize("topic", PAGES)
def test_commands_and_programs_of_a_page_run(topic, tmp_path):
    for block in pages.blocks(PAGES[topic].read_text()):
        try:
            check_block(block, tmp_path)
        except Exception as error:
            error.add_note(f"{PAGES[topic].name}, line {block.line}")
            raise


@pytest.mark.parametrize("topic", PAGES)
def test_pages_are_short_and_their_links_exist(topic):
    text = PAGES[topic].read_text()
    lines = 350 if topic == "recipe" else 300  # the page of all keys has a line for each key
    assert text.startswith("# ") and text.count("\n") <= lines, f"a page has at most {lines} lines: move a part of it"
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (PAGES[topic].parent / link).exists(), link
    assert not re.search(r"!\[", text), "a picture, which no terminal shows"


def test_every_page_is_a_topic():
    assert {path.stem for path in pages_of_help.DOCS.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("topic", PAGES)
def test_figures_of_a_page_match_the_results(topic):
    if not STUDIES.exists():
        pytest.skip("hpcdist is installed, there are no results beside it")
    for figure, file in pages.figures(PAGES[topic].read_text()):
        name = str(file.relative_to("results"))
        of_file = pages.rows_of_file(STUDIES.read_text(), name)
        assert any(re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", row) for row in of_file), (figure, name)


def test_help_shows_pages_keys_and_html(tmp_path):
    run = CliRunner()
    listed = run.invoke(pages_of_help.command, [])
    assert listed.exit_code == 0 and all(topic in listed.output for topic in PAGES)
    shown = run.invoke(pages_of_help.command, ["start"])
    assert shown.exit_code == 0 and "<!--" not in shown.output and "```" not in shown.output
    assert "pipeline" in run.invoke(pages_of_help.command, ["parallel.pipeline"]).output
    named = run.invoke(pages_of_help.command, ["HPCDIST_DEADLINE_S"])
    assert named.exit_code == 2 and re.search("pages that contain the word: .*api", named.output), named.output
    of_a_command = run.invoke(pages_of_help.command, ["hang"]).output
    assert "`hpcdist hang --help`; pages that contain the word: troubleshooting" in " ".join(of_a_command.split())
    for word, topic in (("moe", "experts"), ("ulysses", "parallel.context_method"), ("lr", "optimizer.learning_rate")):
        assert f"`hpcdist help {topic}`" in " ".join(run.invoke(pages_of_help.command, [word]).output.split())
    assert "modules" in run.invoke(pages_of_help.command, ["lmod"]).output
    for topic in pages_of_help.BESIDE_FILES:
        beside = run.invoke(pages_of_help.command, [topic])
        assert beside.exit_code == 0 and beside.output.startswith("(The files of this page are in /")
    wrong = run.invoke(pages_of_help.command, ["chekpoints"])
    assert wrong.exit_code == 2 and "hpcdist help checkpoints" in wrong.output
    copied = run.invoke(pages_of_help.command, ["--examples", str(tmp_path / "programs")])
    assert copied.exit_code == 0 and (tmp_path / "programs" / "heat_mpi4py.py").read_text().startswith('"""')
    unknown = " ".join(run.invoke(pages_of_help.command, ["nosuchword"]).output.split())
    assert "sections are: model, data, " in unknown and "pages are: start, from-one-gpu, " in unknown


def test_help_html_lists_every_page_by_group_and_searches(tmp_path):
    file = tmp_path / "all.html"
    assert CliRunner().invoke(pages_of_help.command, ["--html", str(file)]).exit_code == 0
    text = file.read_text()
    assert all(f'<section id="{topic}">' in text for topic in PAGES) and "<table>" in text
    assert set(re.findall(r'href="#([a-z-]+)"', text)) == set(PAGES)
    assert re.findall("<h2>(.*)</h2>", text.partition("<main>")[0]) == list(pages_of_help.GROUPS)
    assert '<img src="data:image/png;base64,' in text, "the picture of the page training-step"
    assert 'id="search"' in text and "white-space: pre-wrap" in text, "long lines of code are wrapped"
    needed = importlib.metadata.requires("hpcdist") or []
    assert {"rich", "markdown-it-py"} <= {re.split("[ <>=]", line)[0] for line in needed if "extra" not in line}


@pytest.mark.parametrize("columns", [60, 100])
def test_help_wraps_pages_at_the_width_of_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = pages_of_help.styled("# Head\n\n" + "word " * 40 + "\n\n| a | b |\n|---|---|\n| 1 | " + "x y " * 40 + "|\n")
    lines = shown.splitlines()
    assert max(map(len, lines)) in range(columns - 10, columns + 1) and shown.count("word") == 40
    assert "|" not in shown and any(set(line.strip()) == {"─"} for line in lines), "a table is drawn"


@pytest.mark.parametrize(("lines", "pages"), [(5, 1), (500, 0)])
def test_help_uses_a_pager_for_texts_longer_than_the_terminal(lines, pages, monkeypatch):
    monkeypatch.setenv("LINES", str(lines))
    paged = []
    monkeypatch.setattr(pages_of_help.click, "echo_via_pager", paged.append)
    shown = CliRunner().invoke(pages_of_help.command, ["zero"])
    assert shown.exit_code == 0 and len(paged) == pages and ("zero.prefetch" in shown.output) == (pages == 0)


def test_help_does_not_truncate_code(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = pages_of_help.styled("```sh\nhpcdist " + "--option value " * 10 + "end\n```\n")
    assert "".join(shown.split()) == "hpcdist" + "--optionvalue" * 10 + "end"


def test_readme_is_short_and_its_links_exist():
    if not README.exists():
        pytest.skip("hpcdist is installed, there is no README beside it")
    text = README.read_text()
    assert text.count("\n") <= 250 and len(text.encode()) <= 16384
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (README.parent / link).exists(), link


def test_measurement_table_matches_the_studies():
    if not STUDIES.exists():
        pytest.skip("hpcdist is installed, there are no results beside it")
    head, _, rest = STUDIES.read_text().partition("| what | figure | command | date | files |\n")
    rows = rest.partition("\n\n")[0]
    assert head and rows.count("\n| ") > 10 and rows in PAGES["testing"].read_text()
