"""Offload of optimizer state, and of shards of parameters and gradients, to the host or to a file.

Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857). The host
updates offloaded state block by block, in a fixed order. While the host computes with one block, the next block is read
and the previous block is written. Only three sets of blocks stay in memory.

Bytes that a rank moves between memory and file per step, with psi bytes in each of its shards, s optimizer slots (2 for
adamw and lamb, 1 for lars and sgd with momentum) and m micro-batches:

                                   optimizer in the file       parameters too: gathers, gradients, their norm, update
  adamw, sgd    read               s psi                       2 m psi + (m - 1) psi + psi + 2 psi
                written            s psi                       m psi + psi
  lamb          read               s psi                       ... + 2 psi: the step is read again, and the weights,
                written            s psi                       ... + psi    when the norms of whole tensors are known
  lars          as lamb

Parameters that are gathered once for consecutive uses, like the last layer, are read once. Layer-wise learning rates
need a second pass, because DIRECTION comes before the norms and APPLY after them; other optimizers need one pass.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.filestore import BLOCK_BYTES, FileStore
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim.base import AVERAGE, Copy, SegmentWise, Sums, WrappedOptimizer
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data.config import ZeroConfig

SETS: Final = 3  # sets of blocks: one is read, one is computed, one is written
WEIGHTS: Final = "weights"
GRADIENT: Final = "gradient"

Wait = Callable[[], object]


class Offload:
    """Factory of stores and optimizers whose memory is on the device, on the host or in a file. Local."""

    def __init__(self, context: RankContext, config: ZeroConfig) -> None:
        self._context, self._config = context, config
        if context.working is not None and config.offload_optimizer != "none":
            raise ConfigurationError(
                f"zero.offload_optimizer = {config.offload_optimizer!r} is not supported with 16-bit working copies of "
                "the parameters; set precision.mode = 'float32', or zero.offload_optimizer = 'none'"
            )

    @property
    def is_resident(self) -> bool:
        """True if parameters stay in the memory of the device that computes."""
        return self._config.offload_parameters == "none"

    def shards(self, category: str, parts: Sequence[Range]) -> FlatStore:
        """Return a new store of the flat ranges ``parts``. ``category``: "parameters" or "gradients"."""
        return self._store(self._config.offload_parameters, category, parts)

    def optimizer(self, parts: Sequence[Range]) -> Optimizer:
        """Return the optimizer of the parameter ranges ``parts``, with zeroed state."""
        context, place = self._context, self._config.offload_optimizer
        if place == "none":
            return context.build_optimizer(parts)
        inner = optimizers.build(
            context.optimizer,
            context.layout,
            parts,
            np.dtype(context.dtype),
            total_steps=context.total_steps,
            make_slot=lambda name: self._store(place, "optimizer", parts, f"optimizer state {name}"),
        )
        return BlockedOptimizer(inner, on=context.on, ledger=context.ledger)

    def _store(self, place: str, category: str, parts: Sequence[Range], what: str = "") -> FlatStore:
        context = self._context
        if place == "none":
            return context.store(category, parts)
        if place == "host":  # not in the memory report, which counts the GPU's memory
            return FlatStore(context.layout, np.dtype(context.dtype), parts)
        return FileStore(
            context.layout,
            np.dtype(context.dtype),
            parts,
            directory=self._config.offload_directory,
            what=what or category,
            on=context.on,
            category=category,
            ledger=context.ledger,
        )


class BlockedOptimizer(WrappedOptimizer):
    """Optimizer that updates arrays in a file or on the host block by block. Blocks do not change the results."""

    def __init__(self, inner: SegmentWise, *, on: str = "cpu", ledger: Ledger | None = None) -> None:
        super().__init__(inner)
        self._on, self._ledger = on, ledger
        longest = max((part.size for part in inner.parts), default=0)
        self._block = max(1, min(BLOCK_BYTES // inner.dtype.itemsize, longest))
        self._buffers: dict[str, list[np.ndarray]] = {}
        self._io = ThreadPoolExecutor(2, thread_name_prefix="hpcdist-offload")  # one reads, one writes
        self._scale = 1.0

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        inner, self._scale = self._inner, scale
        if not inner.needs_norms:
            return
        moved = {} if inner.slots_in_apply else {name: slot for name, slot in self.slots.items() if name != AVERAGE}

        def compute(block: Range, at: Mapping[str, FlatStore]) -> None:
            inner.direction(block, at[WEIGHTS], at[GRADIENT], scale)

        self._pass(piece, {WEIGHTS: master, GRADIENT: gradient, **moved}, {GRADIENT, *moved}, compute)

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        inner = self._inner
        whole = inner.slots_in_apply or not inner.needs_norms
        moved = {name: slot for name, slot in self.slots.items() if whole or name == AVERAGE}

        def compute(block: Range, at: Mapping[str, FlatStore]) -> None:
            if not inner.needs_norms:
                inner.direction(block, at[WEIGHTS], at[GRADIENT], self._scale)
            inner.apply(block, at[WEIGHTS], at[GRADIENT], working, norms)

        self._pass(piece, {WEIGHTS: master, GRADIENT: direction, **moved}, {WEIGHTS, *moved}, compute)

    def _pass(
        self,
        piece: Range,
        stores: Mapping[str, FlatStore],
        written: set[str],
        compute: Callable[[Range, Mapping[str, FlatStore]], None],
    ) -> None:
        # Read each block of ``piece``, call ``compute``, and write back the stores named in ``written``.
        blocks = list(cut(piece, self._block))
        away = {name: store for name, store in stores.items() if not _is_on_host(store)}
        arrived: list[Wait] = []
        arriving: list[Wait] = []
        leaving: list[list[Wait]] = [[] for _ in range(SETS)]
        try:
            for number in range(-1, len(blocks)):
                arrived, following = arriving, number + 1
                if following < len(blocks):
                    # Three sets of buffers: before a set is used again, its block of two steps ago must be written.
                    _all(leaving[following % SETS])
                    arriving = []  # one by one: reads that started before a failure are waited for
                    for name, store in away.items():
                        buffer = self._buffer(name, following, blocks[following])
                        arriving.append(self._begin_read(store, blocks[following], buffer))
                if number < 0:
                    continue
                _all(arrived)
                block = blocks[number]
                at = dict(stores) | {name: self._window(name, number, block) for name in away}
                self._inner.slots = {name: at.get(name, slot) for name, slot in self.slots.items()}
                compute(block, at)
                leaving[number % SETS] = [
                    self._begin_write(store, block, at[name].array) for name, store in away.items() if name in written
                ]
            for waits in leaving:
                _all(waits)
        finally:
            self._inner.slots = self.slots
            # After a failure nothing may stay in flight. The first error is raised.
            for wait in chain(arrived, arriving, *leaving):
                with suppress(Exception):
                    wait()

    def _window(self, name: str, number: int, block: Range) -> FlatStore:
        buffer = self._buffer(name, number, block)
        return FlatStore(self._inner.layout, self._inner.dtype, block, allocate=lambda size, dtype: buffer)

    def _buffer(self, name: str, number: int, block: Range) -> np.ndarray:
        # The memory is overwritten after `SETS` more blocks.
        sets = self._buffers.setdefault(name, [])
        while len(sets) <= number % SETS:
            sets.append(self._take())
        return sets[number % SETS][: block.size]

    def _take(self) -> np.ndarray:
        if self._on == "gpu":
            return staging.lease(self._block, self._inner.dtype)
        memory = np.empty(self._block, self._inner.dtype)
        return memory if self._ledger is None else self._ledger.track(memory, "optimizer")

    def _begin_read(self, store: FlatStore, where: Range, out: np.ndarray) -> Wait:
        if isinstance(store, FileStore):
            return self._io.submit(store.read, where, out).result
        return staging.begin_to_host(store.range(where), out).synchronize

    def _begin_write(self, store: FlatStore, where: Range, values: np.ndarray) -> Wait:
        if isinstance(store, FileStore):
            return self._io.submit(store.write, where, values).result
        store.range(where).set(values)  # type: ignore[attr-defined]
        return device.record().synchronize


def _is_on_host(store: FlatStore) -> bool:
    return not isinstance(store, FileStore) and not backend.is_device(store.array)


def _all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()
