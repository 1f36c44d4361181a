"""Which algorithm a run reduces with, and where that comes from: the recipe, the checkpoint, or a measurement."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hpcdist import collectives
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.tuning import autotune
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.models.model import Model
from hpcdist.strategies import build as parameter_server
from hpcdist.strategies.core import logical_shards
from hpcdist.training.origin import Origin
from hpcdist.training.recipe import Recipe

AUTO: Final = "auto"
TUNING: Final = "HPCDIST_TUNING"  # "off": `auto` is the MPI library's own, and nothing is measured
DEADLINE_SHARE: Final = 0.25  # of communication.deadline_s: the most that a measurement may aim to take


@dataclass(frozen=True)
class Selection:
    """The algorithm of a run. ``source`` is "recipe", "checkpoint", "cache", "measured" or "default".

    ``seconds`` is what choosing took in this start. ``ranks_per_node`` is the topology that it was chosen for.
    """

    algorithm: str
    source: str
    ranks_per_node: tuple[int, ...]
    seconds: float = 0.0
    note: str = ""

    def described(self) -> str:
        """Return what a log says of a choice, "" where there was none (local)."""
        ways = {
            "checkpoint": "kept from the checkpoint",
            "cache": "measured in an earlier start",
            "measured": f"measured in {self.seconds:.1f} s",
            "default": "not measured",
        }
        lines = (
            [f"communication.algorithm = auto: {self.algorithm}, {ways[self.source]}"] if self.source in ways else []
        )
        return "; ".join([*lines, self.note] if self.note else lines)


def resolve(session: Session, recipe: Recipe, model: Model, data: Communicator, origin: Origin | None) -> Selection:
    """Return what the ranks of ``data`` reduce gradients with, the same on all ranks. Collective over the world."""
    comm, wanted = session.comm, recipe.communication.algorithm
    nodes = tuple(len(members) for members in comm.nodes().members)
    if recipe.run.logical_shards:
        return Selection(logical_shards.ALGORITHM, "recipe", nodes)
    if wanted != AUTO:
        _refuse_on_cpu(wanted, recipe.run.device, data)
        _refuse_over_nodes(wanted, recipe.communication.ranks_per_node, comm, data)
        return Selection(wanted, "recipe", nodes)
    kind = autotune.SHARDED_KIND if recipe.parallel.strategy.startswith("zero") else autotune.ALLREDUCE_KIND
    served = recipe.parallel.strategy == "parameter_server"
    known = parameter_server.server_algorithms(recipe.parameter_server) if served else None

    def is_usable(name: str) -> bool:
        if _needs_gpus(name):
            return recipe.run.device == "gpu" and not (data.size > 1 and nccl.refusal(data))
        return name in known if known is not None else autotune.usable(name, kind, len(nodes))

    kept, note = _kept(comm, nodes, is_usable, origin)
    if kept:
        return Selection(kept, "checkpoint", nodes)
    if served or is_off(comm):
        return Selection(autotune.NATIVE, "default", nodes, note=note)
    found = autotune.select(data, comm, _wanted(recipe, model, data, kind), session.library)
    collectives.release(data)  # what is not chosen keeps no memory
    seconds = found.seconds if found.source == "measured" else 0.0
    return Selection(found.text, found.source, nodes, seconds, "; ".join(filter(None, [note, found.note])))


def _refuse_on_cpu(wanted: str, on: str, data: Communicator) -> None:
    """Raise, on all ranks, if ``wanted`` is for GPUs and cannot run on these, before the first step. Collective."""
    if not _needs_gpus(wanted):
        return
    if on != "gpu":
        raise ConfigurationError(
            f"communication.algorithm = {wanted} is for GPUs, and run.device = {on}; set run.device = 'gpu', or choose "
            "another algorithm"
        )
    reason = nccl.refusal(data) if data.size > 1 else ""
    if reason:
        raise MissingCapabilityError(reason)


def _refuse_over_nodes(wanted: str, declared: int, comm: Communicator, data: Communicator) -> None:
    """Raise, on all ranks of ``comm``, if ``wanted`` needs one node and any has more. Collective over both."""
    inside = set(autotune.ONE_NODE) & _names(wanted)
    nodes = max(comm.allgather_object(data.nodes().count)) if inside else 1
    if nodes > 1:
        cause = f", with communication.ranks_per_node = {declared}" if declared else ""
        other = ", or set communication.ranks_per_node = 0 if they are on one" if declared else ""
        raise ConfigurationError(
            f"communication.algorithm = {wanted}: {', '.join(inside)} works inside one node, and the ranks that reduce "
            f"together are on {nodes}{cause}; choose hierarchical, or auto{other}"
        )


def _names(algorithm: str) -> set[str]:
    """Return the algorithms that ``algorithm`` names, alone or in a table (local)."""
    return {row.partition("<=")[0] for row in algorithm.split(",")}


def _needs_gpus(algorithm: str) -> bool:
    """Whether ``algorithm``, or a row of it where it is a table, is for GPUs alone (local)."""
    return bool(collectives.ON_GPUS.keys() & _names(algorithm))


def _kept(
    comm: Communicator, nodes: tuple[int, ...], is_usable: Callable[[str], bool], origin: Origin | None
) -> tuple[str, str]:
    """Return the algorithm of the checkpoint; or "", and why it is not kept (local)."""
    if origin is None:
        return "", ""
    scalars = origin.scalars
    before, algorithm = scalars.get("ranks_per_node"), str(scalars.get("algorithm", ""))
    if not algorithm:
        return "", ""
    if scalars.get("world") != comm.size or (before is not None and tuple(before) != nodes):
        said = f"{scalars.get('world')} ranks" if before is None else f"nodes of {_listed(before)} ranks"
        return "", f"{algorithm} of the checkpoint was for {said}, and these are {_listed(nodes)}: chosen anew"
    if not is_usable(algorithm):
        return "", f"{algorithm} of the checkpoint is no algorithm of this run: chosen anew"
    return algorithm, ""


def _listed(nodes: tuple[int, ...] | list[int]) -> str:
    return " + ".join(map(str, nodes))


def is_off(comm: Communicator) -> bool:
    """Whether rank 0 was told not to measure. Collective. Raises ConfigurationError on all ranks for another word."""
    said = comm.broadcast_object(os.environ.get(TUNING, "on"))
    if said not in ("on", "off"):
        raise ConfigurationError(f"{TUNING} = {said!r}; set it to 'on' or 'off'")
    return bool(said == "off")


def _wanted(recipe: Recipe, model: Model, data: Communicator, kind: str) -> autotune.TuningRequest:
    """Return what buffers the run will reduce: sizes are rounded up to a power of two, so that like models share."""
    dtype, layout = dtype_of(recipe.precision.mode), model.layout
    parts = len(layout.units) if kind == autotune.SHARDED_KIND else 1
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
