"""The options of `hpcdist plan`: what is planned, how it is laid out, on what; and their help in sections."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from hpcdist.planner.layout import ALGORITHMS, COMPRESSIONS, IMPLEMENTATIONS, PRECISIONS, RECOMPUTE, STRATEGIES
from hpcdist.strategies.schedule.catalogue import SCHEDULES

Command = Callable[..., Any]

MODEL: Final = "Model in numbers"
LAYOUT: Final = "Layout"
WHERE: Final = "Cluster and run"

# Options that describe a transformer, by the field of `hpcdist.planner.description.Shape`.
SHAPE: Final = ("layers", "hidden", "heads", "kv_heads", "vocabulary", "feed_forward", "mlp_ratio", "gated", "experts")
SHAPE_TOO: Final = ("experts_per_token", "tied", "positions", "norm", "bias", "causal")
# Options that are fields of a `Layout` under another name.
RENAMED: Final = {"context_ranks": "context", "expert_ranks": "expert"}
LAYOUT_OPTIONS: Final = (
    *("data", "pipeline", "tensor", "context_ranks", "expert_ranks", "strategy", "zero", "servers", "microbatch"),
    *("schedule", "chunks", "recompute", "sequence_parallel", "precision", "main_gradients", "compression"),
    *("activations", "optimizer_slots", "algorithm", "implementation", "overlap"),
)


class Sectioned(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a section last."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(found, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(found[section])


def _names_of(module: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completion of the names that a module of the planner knows; files are completed beside them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import importlib

        known = importlib.import_module(f"hpcdist.planner.{module}").names()
        found = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


def _positive(*names: str, section: str, text: str, least: int = 1, **settings: Any) -> Callable[[Command], Command]:
    return click.option(
        *names,
        cls=Sectioned,
        section=section,
        type=click.IntRange(min=least),
        metavar="N",
        help=text,
        show_default=False,
        **settings,
    )


def _choice(*names: str, section: str, of: tuple[str, ...], text: str) -> Callable[[Command], Command]:
    return click.option(*names, cls=Sectioned, section=section, type=click.Choice(of), help=text, show_default=False)


_MODEL_OPTIONS: Final = (
    click.option(
        "--model",
        "model",
        cls=Sectioned,
        section=MODEL,
        metavar="NAME",
        shell_complete=_names_of("models"),
        help="A published model: see `hpcdist plan models`.",
    ),
    _positive("--layers", section=MODEL, text="Blocks of a transformer."),
    _positive("--hidden", section=MODEL, text="Their width."),
    _positive("--heads", section=MODEL, text="Heads of a block."),
    _positive("--kv-heads", section=MODEL, text="Heads of keys and values.  [default: as many]"),
    _positive("--vocabulary", section=MODEL, text="Tokens that there are."),
    _positive("--context", section=MODEL, text="Tokens of a sample; also beside --model."),
    _positive("--feed-forward", section=MODEL, text="Inner width of a feed-forward."),
    click.option(
        "--mlp-ratio",
        cls=Sectioned,
        section=MODEL,
        type=click.FloatRange(min=0.0, min_open=True),
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
    _positive("--experts", section=MODEL, text="Feed-forwards of a block.  [default: 1]"),
    _positive("--experts-per-token", section=MODEL, text="Of those, how many see a token.  [default: 1]"),
    click.option(
        "--tied/--untied",
        cls=Sectioned,
        section=MODEL,
        default=None,
        help="The embedding is the output matrix as well.  [default: tied]",
    ),
    _choice(
        "--positions", section=MODEL, of=("learned", "rotary"), text="How a token's place is told.  [default: learned]"
    ),
    _choice("--norm", section=MODEL, of=("layer", "rms"), text="Which norm.  [default: layer]"),
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

_LAYOUT_OPTIONS: Final = (
    _positive("--data", section=LAYOUT, text="Replicas.  [default: what --devices leaves]"),
    _positive("--pipeline", section=LAYOUT, text="Stages.  [default: 1]"),
    _positive("--tensor", section=LAYOUT, text="Devices that compute each layer together.  [default: 1]"),
    _positive("--context-ranks", section=LAYOUT, text="Devices that share the tokens of a sample.  [default: 1]"),
    _positive("--expert-ranks", section=LAYOUT, text="Data devices that share the experts.  [default: 1]"),
    _choice("--strategy", section=LAYOUT, of=STRATEGIES, text="How replicas meet.  [default: allreduce]"),
    click.option(
        "--zero",
        cls=Sectioned,
        section=LAYOUT,
        type=click.IntRange(0, 3),
        metavar="N",
        help="Its stage: --strategy zeroN, or allreduce for 0.",
    ),
    _positive("--servers", section=LAYOUT, text="Dedicated parameter servers beside the other devices."),
    _positive("--microbatch", section=LAYOUT, text="Samples of a micro-batch.  [default: 1]"),
    _choice(
        "--schedule", section=LAYOUT, of=tuple(SCHEDULES), text="Order of the passes of a pipeline.  [default: 1f1b]"
    ),
    _positive(
        "--chunks", section=LAYOUT, text="Parts of the model on each pipeline device.  [default: as the schedule has]"
    ),
    _choice(
        "--recompute", section=LAYOUT, of=RECOMPUTE, text="What is computed again: attention, or all.  [default: none]"
    ),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        cls=Sectioned,
        section=LAYOUT,
        default=None,
        help="Cut by tokens what lies between the products of tensor devices.",
    ),
    _choice("--precision", section=LAYOUT, of=PRECISIONS, text="Type of the numbers.  [default: bfloat16]"),
    _choice(
        "--main-gradients",
        section=LAYOUT,
        of=("float32", "working"),
        text="Type in which gradients are summed.  [default: float32]",
    ),
    _choice(
        "--activations",
        section=LAYOUT,
        of=("working", "float32"),
        text="Type in which layers compute, and keep what they do.  [default: working]",
    ),
    click.option(
        "--optimizer-slots",
        cls=Sectioned,
        section=LAYOUT,
        type=click.IntRange(0, 2),
        metavar="N",
        help="Numbers that the optimizer keeps of a parameter: 2 for Adam, 1 for momentum.  [default: 2]",
    ),
    _choice("--compression", section=LAYOUT, of=COMPRESSIONS, text="How gradients travel.  [default: none]"),
    _choice("--algorithm", section=LAYOUT, of=ALGORITHMS, text="Of the exchange.  [default: auto, the fastest]"),
    _choice(
        "--implementation",
        section=LAYOUT,
        of=IMPLEMENTATIONS,
        text="Whose kernels and memory.  [default: hpcdist]",
    ),
    click.option(
        "--overlap",
        cls=Sectioned,
        section=LAYOUT,
        type=click.FloatRange(0.0, 1.0),
        metavar="X",
        help="Share of the exchange that may hide behind the backward.  [default: 1]",
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
    _positive("--devices", section=WHERE, text="Devices, or ranks, in all.  [default: as the degrees need]"),
    _positive("--batch", section=WHERE, text="Samples of a step, over all replicas.  [default: the recipe's]"),
    _positive("--steps", section=WHERE, text="Steps of the run.  [default: the recipe's, else 1000]"),
    click.option(
        "--tokens",
        cls=Sectioned,
        section=WHERE,
        type=click.FloatRange(min=1.0),
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
        shell_complete=_names_of("cluster_file"),
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
        shell_complete=_names_of("cluster_file"),
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


def layout(command: Command) -> Command:
    """Add the options of the layout."""
    for option in reversed(_LAYOUT_OPTIONS):
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
