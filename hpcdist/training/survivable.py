"""What a job that outlives its ranks can keep, and what it says when it did."""

from hpcdist.arrays.sizes import counted
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.training import architecture
from hpcdist.training.config import written
from hpcdist.training.origin import Origin
from hpcdist.training.recipe import Recipe
from hpcdist.training.team import Change
from hpcdist.training.trainer import Trainer


def check(recipe: Recipe, mode: str, spares: int) -> None:
    """Raise ConfigurationError where nobody could go on with the state of a rank, or on its device (local)."""
    if recipe.run.device == "gpu" and mode == "replace" and not spares:
        raise ConfigurationError(
            "run.device = 'gpu' with --survive replace: which GPU a new process should use is not known in this "
            "version; add --spares N, ranks that have theirs from the start, or choose --survive shrink"
        )
    parallel, servers = recipe.parallel, recipe.parameter_server
    served = parallel.strategy == "parameter_server"
    if parallel.strategy in DECENTRALISED:
        raise ConfigurationError(
            f"parallel.strategy = {parallel.strategy!r} with --survive: each replica has parameters of its own, and "
            "those of a dead rank are gone; choose another strategy, or --restarts"
        )
    if served and not servers.lock_step:
        raise ConfigurationError(
            f"parameter_server.consistency = {servers.consistency!r}"
            f"{f', backup_workers = {servers.backup_workers}' if servers.backup_workers else ''} with --survive: ranks "
            "that share no step have no common state to go back to; choose bsp without backup workers, or --restarts"
        )
    if recipe.communication.compression != "none":
        raise ConfigurationError(
            f"communication.compression = {recipe.communication.compression!r} with --survive is not built in this "
            "version: what compression has lost on a dead rank is nowhere else; set it to 'none', or use --restarts"
        )
    if recipe.compression.parameters != "none":
        raise ConfigurationError(
            f"compression.parameters = {recipe.compression.parameters!r} with --survive is not built in this version; "
            "set it to 'none', or use --restarts"
        )
    for key, given, refused, other in (
        ("parameter_server.transport", servers.transport if served else "", "rma", "messages"),
        ("zero.offload_optimizer", recipe.zero.offload_optimizer, "file", "none"),
        ("zero.offload_parameters", recipe.zero.offload_parameters, "file", "none"),
    ):
        if given == refused:
            raise ConfigurationError(
                f"{key} = {written(given)} with --survive is not built in this version; set it to {written(other)}, or "
                "use --restarts"
            )


def told(change: Change, trainer: Trainer, origin: Origin | None, seconds: float) -> str:
    """Return what happened between two lives, for people (local)."""
    happened = []
    if change.lost:
        plural = "s" if len(change.lost) > 1 else ""
        happened.append(f"rank{plural} {', '.join(map(str, change.lost))} died")
    if change.added:
        happened.append(f"{change.added} new process{'es' if change.added > 1 else ''} started")
    grid, source = trainer.grid, "the beginning" if origin is None else str(origin)
    return (
        f"{' and '.join(happened) or 'the ranks met anew'}: on {counted(trainer.comm.size, 'rank')}, "
        f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor}; {architecture.described(trainer)}; "
        f"after {trainer.first_step} steps, from {source}, in {seconds:.2f} s"
    )
