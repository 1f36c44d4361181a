"""Subject of a plan from options: a model, its layout, its batch and its steps.

Layout options replace the recipe's values. For GPUs without measurements, the kernels of published trainings (Megatron)
are planned, because estimates were validated only with these kernels.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.constants import HALVES
from hpcdist.errors import StorageError, UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import LAYOUT_FIELDS, PARAMETER_SERVER, ParallelLayout
from hpcdist.planner.limits import checks
from hpcdist.planner.limits.unsupported import unsupported
from hpcdist.planner.model.description import ModelDescription, TransformerShape
from hpcdist.planner.report.text import ONE_REPLICA
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.training.use_cases.recipe_plan import PlanSubject, plan_of_recipe

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe

# Options of `hpcdist plan`: of a transformer in numbers (mlp_ratio is an alternative to feed_forward), and of the run.
_SHAPE_FIELDS: Final = tuple(item.name for item in dataclasses.fields(TransformerShape) if item.name != "dropout")
SHAPE_OPTIONS: Final = (*_SHAPE_FIELDS, "mlp_ratio")
RUN_OPTIONS: Final = ("model", "devices", "batch", "steps", "tokens")
DEFAULT_STEPS: Final = 1000  # length of a run if no option sets it
MAX_STEPS: Final = 10**12  # larger values are typing errors
_OWN_RULES: Final = ("zero", "strategy", "servers", "data")  # options that set fields together with others
_REQUIRED_SHAPE: Final = ("layers", "hidden", "heads", "vocabulary", "context")


def options_given(options: Mapping[str, Any], names: Iterable[str] = LAYOUT_FIELDS) -> list[str]:
    """Return the command-line flags (such as --tensor) of the options in ``names`` that the user has set."""
    return [flag(name) for name in names if options.get(name) is not None]


def flag(name: str) -> str:
    """Return the command-line flag of the option ``name``, e.g. --kv-heads for kv_heads."""
    return f"--{name.replace('_', '-')}"


def layout_from_options(options: Mapping[str, Any], base: ParallelLayout) -> ParallelLayout:
    """Return the parallel layout ``base``, changed by ``options`` of `hpcdist plan`.

    Raises UsageError for contradictory options, or if the product of the degrees is not the number of devices.
    """
    plain = {name: field for name, field in LAYOUT_FIELDS.items() if name not in _OWN_RULES}
    values = {field: options[name] for name, field in plain.items() if options.get(name) is not None}
    layout = dataclasses.replace(base, **values, **strategy_from_options(options, base))
    _check_pipeline(layout, options)
    _check_effect(layout, options)
    layout = dataclasses.replace(layout, chunks=_chunks(layout))
    if layout.sequence_parallel and layout.tensor == 1:
        raise UsageError(
            "--sequence-parallel with one tensor device has no effect; leave --sequence-parallel out, or give "
            "--tensor 2 or more"
        )
    return dataclasses.replace(layout, data=_replicas(options, layout))


def strategy_from_options(options: Mapping[str, Any], base: ParallelLayout) -> dict[str, Any]:
    """Return a dict with the layout fields "strategy" and "servers", or {} if no option sets them. Raises UsageError.

    ``base``: layout before the options. It gives the number of servers if ``options`` set the same strategy.
    """
    stage, strategy, servers = options.get("zero"), options.get("strategy"), options.get("servers")
    if stage is not None:
        meant = f"zero{stage}" if stage else "allreduce"
        if strategy not in (None, meant):
            raise UsageError(
                f"--zero {stage} means --strategy {meant}, which contradicts --strategy {strategy}; keep one of the "
                "two options"
            )
        strategy = meant
    if servers is not None:
        if strategy not in (None, PARAMETER_SERVER):
            given_option = f"--zero {stage}" if stage is not None else f"--strategy {strategy}"
            raise UsageError(
                f"--servers {servers} needs --strategy {PARAMETER_SERVER}, but {given_option} is given; keep one of "
                "the two options"
            )
        strategy = PARAMETER_SERVER
    if strategy is None:
        return {}
    default_servers = base.servers if strategy == base.strategy else 0
    return {"strategy": strategy, "servers": default_servers if servers is None else servers}


def _check_pipeline(layout: ParallelLayout, options: Mapping[str, Any]) -> None:
    if layout.pipeline == 1:
        for name in ("schedule", "chunks"):
            if options.get(name) not in (None, 1, "sequential"):
                raise UsageError(
                    f"{flag(name)} {options[name]} with one pipeline device has no effect; leave {flag(name)} out, or "
                    "give --pipeline 2 or more"
                )


def _chunks(layout: ParallelLayout) -> int:
    row, chunks = SCHEDULES[layout.schedule], layout.chunks
    if layout.pipeline == 1:
        return 1
    if row.most is None and chunks < row.least:
        raise UsageError(
            f"--schedule {layout.schedule} needs --chunks, the number of model chunks per stage; give at least "
            f"{row.least}"
        )
    if row.most is not None and chunks not in (1, row.most):
        raise UsageError(
            f"--chunks is {chunks}, but for --schedule {layout.schedule} the number of chunks per stage is {row.most}; "
            "leave --chunks out, or use --schedule interleaved"
        )
    return chunks if row.most is None else row.most


def _check_effect(layout: ParallelLayout, options: Mapping[str, Any]) -> None:
    for name in ("main_gradients", "gradient_fusion"):
        if options.get(name) is not None and layout.implementation != "megatron":
            raise UsageError(
                f"{flag(name)} needs --implementation megatron, and has no effect with {layout.implementation}; leave "
                f"{flag(name)} out, or choose --implementation megatron"
            )
    for name in ("activations", "main_gradients"):
        if options.get(name) is not None and layout.precision not in HALVES:
            raise UsageError(
                f"{flag(name)} {options[name]} has no effect with the precision {layout.precision}; leave {flag(name)} "
                f"out, or choose --precision {' or '.join(HALVES)}"
            )


def _replicas(options: Mapping[str, Any], layout: ParallelLayout) -> int:
    devices, data = options.get("devices"), options.get("data")
    devices_of_replica = layout.pipeline * layout.tensor * layout.context
    if devices is None:
        return data or layout.data
    workers = devices - layout.servers
    replicas = data or workers // devices_of_replica
    if replicas < 1 or replicas * devices_of_replica != workers:
        servers = f" + servers {layout.servers}" if layout.servers else ""
        degrees = f"pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}"
        product = f"data {data or '?'} x {degrees}{servers}"
        nearest = data or max(1, workers // devices_of_replica)  # number of replicas
        near = nearest * devices_of_replica + layout.servers
        raise UsageError(
            f"--devices {devices} does not fit the degrees {product}; the nearest possible number of devices is {near}"
        )
    return int(replicas)


def with_published_kernels(subject: PlanSubject, on: Cluster, *, always: bool = False) -> PlanSubject:
    """Return ``subject`` with Megatron's published kernel speed and memory if cluster ``on`` was not measured."""
    # Only for transformers on GPUs for which the user chose no kernels. Layouts that Megatron does not support are
    # changed only with ``always``.
    is_measured = on.calibrated or not on.device.is_accelerator
    if is_measured or subject.kernels is not None or subject.description.shape is None:
        return subject
    library = subject.layout.library or ("mpi" if subject.of_recipe else "")
    layout = dataclasses.replace(subject.layout, implementation="megatron", library=library)
    if not always and any(checks.shape_problems(subject.description, layout, on, subject.global_batch)):
        return subject
    note = (
        f"kernels and memory are those of published trainings, because hpcdist is not measured on {on.device.name}: "
        "--implementation hpcdist plans its kernels anyway"
    )
    return dataclasses.replace(subject, layout=layout, notes=(*subject.notes, note, *unsupported(subject.layout)))


