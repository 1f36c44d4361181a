"""``hpcdist help``: the pages of documentation in a pager, one key of a recipe, or all as one HTML page.

The pages are Markdown files in ``hpcdist/docs``, installed with the package.
"""

import io
import re
import shutil
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

import hpcdist
from hpcdist.cli.common import DIRECTORY, FILE
from hpcdist.errors import MissingCapabilityError, UsageError
from hpcdist.reporting.nearest import nearest, synonym

# Pages by group, in the order in which a reader needs them, each with its line in `hpcdist help`.
GROUPS: Final = {
    "Begin": {
        "start": "Install, a first run, and which page is for you.",
        "torch": "A script for torch.distributed over MPI: DDP, FSDP2, two lines changed.",
        "your-model": "Train a model of PyTorch or JAX from a script of yours.",
        "from-ddp": "What DDP, FSDP, torchrun and DCP are called here.",
        "api": "Collectives, checkpoints, energy and stop requests for any MPI program.",
        "recipe": "Every key of a recipe: type, default, meaning. `hpcdist help SECTION.KEY` shows one.",
    },
    "Parallelism": {
        "architectures": "Allreduce, ZeRO, parameter server, gossip: memory, bytes, when to use which.",
        "pipelines": "Pipelines, tensor parallelism and their products.",
        "experts": "Mixtures of experts: router, balance, experts on several ranks.",
        "packing": "Whole documents in a sample, without padding and without a view of each other.",
        "collectives": "Algorithms of allreduce and its like, and how one is chosen.",
        "compression": "Gradients in fewer bytes, and what that costs.",
    },
    "Jobs": {
        "cluster": "Slurm and other launchers: submit, sites, modules, GPUs.",
        "checkpoints": "Save, resume on other ranks, verify, import and export.",
        "survival": "When ranks die: restarts, requeues, going on without them.",
        "monitoring": "Metrics, traces, the report of a run, hangs.",
        "energy": "Joules of a run and of its phases; power limits.",
        "security": "What hpcdist trusts, what it does not, and what a site must firewall.",
        "exit-codes": "What a job's exit code tells a script.",
    },
    "Plan and compare": {
        "planner": "Memory, time and energy of a training before it is started.",
        "studies": "Sweeps and benchmarks, and how to compare them.",
        "testing": "What is proven, on which hardware, by which command.",
    },
    "Reference": {
        "troubleshooting": "By symptom: what it means and what to do.",
        "glossary": "Words and symbols of these pages.",
        "contributing": "The tree of the source, its rules and its tests.",
    },
}
TOPICS: Final = {topic: line for pages in GROUPS.values() for topic, line in pages.items()}
DOCS: Final = Path(hpcdist.__file__).parent / "docs"
# Pages that lie beside the files that they are about: the folder of `batch.job.folder`, and what is above its README.
BESIDE_FILES: Final = {
    "sites": ("templates", "..", "Profiles of sites, field by field; templates of job scripts."),
    "install": ("install", ".", "Apptainer, Spack, EasyBuild, an epilog of Slurm."),
    "modules": ("modulefiles", ".", "Modulefiles for Environment Modules and Lmod."),
}
_PAGE_LINK: Final = re.compile(r"\[([^\]]+)\]\((?:\./)?([a-z-]+)\.md\)")
WIDEST: Final = 120  # columns of a drawn page: longer lines are hard to read
_COMMENT: Final = re.compile(r"[ ]?<!--.*?-->", re.DOTALL)


@click.command("help")
@click.argument("topic", required=False)
@click.option("--html", type=FILE, help="Write all pages into one HTML file.")
@click.option("--examples", type=DIRECTORY, help="Copy the example programs into this directory.")
@click.option("--open", "opened", is_flag=True, help="Write hpcdist-help.html, or --html, and show it in a browser.")
def command(topic: str | None, html: Path | None, examples: Path | None, opened: bool) -> None:
    """Show the page TOPIC, a key of a recipe (run.steps) or a section of it (run); without one list the pages."""
    if topic is not None and (html is not None or examples is not None or opened):
        raise click.UsageError(f"--html, --open and --examples take all there is; leave {topic} out")
    if examples is not None:
        for file in copy_examples(examples):
            click.echo(file)
    if html is not None or opened:
        file = html or Path("hpcdist-help.html")
        write_html(file)
        click.echo(file)
        if opened:
            webbrowser.open(file.absolute().as_uri())
    if html is not None or opened or examples is not None:
        return
    if topic is None:
        click.echo(contents())
    elif topic in TOPICS or topic in BESIDE_FILES:
        _show(styled(page(topic)))
    else:
        _show(_key(topic) + "\n")


