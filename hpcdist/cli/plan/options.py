"""Options of `hpcdist plan`: the model, the layout and the cluster, with headings of their own in the help.

There is one layout option for each field of `hpcdist.planner.layout.ParallelLayout`. All options default to None, so
that a command knows which of them were given.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from hpcdist.planner.layout import (
    ALGORITHMS,
    COMPRESSIONS,
    IMPLEMENTATIONS,
    LIBRARIES,
    PRECISIONS,
    RECOMPUTE,
    STRATEGIES,
)
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

ClickCommand = Callable[..., Any]

MODEL_SECTION: Final = "Model in numbers"
LAYOUT_SECTION: Final = "Layout"
CLUSTER_SECTION: Final = "Cluster and run"

PARAMETER_SERVER: Final = "parameter_server"  # the strategy that --servers is for

CALIBRATE: Final = "calibrate"
# Where each command is, and what the overview says of it.
COMMANDS: Final = {
    "search": ("hpcdist.cli.plan.search:command", "Find the best layouts for a number of devices."),
    "compare": ("hpcdist.cli.plan.compare:command", "Put several layouts, or clusters, side by side."),
    "clusters": ("hpcdist.cli.plan.group:clusters", "List the clusters that are known, or show one."),
    "models": ("hpcdist.cli.plan.group:models", "List the models that are known, or show one."),
    CALIBRATE: ("hpcdist.cli.plan.calibrate:command", "Measure the machine at hand, for a cluster of its own."),
}


class SectionedOption(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help has its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a section last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(sections, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(sections[section])


class FiniteNumber(click.FloatRange):
    """A number in a range; infinity and what is no number are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Fails, as a usage error, for one that is not finite, or beyond the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def count_option(
    *names: str, section: str, text: str, least: int = 1, **settings: Any
) -> Callable[[ClickCommand], ClickCommand]:
    """Return an option that is a whole number, ``least`` or more."""
    return click.option(
        *names,
        cls=SectionedOption,
        section=section,
        type=click.IntRange(min=least),
        metavar="N",
        help=text,
        show_default=False,
        **settings,
    )


def choice_option(*names: str, section: str, of: tuple[str, ...], text: str) -> Callable[[ClickCommand], ClickCommand]:
    """Return an option that is one ``of`` some words."""
    return click.option(
        *names, cls=SectionedOption, section=section, type=click.Choice(of), help=text, show_default=False
    )


# Options that describe a transformer, by the field of `hpcdist.planner.model.description.TransformerShape`.
SHAPE_OPTIONS: Final = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "vocabulary",
    "feed_forward",
    "mlp_ratio",
    "gated",
    "experts",
)
SHAPE_FLAGS: Final = ("experts_per_token", "tied", "positions", "norm", "bias", "causal")


def _complete_names(module: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completion of the names that a module of the planner knows; files are completed beside them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import importlib

        known = importlib.import_module(f"hpcdist.planner.{module}").names()
        names = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]

    return complete


