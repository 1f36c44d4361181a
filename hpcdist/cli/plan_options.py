"""The options of `hpcdist plan` that say what is planned, and on what cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

from hpcdist.cli.plan_sections import MODEL, WHERE, Command, Number, Sectioned, choice, count

# Options that describe a transformer, by the field of `hpcdist.planner.model.description.TransformerShape`.
SHAPE: Final = ("layers", "hidden", "heads", "kv_heads", "vocabulary", "feed_forward", "mlp_ratio", "gated", "experts")
SHAPE_TOO: Final = ("experts_per_token", "tied", "positions", "norm", "bias", "causal")


def _names_of(module: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completion of the names that a module of the planner knows; files are completed beside them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import importlib

        known = importlib.import_module(f"hpcdist.planner.{module}").names()
        found = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


_MODEL_OPTIONS: Final = (
    click.option(
        "--model",
        "model",
        cls=Sectioned,
        section=MODEL,
        metavar="NAME",
        shell_complete=_names_of("model.published"),
        help="A published model: see `hpcdist plan models`.",
    ),
    count("--layers", section=MODEL, text="Blocks of a transformer."),
    count("--hidden", section=MODEL, text="Their width."),
    count("--heads", section=MODEL, text="Heads of a block."),
    count("--kv-heads", section=MODEL, text="Heads of keys and values.  [default: as many]"),
    count("--vocabulary", section=MODEL, text="Tokens that there are."),
    count("--context", section=MODEL, text="Tokens of a sample; also beside --model."),
    count("--feed-forward", section=MODEL, text="Inner width of a feed-forward."),
    click.option(
        "--mlp-ratio",
        cls=Sectioned,
        section=MODEL,
        type=Number(min=0.0, min_open=True),
        metavar="X",
        help="The same as a multiple of --hidden.  [default: 4]",
    ),
    click.option(
        "--gated/--no-gated",
        cls=Sectioned,
        section=MODEL,
        default=None,
        help="Three matrices in a feed-forward (SwiGLU).  [default: no-gated]",
    ),
    count("--experts", section=MODEL, text="Feed-forwards of a block.  [default: 1]"),
    count("--experts-per-token", section=MODEL, text="Of those, how many see a token.  [default: 1]"),
    click.option(
        "--tied/--untied",
        cls=Sectioned,
        section=MODEL,
        default=None,
        help="The embedding is the output matrix as well.  [default: tied]",
    ),
    choice(
        "--positions", section=MODEL, of=("learned", "rotary"), text="How a token's place is told.  [default: learned]"
    ),
    choice("--norm", section=MODEL, of=("layer", "rms"), text="Which norm.  [default: layer]"),
    click.option(
        "--bias/--no-bias", cls=Sectioned, section=MODEL, default=None, help="Linears have biases.  [default: bias]"
    ),
    click.option(
        "--causal/--no-causal",
        cls=Sectioned,
        section=MODEL,
        default=None,
        help="A token sees those before it alone.  [default: causal]",
    ),
)

_WHERE_OPTIONS: Final = (
    click.option(
        "--set",
        "overrides",
        cls=Sectioned,
        section=WHERE,
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the recipe, e.g. parallel.tensor=2.",
    ),
    count("--devices", section=WHERE, text="Devices, or ranks, in all.  [default: as the degrees need]"),
    count("--batch", section=WHERE, text="Samples of a step, over all replicas.  [default: the recipe's]"),
    count("--steps", section=WHERE, text="Steps of the run.  [default: the recipe's, else 1000]"),
    click.option(
        "--tokens",
        cls=Sectioned,
        section=WHERE,
        type=Number(min=1.0),
        metavar="X",
        help="The same in tokens, e.g. 300e9.",
    ),
)


def cluster(command: Command) -> Command:
    """Add --cluster."""
    return click.option(
        "--cluster",
        cls=Sectioned,
        section=WHERE,
        metavar="NAME|FILE",
        shell_complete=_names_of("cluster.toml_file"),
        help="See `hpcdist plan clusters`.",
    )(command)


def clusters(command: Command) -> Command:
    """Add --cluster, which may be given more than once."""
    return click.option(
        "--cluster",
        "clusters",
        cls=Sectioned,
        section=WHERE,
        multiple=True,
        metavar="NAME|FILE",
        shell_complete=_names_of("cluster.toml_file"),
        help="See `hpcdist plan clusters`; may be given again.",
    )(command)


def recipe(command: Command) -> Command:
    """Add the argument RECIPE."""
    return click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path), required=False)(command)


def subject(command: Command) -> Command:
    """Add the options of the model and of the run."""
    for option in reversed((*_WHERE_OPTIONS, *_MODEL_OPTIONS)):
        command = option(command)
    return command


def as_json(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def plot(command: Command) -> Command:
    """Add --plot."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Draw memory and timeline into this file (.png, .pdf, .svg).",
    )(command)
