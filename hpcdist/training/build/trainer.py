"""Trainer of a run: makes steps from the parts assembled by `hpcdist.training.build.assemble`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.listing import STATISTICS
from hpcdist.comm.communicator import Communicator
from hpcdist.models.config import loss_unit, speed_unit
from hpcdist.models.model import Model
from hpcdist.models.stage import Stage
from hpcdist.optim import rates
from hpcdist.strategies.compressed.autoselect import CompressionDecision
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.plan import PartitionPlan
from hpcdist.strategies.schedule.executor import Executor, StepResult
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.strategies.schedule.step import ProfilerRanges
from hpcdist.strategies.schedule.verify.proof import Proof
from hpcdist.training import data
from hpcdist.training.build.fault_injection import FaultPlan
from hpcdist.training.build.model import frozen_pieces
from hpcdist.training.build.selection import AlgorithmSelection
from hpcdist.training.data import Prefetcher
from hpcdist.training.data.samples import FilledSamples
from hpcdist.training.observe.step_meters import NoiseMeter, RouterMeter
from hpcdist.training.recipe.recipe import Recipe


@dataclass(frozen=True)
class Trainer:
    """Training of a run on one rank: the model, data, communicators and executor, and methods to train a step."""

    comm: Communicator
    recipe: Recipe
    grid: ProcessGrid
    axes: GridCommunicators  # over ``comm``, or over its ranks with the same role (compute or server)
    context: RankContext
    source: data.Source
    exchange: Exchange
    executor: Executor
    operations: list[Operation]
    ledger: Ledger
    selection: AlgorithmSelection
    compression: CompressionDecision
    proof: Proof | None  # that the operation lists of all ranks are consistent; None if not gathered
    noise: NoiseMeter | None
    faults: FaultPlan | None  # injected faults
    router: RouterMeter | None  # for a mixture of experts
    ranges: ProfilerRanges
    plan: PartitionPlan | None  # for several stages
    factory_seal: str  # digest of the file that builds an imported model, on rank 0
    first_step: int = 0
    sample_order: int = data.UNIFORM  # rule of the sample order, constant over the run
    shares: data.SampleShares | None = None  # None: even shares
    balance: data.LoadBalancer | None = None

    @property
    def model(self) -> Model:
        """Model with the stages of all pipeline ranks. This rank computes only some of the stages."""
        return self.context.model

    @property
    def speed_unit(self) -> str:
        return speed_unit(self.recipe.model.kind, self.model.tokens_per_sample)

    @property
    def loss_unit(self) -> str:
        """Unit of losses: "nats", or "" if unknown."""
        return loss_unit(self.recipe.model.kind, self.model.tokens_per_sample)

    @property
    def data_axis(self) -> Communicator:
        """Communicator over the replicas, with one rank of each replica. Each replica trains on different samples."""
        return self.context.samplers

    @property
    def last_stage(self) -> bool:
        """True if this rank has the last pipeline stage, which computes the loss."""
        return self.context.computed_units[-1] == len(self.model.stages) - 1

    def batches(self, steps: int) -> Prefetcher:
        """Return an iterator over this replica's batches, from the next step to step number ``steps``. Local."""
        ends = self.last_stage or self.context.computed_units[0] == 0
        reads = self.context.computes and (ends or self.recipe.data.packed)
        of = self.source, self.recipe, self.data_axis
        return Prefetcher(*of, self.first_step, steps, reads=reads, shares=self.shares, rule=self.sample_order)

    def place(self, batch: MicroBatch) -> MicroBatch:
        """Return a copy of ``batch`` on the model's device. Raises DataError for invalid tokens. Local."""
        return self.source.place(batch, self.recipe)

    def cut(self, batch: MicroBatch) -> list[MicroBatch]:
        """Split ``batch``, the samples of this rank in a step, into a list of micro-batches. Local."""
        run = self.recipe.run
        if run.logical_shards:
            return data.shards(batch, run.global_batch // run.logical_shards, microbatches_of(self.recipe, self.grid))
        return data.microbatches(batch, self.recipe.parallel.microbatches)

    def step(self, number: int, batches: list[MicroBatch], stop_requests: np.ndarray) -> StepResult:
        """Run training step ``number`` (from 1), and add up the arrays ``stop_requests`` of all ranks. Collective.

        ``batches``: micro-batches of this rank's replica.
        """
        samples, first = self.samples(number), self.first_sample(number)
        targets = self.targets(number) if self.recipe.data.packed else None
        return self.executor.run(self.operations, batches, samples, number, stop_requests, first, targets)

    def evaluate(self, rounds: Iterable[Sequence[MicroBatch]], parts: int = 1) -> float:
        """Return the mean loss per target over all replicas, or NaN without targets. Collective.

        ``rounds``: lists of micro-batches. Each rank fills a list with empty micro-batches up to a length of ``parts``.
        """
        counts_targets = self.context.computes and self.last_stage and self.context.speaks
        total, count = 0.0, 0.0
        for batches in rounds:
            losses, weight = [], 0.0
            for batch in batches:
                losses.append(self.executor.evaluate(*batch))
                weight += self.executor.own_weight
            for inputs, targets in batches[: parts - len(batches)]:
                self.executor.evaluate(inputs[:0], targets[:0])  # every rank must take part in each gather of layers
            per_sample = self.model.tokens_per_sample if counts_targets else 0
            seen = sum(self.source.targets_in(targets, per_sample) for _, targets in batches) if counts_targets else 0
            seen = weight if self.model.loss.weighs else seen
            # Agree in each round, because the deadline also runs for servers that wait for the others.
            loss, targets_of_all = self.exchange.agree_losses(losses, np.array([float(seen)]))
            total, count = total + loss, count + float(targets_of_all[0])
        return total / count if count else float("nan")

    def samples(self, step: int) -> int:
        """Return the total number of samples of all replicas in step number ``step`` (from 1). Local."""
        return self.recipe.run.batches.size(step - 1)

    @cached_property
    def _sampler(self) -> data.Sampler | data.MixedSampler:
        return data.sampler_of(self.source.training, self.recipe.run.seed, self.sample_order)

    def targets(self, step: int) -> int:
        """Return the total number of loss terms of all replicas in step number ``step`` (from 1). Local."""
        samples = self.samples(step)
        if not self.recipe.data.packed:
            return round(samples * self.model.tokens_per_sample)
        before = self.recipe.run.batches.samples_before(step - 1)
        return cast(FilledSamples, self.source.training).targets(np.array(self._sampler.indices(before, samples)))

    def first_sample(self, step: int) -> int:
        """Return the index of this replica's first sample in the global batch of ``step``. Local."""
        return data.own_samples(self.recipe, self.data_axis, step - 1, self.shares).start

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step number ``step`` (from 1). Local."""
        return self.exchange.rate_factor * rates.learning_rate(self.context.optimizer, step, self.recipe.run.steps)

    def state_bytes(self) -> int:
        """Return the number of bytes of state that this rank saves in a checkpoint. Local."""
        return sum(piece.flat.size * piece.array.dtype.itemsize for piece in self.pieces())

    def flush(self) -> None:
        """Average parameters and running statistics over the replicas, where the replicas differ. Collective."""
        if self.exchange.flush():
            self.executor.copies.refresh()
        for values in self._statistics.values():
            if values.dtype.kind == "f":
                self.data_axis.allreduce(values)
                values /= self.data_axis.size
            else:  # number of batches
                self.data_axis.allreduce(values, "max")

    @cached_property
    def _statistics(self) -> dict[str, Array]:
        stages = [self.model.stages[unit] for unit in self.context.computed_units] if self.context.computes else []
        return statistics_of(stages)

    def pieces(self) -> list[Piece]:
        """Return a list of the pieces of parameters, optimizer state and running statistics to save. Local."""
        saves = self.data_axis.rank == 0 and self.context.speaks
        frozen = frozen_pieces(self.context, saved=True)
        return [*self.exchange.pieces(), *frozen, *(statistic_pieces(self._statistics) if saves else ())]

    def wanted(self) -> list[Piece]:
        """Return a list of the pieces of parameters, optimizer state and running statistics to read. Local."""
        frozen = frozen_pieces(self.context, saved=False)
        return [*self.exchange.wanted(), *frozen, *statistic_pieces(self._statistics)]

    def finish(self) -> None:
        """Apply the parameter updates that are still pending after the last step. Collective."""
        if self.exchange.finish():
            self.executor.copies.refresh()

    def close(self) -> None:
        """Free communicators, MPI windows and threads. Do not run a step afterwards. Collective."""
        if self.exchange.background is not None:
            self.exchange.background.close()
        self.exchange.close()
        self.axes.free()
        if self.axes.world is not self.comm:
            self.axes.world.free()


def statistics_of(stages: Iterable[Stage]) -> dict[str, Array]:
    """Return {"LAYER.NAME": array} of the running statistics of the BatchNorm modules in ``stages``. Local."""
    return {
        f"{stage.layer}.{name}": values
        for stage in stages
        if hasattr(stage, "statistics")
        for name, values in stage.statistics().items()
    }


def statistic_pieces(statistics: Mapping[str, Array]) -> list[Piece]:
    """Return a list of the checkpoint pieces of ``statistics``, a result of `statistics_of`. Local."""
    return [Piece.whole(STATISTICS, name, values) for name, values in statistics.items()]


def microbatches_of(recipe: Recipe, grid: ProcessGrid) -> int:
    """Return the number of micro-batches of each rank in a step. Local.

    ``grid``: number of ranks along each axis of parallelism.
    """
    return -(-recipe.run.logical_shards // grid.data) or recipe.parallel.microbatches