_MODEL_OPTIONS: Final = (
    click.option(
        "--model",
        "model",
        cls=SectionedOption,
        section=MODEL_SECTION,
        metavar="NAME",
        shell_complete=_complete_names("model.transformer"),
        help="A published model: see `hpcdist plan models`.",
    ),
    count_option("--layers", section=MODEL_SECTION, text="Blocks of a transformer."),
    count_option("--hidden", section=MODEL_SECTION, text="Their width."),
    count_option("--heads", section=MODEL_SECTION, text="Heads of a block."),
    count_option("--kv-heads", section=MODEL_SECTION, text="Heads of keys and values.  [default: as many]"),
    count_option("--vocabulary", section=MODEL_SECTION, text="Tokens that there are."),
    count_option("--context", section=MODEL_SECTION, text="Tokens of a sample; also beside --model."),
    count_option("--feed-forward", section=MODEL_SECTION, text="Inner width of a feed-forward."),
    click.option(
        "--mlp-ratio",
        cls=SectionedOption,
        section=MODEL_SECTION,
        type=FiniteNumber(min=0.0, min_open=True),
        metavar="X",
        help="The same as a multiple of --hidden.  [default: 4]",
    ),
    click.option(
        "--gated/--no-gated",
        cls=SectionedOption,
        section=MODEL_SECTION,
        default=None,
        help="Three matrices in a feed-forward (SwiGLU).  [default: no-gated]",
    ),
    count_option("--experts", section=MODEL_SECTION, text="Feed-forwards of a block.  [default: 1]"),
    count_option("--experts-per-token", section=MODEL_SECTION, text="Of those, how many see a token.  [default: 1]"),
    click.option(
        "--tied/--untied",
        cls=SectionedOption,
        section=MODEL_SECTION,
        default=None,
        help="The embedding is the output matrix as well.  [default: tied]",
    ),
    choice_option(
        "--positions",
        section=MODEL_SECTION,
        of=("learned", "rotary"),
        text="How a token's place is told.  [default: learned]",
    ),
    choice_option("--norm", section=MODEL_SECTION, of=("layer", "rms"), text="Which norm.  [default: layer]"),
    click.option(
        "--bias/--no-bias",
        cls=SectionedOption,
        section=MODEL_SECTION,
        default=None,
        help="Linears have biases.  [default: bias]",
    ),
    click.option(
        "--causal/--no-causal",
        cls=SectionedOption,
        section=MODEL_SECTION,
        default=None,
        help="A token sees those before it alone.  [default: causal]",
    ),
)

_CLUSTER_OPTIONS: Final = (
    click.option(
        "--set",
        "overrides",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of the recipe, e.g. parallel.tensor=2.",
    ),
    count_option(
        "--devices", section=CLUSTER_SECTION, text="Devices, or ranks, in all.  [default: as the degrees need]"
    ),
    count_option(
        "--batch", section=CLUSTER_SECTION, text="Samples of a step, over all replicas.  [default: the recipe's]"
    ),
    count_option("--steps", section=CLUSTER_SECTION, text="Steps of the run.  [default: the recipe's, else 1000]"),
    click.option(
        "--tokens",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        type=FiniteNumber(min=1.0),
        metavar="X",
        help="The same in tokens, e.g. 300e9.",
    ),
)


def cluster_option(command: ClickCommand) -> ClickCommand:
    """Add --cluster."""
    return click.option(
        "--cluster",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        metavar="NAME|FILE",
        shell_complete=_complete_names("cluster.toml_file"),
        help="See `hpcdist plan clusters`.",
    )(command)


def clusters_option(command: ClickCommand) -> ClickCommand:
    """Add --cluster, which may be given more than once."""
    return click.option(
        "--cluster",
        "clusters",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        multiple=True,
        metavar="NAME|FILE",
        shell_complete=_complete_names("cluster.toml_file"),
        help="See `hpcdist plan clusters`; may be given again.",
    )(command)


def recipe_options(command: ClickCommand) -> ClickCommand:
    """Add the argument RECIPE."""
    return click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path), required=False)(command)


def subject_options(command: ClickCommand) -> ClickCommand:
    """Add the options of the model and of the run."""
    for option in reversed((*_CLUSTER_OPTIONS, *_MODEL_OPTIONS)):
        command = option(command)
    return command


