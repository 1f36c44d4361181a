"""What the keys of ``[parallel]`` that cut a model into stages may be. Light: imports nothing but the errors."""

from collections.abc import Sequence
from typing import Final

from hpcdist.errors import ConfigurationError

PARTITIONS: Final = ("parameters", "flops", "measured")
DEFAULT: Final = "flops"


def check_partition(
    pipeline: int,
    partition: str,
    stage_units: Sequence[int],
    stage_speeds: Sequence[int],
    stage_memory_bytes: Sequence[int],
) -> None:
    """Raise ConfigurationError where a key is wrong, or would be ignored (local)."""
    if partition not in PARTITIONS:
        raise ConfigurationError(f"parallel.partition = {partition!r}; choose one of {', '.join(PARTITIONS)}")
    lists = {"stage_units": stage_units, "stage_speeds": stage_speeds, "stage_memory_bytes": stage_memory_bytes}
    changed = {name: list(given) for name, given in lists.items() if given}
    if pipeline == 1 and (changed or partition != DEFAULT):
        name, given = next(iter(changed.items()), ("partition", repr(partition)))
        raise ConfigurationError(
            f"parallel.{name} = {given} has no effect with parallel.pipeline = 1, where one rank has all units; remove "
            "it, or use several pipeline ranks"
        )
    for name, given in changed.items():
        least = 0 if name == "stage_memory_bytes" else 1
        if min(given) < least:
            raise ConfigurationError(f"parallel.{name} = {given}; each must be at least {least}")
    if stage_units and (partition != DEFAULT or stage_speeds):
        name = "stage_speeds" if stage_speeds else "partition"
        raise ConfigurationError(
            f"parallel.{name} has no effect with parallel.stage_units = {list(stage_units)}, which cuts by hand; "
            "remove one of them"
        )
    if stage_speeds and len(stage_speeds) != pipeline:
        raise ConfigurationError(
            f"parallel.stage_speeds = {list(stage_speeds)} for parallel.pipeline = {pipeline}; give one for each "
            "pipeline rank, relative to each other, as [2, 1] where the first is twice as fast"
        )
    if stage_memory_bytes and len(stage_memory_bytes) not in (1, pipeline):
        raise ConfigurationError(
            f"parallel.stage_memory_bytes = {list(stage_memory_bytes)} for parallel.pipeline = {pipeline}; give one "
            "number for all pipeline ranks, or one for each, 0 for no limit"
        )
