"""Assembly of a run from its recipe: grid, rank context, model, exchange, executor, operations, data.

`assemble` is collective and the same on every rank; the `Trainer` that it returns makes the steps. The exchange is
chosen by strategy, compression and logical shards (`build_exchange`). A user's own model must compute in the type and
on the device that the recipe says (`check_user_model`). In a product with parameter servers every rank computes, and
serves what its replicas share.
"""

from dataclasses import replace
from pathlib import Path

from hpcdist import collectives, models
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.models import factory as models_factory
from hpcdist.models.model import Model
from hpcdist.models.runtime.split_backward import with_recomputation
from hpcdist.optim import rates
from hpcdist.strategies import build
from hpcdist.strategies import build as decentralised
from hpcdist.strategies import build as parameter_server
from hpcdist.strategies import build as strategies
from hpcdist.strategies.allreduce import FixedTreeExchange
from hpcdist.strategies.compressed.dgc import DgcExchange
from hpcdist.strategies.compressed.exchange import CompressedExchange
from hpcdist.strategies.compressed.onebit import OneBitExchange
from hpcdist.strategies.compressed.zero import CompressedZero
from hpcdist.strategies.core import mixed_precision
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.mixed_precision import NoLossScale
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.delayed import DelayedExchange
from hpcdist.strategies.parameter_server.compressed import PushCompression
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.pipeline.plan import PartitionPlan
from hpcdist.strategies.schedule.generate.operation_list import ScheduleText
from hpcdist.strategies.tensor.axis import algorithm_on
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.strategies.zero.config import STAGES
from hpcdist.strategies.zero.exchange import ZeroExchange
from hpcdist.training import data
from hpcdist.training.build import pipeline, state
from hpcdist.training.build import selection as build_selection
from hpcdist.training.build.selection import AlgorithmSelection, resolve_algorithm
from hpcdist.training.build.state_source import CheckpointSource, StateSource
from hpcdist.training.build.trainer import Trainer, microbatches_of
from hpcdist.training.chaos import injection
from hpcdist.training.observe import noise_scale, sdc_check
from hpcdist.training.recipe.recipe import Recipe


def check_user_model(recipe: Recipe, model: Model) -> None:
    """Raise ConfigurationError where ``model`` computes elsewhere or in another type than ``recipe`` says (local)."""
    computes, on = recipe.precision.stages, recipe.run.device
    if model.dtype.name != computes:
        raise ConfigurationError(
            f"the model computes in {model.dtype.name}, and precision.mode = {recipe.precision.mode!r} in {computes}; "
            f"convert the model, or set precision.mode = {model.dtype.name!r}"
            + (", or precision.activations = 'float32'" if recipe.precision.activations != "float32" else "")
        )
    if model.on not in (None, on):
        raise ConfigurationError(
            f"the model is on the {model.on}, and run.device = {on!r}; move the model before it is wrapped, or set "
            f"run.device = {model.on!r}"
        )


def build_exchange(seat: RankContext, recipe: Recipe, compression: str) -> Exchange:
    """Return the exchange of the recipe's strategy; ``compression`` is what `auto` has become. Collective."""
    shards = LogicalShards(seat, recipe.run.logical_shards) if recipe.run.logical_shards else None
    if recipe.parallel.strategy == "parameter_server":
        given = compression, recipe.compression, recipe.run.seed
        pushed = None if compression == "none" else PushCompression(*given)
        return parameter_server.server_exchange(seat, recipe.parameter_server, shards, pushed)
    if recipe.parallel.strategy in decentralised.DECENTRALISED_EXCHANGES:
        return decentralised.DECENTRALISED_EXCHANGES[recipe.parallel.strategy](seat, recipe.decentralised)
    if recipe.parallel.strategy in STAGES:
        stage = STAGES[recipe.parallel.strategy]
        if compression != "none" or recipe.compression.parameters != "none":
            return CompressedZero(seat, stage, recipe.zero, compression, recipe.compression, recipe.run.seed)
        return ZeroExchange(seat, stage, recipe.zero, shards)
    if shards is not None:
        return FixedTreeExchange(seat, shards)
    if recipe.communication.delayed:
        return DelayedExchange(seat)
    if compression == "dgc":
        return DgcExchange(seat, recipe.compression)
    if compression == "onebit":
        return OneBitExchange(seat, recipe.compression, recipe.run.seed)
    if compression != "none":
        return CompressedExchange(seat, compression, recipe.compression, recipe.run.seed)
    return strategies.EXCHANGES[recipe.parallel.strategy](seat)


