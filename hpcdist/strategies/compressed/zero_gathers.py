"""Parameters gathered as payloads: qwZ of ZeRO++ (Wang et al., arXiv:2306.10209).

Every owner encodes its cut, tensor by tensor, and everybody computes with what is decoded, the owner too: replicas have
the same weights to the bit. What is updated, and what a checkpoint keeps, are the weights of the owners, which nobody
rounds. An evaluation in training gathers as a step does, so it sees the weights that training computes with; one of a
checkpoint sees the exact ones. Rounding is to nearest, without feedback: the same weights give the same bits.

A layer is encoded once for each level that carries payloads: at one level n values on p ranks take (p-1)/p c n bytes
from each rank, c the bytes of a payload of one value. Where shards are of more than the own cuts (hpZ) they are brought
together once a step, and what is decoded is kept; in float32 that takes memory beside the own cuts.
"""

from hpcdist.arrays.store import FlatStore
from hpcdist.optim import kernels
from hpcdist.strategies.compressed.catalogue import compressor
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.ways import Quantised
from hpcdist.strategies.compressed.zero_levels import FLOAT32, coded, widened
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero.levels import OPTIMIZER, PARAMETERS, Levels

_NEAREST = CompressionConfig(error_feedback=True)  # how the catalogue is asked for rounding to nearest


class LevelGathers:
    """Gathers along ``levels`` as ``name`` encodes. Construction is collective over the data axis."""

    def __init__(self, seat: Seat, levels: Levels, name: str, *, across_nodes: bool) -> None:
        self._levels = levels
        carries = coded(seat.data, levels, across_nodes=across_nodes)
        coder = Coder(seat.layout, compressor(name, _NEAREST), 0, 0)
        self._ways = {
            level: Quantised(comm, coder)
            for level, comm in enumerate(levels.comms)
            if comm is not None and carries[level]
        }
        # Whether shards hold what is decoded, and not the weights of their owners.
        self.keeps_decoded = any(level in self._ways for level in range(PARAMETERS, OPTIMIZER))

    def gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Fill cut ``start`` of a layer from the cuts ``stop`` of the ranks that have them. Collective over them."""
        for level in reversed(range(start, stop)):
            if level in self._ways:
                self._decode(store, layer, level)
            else:
                self._levels.gather(store, layer, level, level + 1)

    def _decode(self, store: FlatStore, layer: int, level: int) -> None:
        part, own = (self._levels.cuts[layer][cut] for cut in (level, level + 1))
        if not part:
            return
        values = store
        if store.dtype != FLOAT32:
            values = widened(store, layer, level, self._levels)
            kernels.widen(store.range(own), values.range(own))
        self._ways[level].all_gather(values.range(part), part, self._levels.shares_at(layer, level))
        if values is not store:
            for _, where in store.layout.within(part):
                kernels.round_into(values.range(where), store.range(where))
