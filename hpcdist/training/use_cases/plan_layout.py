"""Layout of a plan: `layout_of` computes it from a recipe, and `given_values` reads the keys of the command line.

The planner sees only the layout. Settings that the layout cannot express become notes.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.planner.kernels import RENAMED
from hpcdist.planner.layout import (
    COMPRESSIONS,
    OPTION_KEYS,
    PARAMETER_SERVER,
    PLANNER_OPTIONS,
    STRATEGIES,
    ParallelLayout,
)
from hpcdist.strategies.config import resolve_context_method
from hpcdist.strategies.schedule.registry import FILE, SCHEDULES, chunks_of
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings

if TYPE_CHECKING:
    from hpcdist.planner.model.description import TransformerShape
    from hpcdist.training.recipe.recipe import Recipe

# Compressors of a recipe -> the planner's compressor that sends as much.
_PLANNED_COMPRESSION: Final = {
    "float16": "bfloat16",
    "adaptive": "int8",
    "qsgd": "int8",
    "sign": "onebit",
    "randomk": "topk",
    "dgc": "topk",
}
_PLANNED_ALGORITHMS: Final = {
    "ring": "ring",
    "ring_bidirectional": "ring",
    "double_tree": "tree",
    "hierarchical": "hierarchical",
    "node_shared": "hierarchical",
}
# Algorithms that move rows of experts in another way than planned -> the planned way.
_PLANNED_ROWS: Final = {
    "native": "as with 'auto'",
    "node_shared": "in messages, also within a node",
}
_STRATEGY: Final = OPTION_KEYS["strategy"]  # also the key that --servers implies


@dataclass
class GivenValues:
    """Values that the command line sets, as {recipe key: value} and {layout field: value}."""

    keys: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of layout fields that no recipe key sets


def options_given(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a list of flags, such as --tensor, of the option ``names`` that have a value in ``options``."""
    return [flag(name) for name in names if options.get(name) is not None]


def flag(name: str) -> str:
    """Return the command-line flag of the option ``name``, such as --kv-heads for kv_heads."""
    return f"--{name.replace('_', '-')}"


def given_values(overrides: Iterable[str], options: Mapping[str, Any]) -> GivenValues:
    """Return the `GivenValues` of the command line. Raises ConfigurationError or UsageError.

    ``overrides``: values of --set. ``options``: values of the other options, by option name.
    """
    given = GivenValues(settings.overrides(overrides, recipes.known_keys()).values)
    for key, value in given.keys.items():
        recipes.check_value(key, value)
    given.fields = {name: options[name] for name in PLANNER_OPTIONS if options.get(name) is not None}
    if (program := given.fields.get("implementation")) in RENAMED:
        given.fields["implementation"] = RENAMED[program]
    setters: dict[str, str] = {}
    for name, text in _option_texts(options).items():
        key = OPTION_KEYS.get(name, _STRATEGY)
        try:
            value = settings.overrides([f"{key}={text}"], recipes.known_keys(), flag(name)).values[key]
            recipes.check_value(key, value)
        except ConfigurationError as error:
            raise UsageError(f"{flag(name)} {options[name]} is invalid: {error}") from None
        if key in setters and given.keys[key] != value:
            _refuse_contradiction(setters[key], name, options, value)
        given.keys[key], setters[key] = value, name
    return given


def _option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: str(options[name]) for name in OPTION_KEYS if options.get(name) is not None}
    if "zero" in texts:
        texts["zero"] = "allreduce" if texts["zero"] == "0" else f"zero{texts['zero']}"
    if texts.get("algorithm") == "tree":
        texts["algorithm"] = "double_tree"
    if options.get("servers") is not None:
        texts["servers"] = PARAMETER_SERVER
    return texts


def _refuse_contradiction(first: str, second: str, options: Mapping[str, Any], value: str) -> None:
    if second == "servers":
        raise UsageError(
            f"--servers {options['servers']} needs --strategy {PARAMETER_SERVER}, but {flag(first)} {options[first]} "
            "is given; keep one of the two options"
        )
    raise UsageError(
        f"{flag(second)} {options[second]} means --strategy {value}, which contradicts {flag(first)} "
        f"{options[first]}; keep one of the two options"
    )


def with_keys(recipe: "Recipe", values: Mapping[str, Any]) -> "Recipe":
    """Return a copy of ``recipe`` with ``values``, {recipe key: new value}. Rules between keys are not checked."""
    changed = copy.copy(recipe)
    for key, value in values.items():
        name, _, attribute = key.partition(".")
        section = copy.copy(getattr(changed, name))
        object.__setattr__(section, attribute, value)
        object.__setattr__(changed, name, section)
    return changed


