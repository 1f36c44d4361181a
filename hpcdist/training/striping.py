"""Before a run saves for the first time, its directory of checkpoints is spread over the servers of its file system."""

from collections.abc import Callable
from pathlib import Path

from hpcdist.checkpoint import stripe
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.comm.communicator import Communicator


def prepare(
    comm: Communicator, directory: Path, config: CheckpointConfig, state_bytes: int, say: Callable[[str], None]
) -> None:
    """Stripe ``directory``, made when missing, for ``state_bytes`` of each rank. Collective over ``comm``.

    Rank 0 does, and ``say``s the command. When it fails, that is said, and the run goes on: files then have the stripes
    that the site gives them.
    """
    wanted = config.stripe != "none" and comm.rank == 0 and stripe.file_system(directory).striped
    if not comm.broadcast_object(wanted):
        return
    total = sum(comm.allgather_object(state_bytes))
    writers = int(config.writers) if config.writers.isdecimal() else comm.size
    if config.writers == "node":
        writers = comm.nodes().count
    if comm.rank > 0:
        return
    plan = stripe.plan(directory, total, min(writers, comm.size), config.stripe)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # the save will say so
    failure = stripe.apply(plan)
    say(f"stripes of the checkpoints: {plan.text} ({plan.why})")
    if failure:
        say(f"warning: {failure}; checkpoints have the stripes that the file system gives them")
