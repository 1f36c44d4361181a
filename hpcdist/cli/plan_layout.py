"""The options of `hpcdist plan` that lay a training out, made into a `Layout`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from hpcdist.cli.plan_options_layout import LAYOUT_OPTIONS, RENAMED
from hpcdist.errors import UsageError
from hpcdist.planner.layout import HALVES, ParallelLayout
from hpcdist.reporting.units import counted
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

SERVED: Final = "parameter_server"


def given(options: Mapping[str, Any], names: tuple[str, ...] = LAYOUT_OPTIONS) -> list[str]:
    """Return those of the options ``names`` that were given, as they are written."""
    return [flag(name) for name in names if options.get(name) is not None]


def flag(name: str) -> str:
    """Return an option as it is written: --kv-heads."""
    return f"--{name.replace('_', '-')}"


def laid_out(options: Mapping[str, Any], base: ParallelLayout) -> ParallelLayout:
    """Return ``base`` with what the options say in its place, and as many replicas as --devices leaves.

    Raises UsageError where the options contradict each other, or the degrees do not make up the devices.
    """
    plain = {name for name in LAYOUT_OPTIONS if name not in ("zero", "strategy", "servers", "data")}
    values = {RENAMED.get(name, name): options[name] for name in plain if options.get(name) is not None}
    found = dataclasses.replace(base, **values, **strategy_of(options, base))
    _check_pipeline(found, options)
    _check_effect(found, options)
    found = dataclasses.replace(found, chunks=_chunks(found))
    if found.sequence_parallel and found.tensor == 1:
        raise UsageError(
            "--sequence-parallel with one tensor device cuts nothing; leave it out, or give --tensor 2 or more"
        )
    return dataclasses.replace(found, data=_replicas(options, found))


def strategy_of(options: Mapping[str, Any], base: ParallelLayout) -> dict[str, Any]:
    """Return the fields strategy and servers where the options say them. Raises UsageError for contradictions."""
    stage, strategy, servers = options.get("zero"), options.get("strategy"), options.get("servers")
    if stage is not None:
        meant = f"zero{stage}" if stage else "allreduce"
        if strategy not in (None, meant):
            raise UsageError(f"--zero {stage} is --strategy {meant}, and --strategy {strategy} is given; keep one")
        strategy = meant
    if servers is not None:
        if strategy not in (None, SERVED):
            said = f"--zero {stage}" if stage is not None else f"--strategy {strategy}"
            raise UsageError(f"--servers {servers} is for --strategy {SERVED}, and {said} is given; keep one")
        strategy = SERVED
    if strategy is None:
        return {}
    kept = base.servers if strategy == base.strategy else 0
    return {"strategy": strategy, "servers": kept if servers is None else servers}


def _check_pipeline(found: ParallelLayout, options: Mapping[str, Any]) -> None:
    """Raise UsageError for a schedule or chunks that have no effect, where they were asked for."""
    if found.pipeline == 1:
        for name in ("schedule", "chunks"):
            if options.get(name) not in (None, 1, "sequential"):
                raise UsageError(
                    f"{flag(name)} {options[name]} with one pipeline device has no effect; leave it out, or give "
                    "--pipeline 2 or more"
                )


def _chunks(found: ParallelLayout) -> int:
    """Return how many parts of the model a stage has. Raises UsageError where the schedule has others."""
    row, asked = SCHEDULES[found.schedule], found.chunks
    if found.pipeline == 1:
        return 1
    if row.most is None and asked < row.least:
        raise UsageError(
            f"--schedule {found.schedule} needs --chunks, parts of the model on each stage; give {row.least} or more"
        )
    if row.most is not None and asked not in (1, row.most):
        raise UsageError(
            f"--chunks {asked} with --schedule {found.schedule}, which has {row.most}; leave it out, or try interleaved"
        )
    return asked if row.most is None else row.most


def _check_effect(found: ParallelLayout, options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that would change nothing."""
    for name in ("main_gradients", "gradient_fusion"):
        if options.get(name) is not None and found.implementation != "megatron":
            raise UsageError(
                f"{flag(name)} is of --implementation megatron, and has no effect with {found.implementation}; leave "
                "it out, or choose that one"
            )
    for name in ("activations", "main_gradients"):
        if options.get(name) is not None and found.precision not in HALVES:
            raise UsageError(
                f"{flag(name)} {options[name]} has no effect with the precision {found.precision}; leave it out, or "
                f"choose --precision {' or '.join(HALVES)}"
            )


def _replicas(options: Mapping[str, Any], found: ParallelLayout) -> int:
    """Return the degree of the data axis. Raises UsageError, with the whole equation."""
    devices, data = options.get("devices"), options.get("data")
    each = found.pipeline * found.tensor * found.context
    if devices is None:
        return data or found.data
    workers = devices - found.servers
    replicas = data or workers // each
    if replicas < 1 or replicas * each != workers:
        servers = f" + servers {found.servers}" if found.servers else ""
        product = (
            f"data {data or '?'} x pipeline {found.pipeline} x tensor {found.tensor} x context {found.context}{servers}"
        )
        least, lower = each * (data or 1) + found.servers, max(1, workers // each) * each + found.servers
        near = least if data else lower
        raise UsageError(
            f"--devices {devices}: {product} does not make {counted(devices, 'device')}; the nearest that it makes is "
            f"{near}"
        )
    return int(replicas)
