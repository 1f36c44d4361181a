"""Pipeline of a recipe: its schedule, and the partition of the model into stages.

The order of the passes comes from a named schedule or a file. A partition by parameters or operations follows from
the recipe and, where samples are packed, from the documents of its data. A measured one is kept in checkpoints, and by
a start that goes on from one, as long as it has as many chunks: sums over the ranks of a pipeline would round
differently. Also asked by `hpcdist schedule`, without MPI.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpcdist import models
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint.restoring.restore import on_first_rank
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.model import Model
from hpcdist.optim.optimizer import OPTIMIZERS
from hpcdist.reporting import regular
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline import costs as pipeline_measured
from hpcdist.strategies.pipeline.costs import PassSeconds
from hpcdist.strategies.pipeline.memory import StateBytes
from hpcdist.strategies.pipeline.plan import PartitionPlan, plan
from hpcdist.strategies.pipeline.tied import tied_tensors
from hpcdist.strategies.schedule.generate import operation_list
from hpcdist.strategies.schedule.generate.operation_list import ScheduleText, generated
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES
from hpcdist.strategies.zero.config import STAGES, ShardingDegrees
from hpcdist.training import data
from hpcdist.training.build.state_source import StateSource
from hpcdist.training.recipe.recipe import Recipe


def read_schedule(parallel: ParallelConfig, comm: Communicator) -> ScheduleText | None:
    """Return the schedule of ``parallel.schedule_file``, None where the schedule has a name. Collective.

    One rank reads the file. Raises ConfigurationError, on all ranks, where it cannot be read, or is no schedule of this
    pipeline.
    """
    if parallel.order != FILE:
        return None

    def text() -> str:
        try:
            return regular.text(parallel.schedule_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"parallel.schedule_file = {parallel.schedule_file!r} cannot be read: "
                f"{'' if isinstance(error, OSError) else 'not text: '}{error}; write one with "
                "`hpcdist schedule 1f1b --dump FILE`"
            ) from error

    read = on_first_rank(comm, text)
    schedule = operation_list.read(read, parallel.pipeline, parallel.microbatches, parallel.schedule_file)
    if parallel.recompute and schedule.keeps:
        raise ConfigurationError(
            f"parallel.recompute = true with parallel.schedule_file = {parallel.schedule_file!r}, which is folded or "
            "splits backwards: what its chunks need stays in memory; set it to false, or make it looped, of F and B"
        )
    return schedule


def check_exchange(
    parallel: ParallelConfig, schedule: ScheduleText | None, context: RankContext, *, accumulates: bool
) -> None:
    """Raise ConfigurationError where gradients would be exchanged before they are complete (local)."""
    if not accumulates and tied_tensors(context.model, context.placed):
        raise ConfigurationError(
            f"model.tied = true with parallel.pipeline = {parallel.pipeline} and parallel.strategy = "
            f"{parallel.strategy!r}: the last stage adds to the gradient of the first once a step, and gradients are "
            "reduced after each micro-batch; set zero.keep_gradients = true, or choose allreduce or zero1"
        )
    splits = SCHEDULES[parallel.order].splits if schedule is None else schedule.splits
    if not accumulates and splits:
        raise ConfigurationError(
            f"parallel.schedule = {parallel.schedule!r} with parallel.strategy = {parallel.strategy!r}: the gradients "
            "of several micro-batches are under way at once where a backward is split, and cannot be reduced one by "
            "one; set zero.keep_gradients = true, or choose a schedule that does not split, as 1f1b"
        )


STAGE_UNITS = "stage_units"  # among the scalars of a checkpoint


def plan_partition(
    comm: Communicator,
    recipe: Recipe,
    grid: ProcessGrid,
    whole: Model,
    own: Model,
    schedule: ScheduleText | None,
    origin: StateSource | None,
    documents: DocumentPairs | None,
) -> PartitionPlan | None:
    """Return the partition of the ``whole`` model, the same on all ranks; None where it is one part.

    Collective over ``comm``, the world, where it is measured, in samples of one document: this rank has ``own`` of the
    model. ``schedule`` is that of a file, ``documents`` the pairs of packed samples. Raises ConfigurationError, on all
    ranks.
    """
    parallel = recipe.parallel
    order = schedule or generated(parallel.order, parallel.pipeline, parallel.microbatches, parallel.chunks)
    if grid.pipeline * order.chunks == 1:
        return None
    earlier_units: tuple[int, ...] = ()
    seconds: Sequence[PassSeconds] | None = None
    samples = -(-recipe.run.global_batch // (grid.data * parallel.microbatches))  # of the largest micro-batch
    if parallel.partition == "measured":
        earlier_units = _checkpointed_partition(origin, len(whole.stages), grid.pipeline * order.chunks)
        speeds = parallel.stage_speeds or (1,) * grid.pipeline
        speed = speeds[grid.coordinates(comm.rank)["pipeline"]]
        measured = pipeline_measured.measure(own, samples, recipe.run.device)
        seconds = pipeline_measured.agree(comm, measured, speed)
    kinds = model_state_bytes(recipe, grid.replicas, splits=order.splits)
    return plan(
        whole, parallel, order, kinds, samples, seconds=seconds, earlier_units=earlier_units, documents=documents
    )


def plan_without_mpi(recipe: Recipe) -> PartitionPlan:
    """Return the partition of a recipe where no MPI runs (local). Without ``parallel.data`` there is one replica.

    What is measured is measured here, for one rank that has all of every tensor. Raises UsageError where the recipe has
    one stage.
    """
    parallel, comm = recipe.parallel, solo()
    source = data.open_source(recipe.data, recipe.model, comm, digests=False)
    whole = models.build(recipe.model, recipe.precision.computes, **source.inputs)
    degrees = {axis: getattr(parallel, axis) for axis in ("pipeline", "tensor", "context")}
    grid = ProcessGrid(data=max(1, parallel.data), **degrees)
    schedule = read_schedule(parallel, comm)
    partition = plan_partition(comm, recipe, grid, whole, whole, schedule, None, source.documents)
    if partition is None:
        raise UsageError(
            f"parallel.pipeline = {parallel.pipeline}: there is one stage, and nothing is cut; choose a recipe with a "
            "pipeline, or add --set parallel.pipeline=2"
        )
    return partition


def partition_scalars(recipe: Recipe, plan: PartitionPlan | None) -> dict[str, list[int]]:
    """Return the scalars of a partition that does not follow from the recipe, {} of others (local)."""
    return {STAGE_UNITS: list(plan.stage_units)} if plan and recipe.parallel.partition == "measured" else {}


def model_state_bytes(recipe: Recipe, replicas: int, *, splits: bool = False) -> StateBytes:
    """Return the bytes of state that a rank keeps of each parameter on ``replicas`` data ranks (local).

    ``splits``: backwards are done in two passes.
    """
    master = np.dtype(recipe.precision.computes).itemsize
    working = recipe.precision.working
    itemsize = master if working is None else dtype_of(working).itemsize
    optimizer = recipe.optimizer
    slots = len(OPTIMIZERS[optimizer.name].slot_names) if optimizer.name != "sgd" or optimizer.momentum else 0
    stage = STAGES.get(recipe.parallel.strategy)
    degrees = ShardingDegrees(1, 1, 1) if stage is None else recipe.zero.degrees(stage, replicas)
    state_bytes = StateBytes.of(recipe.zero, degrees, itemsize, master * (slots + (working is not None)))
    each = state_bytes.per_parameter + _compression_state_bytes(recipe, replicas)
    if working is None:
        return replace(state_bytes, per_parameter=each)
    # Between the passes of a split backward gradients are float32, of any unit at its worst.
    return replace(state_bytes, per_parameter=each + (master if splits else 0), widened=master)


def _compression_state_bytes(recipe: Recipe, replicas: int) -> float:
    """Return the bytes that compression keeps of each parameter of a stage: its residuals (local)."""
    name, each = recipe.communication.compression, np.dtype(np.float32).itemsize
    if name == "dgc":
        return each  # the residual; the velocity is that of the optimizer
    if name == "onebit":
        return each + each / replicas  # residuals of a worker, and of the share that it sums
    fed_back = name != "none" and recipe.compression.error_feedback
    return each * (1 if recipe.precision.working is None else 2) * fed_back


def _checkpointed_partition(origin: StateSource | None, units: int, chunks: int) -> tuple[int, ...]:
    """Return the measured partition of ``origin``; () where there is none for as many ``chunks`` (local)."""
    if origin is None:
        return ()
    stage_units = tuple(map(int, origin.scalars.get(STAGE_UNITS, ())))
    return stage_units if len(stage_units) == chunks and sum(stage_units) == units else ()