def subject_from_options(path: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]) -> PlanSubject:
    """Return the model, layout and batch to plan, from the recipe file ``path``, or from a model in ``options``.

    ``overrides``: changes of the recipe. Raises UsageError for contradictory options, and ConfigurationError for an
    unsupported model.
    """
    # Without recipe and model, the default recipe is used. UsageError: contradictory or missing options.
    # ConfigurationError: the recipe or model cannot be planned. StorageError: the recipe file is missing.
    named = options.get("model") is not None
    numbers = options_given(options, SHAPE_OPTIONS)
    if path is not None and (named or numbers):
        raise UsageError(
            f"the recipe {path} and {'--model' if named else numbers[0]} both describe a model; keep one of them "
            "(--set model.KEY=VALUE changes the recipe's model)"
        )
    if not (named or numbers):
        from hpcdist.training.recipe import recipe as recipes

        if path is not None and not path.exists():
            raise StorageError(f"recipe {path}: there is no such file; correct the path")
        recipe = recipes.load(path, overrides).recipe
        return subject_of_recipe(recipe, "the default recipe" if path is None else path.stem, options)
    if overrides:
        raise UsageError(
            f"--set {overrides[0]} changes a recipe, but no recipe is given; give a recipe file, or leave --set out"
        )
    description = _by_name(options) if named else _in_numbers(options)
    if options.get("batch") is None:
        raise UsageError("give --batch, the global number of samples per step; without a recipe it has no default")
    steps, notes = _steps(options, description, options["batch"])
    base = ParallelLayout()
    if options.get("data") is None and options.get("devices") is None:
        notes += (ONE_REPLICA,)
    return PlanSubject(
        description=description,
        layout=layout_from_options(options, base),
        global_batch=options["batch"],
        steps=DEFAULT_STEPS if steps is None else steps,
        notes=notes,
        kernels=options.get("implementation"),
    )


