"""Options of `hpcdist plan`: the model, the layout and the cluster, with headings of their own in the help.

Each is a row of a table: its flags, what it takes and its help; an option of the layout also has the axis of a search
that it fixes. All default to None, so that a command knows which of them were given. The fields that they set are in
`hpcdist.planner.layout.LAYOUT_FIELDS` and `hpcdist.training.use_cases.plan_subject`.
"""

import importlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import click
from click.shell_completion import CompletionItem

from hpcdist.cli.common import COUNT, FILE, Decorator, Parsed, stacked
from hpcdist.planner.layout import (
    ALGORITHMS,
    COMPRESSIONS,
    IMPLEMENTATIONS,
    LIBRARIES,
    PRECISIONS,
    RECOMPUTE,
    STRATEGIES,
)
from hpcdist.reporting.units import parse_size
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

MODEL_SECTION: Final = "Model in numbers"
LAYOUT_SECTION: Final = "Layout"
CLUSTER_SECTION: Final = "Cluster and run"

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


Kind: TypeAlias = click.ParamType | tuple[str, ...] | None  # of a value: a type, words to choose from, yes or no
SHARE: Final = FiniteNumber(0.0, 1.0)
TOKENS: Final = Parsed("tokens", partial(parse_size, of="tokens"))  # 4096, 32K


class PlanOption(NamedTuple):
    """Option of the model, the layout or the run; ``axis`` is the field of `SearchSpec` that it fixes to its value."""

    flags: str
    kind: Kind
    text: str
    axis: str = ""

    @property
    def name(self) -> str:
        """The name of its value."""
        return self.flags.partition("/")[0].removeprefix("--").replace("-", "_")

    def with_default(self, default: str) -> "PlanOption":
        """Return the option with another default in its help."""
        return self._replace(text=f"{self.text.partition('  [default')[0]}  [default: {default}]")

    def decorator(self, section: str, *, hidden: bool = False) -> Decorator:
        """Return the option of click, under the heading ``section``."""
        settings: dict[str, Any] = {"type": self.kind, "metavar": "N"}
        if self.kind is None:
            settings = {"default": None}
        elif isinstance(self.kind, tuple):
            settings = {"type": click.Choice(self.kind)}
        elif isinstance(self.kind, click.FloatRange):
            settings["metavar"] = "X"
        return section_option(section, self.flags, help=self.text, show_default=False, hidden=hidden, **settings)


def section_option(section: str, *names: str, **settings: Any) -> Decorator:
    """Return an option of click under the heading ``section``."""
    return click.option(*names, cls=SectionedOption, section=section, **settings)


_SHAPE: Final = (
    PlanOption("--layers", COUNT, "Blocks of a transformer."),
    PlanOption("--hidden", COUNT, "Their width."),
    PlanOption("--heads", COUNT, "Heads of a block."),
    PlanOption("--kv-heads", COUNT, "Heads of keys and values.  [default: as many]"),
    PlanOption("--window", TOKENS, "Tokens that a token sees, up to itself.  [default: all before it]"),
    PlanOption("--vocabulary", COUNT, "Tokens that there are."),
    PlanOption("--context", TOKENS, "Tokens of a sample, as 4096 or 32K; also beside --model."),
    PlanOption("--feed-forward", COUNT, "Inner width of a feed-forward."),
    PlanOption(
        "--mlp-ratio", FiniteNumber(min=0.0, min_open=True), "The same as a multiple of --hidden.  [default: 4]"
    ),
    PlanOption("--gated/--no-gated", None, "Three matrices in a feed-forward (SwiGLU).  [default: no-gated]"),
    PlanOption("--experts", COUNT, "Feed-forwards of a block.  [default: 1]"),
    PlanOption("--experts-per-token", COUNT, "Of those, how many see a token.  [default: 1]"),
    PlanOption("--shared-experts", COUNT, "Width of one that all tokens see, in experts.  [default: none]"),
    PlanOption("--tied/--untied", None, "The embedding is the output matrix as well.  [default: tied]"),
    PlanOption("--positions", ("learned", "rotary"), "How a token's place is told.  [default: learned]"),
    PlanOption("--norm", ("layer", "rms"), "Which norm.  [default: layer]"),
    PlanOption("--bias/--no-bias", None, "Linears have biases.  [default: bias]"),
    PlanOption("--causal/--no-causal", None, "A token sees those before it alone.  [default: causal]"),
)

_RUN: Final = (
    PlanOption("--devices", COUNT, "Devices, or ranks, in all.  [default: as the degrees need]"),
    PlanOption("--batch", COUNT, "Samples of a step, over all replicas.  [default: the recipe's]"),
    PlanOption("--steps", COUNT, "Steps of the run.  [default: the recipe's, else 1000]"),
    PlanOption("--tokens", FiniteNumber(min=1.0), "The same in tokens, e.g. 300e9."),
)

