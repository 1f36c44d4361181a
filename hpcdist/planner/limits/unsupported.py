"""Layouts that are possible, but that this version of hpcdist cannot run.

Where a configuration class of a recipe knows, it is asked: what becomes possible there becomes possible here.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.optim.config import OptimizerConfig
from hpcdist.planner.layout import ParallelLayout
from hpcdist.strategies.compressed import config
from hpcdist.strategies.compressed.config import LOW_RANK, OPTIMIZING, CompressionConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.zero.config import STAGES, ZeroConfig

Reasons = tuple[str, ...]
_SELECTIVE: Final = (
    "recompute = 'selective' is not built in this version: attention is computed in tiles, and its scores again in any "
    "case; choose 'none' or 'full'"
)


def unsupported(layout: ParallelLayout) -> Reasons:
    """Return what hpcdist itself cannot run of a layout that is possible; nothing where it runs (local)."""
    if layout.implementation == "megatron":
        return ()  # the estimate is of another program
    overlap = layout.overlap if layout.data > 1 else 0.0
    return (
        *_degrees(layout.context, layout.expert),
        *_pipeline(layout.pipeline, layout.strategy, layout.schedule, layout.chunks, layout.recompute),
        *_tensor(layout.tensor, layout.strategy, layout.sequence_parallel),
        *_servers(layout.strategy, layout.servers, layout.pipeline, layout.tensor, overlap),
        *_compressor(layout.compression, layout.strategy, layout.precision),
        *_compressed(
            layout.compression,
            layout.tensor,
            layout.sequence_parallel,
            layout.precision,
            overlap,
            layout.strategy == "parameter_server",
        ),
    )


def _refusal(check: Callable[[], object]) -> Reasons:
    """Return the text of the ConfigurationError that ``check`` raises, () where it raises none."""
    try:
        check()
    except ConfigurationError as error:
        return (str(error),)
    return ()


@lru_cache(maxsize=1024)
def _degrees(context: int, expert: int) -> Reasons:
    reasons = _refusal(lambda: ParallelConfig(context=context))
    if expert > 1:
        reasons += (f"expert = {expert} is not built in this version; set it to 1",)
    return reasons


@lru_cache(maxsize=4096)
def _pipeline(pipeline: int, strategy: str, schedule: str, chunks: int, recompute: str) -> Reasons:
    reasons = _refusal(
        lambda: ParallelConfig(
            pipeline=pipeline,
            strategy=strategy,
            schedule=schedule if pipeline > 1 else "auto",
            chunks=chunks,
            microbatches=pipeline,  # as many as any schedule asks for: the batch is another matter
            recompute=recompute == "full",
        )
    )
    if recompute == "selective":
        reasons += (_SELECTIVE,)
    return reasons


@lru_cache(maxsize=1024)
def _tensor(tensor: int, strategy: str, sequence_parallel: bool) -> Reasons:
    return _refusal(lambda: ParallelConfig(tensor=tensor, strategy=strategy, sequence_parallel=sequence_parallel))


@lru_cache(maxsize=1024)
def _servers(strategy: str, servers: int, pipeline: int, tensor: int, overlap: float) -> Reasons:
    if strategy != "parameter_server":
        return ()
    placement = "dedicated" if servers else "colocated"
    reasons = _refusal(
        lambda: ParameterServerConfig(servers=servers, placement=placement).check_beside(pipeline, tensor)
    )
    if overlap > 0:
        reasons += (f"overlap = {overlap} with a parameter server: pushes wait for the backward in this version",)
    return reasons


@lru_cache(maxsize=1024)
def _compressor(name: str, strategy: str, precision: str) -> Reasons:
    if name == "none":
        return ()
    reasons: Reasons = ()
    if name in OPTIMIZING:
        optimizer = OptimizerConfig(name="adamw" if config.MOMENTUM_OPTIMIZERS[name] == "adamw" else "sgd")
        reasons += _refusal(
            lambda: config.check_momentum_compressor(
                name, CompressionConfig(warmup_steps=1), optimizer, strategy=strategy, mode=precision
            )
        )
    if strategy in STAGES:
        reasons += _refusal(lambda: ZeroConfig().check_compressed(name))
    if strategy == "parameter_server":
        reasons += _refusal(lambda: ParameterServerConfig().check_compressed(name, "auto", across_nodes=False))
    return reasons


@lru_cache(maxsize=1024)
def _compressed(
    name: str, tensor: int, sequence_parallel: bool, precision: str, overlap: float, served: bool
) -> Reasons:
    """Return what a recipe's check of compression refuses beside the strategy."""
    if name == "none":
        return ()
    asked = f"compression = {name!r}"
    reasons: list[str] = []
    if sequence_parallel:
        reasons.append(f"{asked} with sequence_parallel: parts of gradients are summed over the tensor axis only later")
    if precision == "float64":
        reasons.append(f"{asked} with precision = 'float64' is not built in this version: what is encoded is float32")
    if tensor > 1 and name in LOW_RANK:
        reasons.append(f"{asked} with tensor = {tensor}: its factors are of whole tensors, and each device has a part")
    if overlap > 0 and not served:
        reasons.append(
            f"{asked} with overlap = {overlap}: nothing compressed travels behind a backward in this version"
        )
    return tuple(reasons)