def read_cluster(named: str | None) -> Cluster:
    """Return the cluster of this name, or from the file of this path. Raises UsageError if ``named`` is None."""
    from hpcdist.planner.cluster import toml_file

    if named is None:
        raise UsageError(f"give --cluster NAME (one of {', '.join(toml_file.names())}), or --cluster FILE")
    return toml_file.read(named)


def subject_of_recipe(recipe: "Recipe", name: str, options: Mapping[str, Any]) -> PlanSubject:
    """Return model, layout and batch of ``recipe``, changed by command-line ``options``. ``name``: plan title."""
    planned = plan_of_recipe(recipe, name)
    batch = options.get("batch") or planned.global_batch
    layout = layout_from_options(options, planned.layout)
    if options.get("microbatch") is None:  # a recipe has the number of micro-batches, not their size
        many = recipe.parallel.microbatches
        layout = dataclasses.replace(layout, microbatch=max(1, math.ceil(batch / (layout.data * many))))
    steps, _ = _steps(options, planned.description, batch)
    notes = list(planned.notes)
    if not (recipe.parallel.data or options.get("data") or options.get("devices")):
        notes.append(ONE_REPLICA)
    steps, kernels = planned.steps if steps is None else steps, options.get("implementation")
    return dataclasses.replace(
        planned, layout=layout, global_batch=batch, steps=steps, notes=tuple(notes), kernels=kernels
    )


def _steps(options: Mapping[str, Any], description: ModelDescription, batch: int) -> tuple[int | None, tuple[str, ...]]:
    steps, tokens = options.get("steps"), options.get("tokens")
    if steps is not None and tokens is not None:
        raise UsageError(f"--steps {steps} and --tokens {tokens:g} both set the length of the run; keep one")
    if tokens is not None:
        steps = max(1, math.ceil(tokens / (batch * description.tokens)))
    if steps is not None and steps > MAX_STEPS:
        given_option = f"--steps {steps}" if tokens is None else f"--tokens {tokens:g}"
        raise UsageError(f"{given_option} makes the run too long: a plan is made for at most {MAX_STEPS:,} steps")
    if steps is not None:
        return int(steps), ()
    return None, (f"neither --steps nor --tokens is given: the run is planned with {DEFAULT_STEPS} steps",)


def _by_name(options: Mapping[str, Any]) -> ModelDescription:
    from hpcdist.planner.model import transformer
    from hpcdist.planner.model.transformer import describe

    others = options_given(options, (name for name in SHAPE_OPTIONS if name != "context"))
    if others:
        raise UsageError(
            f"--model {options['model']} and {others[0]} both describe a model; keep one (only --context can be added "
            "to --model)"
        )
    shape = transformer.named(options["model"])
    if options.get("context") is not None:
        shape = dataclasses.replace(shape, context=options["context"])
    return describe(shape, options["model"])


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