_LAYOUT: Final = (
    PlanOption("--data", COUNT, "Replicas.  [default: what --devices leaves]"),
    PlanOption("--pipeline", COUNT, "Stages.  [default: 1]", "pipelines"),
    PlanOption("--tensor", COUNT, "Devices that compute each layer together.  [default: 1]", "tensors"),
    PlanOption("--context-ranks", COUNT, "Devices that share the tokens of a sample.  [default: 1]", "contexts"),
    PlanOption("--expert-ranks", COUNT, "Devices of data x context that share the experts.  [default: 1]", "experts"),
    PlanOption("--strategy", STRATEGIES, "How replicas meet.  [default: allreduce]"),
    PlanOption("--zero", click.IntRange(0, 3), "Its stage: --strategy zeroN, or allreduce for 0."),
    PlanOption("--servers", COUNT, "Dedicated parameter servers beside the other devices."),
    PlanOption("--microbatch", COUNT, "Samples of a micro-batch.  [default: 1]", "microbatches"),
    PlanOption("--schedule", tuple(SCHEDULES), "Order of the passes of a pipeline.  [default: 1f1b]", "schedules"),
    PlanOption(
        "--chunks", COUNT, "Parts of the model on each pipeline device.  [default: as the schedule has]", "chunks"
    ),
    PlanOption("--recompute", RECOMPUTE, "What is computed again: attention, or all.  [default: none]", "recompute"),
    PlanOption(
        "--sequence-parallel/--no-sequence-parallel",
        None,
        "Cut by tokens what lies between the products of tensor devices.",
        "sequence_parallel",
    ),
    PlanOption("--precision", PRECISIONS, "Type of the numbers.  [default: bfloat16]"),
    PlanOption("--main-gradients", ("float32", "working"), "Type in which gradients are summed.  [default: float32]"),
    PlanOption(
        "--activations",
        ("working", "float32"),
        "Type in which layers compute, and keep what they do.  [default: working]",
    ),
    PlanOption(
        "--optimizer-slots",
        click.IntRange(0, 2),
        "Numbers that the optimizer keeps of a parameter: 2 for Adam, 1 for momentum.  [default: 2]",
    ),
    PlanOption("--compression", COMPRESSIONS, "How gradients travel.  [default: none]", "compressions"),
    PlanOption("--algorithm", ALGORITHMS, "Of the exchange.  [default: auto, the fastest]"),
    PlanOption(
        "--implementation",
        IMPLEMENTATIONS,
        "Whose kernels and memory.  [default: megatron on a GPU that nobody has measured, else hpcdist]",
    ),
    PlanOption("--library", tuple(filter(None, LIBRARIES)), "Whose collectives.  [default: as the implementation]"),
    PlanOption(
        "--gradient-fusion/--no-gradient-fusion",
        None,
        "Of megatron: products add to the gradients of before.  [default: gradient-fusion]",
    ),
    PlanOption(
        "--tensor-overlap", SHARE, "Share of the tensor messages that may hide behind the backward.  [default: 0]"
    ),
    PlanOption("--overlap", SHARE, "Share of the exchange that may hide behind computation.  [default: 1]"),
)
# Option of the layout -> the field of `SearchSpec` that has only its value, where it is given.
SEARCH_AXES: Final = {option.name: option.axis for option in _LAYOUT if option.axis}
_VARIED: Final = {*SEARCH_AXES, "strategy", "zero"} - {"expert_ranks", "compression"}  # where they are left out
FOUND: Final = ("data", "servers")  # by a search, which says so where one is given


def _complete_names(module: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completion of the names that a module of the planner knows; files are completed beside them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = importlib.import_module(f"hpcdist.planner.{module}").names()
        names = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]

    return complete


def _cluster_option(*names: str, more: str = "", **settings: Any) -> Decorator:
    complete, text = _complete_names("cluster.toml_file"), f"See `hpcdist plan clusters`{more}."
    place = {"metavar": "NAME|FILE", "shell_complete": complete, "help": text}
    return section_option(CLUSTER_SECTION, *names, **place, **settings)


cluster_option = _cluster_option("--cluster")
clusters_option = _cluster_option("--cluster", "clusters", multiple=True, more="; may be given again")
plot_option = click.option("--plot", type=FILE, help="Draw memory and timeline into this file (.png, .pdf, .svg).")
layout_options = stacked(*(option.decorator(LAYOUT_SECTION) for option in _LAYOUT))
search_layout_options = stacked(
    *(
        (option.with_default("varied") if option.name in _VARIED else option).decorator(
            LAYOUT_SECTION, hidden=option.name in FOUND
        )
        for option in _LAYOUT
    )
)
_MODEL: Final = section_option(
    MODEL_SECTION,
    "--model",
    metavar="NAME",
    shell_complete=_complete_names("model.transformer"),
    help="A published model: see `hpcdist plan models`.",
)
_SET: Final = section_option(
    CLUSTER_SECTION,
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the recipe, e.g. parallel.tensor=2.",
)


def _subject_options(run: Iterable[PlanOption]) -> Decorator:
    """Return the options of a model in numbers, and those of ``run``."""
    return stacked(
        _SET,
        *(option.decorator(CLUSTER_SECTION) for option in run),
        _MODEL,
        *(option.decorator(MODEL_SECTION) for option in _SHAPE),
    )


subject_options = _subject_options(_RUN)
search_subject_options = _subject_options((_RUN[0].with_default("all of the cluster"), *_RUN[1:]))