def assemble(
    session: Session, recipe: Recipe, resume_from: Path | StateSource | None = None, given: Model | None = None
) -> Trainer:
    """Build the run of ``recipe`` on this rank, initialised or restored. Collective.

    A model that a script has ``given`` takes the place of that of the recipe, and its script brings the batches.
    """
    origin = CheckpointSource.together(session.comm, resume_from) if isinstance(resume_from, Path) else resume_from
    comm, parallel = session.comm, recipe.parallel
    imports = recipe.model.kind == "import" and comm.rank == 0
    factory_seal = models_factory.seal(recipe.model.factory) if imports else ""  # of what is about to be executed
    # In a product every rank computes, and serves what its replicas share: `Seat.members`.
    roles = Roles.of(recipe.parameter_server, comm.size) if parallel.has_roles else None
    grid = ProcessGrid.of(
        comm.size,
        data=parallel.data,
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        context=parallel.context,
        servers=comm.size - len(roles.workers) if roles else 0,
    )
    recipe.check_world(grid.data)
    computing = len(roles.workers) if roles else comm.size
    recipe.chaos.check_world(comm.size, computing, lock_step=recipe.parameter_server.lock_step)
    source, whole = _source_and_model(comm, recipe, given)
    ledger = Ledger()
    schedule = pipeline.read_schedule(parallel, comm)
    seat, selection, plan = _rank_context(session, recipe, grid, roles, whole, ledger, origin, schedule)
    collectives.account(ledger)  # what a measurement took is given back
    compression = build_selection.resolve_compression(seat, recipe, origin)
    exchange = build_exchange(seat, recipe, compression.name)
    executor = build.build_executor(
        seat,
        exchange,
        injection.executor_factory(recipe.chaos, seat, recipe.run.global_batch),
        loss_scale=_loss_scale(recipe),
        seed=recipe.run.seed,
    )
    sdc_check.attach_sdc_check(executor, comm, recipe.run)
    microbatches = microbatches_of(recipe, grid)
    pipeline.check_exchange(parallel, schedule, seat, accumulates=exchange.accumulates)
    passes = None if schedule is None else schedule.passes
    operations = build.operations(seat, exchange, executor.copies, replace(parallel, microbatches=microbatches), passes)
    noise = noise_scale.attach_noise_meter(executor, operations, recipe.run.noise_scale_every_steps)
    proof = None
    if exchange.lock_step:  # else no two ranks share a step
        proof = build.prove(
            seat, grid, operations, microbatches, accumulates=exchange.accumulates, degrees=exchange.degrees
        )
    parts = seat, source, exchange, executor, operations, ledger, selection, compression, proof, noise, plan
    trainer = Trainer(comm, recipe, grid, *parts, factory_seal)
    if recipe.data.shares == "measured" and seat.computes:
        trainer.share_by_speed()
    if origin is None:
        _initialise(trainer)
    else:
        state.restore_state(trainer, origin)
    return trainer


def _initialise(trainer: Trainer) -> None:
    """Take the initial values, drawn or those of ``run.init_from``. Collective.

    Those of a stage are the same whatever rank draws them, or those of rank 0.
    """
    own, units = trainer.seat.ranges, trainer.model.layout.units
    for unit, stage in enumerate(trainer.model.stages):
        if unit not in own and trainer.model.seeded:
            continue
        # Drawn on the host, so that a GPU starts from the same bits; one stage at a time.
        initial = FlatStore(trainer.model.layout, trainer.seat.master_dtype, units[stage.layer])
        trainer.model.initialise_stage(unit, initial, trainer.recipe.run.seed)
        if not trainer.model.seeded:
            trainer.comm.broadcast(initial.array)
        if unit in own:
            trainer.exchange.load_initial(initial)
    trainer.executor.copies.refresh()
    run = trainer.recipe.run
    if run.init_from:
        state.load_initial(trainer, Path(run.init_from), partial=run.allow_partial)


def _loss_scale(recipe: Recipe) -> NoLossScale:
    """Return the loss scale that the recipe asks for (local)."""
    precision = recipe.precision
    growth = precision.growth_interval, precision.hysteresis, precision.minimum_scale
    return mixed_precision.build_loss_scale(precision.mode, precision.loss_scale, *growth)


def _source_and_model(comm: Communicator, recipe: Recipe, given: Model | None) -> tuple[data.Source, Model]:
    """Return what is trained on, and the whole model. Collective."""
    if recipe.run.device == "gpu" and recipe.precision.mode == "bfloat16":
        device.check_bfloat16()
    source = data.script_source() if given else data.open_source(recipe.data, recipe.model, comm)
    whole = given or models.build(recipe.model, recipe.precision.stages, **source.model_inputs())
    return source, with_recomputation(whole) if recipe.parallel.recomputes_layers else whole


def _rank_context(
    session: Session,
    recipe: Recipe,
    grid: ProcessGrid,
    roles: Roles | None,
    whole: Model,
    ledger: Ledger,
    origin: StateSource | None,
    schedule: ScheduleText | None,
) -> tuple[RankContext, AlgorithmSelection, PartitionPlan | None]:
    """Return the place of this rank, where its algorithm comes from, and the cut of the model. Collective."""
    comm = session.comm
    check_user_model(recipe, whole)
    computes = roles is None or comm.rank in roles.workers
    members = roles.part_of(comm) if roles else comm
    axes = GridCommunicators(grid if computes else ProcessGrid(data=members.size), members)
    tensor = axes.tensor if grid.tensor > 1 else solo()
    selection = resolve_algorithm(session, recipe, cut_model(whole, tensor), axes.data, origin)
    settled = selection.source == "recipe"
    algorithm = algorithm_on(tensor, selection.algorithm, settled=settled, on=recipe.run.device)
    model = cut_model(whole, tensor, algorithm, sequence_parallel=recipe.parallel.sequence_parallel)
    plan = pipeline.plan_partition(comm, recipe, grid, whole, model, schedule, origin) if computes else None
    seat = RankContext(
        world=comm,
        data=axes.data,
        pipeline=axes.pipeline,
        tensor=tensor,
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
    return seat, selection, plan
