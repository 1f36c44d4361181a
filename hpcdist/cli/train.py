"""Commands of one training: `hpcdist train`, `grow`, `evaluate`, `sample`, and `hpcdist config show` for recipes."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import (
    COUNT,
    FILE,
    PATH,
    averaged_option,
    existing_run_argument,
    json_option,
    recipe_argument,
    run_dir_argument,
    set_option,
    tokenizer_option,
)
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.table import aligned

if TYPE_CHECKING:
    from hpcdist.training.inference import TrainedModel
    from hpcdist.training.recipe.recipe import Recipe


@click.command()
@recipe_argument
@set_option
@click.option("--out", type=PATH, help="Run directory.  [default: runs/<UTC>-<strategy>]")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="never",
    help="auto: resume from the newest valid checkpoint in --out, or start without it. never: start anew.",
)
@click.option(
    "--init-from",
    type=PATH,
    help="Start from the parameters of a checkpoint, of a run's newest checkpoint, or of a Hugging Face directory "
    "(recipe key run.init_from).",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="With --init-from: initialize missing, damaged or mismatched tensors at random, and list them.",
)
@click.option(
    "--time-limit",
    metavar="WALLTIME",
    help="Save and stop before this walltime (exit code 75): D-HH:MM:SS, HH:MM:SS or minutes.  "
    "[default: the Slurm job's]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line of stdout."
)
@click.option("-v", "--verbose", is_flag=True, help="Also print the selected algorithms and the proof of the step.")
def train(out: Path | None, resume: str, time_limit: str | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """Train the model of RECIPE (TOML) or of the default recipe. Without a launcher, the training has one rank."""
    from hpcdist.training.run import entry_point

    recipe, limit_s = recipe_from_options(options), time_limit_s(time_limit)
    entry_point.train(recipe, out, resume, as_json, limit_s, verbose)


def recipe_from_options(options: Mapping[str, Any]) -> "Recipe":
    """Return the recipe that the command line selects, with its overrides applied. Local.

    ``options``: {parameter of the `hpcdist train` command: value}. Raises ConfigurationError, UsageError.
    """
    from hpcdist.training.recipe import recipe as recipes

    overrides: tuple[str, ...] = options["overrides"]
    if options["init_from"] is not None:
        overrides = (*overrides, f"run.init_from={options['init_from'].absolute()}")
    if options["allow_partial"]:
        overrides = (*overrides, "run.allow_partial=true")
    return recipes.load(options["recipe"], overrides).recipe


def time_limit_s(walltime: str | None) -> int | None:
    """Convert ``walltime``, the value of --time-limit, to seconds. None stays None. Raises UsageError."""
    from hpcdist.batch.job import walltime_s

    return None if walltime is None else walltime_s(walltime, "--time-limit")


@click.command("grow")
@run_dir_argument
@click.argument("ranks", type=COUNT)
def grow(run_dir: Path, ranks: int) -> None:
    """Add RANKS ranks to the training in RUN_DIR after its next step.

    The training must have been started by `hpcdist run --survive`, which starts the new ranks on the nodes of the job.
    The global batch size stays the same. A new request replaces a request whose ranks have not started yet.
    """
    from hpcdist.training.run.stop_requests import GROW_FILE

    check_can_grow(run_dir)
    atomic.save(run_dir / GROW_FILE, f"{ranks}\n")
    click.echo(f"requested {ranks} more ranks: {run_dir / GROW_FILE} exists until they have joined", err=True)


def check_can_grow(run_dir: Path) -> None:
    """Raise ConfigurationError if no training in ``run_dir`` accepts new ranks, or StorageError if this is unknown."""
    from hpcdist.checkpoint.lock import LOCK_FILE
    from hpcdist.comm.record import run_journal
    from hpcdist.constants import RECIPE_FILE

    if not (run_dir / RECIPE_FILE).exists():
        raise ConfigurationError(f"{run_dir} contains no run of hpcdist; give the training's --out directory")
    try:
        starts = run_journal.starts(run_journal.read(run_dir))
    except StorageError as error:
        raise StorageError(
            f"{error}, so it is unknown if the training accepts more ranks; stop the training "
            f"(touch {run_dir}/stop), and restart it with more ranks"
        ) from error
    if not starts or starts[-1].end or not (run_dir / LOCK_FILE).exists():
        raise ConfigurationError(
            f"no training runs in {run_dir} now, so no ranks can join it; resume the run with more ranks than before: "
            "hpcdist run -n RANKS train ... --resume auto"
        )
    if not starts[-1].survives:
        raise ConfigurationError(
            f"the training in {run_dir} has a fixed number of ranks; stop it (touch {run_dir}/stop), and restart it "
            "with more ranks, or with `hpcdist run --survive`"
        )


@click.command()
@existing_run_argument
@click.option("--trust", is_flag=True, help="Execute the recipe's model.factory even if its file is new or changed.")
@averaged_option
@click.option("--data", type=click.Path(path_type=Path), help="Score the documents of this file instead.")
@click.option("--choices", type=FILE, help="Answer the multiple-choice questions of this .jsonl file instead.")
@click.option("--key", default="text", help="With --data: key of the text in JSONL, or column of Parquet.")
@click.option("--lines", is_flag=True, help="With --data: each line of a text file is a document.")
@tokenizer_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
def evaluate(
    run_dir: Path,
    trust: bool,
    averaged: bool,
    data: Path | None,
    choices: Path | None,
    key: str,
    lines: bool,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Print the validation loss of the newest checkpoint in RUN_DIR. All ranks of the launcher share the work.

    --data prints the perplexity of each document, and of all together, with the bits per byte. --choices prints the
    share of right answers: by the probability of a choice, and by its probability per byte. A row of this file has a
    prompt, choices (a list of texts) and answer (the index of the right one).

    If model.kind = 'import', the user's file that creates the model is executed. If this file is new or changed since
    the training, --trust is required.
    """
    from hpcdist.errors import OK
    from hpcdist.models.config import loss_unit
    from hpcdist.training.inference import InspectionSession

    with InspectionSession(run_dir) as look:
        trained = look.load(trust, averaged=averaged)
        figures: dict[str, Any] = {"steps": trained.steps}
        if data is None and choices is None:
            figures["val_loss"] = trained.validation_loss()
            unit = loss_unit(trained.recipe.model.kind, trained.model.tokens_per_sample)
            text = f"val_loss {figures['val_loss']:.4f} {unit}".rstrip() + f" after {figures['steps']} steps"
        else:
            scored, text = _scores(trained, run_dir, data, choices, key, lines, tokenizer)
            figures |= jsonable(scored)
    if look.session.comm.rank == 0:
        click.echo(text, err=as_json)
        if as_json:
            click.echo(json.dumps(figures))
    look.session.leave(OK)