def _show(text: str) -> None:
    """Print ``text``, in a pager if the text is longer than the terminal."""
    if text.count("\n") < shutil.get_terminal_size().lines:
        click.echo(text, nl=False)
    else:
        click.echo_via_pager(text)


def contents() -> str:
    """Return the list of all pages by group."""
    width = max(map(len, (*TOPICS, *BESIDE_FILES)))
    lines = ["Pages (hpcdist help TOPIC):"]
    for group, pages in (GROUPS | {"Files": {name: line for name, (_, _, line) in BESIDE_FILES.items()}}).items():
        lines += ["", group, *(f"  {name:{width}}  {line}" for name, line in pages.items())]
    lines += ["", "All on one page, with a search: hpcdist help --open"]
    return "\n".join([*lines, "Programs to start from: hpcdist help --examples DIRECTORY"])


def copy_examples(folder: Path) -> list[Path]:
    """Copy the programs of the documentation into ``folder``; return their paths. Raises StorageError."""
    from hpcdist.reporting import atomic

    paths = []
    for source in sorted((DOCS / "examples").iterdir()):
        if source.is_file():
            paths.append(folder / source.name)
            atomic.save(paths[-1], source.read_bytes(), parents=True)
    return paths


def page(topic: str) -> str:
    """Return the page ``topic`` as Markdown, without comments. Raises MissingCapabilityError where its files lack."""
    if topic in BESIDE_FILES:
        from hpcdist.batch import job

        folder, above, _ = BESIDE_FILES[topic]
        place = (job.folder(folder) / above).resolve()
        return f"(The files of this page lie in {place}.)\n\n{(place / 'README.md').read_text(encoding='utf-8')}"
    text = (DOCS / f"{topic}.md").read_text(encoding="utf-8")
    return _COMMENT.sub("", text)


def styled(text: str) -> str:
    """Return Markdown drawn for the terminal: headings, tables and code, wrapped at the width of the terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    width = min(shutil.get_terminal_size().columns, WIDEST)
    console = Console(width=width, force_terminal=sys.stdout.isatty(), file=io.StringIO())
    with console.capture() as drawn:
        console.print(Markdown(_PAGE_LINK.sub(_as_command, text), code_theme="ansi_light", hyperlinks=False))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines()) + "\n"


def _as_command(link: re.Match[str]) -> str:
    """Return a link to another page as the command that shows it."""
    text, topic = link[1], link[2]
    return f"`hpcdist help {topic}`" if text == topic else f"{text} (`hpcdist help {topic}`)"


def write_html(file: Path) -> None:
    """Write all pages into ``file``, by group and with a search. Raises StorageError if it cannot be written."""
    from markdown_it import MarkdownIt

    from hpcdist.reporting import atomic
    from hpcdist.reporting.template import templates

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    linked = {topic: _PAGE_LINK.sub(r"[\1](#\2)", page(topic)) for topic in TOPICS}  # to its place in the one page
    pages = [(topic, markdown.render(text)) for topic, text in linked.items()]
    template = templates(DOCS, {}, html=True).get_template("help.html.j2")
    atomic.save(file, template.render(pages=pages, groups=GROUPS, version=hpcdist.__version__))


def _key(word: str) -> str:
    """Return the text on a key or a section of a recipe. Raises click.UsageError for a word that is no topic either."""
    from hpcdist.cli.main import COMMANDS
    from hpcdist.training.recipe.reference import key_of, lookup

    try:
        return lookup(word)
    except UsageError as error:
        near = nearest(word, [*TOPICS, *BESIDE_FILES])
        found = [f"see `hpcdist {word} --help`"] if word in COMMANDS else []
        if here := synonym(word):
            name = here.rpartition(".")[2]
            found.append(f"here it is {name!r}: `hpcdist help {name if name in TOPICS else key_of(here)}`")
        if on := _pages_with(word):
            found.append(f"pages that have the word: {', '.join(on)}")
        if found:
            raise click.UsageError(f"there is no page {word!r}; {'; '.join(found)}") from error
        pages = f"{error}; pages are: {', '.join((*TOPICS, *BESIDE_FILES))}"
        hint = f"did you mean `hpcdist help {near}`?" if near else pages
        raise click.UsageError(f"there is no page {word!r}; {hint}") from error


def _pages_with(word: str) -> list[str]:
    """Return the pages that have ``word``, in any case, those that have it most often first."""
    counts = {}
    for topic in (*TOPICS, *BESIDE_FILES):
        with suppress(MissingCapabilityError):  # the files of a page may be somewhere else
            counts[topic] = len(re.findall(rf"\b{re.escape(word)}", page(topic), re.IGNORECASE))
    return sorted((topic for topic in counts if counts[topic]), key=lambda topic: -counts[topic])
