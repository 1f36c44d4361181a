"""``hpcdist help``: show documentation pages or recipe keys, or write all pages as one HTML file."""

import base64
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

# Pages by group, in reading order, each with its line in `hpcdist help`.
GROUPS: Final = {
    "Begin": {
        "start": "Install, first run, and a guide to the pages.",
        "from-one-gpu": "A PyTorch script for one GPU becomes a job on two nodes with restarts.",
        "torch": "torch.distributed over MPI in a script with DDP or FSDP2: change two lines.",
        "torch-checkpoints": "Checkpoints, restarts, stop requests and metrics of such a script.",
        "fine-tuning": "A Hugging Face model: train, tune with LoRA on chats, evaluate, sample, export.",
        "your-model": "Train a PyTorch or JAX model from your own script.",
        "from-ddp": "Names in DDP, FSDP, torchrun and DCP, and their equivalents here.",
        "api": "Collectives, checkpoints, energy and stop requests for any MPI program.",
        "recipe": "Every recipe key: type, default, meaning. `hpcdist help SECTION.KEY` shows one.",
    },
    "Parallelism": {
        "architectures": "Allreduce, ZeRO, parameter server, gossip: memory, traffic, when to use which.",
        "training-step": "A step as a list of operations: generated, proven, executed, simulated, recorded.",
        "pipelines": "Pipeline and tensor parallelism, and their combinations.",
        "experts": "Mixture of experts: router, load balance, expert parallelism.",
        "data": "Tokenize files; mixtures of sources; Megatron and flat token files.",
        "packing": "Packed documents without padding and without attention between documents.",
        "collectives": "Algorithms of allreduce and other collectives, and their selection.",
        "compression": "Gradient compression, and its cost.",
    },
    "Jobs": {
        "cluster": "Slurm and other launchers: submit, sites, modules, GPUs.",
        "checkpoints": "Save, resume on other ranks, verify, import and export.",
        "survival": "Rank failures: restarts, requeues, continuing without dead ranks.",
        "monitoring": "Metrics, traces, run reports, hangs.",
        "energy": "Energy of a run and of its phases; power limits.",
        "security": "Trust model, and the ports that a site must firewall.",
        "exit-codes": "Meaning of each exit code.",
    },
    "Plan and compare": {
        "planner": "Memory, time and energy of a training before it is started.",
        "programs": "Training programs that the planner knows, and the accuracy of their plans.",
        "studies": "Sweeps and benchmarks, and how to compare them.",
        "testing": "Tested features, with the hardware and the command of each test.",
    },
    "Reference": {
        "troubleshooting": "Symptoms, their causes and cures.",
        "glossary": "Terms and symbols of these pages.",
        "contributing": "Source tree, rules and tests.",
    },
}
TOPICS: Final = {topic: line for pages in GROUPS.values() for topic, line in pages.items()}
DOCS: Final = Path(hpcdist.__file__).parent / "docs"
# Pages stored next to the files that they describe: folder name in `batch.job.folder`, path of the README, its line.
BESIDE_FILES: Final = {
    "sites": ("templates", "..", "Fields of site profiles; templates of job scripts."),
    "install": ("install", ".", "Apptainer, Spack, EasyBuild, a Slurm epilog."),
    "modules": ("modulefiles", ".", "Modulefiles for Environment Modules and Lmod."),
}
_PICTURE_LINK: Final = re.compile(r"\[([^\]]+)\]\(([a-z-]+\.png)\)")
_PAGE_LINK: Final = re.compile(r"\[([^\]]+)\]\((?:\./)?([a-z-]+)\.md\)")
WIDEST: Final = 120  # maximum columns of a page
_COMMENT: Final = re.compile(r"[ ]?<!--.*?-->", re.DOTALL)


@click.command("help")
@click.argument("topic", required=False)
@click.option("--html", type=FILE, help="Write all pages into one HTML file.")
@click.option("--examples", type=DIRECTORY, help="Copy the example programs into this directory.")
@click.option("--open", "opened", is_flag=True, help="Write the HTML file (default hpcdist-help.html) and open it.")
def command(topic: str | None, html: Path | None, examples: Path | None, opened: bool) -> None:
    """Show the page TOPIC, or the recipe key TOPIC such as run.steps. Without TOPIC, list all pages or write files."""
    if topic is not None and (html is not None or examples is not None or opened):
        raise click.UsageError(f"--html, --open and --examples work for all pages together; leave {topic} out")
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
    if text.count("\n") < shutil.get_terminal_size().lines:
        click.echo(text, nl=False)
    else:
        click.echo_via_pager(text)


