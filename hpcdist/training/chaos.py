"""Chaos on purpose: where the executor and the saver of a run are replaced by others, to which things happen.

Where nothing is asked for, nothing is replaced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.checkpoint.saving.two_phase import group_of
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.training.chaos_config import ChaosConfig
from hpcdist.training.chaos_entries import Fault
from hpcdist.training.chaos_faults import Faults, FaultyExecutor
from hpcdist.training.chaos_slow import SlowedExecutor

if TYPE_CHECKING:
    from hpcdist.training.saving import Saver
    from hpcdist.training.trainer import Trainer


def executor(config: ChaosConfig, seat: RankContext, samples: int) -> Callable[..., Executor]:
    """Return what builds the executor of the rank in ``seat`` for batches of ``samples`` of all replicas (local)."""
    if not config.on:
        return Executor
    kind = FaultyExecutor if config.faults else SlowedExecutor
    return partial(kind, config, seat.world.rank, samples / seat.data.size)


def arm(trainer: "Trainer", saver: "Saver", directory: Path) -> None:
    """Let the faults of the recipe happen to ``trainer`` and ``saver`` in the run of ``directory``.

    Collective over the world. Raises ConfigurationError on all ranks where one of them could never happen.
    """
    recipe, comm = trainer.recipe, trainer.comm
    if not isinstance(trainer.executor, FaultyExecutor):
        return
    faults = Faults(recipe.chaos, comm.rank, directory)
    trainer.executor.arm(faults)
    saver.opens = faults.opens
    if any(fault.in_save for fault in recipe.chaos.faults):
        writes: list[bool] = comm.allgather_object(group_of(comm, recipe.checkpoint.writers).writes)
        _refuse(
            [fault for fault in recipe.chaos.faults if fault.in_save and not writes[fault.rank]],
            f"which writes nothing with checkpoint.writers = {recipe.checkpoint.writers!r}; those who write are "
            f"{[rank for rank, own in enumerate(writes) if own]}",
        )
    keeps: list[int] = comm.allgather_object(trainer.exchange.parameters.array.size)
    _refuse(
        [fault for fault in recipe.chaos.faults if fault.how == "parameters" and not keeps[fault.rank]],
        "which keeps no parameters in memory between steps; name another",
    )


def _refuse(faults: Sequence[Fault], why: str) -> None:
    """Raise ConfigurationError for the first of ``faults``, if any."""
    for fault in faults:
        raise ConfigurationError(f"chaos.{fault.kind} has {fault.rank}@{fault.step}: rank {fault.rank}, {why}")
