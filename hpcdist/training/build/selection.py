"""Selection of the collective algorithm and the gradient compression of a run.

A resume on the same number of ranks keeps the stored choice, and so the same bits. HPCDIST_TUNING=off disables
measurements.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hpcdist import collectives
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.collectives import autotune, nccl
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.models.model import Model
from hpcdist.strategies import build as parameter_server
from hpcdist.strategies.compressed.autoselect import NONE, CompressionDecision, decide
from hpcdist.strategies.core import logical_shards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data.config import STAGES
from hpcdist.training.build.state_source import StateSource
from hpcdist.training.recipe.recipe import Recipe

AUTO: Final = "auto"
DEADLINE_SHARE: Final = 0.25  # largest fraction of communication.deadline_s for the time budget of a measurement


@dataclass(frozen=True)
class AlgorithmSelection:
    """Collective algorithm of a run, and the source of the choice, such as the recipe or a measurement."""

    algorithm: str
    source: str  # "recipe", "checkpoint", "measured", "cache" (an earlier measurement) or "default"
    ranks_per_node: tuple[int, ...]
    seconds: float = 0.0  # duration of the measurement
    note: str = ""  # for the log

    def described(self) -> str:
        """Return a log line that explains the choice of algorithm, or "" if the recipe sets the algorithm. Local."""
        text = {
            "checkpoint": "kept from the checkpoint",
            "cache": "measured in an earlier start",
            "measured": f"measured in {self.seconds:.1f} s",
            "default": "not measured",
        }
        chosen = f"communication.algorithm = auto: {self.algorithm}, {text[self.source]}" if self.source in text else ""
        return "; ".join(filter(None, (chosen, self.note)))


def resolve_algorithm(
    session: Session, recipe: Recipe, model: Model, data: Communicator, origin: StateSource | None
) -> AlgorithmSelection:
    """Return the algorithm for gradient reduction over the communicator ``data``. Collective over the world.

    All ranks get the same result. ``origin``: checkpoint to resume from, or None. Raises ConfigurationError or
    MissingCapabilityError if this run cannot use the recipe's algorithm.
    """
    comm, requested = session.comm, recipe.communication.algorithm
    nodes = tuple(len(members) for members in comm.nodes().members)
    if recipe.run.logical_shards:
        return AlgorithmSelection(logical_shards.ALGORITHM, "recipe", nodes)
    if requested != AUTO:
        _refuse_on_cpu(requested, recipe.run.device, data)
        _refuse_over_nodes(requested, recipe.communication.ranks_per_node, comm, data)
        return AlgorithmSelection(requested, "recipe", nodes)
    kind = autotune.SHARDED_KIND if recipe.parallel.strategy.startswith("zero") else autotune.ALLREDUCE_KIND
    served = recipe.parallel.strategy == "parameter_server"
    server_algorithms = parameter_server.server_algorithms(recipe.parameter_server) if served else None

    def is_usable(name: str) -> bool:
        if _needs_gpus(name):
            return recipe.run.device == "gpu" and not (data.size > 1 and nccl.refusal(data))
        return name in server_algorithms if server_algorithms is not None else autotune.usable(name, kind, len(nodes))

    checkpointed, note = _checkpointed_algorithm(comm, nodes, is_usable, origin)
    if checkpointed:
        return AlgorithmSelection(checkpointed, "checkpoint", nodes)
    if served or tuning_is_off(comm):
        return AlgorithmSelection(autotune.NATIVE, "default", nodes, note=note)
    tuned = autotune.select(data, comm, _tuning_request(recipe, model, data, kind), session.library)
    collectives.release(data)  # free the memory of the algorithms that were not chosen
    seconds = tuned.seconds if tuned.source == "measured" else 0.0
    return AlgorithmSelection(tuned.text, tuned.source, nodes, seconds, "; ".join(filter(None, [note, tuned.note])))


def _refuse_on_cpu(algorithm: str, on: str, data: Communicator) -> None:
    if not _needs_gpus(algorithm):
        return
    if on != "gpu":
        raise ConfigurationError(
            f"communication.algorithm = {algorithm} needs GPUs, but run.device = {on}; set run.device = 'gpu', or "
            "choose another communication.algorithm"
        )
    reason = nccl.refusal(data) if data.size > 1 else ""
    if reason:
        raise MissingCapabilityError(reason)


def _refuse_over_nodes(algorithm: str, declared: int, comm: Communicator, data: Communicator) -> None:
    inside = set(autotune.ONE_NODE) & _algorithm_names(algorithm)
    nodes = max(comm.allgather_object(data.nodes().count)) if inside else 1
    if nodes > 1:
        according_to_recipe = f", with communication.ranks_per_node = {declared}" if declared else ""
        alternative = ", or set communication.ranks_per_node = 0 if they are on one node" if declared else ""
        raise ConfigurationError(
            f"communication.algorithm = {algorithm}: {', '.join(inside)} works only within one node, but the ranks "
            f"that hold the same parameters are on {nodes} nodes{according_to_recipe}; set communication.algorithm to "
            f"hierarchical or auto{alternative}"
        )


def _algorithm_names(algorithm: str) -> set[str]:
    return {row.partition("<=")[0] for row in algorithm.split(",")}


def _needs_gpus(algorithm: str) -> bool:
    return bool(collectives.ON_GPUS.keys() & _algorithm_names(algorithm))


def _checkpointed_algorithm(
    comm: Communicator, nodes: tuple[int, ...], is_usable: Callable[[str], bool], origin: StateSource | None
) -> tuple[str, str]:
    if origin is None:
        return "", ""
    scalars = origin.scalars
    before, algorithm = scalars.get("ranks_per_node"), str(scalars.get("algorithm", ""))
    if not algorithm:
        return "", ""
    if scalars.get("world") != comm.size or (before is not None and tuple(before) != nodes):
        was_for = f"{scalars.get('world')} ranks" if before is None else f"nodes of {_nodes_text(before)} ranks"
        return "", f"{algorithm} of the checkpoint was for {was_for}, now there are {_nodes_text(nodes)}: chosen again"
    if not is_usable(algorithm):
        return "", f"{algorithm} of the checkpoint is not usable in this run: chosen again"
    return algorithm, ""


def _nodes_text(nodes: tuple[int, ...] | list[int]) -> str:
    return " + ".join(map(str, nodes))


def tuning_is_off(comm: Communicator) -> bool:
    """Return True if HPCDIST_TUNING is "off" on rank 0. Collective. Raises ConfigurationError for an invalid value."""
    switch = comm.broadcast_object(os.environ.get(autotune.TUNING, "on"))
    if switch not in ("on", "off"):
        raise ConfigurationError(
            f"the environment variable {autotune.TUNING} = {switch!r} is invalid; set {autotune.TUNING} to 'on' or "
            "'off'"
        )
    return bool(switch == "off")


def _tuning_request(recipe: Recipe, model: Model, data: Communicator, kind: str) -> autotune.TuningRequest:
    dtype, layout = dtype_of(recipe.precision.mode), model.layout
    parts = len(layout.units) if kind == autotune.SHARDED_KIND else 1
    # Rounded up, so that similar models share measurements.
    nbytes = 1 << (max(1, layout.size * dtype.itemsize // parts) - 1).bit_length()
    on_gpu = recipe.run.device == "gpu"
    return autotune.TuningRequest(
        kind=kind,
        max_bytes=nbytes if kind == autotune.SHARDED_KIND else min(nbytes, recipe.communication.bucket_bytes),
        dtype=dtype,
        buffer="device" if on_gpu else "shared",
        allocate=None if on_gpu else lambda size: shared_memory.allocate(data, size, dtype),
        budget_s=min(autotune.BUDGET_S, DEADLINE_SHARE * recipe.communication.deadline_s),
    )


def resolve_compression(context: RankContext, recipe: Recipe, origin: StateSource | None) -> CompressionDecision:
    """Return the decision about gradient compression, which is the same on all ranks. Collective over the world.

    ``origin``: checkpoint to resume from, or None. If the recipe sets "auto", a resume on the same number of ranks
    keeps the compressor of the checkpoint.
    """
    configured = recipe.communication.compression
    if configured != AUTO:
        return CompressionDecision(configured, "recipe")
    checkpointed = _checkpointed_compression(context, recipe, origin)
    if checkpointed is not None:
        return CompressionDecision(checkpointed, "checkpoint")
    if tuning_is_off(context.world):
        return CompressionDecision(NONE, "default", note="not measured")
    halved = recipe.parallel.strategy in STAGES  # gradients are reduce-scattered, without an all-gather
    return decide(context, recipe.compression, recipe.run.seed, halved=halved)


def _checkpointed_compression(context: RankContext, recipe: Recipe, origin: StateSource | None) -> str | None:
    if origin is None or origin.scalars.get("world") != context.world.size:
        return None
    name = origin.scalars.get("compression")
    return str(name) if name in (NONE, *recipe.compression.candidates) else None
