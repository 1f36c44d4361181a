"""CUDA graphs of the compute operations of one rank: tens of kernels of a unit become one launch from Python.

`KernelLaunches` runs operations as they are, `StageGraphs` as graphs. Forward and backward of a unit for a micro-batch
are captured, each as a graph of its own; all between them (messages, exchanges, agreement, clipping, updates) stays as
it is, and so every strategy has them. The first `WARM_UP` steps run as they would without graphs: kernels are compiled
and memory is taken. From then on an operation is captured where no graph fits it.

A graph is fixed to what it was captured with. It fits an operation with the same arrays at the same addresses, the same
gradients to write or to add to, behind the same graph of its forward, and whose blocks of the arena are free: it takes
them as the capture did. What comes from outside of the unit's chunk (data, targets, messages, the step and the sample
that masks follow from) has another address each time and is copied to a fixed place before. Shapes, and the scale of
the loss, are numbers in the kernels: where they change, all graphs are dropped, and the next steps warm up again. A
graph refers to all arrays that it works on. So a replay has the same kernels on the same values.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu.graphs import GraphRecorder
from hpcdist.arrays.memory import Ledger
from hpcdist.models.model import BoundGradients
from hpcdist.models.runtime.arena import Arena, ArenaSaved, BlockUse, SavedState
from hpcdist.models.stage import Draw, Parameters
from hpcdist.strategies.schedule.operations import Kind, Operation

WARM_UP: Final = 2  # steps: the second takes what is left of its memory, since all of the first is free then
MOST: Final = 4  # graphs of a kind of operation on a unit, for each micro-batch: gradients have two stores in some

T = TypeVar("T")
Moving = Mapping[str, Array]  # what is copied to a fixed place, by name


class KernelLaunches:
    """Runs compute operations one by one, as they are. All of it is local."""

    own_messages = False  # whether messages have memory of their own

    def begin(self, draws: Sequence[Draw], sizes: Sequence[int], scale: float, *, steady: bool) -> Sequence[Draw]:
        """Begin a list with micro-batches of ``sizes`` samples, ``steady`` unless it evaluates or looks for NaN.

        Return the ``draws`` of micro-batches as kernels get them; an evaluation has none.
        """
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
        """Return what ``call`` of the ``moving`` arrays, or of fixed places with their values, returns.

        It launches kernels that read ``still``, besides what ``saved`` and the other arguments have.
        """
        return call(moving)


@dataclass(frozen=True)
class _Captured:
    """A graph, and all that an operation leaves behind on the host."""

    number: int
    graph: Any
    result: Any
    fixed: dict[str, Array]
    blocks: BlockUse
    state: SavedState
    written: frozenset[str]
    arrays: tuple[object, ...]  # parameters and gradients: referred to, so that their memory stays


class StageGraphs(KernelLaunches):
    """Graphs of the forwards and backwards of a rank whose memory is that of ``arena``.

    ``drops``: masks follow from the step. ``ledger`` gets the memory that only graphs need.
    """

    own_messages = True  # when one has left, and its memory is free, differs from step to step

    def __init__(self, arena: Arena, *, drops: bool = False, ledger: Ledger | None = None) -> None:
        self._arena, self._drops, self._ledger = arena, drops, ledger
        self._recorder = GraphRecorder()
        self._graphs: dict[tuple[Kind, int], dict[Hashable, list[_Captured]]] = {}
        self._numbers: Hashable = None  # those that are in the kernels
        self._steps = self._microbatches = self._counted = self._captures = 0
        self._on = False  # whether the operations of this list run as graphs

    def begin(self, draws: Sequence[Draw], sizes: Sequence[int], scale: float, *, steady: bool) -> Sequence[Draw]:
        """Begin a list; the draws of a steady one have first sample and step on the GPU, too."""
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
        return [replace(draw, words=own) for draw, own in zip(draws, words, strict=True)]

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
        """Launch the graph that fits, or capture it first; as it is where the list is not steady, or has too many."""
        if not self._on:
            return call(moving)
        if op.kind is Kind.FORWARD and saved.draw is not None and saved.draw.words is not None:
            moving = {**moving, "words": saved.draw.words}
        graphs = self._graphs.setdefault((op.kind, op.unit), {})
        before = frozenset[str]() if gradients is None else gradients.written
        arrays = (parameters or {}, {} if gradients is None else gradients.views)
        addresses = [backend.address(array) for views in arrays for array in views.values()]
        shapes = tuple((name, array.shape, array.dtype) for name, array in moving.items())
        place = None if still is None else (backend.address(still), still.shape)
        key = (saved.graph, shapes, place, *addresses, before)
        captured = next((own for own in graphs.get(key, ()) if self._arena.has_free(own.blocks)), None)
        if captured is None:
            full = sum(map(len, graphs.values())) >= MOST * self._microbatches
            if full or (op.kind is not Kind.FORWARD and not saved.graph):  # its forward was none
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
        # A gradient that came from another rank runs along the whole chunk, past the end of this unit's memory.
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
