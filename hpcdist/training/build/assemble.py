"""Assembly of a run from its recipe: grid, rank context, model, exchange, executor, operation list, data."""

import copy
from dataclasses import replace
from pathlib import Path

from hpcdist import collectives
from hpcdist.adapters.torch.batchnorm import StatisticsAxis
from hpcdist.adapters.torch.stage import TorchStage
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.spans import SpanSink
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.models import factory as models_factory
from hpcdist.models.config import FOREIGN, TRANSFORMERS
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.model import Model
from hpcdist.models.split_backward import with_recomputation
from hpcdist.optim import rates
from hpcdist.strategies import build as strategies
from hpcdist.strategies.build import StrategySettings
from hpcdist.strategies.compressed.registry import Compression
from hpcdist.strategies.config import SUMMING, resolve_context_method
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.model import cut_context
from hpcdist.strategies.core import mixed_precision
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.mixed_precision import NoLossScale
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.expert.axis import ExpertAxis, algorithm_for
from hpcdist.strategies.expert.model import share_out
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.pipeline.plan import PartitionPlan
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.operation_list import ScheduleText
from hpcdist.strategies.schedule.step import NO_RANGES, NanFinder, OperationRanges, ProfilerRanges, StepObserver
from hpcdist.strategies.schedule.verify.proof import Proof
from hpcdist.strategies.tensor.axis import algorithm_on
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.training import data
from hpcdist.training.build import pipeline, state
from hpcdist.training.build import selection as build_selection
from hpcdist.training.build.fault_injection import FaultInjector, FaultPlan, Slowdown
from hpcdist.training.build.model import build_model, frozen_model, hold_frozen, round_frozen
from hpcdist.training.build.selection import AlgorithmSelection, resolve_algorithm
from hpcdist.training.build.state_source import CheckpointSource, StateSource
from hpcdist.training.build.trainer import Trainer, microbatches_of
from hpcdist.training.observe.instrumentation import NvtxRanges
from hpcdist.training.observe.sdc_check import SdcCheck
from hpcdist.training.observe.step_meters import NoiseMeter, RouterMeter
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.recipe.requirements import grid_and_roles


def check_user_model(recipe: Recipe, model: Model) -> None:
    """Raise ConfigurationError if the device or dtype of the script's ``model`` differs from ``recipe``. Local."""
    computes, on = recipe.precision.stages, recipe.run.device
    if model.dtype.name != computes:
        raise ConfigurationError(
            f"the model computes in {model.dtype.name}, but precision.mode = {recipe.precision.mode!r} requires "
            f"{computes}; convert the model, or set precision.mode = {model.dtype.name!r}"
            + (", or precision.activations = 'float32'" if recipe.precision.activations != "float32" else "")
        )
    if model.on not in (None, on):
        raise ConfigurationError(
            f"the model is on device {model.on!r}, but run.device = {on!r}; move the model to {on!r} before wrapping "
            f"the model, or set run.device = {model.on!r}"
        )


def strategy_settings(recipe: Recipe, compression: str) -> StrategySettings:
    """Return the `StrategySettings` of ``recipe`` with the gradient compressor named ``compression``."""
    return StrategySettings(
        recipe.parallel.strategy,
        recipe.zero,
        recipe.parameter_server,
        recipe.decentralised,
        Compression(compression, recipe.compression, recipe.run.seed),
        delayed=recipe.communication.delayed,
        logical_shards=recipe.run.logical_shards,
    )


