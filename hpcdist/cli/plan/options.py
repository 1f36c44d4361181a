"""Options of `hpcdist plan` for the model, the layout and the cluster, as tables.

All options default to None, so that a command sees which options were given.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from hpcdist.cli.common import COUNT, FILE, Decorator, Parsed, stacked
from hpcdist.planner.kernels import RENAMED
from hpcdist.planner.layout import IMPLEMENTATIONS, LAYOUT_FIELDS, LIBRARIES, OPTION_KEYS, RECOMPUTE, SEARCH_SETTINGS
from hpcdist.reporting.units import parse_size

MODEL_SECTION: Final = "Model in numbers"
LAYOUT_SECTION: Final = "Layout"
CLUSTER_SECTION: Final = "Cluster and run"

CALIBRATE: Final = "calibrate"
# name -> ("module:attribute" of the click command, its line in the overview)
COMMANDS: Final = {
    "search": ("hpcdist.cli.plan.search:command", "Find the best layouts for a number of devices."),
    "compare": ("hpcdist.cli.plan.group:compare", "Compare several layouts or clusters in a table."),
    "clusters": ("hpcdist.cli.plan.group:clusters", "List the known clusters, or print one."),
    "models": ("hpcdist.cli.plan.group:models", "List the known models, or print one."),
    CALIBRATE: ("hpcdist.cli.plan.calibrate:command", "Measure this machine, and write a cluster file."),
}


class SectionedOption(click.Option):
    """A click option that the help of a command lists under the heading ``section``."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class SectionedCommand(click.Command):
    """A click command whose help lists options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section; options without a section come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(sections, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(sections[section])


class FiniteNumber(click.FloatRange):
    """Click type of a finite number in a given range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


SHARE: Final = FiniteNumber(0.0, 1.0)
TOKENS: Final = Parsed("tokens", partial(parse_size, noun="tokens"))  # 4096, 32K


class PlanOption(NamedTuple):
    """Command-line option of `hpcdist plan`."""

    flags: str
    kind: click.ParamType | tuple[str, ...] | None  # click type, choices, or None for a flag
    text: str  # help text

    @property
    def name(self) -> str:
        """Python name of the parameter that receives the option's value."""
        return self.flags.partition("/")[0].removeprefix("--").replace("-", "_")

    def with_default(self, default: str) -> "PlanOption":
        """Return a copy of this option whose help text states the default ``default``."""
        return self._replace(text=f"{self.text.partition('  [default')[0]}  [default: {default}]")

    def decorator(self, section: str, *, hidden: bool = False) -> Decorator:
        """Return the click decorator that adds this option, listed under the heading ``section`` of the help."""
        settings: dict[str, Any] = {"type": self.kind, "metavar": "VALUE" if self.kind is click.STRING else "N"}
        if self.kind is None:
            settings = {"default": None}
        elif isinstance(self.kind, tuple):
            settings = {"type": click.Choice(self.kind)}
        elif isinstance(self.kind, click.FloatRange):
            settings["metavar"] = "X"
        return section_option(section, self.flags, help=self.text, show_default=False, hidden=hidden, **settings)


def _key_option(name: str, *, is_flag: bool = False) -> PlanOption:
    # The schema of the recipe checks the value.
    flag = f"--{name.replace('_', '-')}"
    return PlanOption(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_flag else flag,
        None if is_flag else click.STRING,
        f"Same as --set {OPTION_KEYS[name]}={'true' if is_flag else 'VALUE'}.",
    )


def section_option(section: str, *names: str, **settings: Any) -> Decorator:
    """Return a click option decorator. The help lists the option under the heading ``section``."""
    return click.option(*names, cls=SectionedOption, section=section, **settings)


_SHAPE: Final = (
    PlanOption("--layers", COUNT, "Number of transformer blocks."),
    PlanOption("--hidden", COUNT, "Hidden size (model width)."),
    PlanOption("--heads", COUNT, "Attention heads per block."),
    PlanOption("--kv-heads", COUNT, "Key/value heads per block.  [default: as --heads]"),
    PlanOption("--window", TOKENS, "Sliding attention window in tokens.  [default: the whole context]"),
    PlanOption("--vocabulary", COUNT, "Vocabulary size."),
    PlanOption("--context", TOKENS, "Sequence length in tokens, e.g. 4096 or 32K; also with --model."),
    PlanOption("--feed-forward", COUNT, "Inner width of the feed-forward layers."),
    PlanOption(
        "--mlp-ratio", FiniteNumber(min=0.0, min_open=True), "Inner feed-forward width / hidden size.  [default: 4]"
    ),
    PlanOption("--gated/--no-gated", None, "Gated feed-forward with three matrices (SwiGLU).  [default: no-gated]"),
    PlanOption("--experts", COUNT, "Experts per block (mixture of experts).  [default: 1]"),
    PlanOption("--experts-per-token", COUNT, "Experts that process each token (top-k).  [default: 1]"),
    PlanOption("--shared-experts", COUNT, "Width of the shared expert, in experts.  [default: none]"),
    PlanOption("--tied/--untied", None, "Share the embedding and output matrices.  [default: tied]"),
    PlanOption("--positions", ("learned", "rotary"), "Position encoding.  [default: learned]"),
    PlanOption("--norm", ("layer", "rms"), "Normalization: LayerNorm or RMSNorm.  [default: layer]"),
    PlanOption("--bias/--no-bias", None, "Linear layers have biases.  [default: bias]"),
    PlanOption("--causal/--no-causal", None, "Causal attention mask.  [default: causal]"),
)

