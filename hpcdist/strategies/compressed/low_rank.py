"""PowerSGD reduction: two allreduces of thin factors for all matrices of a range; vectors are not compressed.

With p ranks and factors of rank r, a rank sends 2 (p-1)/p times 4 (sum of r (a + b) over the a x b matrices, plus the
elements of vectors) bytes. See `hpcdist.compression.powersgd`.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.compression import powersgd
from hpcdist.compression.compressor import ErrorFeedback, is_finite

QUERY: Final = "powersgd.query"  # kind of the start factors of the next step in a checkpoint
_LINE: Final = ALIGN_BYTES // FLOAT32.itemsize


class PowerSgdReduction:
    """PowerSGD: a gradient allreduce that sends each gradient matrix as two factors of low rank."""

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        parts: Iterable[Range],  # all ranges whose gradients will be summed, each of whole tensors
        rank: int,
        seed: int,
        algorithm: str,  # allreduce algorithm of the factors
        on: str = "cpu",
    ) -> None:
        self.comm, self.layout, self.rank, self.algorithm = comm, layout, rank, algorithm
        self.feedback: ErrorFeedback | None = None
        self.matrices: dict[str, powersgd.PowerSgd] = {}
        for part in parts:
            for segment, touched in layout.within(part):
                assert touched == segment.range, f"{segment.key} is cut"
                shape, line = segment.spec.shape, segment.range.start // _LINE
                clamped = powersgd.rank_of(shape, rank) if segment.spec.is_matrix else 0
                if clamped:
                    self.matrices[segment.key] = powersgd.PowerSgd(shape, clamped, seed=seed, tensor=line, on=on)
        self.owes = False  # whether uncompressed tensors may have residuals
        self._owing: dict[str, Array] = {}  # residuals of this step, by tensor
        self._before = {key: matrix.query.copy() for key, matrix in self.matrices.items()}
        self.rounds = lru_cache(maxsize=None)(self._rounds)

    @property
    def passes(self) -> tuple[float, float]:
        return 1.0, 1.0

    def kept(self, part: Range) -> list[Range]:
        return [part]

    def _rounds(self, part: Range) -> list[tuple[Segment, Range, Range]]:
        rounds, ends = [], [0, 0]  # ends of the used parts of the first and the second allreduce buffer
        for segment, _ in self.layout.within(part):
            is_thin = segment.key in self.matrices
            sizes = powersgd.round_elements(segment.spec.shape, self.rank) if is_thin else (segment.spec.size, 0)
            first, second = (Range(end, end + size) for end, size in zip(ends, sizes, strict=True))
            ends = [first.stop, second.stop]
            rounds.append((segment, first, second))
        return rounds

    def allreduce(self, values: Array, part: Range) -> None:
        rounds = self.rounds(part)
        if not rounds:
            return
        ps = scratch("powersgd.p", rounds[-1][1].stop, FLOAT32, values)
        qs = scratch("powersgd.q", rounds[-1][2].stop, FLOAT32, values)
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
                if segment.key in self._owing:
                    self._owing[segment.key] -= out * np.float32(1.0 / self.comm.size)
            else:
                out[...] = ps[first.slice]
        self._owing.clear()

    def _in_full(self, segment: Segment, gradient: Array) -> Array:
        if not self.owes:
            return gradient
        total = self._compensated(segment, gradient).copy()
        if segment.key in self._owing:
            self._owing[segment.key][...] = 0  # the uncompressed sum includes the residual
        return total

    def _compensated(self, segment: Segment, gradient: Array) -> Array:
        if self.feedback is None or not is_finite(gradient):
            return gradient
        self._owing[segment.key] = self.feedback.compensate(segment.range, gradient)
        return self._owing[segment.key]

    def rollback(self) -> None:
        """Restore the low-rank factors to their values before the last step, which failed. Local."""
        for key, before in self._before.items():
            self.matrices[key].query[...] = before

    def pieces(self, parts: Iterable[Range]) -> list[Piece]:
        """Return a list of checkpoint pieces: a low-rank factor of each matrix in the flat ranges ``parts``. Local."""
        return [
            Piece.whole(QUERY, segment.key, self.matrices[segment.key].query)
            for part in parts
            for segment, _ in self.layout.within(part)
            if segment.key in self.matrices
        ]
