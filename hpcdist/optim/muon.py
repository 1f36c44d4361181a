"""Muon: orthogonalised momentum for hidden matrices, and AdamW for all other tensors.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with the scale and the weight decay of Liu et al.
(arXiv:2502.16982). W: matrix of m rows and n columns, G: its gradient, V: its velocity. The scale gives Muon's steps
the size of AdamW's steps, so that both have one learning rate.

    V = momentum V + G;  U = G + momentum V;  W -= rate (0.2 sqrt(max(m, n)) orthogonalise(U) + weight_decay W)

A tensor uses Muon if it is a matrix outside of the first layer (embedding) and the last layer (head) of the model. The
option ``muon`` of a parameter group overrides this. Stacked matrices, such as query, key and value, are orthogonalised
one by one. An update needs whole matrices, so ZeRO cuts layers between matrices: see `owned_ranges`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.layout import ALIGN_ELEMENTS, Layout, Segment, TensorSpec
from hpcdist.arrays.ranges import Range, align_up, cut, gaps, split
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.optim import fused, kernels
from hpcdist.optim.adam import AdamW
from hpcdist.optim.base import Copy, Sums, grouped
from hpcdist.optim.config import OptimizerConfig

ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # a, b, c of a x + b x^3 + c x^5, applied to the singular values
SMALLEST_NORM: Final = 1e-7  # matrices of smaller norm are divided by this number
SCALE: Final = 0.2  # root mean square of the elements of an AdamW step
ELEMENTWISE_WORK: Final = 256  # estimated cost of AdamW per element, in floating-point operations
SEARCH_STEPS: Final = 40  # bisections of the largest load


def orthogonalise(matrix: Array) -> None:
    """Replace the singular values of the float32 or float64 ``matrix`` by values near 1, in place.

    Computes 5 Newton-Schulz iterations with about 20 k + 10 k^2 / n operations per element, for sides k <= n.
    """
    rows, columns = matrix.shape
    xp, (a, b, c) = namespace(matrix), COEFFICIENTS
    matrix /= xp.maximum(xp.sqrt(xp.square(matrix).sum()), matrix.dtype.type(SMALLEST_NORM))
    gram, polynomial = (xp.empty((min(rows, columns),) * 2, matrix.dtype) for _ in range(2))
    product = xp.empty(matrix.shape, matrix.dtype)
    for _ in range(ITERATIONS):
        # X <- a X + (b A + c A^2) X with A = X X^T. For a tall X: X <- a X + X (b A + c A^2) with A = X^T X.
        gram_factors = (matrix, matrix.T) if rows <= columns else (matrix.T, matrix)
        backend.matmul(gram_factors[0], gram_factors[1], gram)
        backend.matmul(gram, gram, polynomial)
        polynomial *= c
        gram *= b
        polynomial += gram
        factors = (polynomial, matrix) if rows <= columns else (matrix, polynomial)
        backend.matmul(factors[0], factors[1], product)
        matrix *= a
        matrix += product


def sides(spec: TensorSpec, shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of the matrices in a tensor of ``shape`` with the properties of ``spec``."""
    if spec.stacked > 1 or spec.expert:
        return shape[-2], shape[-1]
    return shape[0], math.prod(shape[1:])


def unsharded_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of the tensor of ``spec`` without its division over tensor ranks."""
    # Experts stay divided over expert ranks, because each expert has a matrix of its own.
    return tuple(spec.whole[dim] if spec.whole and dim == spec.cut else size for dim, size in enumerate(spec.shape))


def muon_tensors(config: OptimizerConfig, layout: Layout) -> frozenset[str]:
    """Return the names of the tensors that Muon updates. Raises ConfigurationError if there are none."""
    groups, ends = grouped(config, layout), (min(layout.units), max(layout.units))
    names = set()
    for segment in layout.segments:
        spec, group = segment.spec, groups.get(segment.key)
        selected = None if group is None else group.muon
        if selected and not spec.is_matrix:
            raise ConfigurationError(
                f"optimizer.groups: muon=1 matches the tensor {segment.key} of shape {spec.shape}, but muon updates "
                "matrices only; use patterns that match matrices, such as '*.weight'"
            )
        if spec.is_matrix and (selected or (selected is None and spec.adapted and spec.layer not in ends)):
            names.add(segment.key)
    if not names:
        raise ConfigurationError(
            "optimizer.name = 'muon', but the model has no matrix between its first and its last layer; choose another "
            "optimizer, or name matrices in optimizer.groups, as in '1.*.weight: muon=1'"
        )
    return frozenset(names)


class Muon(AdamW):
    """Muon for hidden matrices, which have a velocity "m" and no second moment "v", and AdamW for other tensors."""

    # Each range of an update contains whole matrices. Matrices that tensor ranks share are the exception: the caller
    # orthogonalises the result of `momentum`, and stores this rank's shards in `orthogonal`.

    def __init__(self, config: OptimizerConfig, layout: Layout, *args: Any, **options: Any) -> None:
        self.matrices = muon_tensors(config, layout)
        self.orthogonal: dict[str, Array] = {}  # {tensor name: this rank's shard of its direction}, until `apply`
        super().__init__(config, layout, *args, **options)

    def _ranges_of(self, slot: str) -> Sequence[Range]:
        if slot != "v":
            return self.parts
        matrices = [segment.range for segment in self.layout.segments if segment.key in self.matrices]
        return [between for part in self.parts for between in gaps(part, filter(part.intersect, matrices))]

    def momentum(self, where: Range, gradient: FlatStore) -> Array:
        """Update the velocity in the flat range ``where``. Return the direction U as a flat array of master dtype.

        The array may be the memory of ``gradient``.
        """
        values = gradient.range(where)
        if gradient.dtype != self.dtype:
            wide = backend.empty(values.size, self.dtype, "gpu" if is_device(values) else "cpu")
            kernels.widen(values, wide)
            values = wide
        velocity, options = self.slots["m"].range(where), {"momentum": self.config.momentum, "decay": 0.0}
        kernels.momentum_direction(values, values, velocity, scale=self._scale, nesterov=True, **options)
        return values

    def _apply(self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy, norms: Sums) -> None:
        for segment, run in self._runs(piece):
            if segment is None:
                super()._apply(run, master, direction, working, norms)
            else:
                self._update_matrices(segment, run, master, direction, working)

    def _runs(self, piece: Range) -> Iterator[tuple[Segment | None, Range]]:
        # Tensors of Muon one by one, and between them ranges of tensors of AdamW.
        start = piece.start
        for segment, where in self.layout.within(piece):
            if segment.key in self.matrices:
                if start < where.start:
                    yield None, Range(start, where.start)
                yield segment, where
                start = where.stop
        if start < piece.stop:
            yield None, Range(start, piece.stop)

    def _update_matrices(
        self, segment: Segment, where: Range, master: FlatStore, gradient: FlatStore, working: Copy
    ) -> None:
        spec, local_sides = segment.spec, sides(segment.spec, segment.spec.shape)
        offsets = where.shift(-segment.range.start)
        assert not any(at % math.prod(local_sides) for at in (offsets.start, offsets.stop)), f"{where} cuts a matrix"
        step = self.orthogonal.pop(segment.key, None)
        if step is None:
            step = self.momentum(where, gradient)
            for matrix in step.reshape(-1, *local_sides):
                orthogonalise(matrix)
        rate, on_device = self.learning_rate, is_device(step)
        fused.sgd(
            master.range(where),
            step,
            scale=SCALE * math.sqrt(max(sides(spec, unsharded_shape(spec)))),
            rate=rate if on_device else rate * self._rate_factor(spec),
            decay=self._all_tensors(where) if on_device else self._decay(spec),
            working=None if working is None else working.range(where),
        )


def work(spec: TensorSpec) -> float:
    """Return the estimated floating-point operations of Muon's update of a tensor, without its division over ranks."""
    shape = unsharded_shape(spec)
    shorter, longer = sorted(sides(spec, shape))
    return math.prod(shape) * (ELEMENTWISE_WORK + 20 * shorter + 10 * shorter**2 / max(1, longer))


