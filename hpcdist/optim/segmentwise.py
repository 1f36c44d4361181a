"""What the optimizers share: their state on the owned part, the clock, and the walk over tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from hpcdist.arrays.backend import to_host
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ledger import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.optim import rates
from hpcdist.optim.config import Group, OptimizerConfig
from hpcdist.optim.norms import ExactNorms, Norms


class SegmentWise(ABC):
    """State and walk of an optimizer: `hpcdist.optim.elementwise` and `hpcdist.optim.layerwise` give the phases.

    See `hpcdist.optim.optimizer.Optimizer` for the members and for who calls them when.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    needs_norms: ClassVar[bool] = False
    slots_in_apply: ClassVar[bool] = False  # whether `apply` advances the slots, instead of `direction`

    def __init__(
        self,
        config: OptimizerConfig,
        layout: Layout,
        parts: Range | Sequence[Range],
        dtype: np.dtype,
        *,
        ledger: Ledger | None,
        total_steps: int,
        on: str,
        make_slot: Callable[[str], FlatStore] | None = None,
    ) -> None:
        if dtype not in (np.float32, np.float64):
            raise UsageError(f"master weights in {dtype}: updates would be rounded away; use float32 or float64")
        self.config = config
        self.layout = layout
        self.parts = (parts,) if isinstance(parts, Range) else tuple(parts)
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._factor = self._scale = 1.0
        make = make_slot or (
            lambda name: FlatStore(layout, self.dtype, parts, on=on, category="optimizer", ledger=ledger)
        )
        self.slots = {name: make(name) for name in self._slots_of(config)}
        self._total_steps = total_steps
        self._index = {segment.range.start: index for index, segment in enumerate(layout.segments)}
        self._norms: Norms | ExactNorms = Norms(len(layout.segments), on)
        self._groups = grouped(config, layout)

    def _slots_of(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self.slot_names

    @property
    def learning_rate(self) -> float:
        """Rate of the update that `begin_step` began; of the coming one before the first."""
        return self._factor * rates.learning_rate(self.config, max(1, self.count), self._total_steps)

    def begin_step(self, factor: float = 1.0) -> None:
        """Count one update more, at ``factor`` times its rate, and forget the partial norms of the one before."""
        self.count += 1
        self._factor = factor
        self._norms.clear()

    @abstractmethod
    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Do what `apply` on ``piece`` may need of all pieces; see `hpcdist.optim.optimizer.Optimizer`."""

    def sum_exactly(self) -> None:
        """From now on sum the partial norms in exact accumulators."""
        self._norms = ExactNorms(len(self.layout.segments))

    def partial_norms(self) -> np.ndarray:  # (segments, 2) or (segments, 2, exact.SLOTS)
        """Return sums of squares of w and of the direction over the pieces seen; 0 for tensors that need none."""
        return to_host(self._norms.sums()).copy()

    @abstractmethod
    def apply(
        self,
        piece: Range,
        master: FlatStore,
        direction: FlatStore,
        working: FlatStore | None = None,
        norms: np.ndarray | None = None,
    ) -> None:
        """Write the new ``master`` weights on ``piece`` and, when given, their rounded ``working`` copy."""

    def state(self) -> dict[str, float]:
        """Return what a checkpoint needs beside the slots: the number of applied updates."""
        return {"count": self.count}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue after the update that `state` describes; the slots are filled by the caller."""
        self.count = int(state["count"])

    def _tensors(self, piece: Range) -> Iterator[tuple[int, TensorSpec, Range]]:
        for segment, where in self.layout.within(piece):
            yield self._index[segment.range.start], segment.spec, where

    def _decay(self, spec: TensorSpec) -> float:
        group = self._groups.get(spec.key) if self._groups else None
        if group is not None and group.weight_decay is not None:
            return group.weight_decay
        return self.config.weight_decay if spec.adapted else 0.0

    def _rate_factor(self, spec: TensorSpec) -> float:
        group = self._groups.get(spec.key) if self._groups else None
        return 1.0 if group is None else group.rate_factor


def grouped(config: OptimizerConfig, layout: Layout) -> dict[str, Group]:
    """Return the group of each tensor of ``layout`` that has one, by its name (local).

    Raises ConfigurationError for a group without a tensor.
    """
    groups = config.parsed_groups
    found: dict[str, Group] = {}
    for key in (segment.key for segment in layout.segments) if groups else ():
        group = next((group for group in groups if group.has(key)), None)
        if group is not None:
            found[key] = group
    for text, group in zip(config.groups, groups, strict=True):
        if not any(group is taken for taken in found.values()):
            raise ConfigurationError(
                f"optimizer.groups has {text!r}, which no tensor matches that an earlier group has not taken; names "
                f"are such as {', '.join(segment.key for segment in layout.segments[:4])}: `hpcdist checkpoint show "
                "--tensors` lists those of a run"
            )
    return found