_MOST_ROWS: Final = 20  # documents in the printed table


def _scores(
    trained: "TrainedModel",
    run_dir: Path,
    data: Path | None,
    choices: Path | None,
    key: str,
    lines: bool,
    tokenizer: Path | None,
) -> tuple[dict[str, Any], str]:
    # Return (figures for JSON, text). Collective.
    from hpcdist.training import scoring
    from hpcdist.training.text import codec_of

    if trained.recipe.model.kind != "gpt":
        raise UsageError(f"{run_dir} has a model of kind {trained.recipe.model.kind!r}; only a gpt scores texts")
    codec = codec_of(run_dir, trained.recipe, tokenizer)
    figures: dict[str, Any] = {}
    texts = []
    if data is not None:
        scores = scoring.score_documents(trained, codec, data, key, lines)
        total = scoring.totals(scores)
        figures |= total | {"by_document": [score.row() for score in scores]}
        rows = [("document", "tokens", "perplexity")]
        rows += [(one.place, f"{one.tokens:,}", f"{one.perplexity:.3f}") for one in scores[:_MOST_ROWS]]
        texts += aligned(rows, left=(0,)) + [f"and {len(scores) - _MOST_ROWS} more; --json lists them"] * (
            len(scores) > _MOST_ROWS
        )
        texts.append(
            f"{total['documents']:,} documents, {total['scored']:,} scored tokens: loss {total['loss']:.4f} nats, "
            f"perplexity {total['perplexity']:.3f}, {total['bits_per_byte']:.4f} bits per byte"
        )
    if choices is not None:
        answers = scoring.score_choices(trained, codec, choices)
        right = scoring.accuracy(answers)
        figures |= right | {"answers": [dataclasses.asdict(one) for one in answers]}
        texts.append(
            f"{right['questions']} questions: {right['accuracy']:.1%} right, {right['accuracy_per_byte']:.1%} by the "
            "probability per byte"
        )
    return figures, "\n".join(texts)


@click.command()
@existing_run_argument
@click.option(
    "--prompt", "prompts", multiple=True, default=["def "], help="Text to continue. Several: one text for each."
)
@click.option("--chat", is_flag=True, help="Prompts are messages of a user, in the tokenizer's chat template.")
@tokenizer_option
@click.option("--tokens", default=400, type=COUNT, help="Number of tokens to generate.")
@click.option("--temperature", default=0.8, type=click.FloatRange(min=0.0), help="Sampling temperature; 0: greedy.")
@click.option("--top-k", default=0, type=click.IntRange(min=0), help="Sample only from the k likeliest tokens; 0: all.")
@click.option(
    "--top-p",
    default=1.0,
    type=click.FloatRange(min=0.0, max=1.0, min_open=True),
    help="Sample only from the likeliest tokens whose probabilities sum to p; 1: all.",
)
@click.option("--stop", "stops", multiple=True, help="End before this text. May be repeated.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Random seed.")
@averaged_option
def sample(run_dir: Path, prompts: tuple[str, ...], tokens: int, **options: Any) -> None:
    """Generate text with the model in RUN_DIR, a gpt.

    The tokenizer is in the imported directory, in the directory of the training's tokens, or in --tokenizer. Without a
    tokenizer, a model of 256 tokens reads and writes bytes. A text ends at an end token of the tokenizer.
    """
    from hpcdist.training import inference

    try:
        for part in inference.sample(run_dir, prompts, tokens, **options):
            sys.stdout.write(part)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe: keep the interpreter from failing when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group("config")
def config() -> None:
    """Print training recipes."""


@config.command()
@recipe_argument
@set_option
@click.option("--origin", is_flag=True, help="Print the source of each value.")
@json_option
def show(recipe: Path | None, overrides: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Print RECIPE (TOML) or the default recipe as TOML, with every key and the value that a run would use."""
    from hpcdist.training.recipe import recipe as recipes

    resolved = recipes.load(recipe, overrides)
    if as_json:
        content = {"recipe": recipes.flat(resolved.recipe), "origin": dict(resolved.origin)}
        click.echo(json.dumps(content, default=dataclasses.asdict))
    elif not origin:
        click.echo(recipes.dump(resolved.recipe), nl=False)
    else:
        click.echo(_with_origins(recipes.dump(resolved.recipe), list(resolved.origin.values())), nl=False)


def _with_origins(text: str, origins: list[str]) -> str:
    width = max(len(line) for line in text.splitlines())
    comments = iter(origins)
    lines = [f"{line:<{width}}  # {next(comments)}" if " = " in line else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"
