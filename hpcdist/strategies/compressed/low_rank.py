"""PowerSGD reduction: two allreduces of thin factors for all matrices of a range, and vectors as they are.

See `hpcdist.compression.powersgd` for the method. A rank sends 2 (p-1)/p times 4 (sum of r (a + b) over the matrices,
and the elements of vectors) bytes. Tensors must be whole in the range, on this rank.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.compression import powersgd
from hpcdist.compression.compressor import ErrorFeedback, is_finite

QUERY: Final = "powersgd.query"  # the kind of the factors that the next step begins with, in a checkpoint
_FLOAT32 = np.dtype(np.float32)
_LINE: Final = ALIGN_BYTES // _FLOAT32.itemsize


class PowerSgdReduction:
    """Reduction (`reduction.CompressedReduction`) by low-rank factors, which are kept from step to step.

    ``parts`` is what it will ever sum: whole tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        parts: Iterable[Range],
        rank: int,
        seed: int,
        algorithm: str,
        on: str = "cpu",
    ) -> None:
        self.comm, self.layout, self.rank, self.algorithm = comm, layout, rank, algorithm
        self.feedback: ErrorFeedback | None = None
        self.matrices: dict[str, powersgd.PowerSgd] = {}
        for part in parts:
            for segment, where in layout.within(part):
                assert where == segment.range, f"{segment.key} is cut"
                shape, place = segment.spec.shape, segment.range.start // _LINE
                clamped = powersgd.rank_of(shape, rank) if segment.spec.is_matrix else 0
                if clamped:
                    self.matrices[segment.key] = powersgd.PowerSgd(shape, clamped, seed=seed, tensor=place, on=on)
        self.owes = False  # whether there may be residuals of tensors that travel as they are
        self._owing: dict[str, Array] = {}  # residuals of this step, by tensor
        self._before = {key: matrix.query.copy() for key, matrix in self.matrices.items()}
        self.rounds = lru_cache(maxsize=None)(self._rounds)

    @property
    def passes(self) -> tuple[float, float]:
        """Both factors are made once, and multiplied once."""
        return 1.0, 1.0

    def kept(self, part: Range) -> list[Range]:
        """Return all of ``part``: vectors may have residuals of a checkpoint in which they were encoded."""
        return [part]

    def _rounds(self, part: Range) -> list[tuple[Segment, Range, Range]]:
        """Return each tensor of ``part``, and its place in the messages of both rounds (local)."""
        rounds, ends = [], [0, 0]
        for segment, _ in self.layout.within(part):
            is_thin = segment.key in self.matrices
            sizes = powersgd.round_elements(segment.spec.shape, self.rank) if is_thin else (segment.spec.size, 0)
            first, second = (Range(end, end + size) for end, size in zip(ends, sizes, strict=True))
            ends = [first.stop, second.stop]
            rounds.append((segment, first, second))
        return rounds

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place, matrices by their factors. Collective."""
        rounds = self.rounds(part)
        if not rounds:
            return
        ps = scratch("powersgd.p", rounds[-1][1].stop, _FLOAT32, values)
        qs = scratch("powersgd.q", rounds[-1][2].stop, _FLOAT32, values)
        compensated: dict[str, Array] = {}
        for segment, first, _ in rounds:
            gradient = values[segment.range.shift(-part.start).slice]
            if segment.key in self.matrices:
                matrix = self.matrices[segment.key]
                self._before[segment.key][...] = matrix.query
                compensated[segment.key] = self._compensated(segment, gradient)
                matrix.project(compensated[segment.key], ps[first.slice])
            else:
                ps[first.slice] = self._in_full(segment, gradient)
        collectives.allreduce(self.comm, ps, self.algorithm)
        for segment, first, second in rounds:
            if segment.key in self.matrices:
                self.matrices[segment.key].orthogonalise(ps[first.slice])
                self.matrices[segment.key].project_back(compensated[segment.key], ps[first.slice], qs[second.slice])
        if qs.size:
            collectives.allreduce(self.comm, qs, self.algorithm)
        for segment, first, second in rounds:
            out = values[segment.range.shift(-part.start).slice]
            if segment.key in self.matrices:
                self.matrices[segment.key].reconstruct(ps[first.slice], qs[second.slice], out)
                self._take_away(segment, out)
            else:
                out[...] = ps[first.slice]
        self._owing.clear()

    def _in_full(self, segment: Segment, gradient: Array) -> Array:
        """Return the gradient of a tensor that is not compressed, plus all of its residual."""
        if not self.owes:
            return gradient
        total = self._compensated(segment, gradient).copy()
        if segment.key in self._owing:
            self._owing[segment.key][...] = 0
        return total

    def _compensated(self, segment: Segment, gradient: Array) -> Array:
        """Return the gradient of a tensor plus its residual; one that is not finite is left alone."""
        if self.feedback is None or not is_finite(gradient):
            return gradient
        self._owing[segment.key] = self.feedback.compensate(segment.range, gradient)
        return self._owing[segment.key]

    def _take_away(self, segment: Segment, total: Array) -> None:
        """Subtract this rank's share of the ``total`` from the residual of a matrix."""
        if segment.key in self._owing:
            self._owing[segment.key] -= total * np.float32(1.0 / self.comm.size)

    def rollback(self) -> None:
        """Restore the factors of before a step that was given up (local)."""
        for key, before in self._before.items():
            self.matrices[key].query[...] = before

    def pieces(self, parts: Iterable[Range]) -> list[Piece]:
        """Return views of the factors that the next step of ``parts`` begins with, the same on all ranks (local)."""
        return [
            Piece.whole(QUERY, segment.key, self.matrices[segment.key].query)
            for part in parts
            for segment, _ in self.layout.within(part)
            if segment.key in self.matrices
        ]