def assemble(
    session: Session,
    recipe: Recipe,
    resume_from: Path | StateSource | None = None,
    script_model: Model | None = None,
    directory: Path | None = None,
) -> Trainer:
    """Build the trainer of ``recipe`` on this rank, with initial or restored parameters. Collective.

    ``resume_from``: checkpoint to restore, or None. ``script_model``: model of a script that provides the batches, or
    None. ``directory``: run directory, or None to inject no faults of section [chaos].
    """
    origin = CheckpointSource.together(session.comm, resume_from) if isinstance(resume_from, Path) else resume_from
    comm, parallel, precision = session.comm, recipe.parallel, recipe.precision
    imports = recipe.model.kind == "import" and comm.rank == 0
    factory_seal = models_factory.seal(recipe.model.factory) if imports else ""  # digest before the file is executed
    grid, roles = grid_and_roles(recipe, comm.size)
    source, whole = _source_and_model(comm, recipe, script_model)
    ledger, schedule = Ledger(), pipeline.read_schedule(parallel, comm)
    axes, computes = _axes(comm, grid, roles)
    context, selection, plan = _rank_context(
        session, recipe, grid, axes, source.documents, whole, ledger, origin, schedule, computes
    )
    collectives.account(ledger)  # also frees the buffers of the algorithm measurement
    compression = build_selection.resolve_compression(context, recipe, origin)
    exchange = strategies.build_exchange(context, strategy_settings(recipe, compression.name))
    growth = precision.growth_interval, precision.hysteresis, precision.minimum_scale
    loss_scale = mixed_precision.build_loss_scale(precision.mode, precision.loss_scale, *growth)
    in_order, router, noise, faults, ranges = _build_observers(recipe, context, exchange, loss_scale, directory)
    executor = _build_executor(session, recipe, context, exchange, loss_scale, in_order)
    operations, proof = _proven_operations(recipe, grid, context, executor, schedule)
    if noise is not None:
        noise.check(operations)
    shares, balance = _measured_shares(recipe, context)
    trainer = Trainer(
        comm=comm,
        recipe=recipe,
        grid=grid,
        axes=axes,
        context=context,
        source=source,
        exchange=exchange,
        executor=executor,
        operations=operations,
        ledger=ledger,
        selection=selection,
        compression=compression,
        proof=proof,
        noise=noise,
        router=router,
        faults=faults,
        ranges=ranges,
        plan=plan,
        factory_seal=factory_seal,
        shares=shares,
        balance=balance,
    )
    return _initialised(trainer) if origin is None else state.restore_state(trainer, origin)


def _build_executor(
    session: Session,
    recipe: Recipe,
    context: RankContext,
    exchange: Exchange,
    loss_scale: NoLossScale,
    observers: tuple[StepObserver, ...],
) -> Executor:
    return strategies.build_executor(
        context,
        exchange,
        loss_scale=loss_scale,
        seed=recipe.run.seed,
        spans=session.spans,
        observers=observers,
        cuda_graph=recipe.run.cuda_graph,
        drops=recipe.model.dropout > 0 or recipe.lora.dropout > 0,
    )


def _axes(comm: Communicator, grid: ProcessGrid, roles: Roles | None) -> tuple[GridCommunicators, bool]:
    # The result is (communicators, False on a dedicated parameter server). Collective.
    computes = roles is None or comm.rank in roles.workers
    members = roles.part_of(comm) if roles else comm
    return GridCommunicators(grid if computes else ProcessGrid(data=members.size), members), computes


def _measured_shares(
    recipe: Recipe, context: RankContext
) -> tuple[data.SampleShares, data.LoadBalancer] | tuple[None, None]:
    if recipe.data.shares != "measured" or not context.computes:
        return None, None
    shares = data.SampleShares(recipe.run.global_batch, context.samplers.size)
    return shares, data.LoadBalancer(context.samplers, context.pipeline, shares)


def _proven_operations(
    recipe: Recipe, grid: ProcessGrid, context: RankContext, executor: Executor, schedule: ScheduleText | None
) -> tuple[list[Operation], Proof | None]:
    exchange, microbatches = executor.exchange, microbatches_of(recipe, grid)
    pipeline.check_exchange(recipe.parallel, schedule, context, accumulates=exchange.traits.accumulates)
    passes = None if schedule is None else schedule.passes
    parallel = replace(recipe.parallel, microbatches=microbatches)
    operations = strategies.operations(context, exchange, executor.copies, parallel, passes)
    if not exchange.traits.lock_step:  # ranks step independently
        return operations, None
    proof = strategies.prove(
        context,
        grid,
        operations,
        microbatches,
        accumulates=exchange.traits.accumulates,
        degrees=exchange.traits.degrees,
    )
    return operations, proof