def layout_of(
    recipe: "Recipe", replaced_fields: Mapping[str, Any], notes: list[str], devices: int | None = None
) -> ParallelLayout:
    """Return the `ParallelLayout` of ``recipe``. Raises HpcdistError.

    ``replaced_fields``: layout fields set by the user. ``notes``: list to which texts about ignored settings are
    appended. ``devices``: number of devices, or None.
    """
    from hpcdist.optim.optimizer import state_vectors

    parallel = recipe.parallel
    pipeline, order = parallel.pipeline, parallel.order
    chunks = chunks_of(order, parallel.chunks) if pipeline > 1 and order in SCHEDULES else 1
    layout = ParallelLayout(
        data=max(1, parallel.data),
        pipeline=pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        expert=parallel.expert,
        strategy=parallel.strategy,
        servers=_servers(recipe, notes),
        schedule="1f1b" if pipeline == 1 and order == "sequential" else order,
        chunks=chunks,
        recompute="full" if parallel.recompute else "none",
        sequence_parallel=parallel.sequence_parallel,
        precision=recipe.precision.mode,
        main_gradients="working",
        activations=recipe.precision.activations,
        optimizer_slots=state_vectors(recipe.optimizer),
        compression=_compression(recipe, notes),
        algorithm=_algorithm(recipe, notes),
        overlap=0.0 if recipe.communication.overlap == "none" else 1.0,
    )
    layout = replace(layout, **replaced_fields)
    layout = replace(layout, data=_replicas(parallel.data, layout, devices))
    if "microbatch" in replaced_fields:
        return layout
    return replace(layout, microbatch=max(1, -(-recipe.run.global_batch // (layout.data * parallel.microbatches))))


def refuse_unplannable(recipe: "Recipe") -> None:
    """Raise ConfigurationError if the strategy or schedule of ``recipe`` cannot be planned."""
    parallel = recipe.parallel
    if parallel.strategy not in STRATEGIES:
        raise ConfigurationError(
            f"parallel.strategy = {parallel.strategy!r} cannot be planned: its time depends on how far the replicas "
            f"drift apart, for which there is no formula; choose one of {', '.join(STRATEGIES)}"
        )
    if parallel.order == FILE:
        raise ConfigurationError(
            f"parallel.schedule = 'file' ({parallel.schedule_file}) cannot be planned; choose a named schedule, or "
            "examine the file with `hpcdist schedule --file`"
        )


def _replicas(data: int, layout: ParallelLayout, devices: int | None) -> int:
    devices_of_replica = layout.pipeline * layout.tensor * layout.context
    if devices is None:
        return layout.data
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


def _servers(recipe: "Recipe", notes: list[str]) -> int:
    servers = recipe.parameter_server
    if recipe.parallel.strategy != "parameter_server":
        return 0
    if not servers.lock_step:
        notes.append(f"parameter servers ({servers.described}) are planned as if all workers stepped together")
    if servers.placement == "colocated" and servers.servers:
        notes.append(f"parameter_server.servers = {servers.servers}: planned as if every rank served")
    if servers.transport != type(servers).transport:
        notes.append(f"parameter_server.transport = {servers.transport!r} is not in the plan")
    if servers.placement == "colocated" or not recipe.parallel.has_roles:
        return 0
    return servers.servers or 1


def _compression(recipe: "Recipe", notes: list[str]) -> str:
    name = recipe.communication.compression
    if name == "auto":
        notes.append("communication.compression = 'auto' is measured at the start: planned without")
        return "none"
    if name == "qsgd" and recipe.compression.bits == 4:
        return "int4"
    planned = name if name in COMPRESSIONS else _PLANNED_COMPRESSION[name]
    if planned != name:
        notes.append(f"communication.compression = {name!r} is planned as {planned}, which sends about as much")
    for item in fields(recipe.compression):
        value = getattr(recipe.compression, item.name)
        if value != item.default and item.name != "error_feedback":
            notes.append(f"compression.{item.name} = {value!r} is not in the plan")
    return planned


def _algorithm(recipe: "Recipe", notes: list[str]) -> str:
    algorithm = recipe.communication.algorithm
    if algorithm not in _PLANNED_ALGORITHMS and algorithm not in ("auto", "native"):
        notes.append(f"communication.algorithm = {algorithm!r} is planned as the fastest algorithm of the planner")
    if recipe.parallel.expert > 1 and algorithm in _PLANNED_ROWS:
        notes.append(f"communication.algorithm = {algorithm!r}: rows of experts are planned {_PLANNED_ROWS[algorithm]}")
    return _PLANNED_ALGORITHMS.get(algorithm, "auto")


def note_unplanned_keys(recipe: "Recipe", shape: "TransformerShape | None", notes: list[str]) -> None:
    """Append a text to the list ``notes`` for each key of ``recipe`` that a plan ignores.

    ``shape``: sizes of the transformer, or None for other models.
    """
    for item in fields(recipe.zero):
        value = getattr(recipe.zero, item.name)
        if value != item.default and item.name != "offload_directory":
            notes.append(f"zero.{item.name} = {value!r} is not in the plan")
    parallel = recipe.parallel
    if parallel.partition != "flops" or parallel.stage_units or parallel.stage_speeds:
        notes.append("parallel.partition: stages are planned with the default partition")
    if parallel.context > 1 and shape is not None:
        ring = recipe.precision.activations != "working"
        heads = [count // parallel.tensor for count in (shape.heads, shape.kv_heads or shape.heads)]
        planned, chosen = (
            resolve_context_method(method, parallel.context, *heads, ring=ring)
            for method in ("auto", parallel.context_method)
        )
        if chosen != planned:
            notes.append(f"parallel.context_method = {chosen!r} is planned as {planned}, which sends less")
    if recipe.run.logical_shards:
        notes.append(f"run.logical_shards = {recipe.run.logical_shards}: the cost of fixed summation is left out")
    if recipe.communication.delayed:
        notes.append("communication.delayed: planned as if a sum had to end within its own step")
