"""Trainer of a run: makes its steps, from the parts that `hpcdist.training.build.assemble` puts together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from hpcdist.arrays.memory import Ledger
from hpcdist.comm.communicator import Communicator
from hpcdist.models.config import loss_unit, speed_unit
from hpcdist.models.model import Model
from hpcdist.optim import rates
from hpcdist.strategies.compressed.autoselect import CompressionDecision
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.plan import PartitionPlan
from hpcdist.strategies.schedule.executor import Executor, StepResult
from hpcdist.strategies.schedule.observers import ProfilerRanges
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.strategies.schedule.verify.proof import Proof
from hpcdist.training import data
from hpcdist.training.build.selection import AlgorithmSelection
from hpcdist.training.chaos.injection import FaultPlan
from hpcdist.training.data import Prefetcher
from hpcdist.training.data.samples import FilledSamples
from hpcdist.training.observe.noise_scale import NoiseMeter
from hpcdist.training.observe.router_meter import RouterMeter
from hpcdist.training.recipe.recipe import Recipe


@dataclass(frozen=True)
class Trainer:
    """Trainer: the parts of a run, assembled on every rank alike, and the steps that they make together.

    ``first_step`` steps were made by earlier starts of the run.
    """

    comm: Communicator
    recipe: Recipe
    grid: ProcessGrid
    axes: GridCommunicators  # over ``comm``, or those of its ranks that compute as this one does
    context: RankContext
    source: data.Source
    exchange: Exchange
    executor: Executor
    operations: list[Operation]
    ledger: Ledger
    selection: AlgorithmSelection
    compression: CompressionDecision
    proof: Proof | None  # that the lists of all ranks are one step; None where they were not gathered
    noise: NoiseMeter | None
    faults: FaultPlan | None  # injected ones
    router: RouterMeter | None  # of a mixture of experts
    ranges: ProfilerRanges
    plan: PartitionPlan | None  # of the stages, where there are several
    factory_seal: str  # of the file that makes an imported model, on rank 0
    first_step: int = 0
    sample_order: int = data.UNIFORM  # the rule of the order, which a run keeps to its end
    shares: data.SampleShares | None = None  # None: even ones
    balance: data.LoadBalancer | None = None

    @property
    def model(self) -> Model:
        """The whole model; this rank computes ``context.units`` of it."""
        return self.context.model

    @property
    def speed_unit(self) -> str:
        """The unit of speeds: "tokens" or "samples"."""
        return speed_unit(self.recipe.model.kind, self.model.tokens_per_sample)

    @property
    def loss_unit(self) -> str:
        """The unit of losses: "nats", or "" if it is not known."""
        return loss_unit(self.recipe.model.kind, self.model.tokens_per_sample)

    @property
    def data_axis(self) -> Communicator:
        """The replicas of this rank's stages that see other samples."""
        return self.context.samplers

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.context.units[-1] == len(self.model.stages) - 1

    def batches(self, steps: int) -> Prefetcher:
        """Return the batches of this rank's replica up to step ``steps``, read ahead; a context manager (local).

        Only the ends of a pipeline look at samples: all other ranks get as many rows without columns. Where documents
        lie in packed samples, all look.
        """
        ends = self.last_stage or self.context.units[0] == 0
        reads = self.context.computes and (ends or self.recipe.data.packed)
        of = self.source, self.recipe, self.data_axis
        return Prefetcher(*of, self.first_step, steps, reads=reads, shares=self.shares, rule=self.sample_order)

    def place(self, batch: MicroBatch) -> MicroBatch:
        """Return a batch where the model computes (local). Raises DataError on tokens that it does not know."""
        return self.source.place(batch, self.recipe)

    def cut(self, batch: MicroBatch) -> list[MicroBatch]:
        """Return the micro-batches of this rank's share of a step (local)."""
        run = self.recipe.run
        if run.logical_shards:
            return data.shards(batch, run.global_batch // run.logical_shards, microbatches_of(self.recipe, self.grid))
        return data.microbatches(batch, self.recipe.parallel.microbatches)

    def step(self, number: int, batches: list[MicroBatch], stop_requests: np.ndarray) -> StepResult:
        """Run step ``number``, counted from 1, on this rank's micro-batches; see `Executor.run`. Collective."""
        samples, first = self.samples(number), self.first_sample(number)
        targets = self.targets(number) if self.recipe.data.packed else None
        return self.executor.run(self.operations, batches, samples, number, stop_requests, first, targets)

    def evaluate(self, rounds: Iterable[Sequence[MicroBatch]], parts: int = 1) -> float:
        """Return the mean loss in nats over the targets of all replicas, NaN for none. Collective; call `flush` before.

        All ranks bring equally many ``rounds``: of each up to ``parts`` batches, already in their place, and none where
        nothing is computed.
        """
        speaks = self.context.computes and self.last_stage and self.context.speaks
        total, count = 0.0, 0.0
        for batches in rounds:
            losses, weight = [], 0.0
            for batch in batches:
                losses.append(self.executor.evaluate(*batch))
                weight += self.executor.own_weight
            for inputs, targets in batches[: parts - len(batches)]:
                self.executor.evaluate(inputs[:0], targets[:0])  # layers may be gathered: all ranks come equally often
            each = self.model.tokens_per_sample if speaks else 0
            seen = sum(self.source.targets_in(targets, each) for _, targets in batches) if speaks else 0
            seen = weight if self.model.loss.weighs else seen
            # Round by round, since the deadline of a communication runs for servers that wait for the others.
            loss, targets_of_all = self.exchange.agree_losses(losses, np.array([float(seen)]))
            total, count = total + loss, count + float(targets_of_all[0])
        return total / count if count else float("nan")

    def samples(self, step: int) -> int:
        """Return how many samples all replicas together take in ``step``, counted from 1 (local)."""
        return self.recipe.run.batches.size(step - 1)

    @cached_property
    def _order(self) -> data.SampleOrder:
        return data.SampleOrder(self.recipe.run.seed, self.source.training.count, self.sample_order)

    def targets(self, step: int) -> int:
        """Return how many targets all replicas together have in ``step``, counted from 1 (local)."""
        samples = self.samples(step)
        if not self.recipe.data.packed:
            return round(samples * self.model.tokens_per_sample)
        before = self.recipe.run.batches.samples_before(step - 1)
        return cast(FilledSamples, self.source.training).targets(np.array(self._order.indices(before, samples)))

    def first_sample(self, step: int) -> int:
        """Return the place of this replica's first sample in the batch of ``step``, counted from 1 (local)."""
        return data.own_samples(self.recipe, self.data_axis, step - 1, self.shares).start

    def learning_rate(self, step: int) -> float:
        """Return the rate of the update in step ``step``, counted from 1 (local)."""
        return rates.learning_rate(self.context.optimizer, step, self.recipe.run.steps)

    def state_bytes(self) -> int:
        """Return the bytes of state that this rank saves (local)."""
        return sum(piece.flat.size * piece.array.dtype.itemsize for piece in self.exchange.pieces())

    def flush(self) -> None:
        """Bring replicas that differ to one state. Collective."""
        if self.exchange.flush():
            self.executor.copies.refresh()

    def finish(self) -> None:
        """Apply what the last step has left to be done. Collective."""
        if self.exchange.finish():
            self.executor.copies.refresh()

    def close(self) -> None:
        """Free communicators, windows and threads. Collective; no step can be made afterwards."""
        if self.exchange.overlap is not None:
            self.exchange.overlap.close()
        self.exchange.close()
        self.axes.free()
        if self.axes.world is not self.comm:
            self.axes.world.free()


def microbatches_of(recipe: Recipe, grid: ProcessGrid) -> int:
    """Return how many micro-batches every rank has in a step, some perhaps without samples (local)."""
    return -(-recipe.run.logical_shards // grid.data) or recipe.parallel.microbatches