def _build_observers(
    recipe: Recipe, context: RankContext, exchange: Exchange, loss_scale: NoLossScale, directory: Path | None
) -> tuple[tuple[StepObserver, ...], RouterMeter | None, NoiseMeter | None, FaultPlan | None, ProfilerRanges]:
    in_order: list[StepObserver] = []
    run, chaos, router, noise, faults, ranges = recipe.run, recipe.chaos, None, None, None, NO_RANGES
    if (experts := context.model.operations.experts) is not None:
        router = RouterMeter(context, experts.state)
        in_order.append(router)
    if run.noise_scale_every_steps:
        noise = NoiseMeter(context, exchange, run.noise_scale_every_steps)
        in_order.append(noise)
    if chaos.on:
        in_order.append(Slowdown(chaos, context.world.rank, run.global_batch / context.samplers.size, exchange))
    if chaos.faults and directory is not None:
        faults = FaultPlan(chaos, context.world.rank, directory)
        in_order.append(FaultInjector(faults, exchange))
    if run.recomputes:
        check = SdcCheck(
            context.world,
            exchange,
            factor=run.suspicious_factor,
            every_steps=run.recompute_every_steps,
            skips_overflow=loss_scale.skips_overflow,
        )
        in_order.append(check)
    if recipe.telemetry.nvtx:
        ranges = NvtxRanges()
        in_order.append(OperationRanges(ranges))
    return tuple(in_order), router, noise, faults, ranges


def _initialised(trainer: Trainer) -> Trainer:
    # Drawn from the seed, received from rank 0, or read from a checkpoint. Collective.
    local_units, units = trainer.context.ranges, trainer.model.layout.units
    for unit, stage in enumerate(trainer.model.stages):
        frozen = getattr(stage, "store", None)  # here also if this rank only shares a tensor with the stage
        if unit not in local_units and frozen is None and trainer.model.seeded:
            continue
        # Drawn on the host, one stage at a time, so that CPU and GPU start from the same bits.
        initial = FlatStore(trainer.model.layout, trainer.context.master_dtype, units[stage.layer])
        trainer.model.initialise_stage(unit, initial, trainer.recipe.run.seed)
        if not trainer.model.seeded:
            trainer.comm.broadcast(initial.array)
        if unit in local_units:
            trainer.exchange.load_initial(initial)
    trainer.executor.copies.refresh()
    run = trainer.recipe.run
    if run.init_from:
        state.load_initial(trainer, Path(run.init_from), partial=run.allow_partial)
    if trainer.recipe.lora.init_from:
        state.load_adapters(trainer, Path(trainer.recipe.lora.init_from))
    round_frozen(trainer.context)
    return trainer


def _source_and_model(comm: Communicator, recipe: Recipe, script_model: Model | None) -> tuple[data.Source, Model]:
    if recipe.run.device == "gpu":
        _check_gpu(recipe)
    source = data.script_source() if script_model else data.open_source(recipe.data, recipe.model, comm)
    whole = script_model or build_model(recipe, recipe.precision.stages, source.inputs)
    for stage in () if script_model else whole.stages:
        if hasattr(stage, "script_only") and (names := stage.script_only()):
            raise ConfigurationError(
                f"model.kind = 'import' supports no frozen parameters and no running statistics, but stage "
                f"{stage.layer} has {', '.join(names[:3])}; train the model in a script with "
                "hpcdist.training.pytorch.Training"
            )
    if source.targets is not None:
        whole = whole.predicting(source.targets)
    return source, with_recomputation(whole) if recipe.parallel.recomputes_layers else whole


def _check_gpu(recipe: Recipe) -> None:
    if recipe.precision.mode == "bfloat16":
        device.check_bfloat16()
        device.check_tensor_cores(
            "precision.mode = 'bfloat16'", "set precision.mode = 'float16' and precision.activations = 'float32'"
        )
    elif recipe.precision.activations == "working" and recipe.model.kind in TRANSFORMERS:
        device.check_tensor_cores("attention in 16-bit floats", "set precision.activations = 'float32'")


