"""Plan subject of a recipe: the description of its model, its layout, and notes.

Recipes that the planner cannot describe (asynchronous replicas, schedules from a file) are rejected.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hpcdist.errors import ConfigurationError, DataError, HpcdistError
from hpcdist.models.config import TRANSFORMERS
from hpcdist.planner.layout import COMPRESSIONS, STRATEGIES, ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.reporting.units import format_bytes
from hpcdist.strategies.config import resolve_context_method
from hpcdist.strategies.schedule.registry import FILE

if TYPE_CHECKING:
    from hpcdist.models.counts import DocumentPairs
    from hpcdist.training.data.source import Source
    from hpcdist.training.recipe.recipe import Recipe

MOST_READ_BYTES: Final = 1 << 30  # largest data file read for the lengths of documents

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


@dataclass(frozen=True, kw_only=True)
class PlanSubject:
    """Input of a plan: model, layout, global batch and steps. ``notes``: texts about settings that the plan ignores."""

    description: ModelDescription
    layout: ParallelLayout
    global_batch: int
    steps: int
    notes: tuple[str, ...] = ()
    kernels: str | None = None  # requested implementation
    of_recipe: bool = False  # True if hpcdist will train it


def plan_of_recipe(recipe: "Recipe", name: str) -> PlanSubject:
    """Return ``recipe`` as input of a plan. ``name``: title of the plan. ``parallel.data`` = 0 counts as one replica.

    Raises ConfigurationError if the planner does not support the recipe, and DataError if its data is unreadable.
    """
    _refuse(recipe)
    notes: list[str] = []
    layout = _layout(recipe, notes)
    _note_unplanned_keys(recipe, notes)
    batch = recipe.run.global_batch
    if recipe.run.batch_warmup:
        notes.append(f"run.batch_warmup: all steps are planned with the {batch} samples of the last ones")
    steps, description = recipe.run.steps, _description(recipe, name, notes)
    return PlanSubject(
        description=description, layout=layout, global_batch=batch, steps=steps, notes=tuple(notes), of_recipe=True
    )


def _refuse(recipe: "Recipe") -> None:
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


def _description(recipe: "Recipe", name: str, notes: list[str]) -> ModelDescription:
    from hpcdist.planner.model import transformer

    documents = None
    if recipe.model.kind in TRANSFORMERS:
        inputs = {"context": recipe.data.context}
        documents = _documents(recipe, notes) if recipe.data.packed else None
    elif recipe.model.kind == "mlp" and not recipe.data.path:
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


def _layout(recipe: "Recipe", notes: list[str]) -> ParallelLayout:
    parallel, batch = recipe.parallel, recipe.run.global_batch
    data = max(1, parallel.data)
    microbatch = -(-batch // (data * parallel.microbatches))
    return ParallelLayout(
        data=data,
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        expert=parallel.expert,
        strategy=parallel.strategy,
        servers=_servers(recipe, notes),
        microbatch=microbatch,
        schedule="1f1b" if parallel.order == "sequential" else parallel.order,
        chunks=parallel.chunks_each if parallel.pipeline > 1 else 1,
        recompute="full" if parallel.recompute else "none",
        sequence_parallel=parallel.sequence_parallel,
        precision=recipe.precision.mode,
        main_gradients="working",
        activations=recipe.precision.activations,
        optimizer_slots=_slots(recipe),
        compression=_compression(recipe, notes),
        algorithm=_algorithm(recipe, notes),
        overlap=0.0 if recipe.communication.overlap == "none" else 1.0,
    )


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


def _slots(recipe: "Recipe") -> int:
    from hpcdist.optim.optimizer import OPTIMIZERS

    optimizer = recipe.optimizer
    if optimizer.name == "sgd" and not optimizer.momentum:
        return 0
    return len(OPTIMIZERS[optimizer.name].slot_names)


def _note_unplanned_keys(recipe: "Recipe", notes: list[str]) -> None:
    for item in fields(recipe.zero):
        value = getattr(recipe.zero, item.name)
        if value != item.default and item.name != "offload_directory":
            notes.append(f"zero.{item.name} = {value!r} is not in the plan")
    parallel = recipe.parallel
    if parallel.partition != "flops" or parallel.stage_units or parallel.stage_speeds:
        notes.append("parallel.partition: stages are planned with the default partition")
    ring = recipe.precision.activations != "working"
    heads = [count // parallel.tensor for count in (recipe.model.heads, recipe.model.kv_heads or recipe.model.heads)]
    planned, chosen = (
        resolve_context_method(method, parallel.context, *heads, ring=ring)
        for method in ("auto", parallel.context_method)
    )
    if parallel.context > 1 and chosen != planned:
        notes.append(f"parallel.context_method = {chosen!r} is planned as {planned}, which sends less")
    if recipe.run.logical_shards:
        notes.append(f"run.logical_shards = {recipe.run.logical_shards}: the cost of fixed summation is left out")
    if recipe.communication.delayed:
        notes.append("communication.delayed: planned as if a sum had to end within its own step")
