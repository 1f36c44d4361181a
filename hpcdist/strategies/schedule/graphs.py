"""CUDA graphs of a rank's compute operations: one launch per unit instead of tens of kernel launches from Python.

Each forward or backward pass of a unit and a micro-batch has a graph, captured after `WARM_UP` steps. A graph matches
an operation with the same array addresses, gradients and forward graph, and with free arena blocks. Shapes and the loss
scale are constants in kernels: if they change, all graphs are dropped.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.gpu.graphs import GraphRecorder
from hpcdist.models.arena import Arena, ArenaSaved, BlockUse, SavedState
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Draw, Parameters
from hpcdist.strategies.core.operations import Kind, Operation

WARM_UP: Final = 2  # steps: the second allocates the memory that the first step did not need yet
MOST: Final = 4  # graphs per kind of operation, unit and micro-batch: some strategies alternate two gradient stores

T = TypeVar("T")
Moving = Mapping[str, Array]  # arrays to copy to a fixed address, by name


class KernelLaunches:
    """Runner of compute operations that launches their kernels directly, without CUDA graphs. Local."""

    own_messages = False  # whether messages have memory of their own

    def begin(self, draws: Sequence[Draw], sizes: Sequence[int], scale: float, *, steady: bool) -> Sequence[Draw]:
        """Prepare for the operations of a step. Return the list ``draws`` of dropout draws, or a copy on the GPU.

        ``sizes``: number of samples of each micro-batch. ``scale``: loss scale.
        """
        # ``steady`` is False in an evaluation or a NaN search.
        return draws

    def run(
        self,
        op: Operation,
        saved: ArenaSaved,
        call: Callable[[Moving], T],
        *,
        moving: Moving,
        still: Array | None = None,
        parameters: Parameters | None = None,
        gradients: BoundGradients | None = None,
    ) -> T:
        """Run the compute operation ``op`` by calling the function ``call``, and return the result of ``call``.

        ``saved``: memory for the arrays that the backward pass of ``op`` needs.
        """
        # All other arrays have fixed addresses: ``saved`` (for the backward pass), ``still`` (an input),
        # ``parameters``, ``gradients``.
        return call(moving)


@dataclass(frozen=True)
class _Captured:
    number: int
    graph: Any
    result: Any
    fixed: dict[str, Array]
    blocks: BlockUse
    state: SavedState
    written: frozenset[str]
    arrays: tuple[object, ...]  # parameters and gradients, referenced to keep their memory


class StageGraphs(KernelLaunches):
    """Runner of compute operations that captures forward and backward passes as CUDA graphs."""

    own_messages = True  # sends complete at varying times, so their memory must not come from the recorded arena

    def __init__(self, arena: Arena, *, drops: bool = False, ledger: Ledger | None = None) -> None:
        self._arena, self._drops, self._ledger = arena, drops, ledger
        self._recorder = GraphRecorder()
        self._graphs: dict[tuple[Kind, int], dict[Hashable, list[_Captured]]] = {}
        self._numbers: Hashable = None  # loss scale and sizes that captured kernels contain
        self._steps = self._microbatches = self._counted = self._captures = 0
        self._on = False  # whether the operations of this list run as graphs

    def begin(self, draws: Sequence[Draw], sizes: Sequence[int], scale: float, *, steady: bool) -> Sequence[Draw]:
        self._on = False
        if not steady:
            return draws
        if (scale, *sizes) != self._numbers:
            self._numbers, self._steps, self._microbatches = (scale, *sizes), 0, len(sizes)
            self._graphs.clear()
        self._steps += 1
        self._on = self._steps > WARM_UP
        if not (self._on and self._drops):
            return draws
        words = backend.place(np.array([(draw.first_sample, draw.step) for draw in draws], np.int64), "gpu")
        return [replace(draw, words=draw_words) for draw, draw_words in zip(draws, words, strict=True)]

    def run(
        self,
        op: Operation,
        saved: ArenaSaved,
        call: Callable[[Moving], T],
        *,
        moving: Moving,
        still: Array | None = None,
        parameters: Parameters | None = None,
        gradients: BoundGradients | None = None,
    ) -> T:
        # A graph is captured per operation and set of arrays. Without a graph: warm-up, evaluations, a search for NaN,
        # or too many graphs.
        if not self._on:
            return call(moving)
        if op.kind is Kind.FORWARD and saved.draw is not None and saved.draw.words is not None:
            moving = {**moving, "words": saved.draw.words}
        graphs = self._graphs.setdefault((op.kind, op.unit), {})
        before = frozenset[str]() if gradients is None else gradients.written
        arrays = (parameters or {}, {} if gradients is None else gradients.views)
        addresses = [backend.address(array) for views in arrays for array in views.values()]
        shapes = tuple((name, array.shape, array.dtype) for name, array in moving.items())
        still_key = None if still is None else (backend.address(still), still.shape)
        key = (saved.graph, shapes, still_key, *addresses, before)
        captured = next((graph for graph in graphs.get(key, ()) if self._arena.has_free(graph.blocks)), None)
        if captured is None:
            full = sum(map(len, graphs.values())) >= MOST * self._microbatches
            if full or (op.kind is not Kind.FORWARD and not saved.graph):  # its forward pass has no graph
                saved.graph = 0
                return call(moving)
            captured = self._capture(op, saved, call, moving, gradients, (*arrays, still))
            graphs.setdefault(key, []).append(captured)
        else:
            self._arena.repeat(captured.blocks)
            saved.restore(captured.state)
            if gradients is not None:
                gradients.wrote(captured.written)
        saved.graph = captured.number
        for name, array in moving.items():
            captured.fixed[name][...] = array
        captured.graph.launch()
        result: T = captured.result
        return result

    def _capture(
        self,
        op: Operation,
        saved: ArenaSaved,
        call: Callable[[Moving], Any],
        moving: Moving,
        gradients: BoundGradients | None,
        arrays: tuple[object, ...],
    ) -> _Captured:
        self._arena.begin_record()
        # A received gradient is used by the whole chunk, beyond the lifetime of this unit's memory.
        take = saved.empty if op.kind is Kind.FORWARD else saved.scratch
        fixed = {name: take(f"graph.{name}", array.shape, array.dtype) for name, array in moving.items()}
        if "words" in fixed:
            assert saved.draw is not None
            saved.draw = replace(saved.draw, words=fixed["words"])
        graph, result = self._recorder.capture(lambda: call(fixed))
        blocks, nbytes = self._arena.end_record(), self._recorder.nbytes
        if self._ledger is not None:
            self._ledger.add("activations", nbytes - self._counted)
        self._counted = nbytes
        self._captures += 1
        written = frozenset[str]() if gradients is None else gradients.written
        return _Captured(self._captures, graph, result, fixed, blocks, saved.state(), written, arrays)
