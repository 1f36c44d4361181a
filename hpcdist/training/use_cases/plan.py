"""Plan of one layout: `plan_of_subject` as a planner estimate, `plan` (`hpcdist.plan`) as JSON values.

The subject of a plan is a model, its layout, its batch and its steps. `subject_of_recipe` and `subject_from_options`
make it. Layout options replace the recipe's values. For GPUs without measurements, the kernels of published trainings
(FSDP2, Megatron-Core) are planned, because estimates were compared only with these trainings.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hpcdist.errors import ConfigurationError, DataError, HpcdistError, StorageError, UsageError
from hpcdist.models.config import TRANSFORMERS, ModelConfig
from hpcdist.planner import checks
from hpcdist.planner import plan as planner
from hpcdist.planner.checks import unsupported
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.kernels import KERNELS, RENAMED, modern_program
from hpcdist.planner.layout import HALVES, LAYOUT_FIELDS, ParallelLayout
from hpcdist.planner.model.description import ModelDescription, TransformerShape
from hpcdist.planner.report import table
from hpcdist.planner.report.quantities import estimate_json
from hpcdist.planner.report.text import ONE_REPLICA
from hpcdist.reporting.jsonable import plain_number
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.units import format_bytes
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.use_cases.plan_layout import (
    GivenValues,
    flag,
    given_values,
    layout_of,
    note_unplanned_keys,
    options_given,
    refuse_unplannable,
    with_keys,
)

if TYPE_CHECKING:
    from hpcdist.models.counts import DocumentPairs
    from hpcdist.training.data.source import Source

MOST_READ_BYTES: Final = 1 << 30  # largest data file read for the lengths of documents
# Options of `hpcdist plan`: of a transformer in numbers (mlp_ratio is an alternative to feed_forward), and of the run.
_WITHOUT_OPTION: Final = ("dropout", "head_size", "biased", "query_key_norm", "window_layers")
_SHAPE_FIELDS: Final = tuple(
    item.name for item in dataclasses.fields(TransformerShape) if item.name not in _WITHOUT_OPTION
)
SHAPE_OPTIONS: Final = (*_SHAPE_FIELDS, "mlp_ratio")
RUN_OPTIONS: Final = ("model", "devices", "batch", "steps", "tokens")
OPTIONS: Final = (*RUN_OPTIONS, *SHAPE_OPTIONS, *LAYOUT_FIELDS, "simulate")
DEFAULT_STEPS: Final = 1000  # length of a run if no option sets it
MAX_STEPS: Final = 10**12  # larger values are typing errors
_REQUIRED_SHAPE: Final = ("layers", "hidden", "heads", "vocabulary", "context")
# Assumptions of a plan without a recipe, besides the precision.
_ASSUMED_KEYS: Final = {
    "precision.activations": "working",
    "communication.overlap": "thread",
    "parameter_server.placement": "colocated",
}
_ASSUMED_FIELDS: Final = {"main_gradients": "float32"}
PlanResult = TypeVar("PlanResult")


@dataclass(frozen=True, kw_only=True)
class PlanSubject:
    """Input of a plan: the model, its parallel layout, the global batch and the number of steps."""

    description: ModelDescription
    layout: ParallelLayout
    global_batch: int
    steps: int
    notes: tuple[str, ...] = ()  # texts about settings that the plan ignores
    of_recipe: bool = False  # True if hpcdist will train it
    programs: tuple[str, ...] = ()  # of a search: as `SearchSpec.programs`


def plan(
    recipe: str | os.PathLike[str] | None = None,
    *,
    cluster: str,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a dict of JSON values: memory, time and energy estimates of a training run. Needs neither MPI nor a GPU.

    ``recipe``: file or None. ``cluster``: name or file of a cluster. ``keys``: {recipe key: value}, such as
    ``{"model.layers": 12}``. ``**options``: options of `hpcdist plan`, such as ``devices=64``. Unknown values are None.
    Raises UsageError, and ConfigurationError for impossible plans.
    """
    for name in options:
        if name not in OPTIONS:
            near = nearest(name, OPTIONS)
            raise UsageError(f"plan has no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    options = {name: plain_number(value) for name, value in options.items()}
    simulate = options.pop("simulate", True)
    described = read_cluster(cluster)
    changes = tuple(f"{key}={value}" for key, value in (keys or {}).items())
    subject = subject_from_options(None if recipe is None else Path(recipe), changes, options, described)
    estimate = plan_of_subject(subject, described, simulate=simulate)
    return estimate_json(estimate, subject.description, described)


def plan_of_subject(subject: PlanSubject, cluster: Cluster, *, simulate: bool = False) -> PlanEstimate:
    """Return the `PlanEstimate` of ``subject``, a model with layout and batch, on ``cluster``.

    Raises ConfigurationError for an impossible layout, but not for a lack of memory. ``simulate``: True to
    simulate the pipeline if the simulator is available.
    """
    description, layout, batch = subject.description, subject.layout, subject.global_batch
    wrong = [problem.text for problem in checks.shape_problems(description, layout, cluster, batch)]
    if wrong:
        raise ConfigurationError(f"this layout is not possible: {'; '.join(wrong)}")
    answer, notes = with_simulator(
        lambda runs: planner.plan(description, layout, cluster, batch, subject.steps, simulate=runs),
        simulate=simulate and layout.pipeline > 1,
    )
    flags = (*answer.flags, *table.layout_caveats(answer), *notes, *subject.notes, *table.assumption_line(cluster))
    return replace(answer, flags=table.ordered(flags, [layout]))


def with_simulator(make: Callable[[bool], PlanResult], *, simulate: bool) -> tuple[PlanResult, tuple[str, ...]]:
    """Return (result of ``make(simulate)``, notes for the user).

    ``make``: function that makes a plan. If the simulator cannot be loaded, call ``make(False)`` instead.
    """
    try:
        return make(simulate), ()
    except ImportError as error:
        if not simulate:
            raise
        return make(False), (f"pipelines are planned by closed forms: the simulator cannot be loaded ({error})",)


def read_cluster(name_or_path: str | None) -> Cluster:
    """Return the shipped cluster named ``name_or_path``, or the cluster in this file. Raises UsageError for None."""
    from hpcdist.planner.cluster import toml_file

    if name_or_path is None:
        raise UsageError(f"give --cluster NAME (one of {', '.join(toml_file.names())}), or --cluster FILE")
    return toml_file.read(name_or_path)


def subject_from_options(
    path: Path | None, overrides: Iterable[str], options: Mapping[str, Any], cluster: Cluster
) -> PlanSubject:
    """Return the `PlanSubject` that the ``options`` of `hpcdist plan` describe.

    ``path``: recipe file or None. ``overrides``: values of --set. ``cluster``: cluster with default values. Raises
    UsageError or ConfigurationError.
    """
    given = given_values(overrides, options)
    subject = subject_of_values(path, overrides, options, given, cluster)
    if (earlier := options.get("implementation")) in RENAMED:
        note = f"--implementation {earlier} is the earlier name of {RENAMED[earlier]}; use the new name"
        subject = replace(subject, notes=(*subject.notes, note))
    for name in ("schedule", "chunks"):
        if subject.layout.pipeline == 1 and str(options.get(name)) not in ("None", "1", "sequential"):
            raise UsageError(
                f"{flag(name)} {options[name]} with one pipeline device has no effect; leave {flag(name)} out, or give "
                "--pipeline 2 or more"
            )
    return with_published_kernels(subject, cluster, given)


def subject_of_values(
    path: Path | None, overrides: Iterable[str], options: Mapping[str, Any], given: GivenValues, cluster: Cluster
) -> PlanSubject:
    """Return the `PlanSubject` that the recipe, the ``options`` of `hpcdist plan` and ``given`` describe.

    ``path``: recipe file or None. ``overrides``: values of --set. ``given``: result of `given_values`. Raises the
    errors of `subject_from_options`.
    """
    named = options.get("model") is not None
    numbers = options_given(options, SHAPE_OPTIONS)
    is_recipe = not (named or numbers)
    described_by = "--model" if named else numbers[0] if numbers else ""
    if path is not None and not is_recipe:
        raise UsageError(
            f"the recipe {path} and {described_by} both describe a model; keep one of them (--set model.KEY=VALUE "
            "changes the recipe's model)"
        )
    if is_recipe:
        if path is not None and not path.exists():
            raise StorageError(f"recipe {path}: there is no such file; correct the path")
        recipe = recipes.load(path, overrides).recipe
        subject = subject_of_recipe(recipe, "the default recipe" if path is None else path.stem, options, given)
    else:
        for key in given.keys:
            if key.startswith(("model.", "data.")):
                raise UsageError(f"--set {key} and {described_by} both describe a model; keep one of them")
        subject = _subject_of_model(_by_name(options) if named else _in_numbers(options), options, given, cluster)
    _check_effect(subject.layout, options)
    return subject


def subject_of_recipe(
    recipe: Recipe, title: str, options: Mapping[str, Any] | None = None, given: GivenValues | None = None
) -> PlanSubject:
    """Return a `PlanSubject` with the model, layout and batch of ``recipe``.

    ``title``: name of the plan. ``options``: options of `hpcdist plan`. ``given``: values that replace recipe values.
    Raises ConfigurationError or DataError.
    """
    options, given = options or {}, given or GivenValues()
    if options.get("devices") is not None:
        recipe = with_keys(recipe, {"parallel.data": 0})
    recipe = with_keys(recipe, given.keys)
    refuse_unplannable(recipe)
    notes: list[str] = []
    if recipe.run.batch_warmup:
        batch = recipe.run.global_batch
        notes.append(f"run.batch_warmup: all steps are planned with the {batch} samples of the last ones")
    description = _description(recipe, title, notes)
    return replace(_subject(recipe, description, options, given.fields, notes), of_recipe=True)


def _subject_of_model(
    description: ModelDescription, options: Mapping[str, Any], given: GivenValues, cluster: Cluster
) -> PlanSubject:
    if "run.global_batch" not in given.keys:
        raise UsageError("give --batch, the global number of samples per step; it has no default without a recipe")
    notes: list[str] = []
    keys: dict[str, Any] = dict(_ASSUMED_KEYS)
    if "precision.mode" not in given.keys:
        keys["precision.mode"] = "bfloat16" if cluster.device.is_accelerator else "float32"
        notes.append(
            f"{keys['precision.mode']} is assumed, because no recipe sets it; --set precision.mode=MODE plans another "
            "precision"
        )
    if "run.steps" not in given.keys and options.get("tokens") is None:
        keys["run.steps"] = DEFAULT_STEPS
        notes.append(f"neither --steps nor --tokens is given: the run is planned with {DEFAULT_STEPS} steps")
    recipe = with_keys(Recipe(), keys | given.keys)
    refuse_unplannable(recipe)
    microbatch = {} if "parallel.microbatches" in given.keys else {"microbatch": 1}
    return _subject(recipe, description, options, _ASSUMED_FIELDS | microbatch | given.fields, notes)


def _subject(
    recipe: Recipe,
    description: ModelDescription,
    options: Mapping[str, Any],
    fields: Mapping[str, Any],
    notes: list[str],
) -> PlanSubject:
    layout = layout_of(recipe, fields, notes, options.get("devices"))
    note_unplanned_keys(recipe, description.shape, notes)
    if not recipe.parallel.data and options.get("devices") is None:
        notes.append(ONE_REPLICA)
    return PlanSubject(
        description=description,
        layout=layout,
        global_batch=recipe.run.global_batch,
        steps=_steps(options, description, recipe),
        notes=tuple(notes),
    )


def with_published_kernels(
    subject: PlanSubject, cluster: Cluster, given: GivenValues | None = None, *, always: bool = False
) -> PlanSubject:
    """Return a copy of ``subject`` with the kernels of `modern_program`, or ``subject`` if ``cluster`` is calibrated.

    ``given``: values set by the user, or None. The kernels change only for transformers on GPUs, and only if the user
    chose no kernels. A layout that the program does not support is changed only if ``always`` is True.
    """
    is_measured = cluster.calibrated or not cluster.device.is_accelerator
    is_chosen = given is not None and "implementation" in given.fields
    if is_measured or is_chosen or subject.description.shape is None:
        return subject
    library = subject.layout.library or ("mpi" if subject.of_recipe else "")
    is_fused = "bfloat16" in cluster.device.peak_flops
    programs = tuple(modern_program(is_data_parallel=alone, has_fused_attention=is_fused) for alone in (True, False))
    layout = subject.layout
    is_split = layout.pipeline * layout.tensor * layout.context * layout.expert > 1
    layout = replace(layout, implementation=programs[is_split], library=library)
    if not always and any(checks.shape_problems(subject.description, layout, cluster, subject.global_batch)):
        return subject
    note = (
        "kernels and memory are those of published trainings, because hpcdist is not measured on "
        f"{cluster.device.name}: --implementation hpcdist plans its kernels anyway"
    )
    notes = *subject.notes, note, *unsupported(subject.layout)
    return replace(subject, layout=layout, notes=notes, programs=programs)


def _check_effect(layout: ParallelLayout, options: Mapping[str, Any]) -> None:
    for name, feature in (("main_gradients", "has_main_gradients"), ("gradient_fusion", "fuses_gradients")):
        kernels = KERNELS.get(layout.implementation)
        if options.get(name) is not None and kernels is not None and not getattr(kernels, feature):
            raise UsageError(
                f"{flag(name)} needs --implementation megatron-core or megatron-2022, and has no effect with "
                f"{layout.implementation}; leave {flag(name)} out, or choose one of the two"
            )
    for name in ("activations", "main_gradients"):
        if options.get(name) is not None and layout.precision not in HALVES:
            raise UsageError(
                f"{flag(name)} {options[name]} has no effect with the precision {layout.precision}; leave {flag(name)} "
                f"out, or choose --precision {' or '.join(HALVES)}"
            )


def _description(recipe: "Recipe", name: str, notes: list[str]) -> ModelDescription:
    from hpcdist.planner.model import transformer

    documents = None
    if recipe.model.kind in TRANSFORMERS:
        inputs = {"context": recipe.data.context}
        documents = _documents(recipe, notes) if recipe.data.packed else None
    elif recipe.model.kind == "mlp" and not recipe.data.paths:
        inputs = {"features": recipe.data.context, "classes": 256}  # predicts the next byte of a text
    elif recipe.model.kind in ("mlp", "convnet"):
        inputs = _source(recipe).inputs
    else:
        inputs = {}
    return replace(transformer.of_config(recipe.model, documents=documents, **inputs), name=name)


def _source(recipe: "Recipe") -> "Source":
    from hpcdist.comm.threads.communicator import solo
    from hpcdist.training.data.source import open_source

    return open_source(recipe.data, recipe.model, solo(), digests=False)


def _documents(recipe: "Recipe", notes: list[str]) -> "DocumentPairs | None":
    from hpcdist.models.counts import attention_pairs

    model, path = recipe.model, Path(recipe.data.path)
    try:
        if path.is_file() and path.stat().st_size > MOST_READ_BYTES:
            raise DataError(f"{path} is too large: a plan reads data of at most {format_bytes(MOST_READ_BYTES)}")
        documents = _source(recipe).documents
    except HpcdistError as error:
        notes.append(
            "data.packed: attention is planned over the whole context, its maximum, because the documents are "
            f"not known here: {error}"
        )
        return None
    assert documents is not None
    whole = attention_pairs(recipe.data.context, causal=model.kind == "gpt", window=model.window)
    notes.append(
        "data.packed: attention is planned within the documents of the data, which have "
        f"{documents.seen / whole:.1%} of the pairs of tokens of whole contexts"
    )
    return documents


def _steps(options: Mapping[str, Any], description: ModelDescription, recipe: Recipe) -> int:
    steps, tokens = recipe.run.steps, options.get("tokens")
    if options.get("steps") is not None and tokens is not None:
        raise UsageError(f"--steps {options['steps']} and --tokens {tokens:g} both set the length of the run; keep one")
    if tokens is not None:
        steps = max(1, math.ceil(tokens / (recipe.run.global_batch * description.tokens)))
    if steps > MAX_STEPS:
        length = f"--steps {steps}" if tokens is None else f"--tokens {tokens:g}"
        raise UsageError(f"{length} makes the run too long: a plan is made for at most {MAX_STEPS:,} steps")
    return int(steps)


def _by_name(options: Mapping[str, Any]) -> ModelDescription:
    from hpcdist.planner.model import transformer
    from hpcdist.planner.model.transformer import describe

    others = options_given(options, (name for name in SHAPE_OPTIONS if name != "context"))
    if others:
        raise UsageError(
            f"--model {options['model']} and {others[0]} both describe a model; keep one (only --context can be added "
            "to --model)"
        )
    path = Path(options["model"])
    if path.suffix == ".json" or path.is_dir():
        directory = path if path.is_dir() else path.parent
        shape, name = _in_directory(directory), directory.resolve().name
    else:
        shape, name = transformer.named(options["model"]), options["model"]
    if options.get("context") is not None:
        shape = replace(shape, context=options["context"])
    return describe(shape, name)


def _in_directory(directory: Path) -> TransformerShape:
    """Return the sizes of the model of Hugging Face in ``directory``. The context is the longest of the model."""
    from hpcdist.checkpoint.convert import families
    from hpcdist.planner.model import transformer

    config = families.read_config(directory)
    model = ModelConfig(**{"kind": "gpt", **families.model_keys(config)})
    shape = transformer.of_config(model, context=families.context_of(config)).shape
    assert shape is not None, "a gpt is a transformer"
    return shape


def _in_numbers(options: Mapping[str, Any]) -> ModelDescription:
    from hpcdist.planner.model.transformer import describe

    missing = [flag(name) for name in _REQUIRED_SHAPE if options.get(name) is None]
    if missing:
        raise UsageError(f"a model that is described by options also needs the options {', '.join(missing)}")
    if options.get("feed_forward") is not None and options.get("mlp_ratio") is not None:
        raise UsageError("--feed-forward and --mlp-ratio both set the inner width; keep one")
    if options.get("experts_per_token") is not None and options.get("experts") is None:
        raise UsageError(f"--experts-per-token {options['experts_per_token']} needs --experts, the number of experts")
    values = {name: options[name] for name in SHAPE_OPTIONS if options.get(name) is not None and name != "mlp_ratio"}
    if options.get("mlp_ratio") is not None:
        wide = options["mlp_ratio"] * options["hidden"]
        if not math.isclose(wide, round(wide)) or round(wide) < 1:
            raise UsageError(
                f"--mlp-ratio {options['mlp_ratio']:g} x --hidden {options['hidden']} = {wide:g} is not an integer; "
                "give an integer width with --feed-forward"
            )
        values["feed_forward"] = round(wide)
    shape = TransformerShape(**values)
    name = f"transformer {shape.layers} x {shape.hidden}"
    return describe(shape, name)
