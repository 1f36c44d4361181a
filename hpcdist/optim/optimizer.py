"""Two-phase optimizer interface, and the table of optimizers by name.

A layer-wise optimizer needs norms of whole tensors, but a rank may own any part of the flat space. So an update is

    begin_step  ->  direction(piece)...  ->  partial_norms  -> (the caller sums them) ->  apply(piece)...

and equals the undivided update for every partition, up to the order of summation of the norms, or to the bit where
they are summed exactly. Without norms to wait for, `direction` only stores the scale, and `apply` does everything in
one pass over memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim.adam import AdamW, Lamb
from hpcdist.optim.base import Copy, SegmentWise, Sums
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.sgd import Lars, Sgd

OPTIMIZERS: Final[dict[str, type[SegmentWise]]] = {"adamw": AdamW, "lamb": Lamb, "lars": Lars, "sgd": Sgd}


class Optimizer(Protocol):
    """One optimizer on the parts of the flat space that a rank owns. Nothing here communicates."""

    parts: tuple[Range, ...]

    @property
    def slots(self) -> dict[str, FlatStore]:
        """Stores of the state, by name, on the owned part, in the master dtype; a checkpoint saves them as pieces."""

    @property
    def count(self) -> int:
        """Number of applied updates, the begun one included."""

    @property
    def needs_norms(self) -> bool:
        """Whether `apply` needs the reduced `partial_norms`."""

    @property
    def learning_rate(self) -> float:
        """Rate of the update that is under way."""

    def begin_step(self, factor: float = 1.0) -> None:
        """Begin an update, at ``factor`` times the rate. Call it once it is certain that this one is not skipped."""

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Take the mean gradient on ``piece``, times ``scale`` (see `hpcdist.optim.norms`): one in each update.

        Where norms are needed the buffer of ``gradient``, in the master dtype, holds the direction u afterwards; else
        it must stay as it is until `apply`. Each element of the owned part is given once in an update; pieces may cut
        tensors anywhere. Padding is not touched.
        """

    def sum_exactly(self) -> None:
        """From the next update on make `partial_norms` exact: the norms then have the same bits for every partition."""

    def partial_norms(self) -> np.ndarray:  # (segments, 2)
        """Return, for each tensor of the layout, sum(w^2) and sum(u^2) over the given pieces, in float64.

        On the host. The caller sums them over the ranks that share the tensors; rows of tensors that need none are 0.
        After `sum_exactly` they are accumulators of `hpcdist.optim.update.exact` (segments, 2, exact.SLOTS), int64,
        which the caller sums and rounds.
        """

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Write the new ``master`` weights on ``piece`` and, when given, their rounded ``working`` copy.

        ``direction`` is what `direction` was given, undefined afterwards. ``norms`` are the summed `partial_norms`;
        they may be None when `needs_norms` is false.
        """

    def state(self) -> dict[str, float]:
        """Return the scalars that a checkpoint needs beside the slots."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Take back what `state` returned."""


def build(
    config: OptimizerConfig,
    layout: Layout,
    parts: Range | Sequence[Range],
    dtype: np.dtype,
    *,
    total_steps: int,
    ledger: Ledger | None = None,
    on: str = "cpu",
    make_slot: Callable[[str], FlatStore] | None = None,
) -> SegmentWise:
    """Return the optimizer that ``config`` names for ``parts`` of the flat space, with zeroed state.

    ``dtype`` is that of the master weights, float32 or float64 (UsageError otherwise). ``total_steps`` is the length of
    the learning-rate schedule; ``on`` is where the state lives, ``"cpu"`` or ``"gpu"``. Who keeps the state elsewhere
    passes ``make_slot``, which returns the store of a slot by its name.
    """
    return OPTIMIZERS[config.name](
        config, layout, parts, dtype, ledger=ledger, total_steps=total_steps, on=on, make_slot=make_slot
    )