def owned_ranges(
    config: OptimizerConfig, layout: Layout, layers: Mapping[int, Range], owners: int
) -> dict[int, list[Range]]:
    """Cut each layer between matrices. Return {layer: one range per owner, in the order of the flat space}.

    ``layers``: {layer: its flat range}. The result is equal on all tensor ranks.
    """
    # Layers are placed in descending order of their work, as in Graham's (1969) longest-processing-time rule. Each
    # layer is cut such that the largest load is as small as possible. Collectives need the ranges in order.
    names, loads, result = muon_tensors(config, layout), [0.0] * owners, dict[int, list[Range]]()
    atoms = {layer: _atoms(layout, whole, names, owners) for layer, whole in layers.items()}
    for layer in sorted(layers, key=lambda layer: (-sum(cost for _, cost in atoms[layer]), layer)):
        costs, whole = [cost for _, cost in atoms[layer]], layers[layer]
        if not any(segment.key in names for segment, _ in layout.within(whole)):  # equal loads
            result[layer] = [part.shift(whole.start) for part in split(whole.size, owners, 1, ALIGN_ELEMENTS)]
            continue
        lowest, highest = max(loads), (max(loads) + sum(costs)) * (1 + 1e-9)  # one owner may take the layer
        counts = _fill(costs, loads, highest)
        for _ in range(SEARCH_STEPS):
            middle = (lowest + highest) / 2
            tried = _fill(costs, loads, middle)
            lowest, highest, counts = (lowest, middle, tried) if sum(tried) == len(costs) else (middle, highest, counts)
        ranges, first = [], 0
        for owner, count in enumerate(counts):
            stop = first + count
            ends = [part.start for part, _ in atoms[layer]] + [whole.stop]
            ranges.append(Range(ends[first], ends[stop]))
            loads[owner] += sum(costs[first:stop])
            first = stop
        result[layer] = ranges
    return result


def _fill(costs: Sequence[float], loads: Sequence[float], limit: float) -> list[int]:
    # Number of consecutive atoms of each owner, if every owner takes as many as its load allows.
    counts, first = [], 0
    for load in loads:
        before = first
        while first < len(costs) and load + costs[first] <= limit:
            load += costs[first]
            first += 1
        counts.append(first - before)
    return counts


def _atoms(layout: Layout, whole: Range, names: frozenset[str], owners: int) -> list[tuple[Range, float]]:
    # Ranges with their work. Together they cover ``whole``. No owner's range may begin inside of one of them.
    atoms: list[tuple[Range, float]] = []
    longest = align_up(max(1, whole.size // owners), ALIGN_ELEMENTS)
    for segment, _ in layout.within(whole):
        spec, room = segment.spec, Range(segment.range.start, segment.range.start + segment.spec.padded)
        if segment.key not in names:
            atoms += [(part, part.size * ELEMENTWISE_WORK) for part in cut(room, longest)]
            continue
        stack = _stack(spec)
        if unsharded_shape(spec) != spec.shape or segment.range.size // stack % ALIGN_ELEMENTS:
            stack = 1  # the borders of the matrices differ between tensor ranks, or lie within a cache line
        atoms += [(part, work(spec) / stack) for part in cut(room, max(1, room.size // stack))]
    return atoms


def _stack(spec: TensorSpec) -> int:
    return math.prod(spec.shape[:-2]) if spec.stacked > 1 or spec.expert else 1