def json_option(command: ClickCommand) -> ClickCommand:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def plot_option(command: ClickCommand) -> ClickCommand:
    """Add --plot."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Draw memory and timeline into this file (.png, .pdf, .svg).",
    )(command)


# Options that are fields of a `Layout` under another name.
LAYOUT_FIELDS: Final = {"context_ranks": "context", "expert_ranks": "expert"}
LAYOUT_OPTIONS: Final = (
    *("data", "pipeline", "tensor", "context_ranks", "expert_ranks", "strategy", "zero", "servers", "microbatch"),
    *("schedule", "chunks", "recompute", "sequence_parallel", "precision", "main_gradients", "compression"),
    *("activations", "optimizer_slots", "algorithm", "implementation", "library", "gradient_fusion", "overlap"),
    "tensor_overlap",
)
_LAYOUT_DECORATORS: Final = (
    count_option("--data", section=LAYOUT_SECTION, text="Replicas.  [default: what --devices leaves]"),
    count_option("--pipeline", section=LAYOUT_SECTION, text="Stages.  [default: 1]"),
    count_option("--tensor", section=LAYOUT_SECTION, text="Devices that compute each layer together.  [default: 1]"),
    count_option(
        "--context-ranks", section=LAYOUT_SECTION, text="Devices that share the tokens of a sample.  [default: 1]"
    ),
    count_option("--expert-ranks", section=LAYOUT_SECTION, text="Data devices that share the experts.  [default: 1]"),
    choice_option("--strategy", section=LAYOUT_SECTION, of=STRATEGIES, text="How replicas meet.  [default: allreduce]"),
    click.option(
        "--zero",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        type=click.IntRange(0, 3),
        metavar="N",
        help="Its stage: --strategy zeroN, or allreduce for 0.",
    ),
    count_option("--servers", section=LAYOUT_SECTION, text="Dedicated parameter servers beside the other devices."),
    count_option("--microbatch", section=LAYOUT_SECTION, text="Samples of a micro-batch.  [default: 1]"),
    choice_option(
        "--schedule",
        section=LAYOUT_SECTION,
        of=tuple(SCHEDULES),
        text="Order of the passes of a pipeline.  [default: 1f1b]",
    ),
    count_option(
        "--chunks",
        section=LAYOUT_SECTION,
        text="Parts of the model on each pipeline device.  [default: as the schedule has]",
    ),
    choice_option(
        "--recompute",
        section=LAYOUT_SECTION,
        of=RECOMPUTE,
        text="What is computed again: attention, or all.  [default: none]",
    ),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        default=None,
        help="Cut by tokens what lies between the products of tensor devices.",
    ),
    choice_option(
        "--precision", section=LAYOUT_SECTION, of=PRECISIONS, text="Type of the numbers.  [default: bfloat16]"
    ),
    choice_option(
        "--main-gradients",
        section=LAYOUT_SECTION,
        of=("float32", "working"),
        text="Type in which gradients are summed.  [default: float32]",
    ),
    choice_option(
        "--activations",
        section=LAYOUT_SECTION,
        of=("working", "float32"),
        text="Type in which layers compute, and keep what they do.  [default: working]",
    ),
    click.option(
        "--optimizer-slots",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        type=click.IntRange(0, 2),
        metavar="N",
        help="Numbers that the optimizer keeps of a parameter: 2 for Adam, 1 for momentum.  [default: 2]",
    ),
    choice_option(
        "--compression", section=LAYOUT_SECTION, of=COMPRESSIONS, text="How gradients travel.  [default: none]"
    ),
    choice_option(
        "--algorithm", section=LAYOUT_SECTION, of=ALGORITHMS, text="Of the exchange.  [default: auto, the fastest]"
    ),
    choice_option(
        "--implementation",
        section=LAYOUT_SECTION,
        of=IMPLEMENTATIONS,
        text="Whose kernels and memory.  [default: megatron on a GPU that nobody has measured, else hpcdist]",
    ),
    choice_option(
        "--library",
        section=LAYOUT_SECTION,
        of=tuple(name for name in LIBRARIES if name),
        text="Whose collectives.  [default: as the implementation]",
    ),
    click.option(
        "--gradient-fusion/--no-gradient-fusion",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        default=None,
        help="Of megatron: products add to the gradients of before.  [default: gradient-fusion]",
    ),
    click.option(
        "--tensor-overlap",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        type=FiniteNumber(0.0, 1.0),
        metavar="X",
        help="Share of the tensor messages that may hide behind the backward.  [default: 0]",
    ),
    click.option(
        "--overlap",
        cls=SectionedOption,
        section=LAYOUT_SECTION,
        type=FiniteNumber(0.0, 1.0),
        metavar="X",
        help="Share of the exchange that may hide behind computation.  [default: 1]",
    ),
)


def layout_options(command: ClickCommand) -> ClickCommand:
    """Add the options of the layout."""
    for option in reversed(_LAYOUT_DECORATORS):
        command = option(command)
    return command
