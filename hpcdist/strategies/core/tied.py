"""Tied tensors of a pipeline: parameters that two ranks share, their copies and gradients.

The first and the last stage of a language model may share the embedding.
"""

from dataclasses import dataclass

from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import wait_all
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request
from hpcdist.models.model import Model
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.core.rank_context import RankContext

TAG = 0  # the first of `TIES` tags, below the tags of activations and gradients
TIES = 1 << 10


@dataclass(frozen=True)
class TiedTensor:
    """Tensor that two pipeline ranks use: rank ``owner`` has the original, and rank ``holder`` has a copy."""

    key: str  # name in the model's layout
    unit: int  # model unit of the original tensor
    owner: int
    holder: int


def tied_tensors(model: Model, placement: StagePlacement) -> list[TiedTensor]:
    """Return a list of the tied tensors of ``model`` that more than one pipeline rank uses.

    ``placement``: assignment of layers to pipeline ranks.
    """
    unit_of = {stage.layer: unit for unit, stage in enumerate(model.stages)}
    ties = []
    for unit, stage in enumerate(model.stages):
        for key in stage.tied.values():
            owner = unit_of[model.layout.by_key[key].spec.layer]
            tie = TiedTensor(key, owner, placement.rank_of(owner), placement.rank_of(unit))
            if tie.owner != tie.holder and tie not in ties:
                ties.append(tie)
    assert len(ties) <= TIES, f"{len(ties)} tied tensors would run into the tags of activations"
    return ties


class TiedCopies:
    """This rank's copies of tensors, such as embeddings, that several pipeline ranks use."""

    # The owner of a tensor adds the gradients of all copies to its gradient before any reduction, and sends the new
    # value after the update. Norms and checkpoints count only the original.
    def __init__(self, context: RankContext, ties: list[TiedTensor], exchange: Exchange) -> None:
        self._comm: Communicator = context.pipeline
        self._exchange, self._layout = exchange, context.layout
        self._owned = [tie for tie in ties if tie.owner == self._comm.rank]
        self._held = [tie for tie in ties if tie.holder == self._comm.rank]
        self._tags = {tie: TAG + number for number, tie in enumerate(ties)}
        keys = sorted({tie.key for tie in self._held}, key=lambda key: context.layout.by_key[key].range)
        parts = [context.layout.by_key[key].range for key in keys]
        self.layers = {context.layout.by_key[key].spec.layer for key in keys}
        self.parameters = context.store("parameters", parts)
        self.gradients = context.store("gradients", parts)
        owned_sizes = [context.layout.by_key[tie.key].range.size for tie in self._owned]
        self._arrival = backend.empty(max(owned_sizes, default=0), self.parameters.dtype, context.on)

    @property
    def keys(self) -> set[str]:
        """Names of the tensors of which this rank holds copies."""
        return {tie.key for tie in self._held}

    def after_backward(self) -> list[Operation]:
        """Return a list of the operations that send gradients of tied tensors from the copies to the owners. Local."""
        return [Operation(Kind.COPY_GRADIENT, unit=unit) for unit in self._units()]

    def after_update(self) -> list[Operation]:
        """Return a list of the operations that send new values of tied tensors from the owners to the copies. Local."""
        return [Operation(Kind.COPY_VALUE, unit=unit) for unit in self._units()]

    def _units(self) -> list[int]:
        return sorted({tie.unit for tie in (*self._owned, *self._held)})

    def gradient(self, op: Operation) -> None:
        """Add the gradients of all copies of tied tensors to the gradients of their owners. Collective.

        ``op.unit``: layer of the tied tensors.
        """
        held = [tie for tie in self._held if tie.unit == op.unit]
        requests = [self._comm.isend(self._of(self.gradients, tie), tie.owner, self._tags[tie]) for tie in held]
        for tie in self._owned:
            if tie.unit == op.unit:
                owned = self._layout.by_key[tie.key].range
                arrival = self._arrival[: owned.size]
                self._comm.recv(arrival, tie.holder, self._tags[tie])
                self._exchange.gradients_at(self._layer(tie)).add(owned, arrival)
        wait_all(requests)

    def value(self, op: Operation) -> None:
        """Send the tied tensors of layer ``op.unit`` from the owner to the copies. Collective."""
        requests: list[Request] = []
        for tie in self._owned:
            if tie.unit == op.unit:
                values = self._of(self._exchange.parameters_at(self._layer(tie)), tie)
                requests.append(self._comm.isend(values, tie.holder, self._tags[tie]))
        for tie in self._held:
            if tie.unit == op.unit:
                self._comm.recv(self._of(self.parameters, tie), tie.owner, self._tags[tie])
        wait_all(requests)

    def refresh(self) -> None:
        """Send all tied tensors from owners to copies, at the start of a run. Collective over the pipeline."""
        for op in self.after_update():
            self.value(op)

    def _layer(self, tie: TiedTensor) -> int:
        return self._layout.by_key[tie.key].spec.layer

    def _of(self, store: FlatStore, tie: TiedTensor) -> backend.Array:
        return store.range(self._layout.by_key[tie.key].range)