def contents() -> str:
    """Return the table of contents as text: all pages by group."""
    width = max(map(len, (*TOPICS, *BESIDE_FILES)))
    lines = ["Pages (hpcdist help TOPIC):"]
    for group, pages in (GROUPS | {"Files": {name: line for name, (_, _, line) in BESIDE_FILES.items()}}).items():
        lines += ["", group, *(f"  {name:{width}}  {line}" for name, line in pages.items())]
    lines += ["", "All pages in one searchable HTML file: hpcdist help --open"]
    return "\n".join([*lines, "Example programs: hpcdist help --examples DIRECTORY"])


def copy_examples(folder: Path) -> list[Path]:
    """Copy the example programs into ``folder`` and return their paths. Raises StorageError."""
    from hpcdist.reporting import atomic

    paths = []
    for source in sorted((DOCS / "examples").iterdir()):
        if source.is_file():
            paths.append(folder / source.name)
            atomic.save(paths[-1], source.read_bytes(), parents=True)
    return paths


def page(topic: str) -> str:
    """Return the page ``topic`` as Markdown. Raises MissingCapabilityError if the pages are not installed."""
    if topic in BESIDE_FILES:
        from hpcdist.batch import job

        folder, above, _ = BESIDE_FILES[topic]
        place = (job.folder(folder) / above).resolve()
        return f"(The files of this page are in {place}.)\n\n{(place / 'README.md').read_text(encoding='utf-8')}"
    text = (DOCS / f"{topic}.md").read_text(encoding="utf-8")
    return _COMMENT.sub("", text)


def styled(text: str) -> str:
    """Return the Markdown ``text`` formatted for the terminal and wrapped at the terminal's width."""
    from rich.console import Console
    from rich.markdown import Markdown

    width = min(shutil.get_terminal_size().columns, WIDEST)
    console = Console(width=width, force_terminal=sys.stdout.isatty(), file=io.StringIO())
    with console.capture() as drawn:
        console.print(Markdown(_PAGE_LINK.sub(_as_command, text), code_theme="ansi_light", hyperlinks=False))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines()) + "\n"


def _as_command(link: re.Match[str]) -> str:
    text, topic = link[1], link[2]
    return f"`hpcdist help {topic}`" if text == topic else f"{text} (`hpcdist help {topic}`)"


def write_html(file: Path) -> None:
    """Write all pages into one searchable HTML ``file``. Raises StorageError."""
    from markdown_it import MarkdownIt

    from hpcdist.reporting import atomic
    from hpcdist.reporting.template import templates

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    linked = {topic: _PAGE_LINK.sub(r"[\1](#\2)", page(topic)) for topic in TOPICS}  # links become anchors
    pages = [(topic, markdown.render(_PICTURE_LINK.sub(_embedded, text))) for topic, text in linked.items()]
    template = templates(DOCS, {}, html=True).get_template("help.html.j2")
    atomic.save(file, template.render(pages=pages, groups=GROUPS, version=hpcdist.__version__))


def _embedded(link: re.Match[str]) -> str:
    data = base64.b64encode((DOCS / link[2]).read_bytes()).decode()
    return f"![{link[1]}](data:image/png;base64,{data})"


def _key(word: str) -> str:
    from hpcdist.cli.main import COMMANDS
    from hpcdist.training.recipe.reference import key_of, lookup

    try:
        return lookup(word)
    except UsageError as error:
        near = nearest(word, [*TOPICS, *BESIDE_FILES])
        hints = [f"see `hpcdist {word} --help`"] if word in COMMANDS else []
        if here := synonym(word):
            name = here.rpartition(".")[2]
            hints.append(f"hpcdist calls this {name!r}: `hpcdist help {name if name in TOPICS else key_of(here)}`")
        if on := _pages_with(word):
            hints.append(f"pages that contain the word: {', '.join(on)}")
        if hints:
            raise click.UsageError(f"no page of the documentation is named {word!r}; {'; '.join(hints)}") from error
        pages = f"{error}; pages are: {', '.join((*TOPICS, *BESIDE_FILES))}"
        suggestion = f"did you mean `hpcdist help {near}`?" if near else pages
        raise click.UsageError(f"no page of the documentation is named {word!r}; {suggestion}") from error


def _pages_with(word: str) -> list[str]:
    counts = {}
    for topic in (*TOPICS, *BESIDE_FILES):
        with suppress(MissingCapabilityError):  # the files of a page may not be installed
            counts[topic] = len(re.findall(rf"\b{re.escape(word)}", page(topic), re.IGNORECASE))
    return sorted((topic for topic in counts if counts[topic]), key=lambda topic: -counts[topic])
