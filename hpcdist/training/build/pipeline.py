"""Pipeline of a recipe: its schedule, and the partition of the model into stages.

A measured partition is stored in checkpoints and reused on resume while the number of chunks is unchanged, because
another partition would change the rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint.restoring.restore import on_first_rank
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.model import Model
from hpcdist.optim.optimizer import state_vectors
from hpcdist.reporting import regular
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid, ShardingDegrees
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.tied import tied_tensors
from hpcdist.strategies.data.config import STAGES
from hpcdist.strategies.pipeline import costs as pipeline_measured
from hpcdist.strategies.pipeline.costs import PassSeconds
from hpcdist.strategies.pipeline.memory import StateBytes
from hpcdist.strategies.pipeline.plan import PartitionPlan, plan
from hpcdist.strategies.schedule import operation_list
from hpcdist.strategies.schedule.operation_list import ScheduleText, generated
from hpcdist.strategies.schedule.registry import FILE, SCHEDULES
from hpcdist.training import data
from hpcdist.training.build.model import build_model
from hpcdist.training.build.state_source import StateSource
from hpcdist.training.recipe.recipe import Recipe


def read_schedule(parallel: ParallelConfig, comm: Communicator) -> ScheduleText | None:
    """Return the schedule in the file ``parallel.schedule_file``, or None if no file is set. Collective."""
    if parallel.order != FILE:
        return None

    def text() -> str:
        try:
            return regular.text(parallel.schedule_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"parallel.schedule_file = {parallel.schedule_file!r} cannot be read: "
                f"{'' if isinstance(error, OSError) else 'not text: '}{error}; create a schedule file with `hpcdist "
                "schedule 1f1b --dump FILE`"
            ) from error

    read = on_first_rank(comm, text)
    schedule = operation_list.read(read, parallel.pipeline, parallel.microbatches, parallel.schedule_file)
    if parallel.recompute and schedule.keeps:
        raise ConfigurationError(
            f"parallel.recompute = true with parallel.schedule_file = {parallel.schedule_file!r}: the passes in this "
            "file need stored activations; set parallel.recompute = false, or use a schedule file with 'placement = "
            "looped' and only the passes F and B"
        )
    return schedule


def check_exchange(
    parallel: ParallelConfig, schedule: ScheduleText | None, context: RankContext, *, accumulates: bool
) -> None:
    """Raise ConfigurationError if the strategy would reduce gradients before the gradients are complete. Local.

    ``schedule``: schedule that `read_schedule` returned, or None for the generated schedule of the recipe.
    """
    # ``accumulates``: the strategy adds up the gradients of all micro-batches before it reduces them.
    if not accumulates and tied_tensors(context.model, context.placed):
        raise ConfigurationError(
            f"model.tied = true with parallel.pipeline = {parallel.pipeline} and parallel.strategy = "
            f"{parallel.strategy!r}: this strategy reduces gradients after each micro-batch, but the gradient of tied "
            "parameters is complete only at the end of a step; set zero.keep_gradients = true, or parallel.strategy = "
            "'allreduce' or 'zero1'"
        )
    splits = SCHEDULES[parallel.order].splits if schedule is None else schedule.splits
    if not accumulates and splits:
        raise ConfigurationError(
            f"parallel.schedule = {parallel.schedule!r} with parallel.strategy = {parallel.strategy!r}: this strategy "
            "reduces gradients after each micro-batch, but this schedule splits backward passes of several "
            "micro-batches; set zero.keep_gradients = true, or use a parallel.schedule that does not split backward "
            "passes, such as '1f1b'"
        )


STAGE_UNITS = "stage_units"  # key in the scalars of a checkpoint


def plan_partition(
    comm: Communicator,
    recipe: Recipe,
    grid: ProcessGrid,
    whole: Model,
    local_model: Model,
    schedule: ScheduleText | None,
    origin: StateSource | None,
    documents: DocumentPairs | None,
) -> PartitionPlan | None:
    """Return the assignment of layers to pipeline stages, or None if there is only one stage. Collective.

    ``whole``: unsharded model. ``local_model``: this rank's shard of the model. ``documents``: mean number of query-key
    pairs in packed samples, or None. ``origin``: checkpoint to resume from, or None. A measured assignment in the
    checkpoint is reused if the number of stages is unchanged. Local unless parallel.partition = "measured".
    """
    parallel = recipe.parallel
    order = schedule or generated(parallel.order, parallel.pipeline, parallel.microbatches, parallel.chunks)
    if grid.pipeline * order.chunks == 1:
        return None
    earlier_units: tuple[int, ...] = ()
    seconds: Sequence[PassSeconds] | None = None
    samples = -(-recipe.run.global_batch // (grid.data * parallel.microbatches))  # in the largest micro-batch
    if parallel.partition == "measured":
        earlier_units = _checkpointed_partition(origin, len(whole.stages), grid.pipeline * order.chunks)
        speeds = parallel.stage_speeds or (1,) * grid.pipeline
        speed = speeds[grid.coordinates(comm.rank)["pipeline"]]
        measured = pipeline_measured.measure(local_model, samples, recipe.run.device)
        seconds = pipeline_measured.agree(comm, measured, speed)
    kinds = model_state_bytes(recipe, grid.replicas, splits=order.splits)
    return plan(
        whole, parallel, order, kinds, samples, seconds=seconds, earlier_units=earlier_units, documents=documents
    )


def plan_without_mpi(recipe: Recipe) -> PartitionPlan:
    """Return the assignment of layers to pipeline stages for ``recipe``, in a process without MPI.

    Raises UsageError if there is only one stage.
    """
    parallel, comm = recipe.parallel, solo()
    source = data.open_source(recipe.data, recipe.model, comm, digests=False)
    whole = build_model(recipe, recipe.precision.computes, source.inputs)
    degrees = {axis: getattr(parallel, axis) for axis in ("pipeline", "tensor", "context")}
    grid = ProcessGrid(data=max(1, parallel.data), **degrees)
    schedule = read_schedule(parallel, comm)
    partition = plan_partition(comm, recipe, grid, whole, whole, schedule, None, source.documents)
    if partition is None:
        raise UsageError(
            f"parallel.pipeline = {parallel.pipeline}: there is only one stage, so the model is not partitioned; "
            "choose a recipe with a pipeline, or add --set parallel.pipeline=2"
        )
    return partition


def partition_scalars(recipe: Recipe, plan: PartitionPlan | None) -> dict[str, list[int]]:
    """Return a dict of checkpoint scalars that store ``plan``, or {} unless the partition was measured. Local."""
    return {STAGE_UNITS: list(plan.stage_units)} if plan and recipe.parallel.partition == "measured" else {}


def model_state_bytes(recipe: Recipe, replicas: int, *, splits: bool = False) -> StateBytes:
    """Return a `StateBytes`: the memory of parameters, gradients and optimizer state on one rank.

    ``replicas``: number of ranks over which ZeRO may shard the state.
    """
    # ``splits``: the schedule computes input gradients and weight gradients in separate passes.
    master = np.dtype(recipe.precision.computes).itemsize
    working = recipe.precision.working
    itemsize = master if working is None else dtype_of(working).itemsize
    slots = state_vectors(recipe.optimizer)
    stage = STAGES.get(recipe.parallel.strategy)
    degrees = ShardingDegrees(1, 1, 1) if stage is None else recipe.zero.degrees(stage, replicas)
    state_bytes = StateBytes.of(recipe.zero, degrees, itemsize, master * (slots + (working is not None)))
    per_parameter = state_bytes.per_parameter + _compression_state_bytes(recipe, replicas)
    if working is None:
        return replace(state_bytes, per_parameter=per_parameter)
    # A split backward keeps float32 gradients between its two passes, in the worst case of all units.
    return replace(state_bytes, per_parameter=per_parameter + (master if splits else 0), widened=master)


def _compression_state_bytes(recipe: Recipe, replicas: int) -> float:
    name, itemsize = recipe.communication.compression, np.dtype(np.float32).itemsize
    if name == "dgc":
        return itemsize  # the residual; the velocity belongs to the optimizer
    if name == "onebit":
        return itemsize + itemsize / replicas  # residuals of the worker, and of the share it sums
    fed_back = name != "none" and recipe.compression.error_feedback
    return itemsize * (1 if recipe.precision.working is None else 2) * fed_back


def _checkpointed_partition(origin: StateSource | None, units: int, chunks: int) -> tuple[int, ...]:
    if origin is None:
        return ()
    stage_units = tuple(map(int, origin.scalars.get(STAGE_UNITS, ())))
    return stage_units if len(stage_units) == chunks and sum(stage_units) == units else ()