def _context_axis(recipe: Recipe, axes: GridCommunicators, spans: SpanSink) -> ContextAxis:
    model, parallel = recipe.model, recipe.parallel
    heads = (count // parallel.tensor for count in (model.heads, model.kv_heads or model.heads))
    ring = recipe.precision.activations != "working"
    method = resolve_context_method(parallel.context_method, parallel.context, *heads, ring=ring)
    if model.kind in FOREIGN:
        method = "ring"  # the number of heads is unknown for foreign modules
    return ContextAxis(axes.context, recipe.data.context, method, window=model.window, spans=spans)


def _with_shared_statistics(model: Model, recipe: Recipe, replicas: Communicator) -> Model:
    parallel = recipe.parallel
    own_steps = parallel.strategy not in SUMMING or recipe.parameter_server.own_steps
    if own_steps or recipe.run.logical_shards:
        term = f"parallel.strategy = {parallel.strategy!r}" if own_steps else "run.logical_shards"
        raise ConfigurationError(
            f"SyncBatchNorm modules cannot be used with {term}: all replicas must compute each micro-batch together, "
            "with equal parameters, and the result depends on their number; use BatchNorm modules, or "
            + ("a strategy in which replicas sum their gradients in each step" if own_steps else "set it to 0")
        )
    if replicas.size == 1:
        return model
    shared, axis = copy.copy(model), StatisticsAxis(replicas, model.watch or NanFinder())
    shared.stages = tuple(stage.in_replicas(axis) if isinstance(stage, TorchStage) else stage for stage in model.stages)
    shared.clocks, shared.watch = (*model.clocks, axis.taken_s), axis.watch
    return shared


def _rank_context(
    session: Session,
    recipe: Recipe,
    grid: ProcessGrid,
    axes: GridCommunicators,
    documents: DocumentPairs | None,
    whole: Model,
    ledger: Ledger,
    origin: StateSource | None,
    schedule: ScheduleText | None,
    computes: bool,
) -> tuple[RankContext, AlgorithmSelection, PartitionPlan | None]:
    comm = session.comm
    check_user_model(recipe, whole)
    tensor = axes.tensor if grid.tensor > 1 else solo()
    selection = resolve_algorithm(session, recipe, cut_model(whole, tensor), axes.replicas, origin)
    settled = selection.source == "recipe"
    algorithm = algorithm_on(tensor, selection.algorithm, settled=settled, on=recipe.run.device)
    cut = _context_axis(recipe, axes, session.spans) if grid.context > 1 else None
    model = cut_context(whole, cut)
    model = cut_model(model, tensor, algorithm, sequence_parallel=recipe.parallel.sequence_parallel, context=cut)
    experts = axes.experts(grid.expert) if grid.expert > 1 and computes else solo()
    if experts.size > 1:
        exchange = algorithm_for(experts, selection.algorithm, settled=settled, on=recipe.run.device)
        model = share_out(model, ExpertAxis(experts, exchange, model.watch or NanFinder()))
    model = frozen_model(recipe, model)
    if computes and any(getattr(stage, "synchronised", list)() for stage in model.stages):
        model = _with_shared_statistics(model, recipe, axes.statistics)
    plan = None
    if computes:
        plan = pipeline.plan_partition(comm, recipe, grid, whole, model, schedule, origin, documents)
    context = RankContext(
        world=comm,
        data=axes.replicas,
        pipeline=axes.pipeline,
        tensor=tensor,
        context_axis=cut,
        batch=axes.data,
        experts=experts,
        model=model,
        placement=None if plan is None else plan.placement,
        optimizer=rates.resolve_rate(recipe.optimizer, recipe.run.batches),
        total_steps=recipe.run.steps,
        algorithm=selection.algorithm,
        bucket_bytes=recipe.communication.bucket_bytes,
        overlap=recipe.communication.overlap,
        on=recipe.run.device,
        ledger=ledger,
        computes=computes,
        working=None if recipe.precision.working is None else dtype_of(recipe.precision.working),
    )
    hold_frozen(context, ledger)
    return context, selection, plan