_RUN: Final = (
    PlanOption("--devices", COUNT, "Total number of devices (ranks).  [default: product of the degrees]"),
    _key_option("batch"),
    _key_option("steps"),
    PlanOption("--tokens", FiniteNumber(min=1.0), "Training length in tokens instead of --steps, e.g. 300e9."),
)

_LAYOUT: Final = (
    _key_option("data"),
    _key_option("pipeline"),
    _key_option("tensor"),
    _key_option("context_ranks"),
    _key_option("expert_ranks"),
    _key_option("strategy"),
    PlanOption("--zero", click.IntRange(0, 3), "ZeRO stage N: short for --strategy zeroN; 0: allreduce."),
    PlanOption("--servers", click.IntRange(0), "Dedicated parameter-server ranks. 0: every worker serves, too."),
    PlanOption("--microbatch", COUNT, "Samples per micro-batch.  [default: as parallel.microbatches, else 1]"),
    _key_option("schedule"),
    _key_option("chunks"),
    PlanOption(
        "--recompute",
        RECOMPUTE,
        "Activations to recompute in backward; full is parallel.recompute=true.  [default: none]",
    ),
    _key_option("sequence_parallel", is_flag=True),
    _key_option("precision"),
    PlanOption("--main-gradients", ("float32", "working"), "Data type of gradient accumulation.  [default: float32]"),
    _key_option("activations"),
    PlanOption(
        "--optimizer-slots",
        click.IntRange(0, 2),
        "Optimizer states per parameter: 2 for Adam, 1 for momentum.  [default: by optimizer.name]",
    ),
    _key_option("compression"),
    _key_option("algorithm"),
    PlanOption(
        "--implementation",
        (*IMPLEMENTATIONS, *RENAMED),
        "Software whose kernels and memory use are modelled.  [default: hpcdist; on a GPU that is not calibrated fsdp2 "
        "for data parallelism, else megatron-core]",
    ),
    PlanOption(
        "--library",
        tuple(filter(None, LIBRARIES)),
        "Communication library whose collectives are modelled.  [default: as --implementation]",
    ),
    PlanOption(
        "--gradient-fusion/--no-gradient-fusion",
        None,
        "With Megatron: matrix products accumulate into the gradients.  [default: gradient-fusion]",
    ),
    PlanOption("--tensor-overlap", SHARE, "Share of tensor-parallel traffic overlapped with backward.  [default: 0]"),
    PlanOption(
        "--overlap",
        SHARE,
        "Share of the gradient exchange overlapped with computation.  [default: by communication.overlap]",
    ),
)
# layout option -> field of `SearchSpec` that gets only the option's value, if the option is given
SEARCH_AXES: Final = {name: SEARCH_SETTINGS[field] for name, field in LAYOUT_FIELDS.items() if field in SEARCH_SETTINGS}
_VARIED: Final = {*SEARCH_AXES, "zero"} - {"expert_ranks", "compression"}  # varied by a search by default
FOUND: Final = ("data", "servers")  # results of a search: a search rejects these options


def _complete_names(module: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        choices = importlib.import_module(f"hpcdist.planner.{module}").names()
        names = [CompletionItem(name) for name in choices if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]

    return complete


def _cluster_option(*names: str, more: str = "", **settings: Any) -> Decorator:
    complete, text = _complete_names("cluster.toml_file"), f"Cluster name or file; see `hpcdist plan clusters`{more}."
    place = {"metavar": "NAME|FILE", "shell_complete": complete, "help": text}
    return section_option(CLUSTER_SECTION, *names, **place, **settings)


cluster_option = _cluster_option("--cluster")
clusters_option = _cluster_option("--cluster", "clusters", multiple=True, more="; repeatable")
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
    metavar="NAME|DIR",
    shell_complete=_complete_names("model.transformer"),
    help="Published model (see `hpcdist plan models`), or a Hugging Face directory or its config.json.",
)
_SET: Final = section_option(
    CLUSTER_SECTION,
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a recipe key, e.g. parallel.tensor=2, with or without a recipe; repeatable.",
)


def _subject_options(run: Iterable[PlanOption]) -> Decorator:
    return stacked(
        _SET,
        *(option.decorator(CLUSTER_SECTION) for option in run),
        _MODEL,
        *(option.decorator(MODEL_SECTION) for option in _SHAPE),
    )


subject_options = _subject_options(_RUN)
search_subject_options = _subject_options((_RUN[0].with_default("all of the cluster"), *_RUN[1:]))


def option_words(option: click.Option, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the command line that set ``option`` to its value in ``values``."""
    value = values.get(str(option.name))
    if value is None or value == ():
        return
    if isinstance(value, bool):
        yield from (option.opts if value else option.secondary_opts)[:1]
        return
    for item in value if isinstance(value, tuple) else (value,):
        yield option.opts[0]
        yield str(item)
