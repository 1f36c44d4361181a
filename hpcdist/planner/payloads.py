"""What compression makes of gradients: bytes of a payload, how payloads are summed, and the time of coding them.

Of n values, with the defaults of `hpcdist.strategies.compressed.config`, in bytes:

    bfloat16    2 n                        casts                 shares to their owners, sums back
    int8        n + 4 ceil(n / 256)        blockwise             the same
    int4        n / 2 + 4 ceil(n / 256)    blockwise             the same
    onebit      n / 8 + 4 p                onebit                the same: signs and a scale for each of p chunks
    topk        8 ceil(n / 100)            topk                  gathered: (p-1) payloads come to everybody
    powersgd    4 r (a + b), r = 4         powersgd              summed, for each matrix (a, b)

Modules: `hpcdist.compression`. Coding is bound by memory: every value is read and its residual read and written (12
bytes), its payload written, and on the way back payloads are read and values written; what is gathered is decoded for
every rank. The two products and the orthogonalisation of powersgd are 3 x 2 r operations a value, of float32.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.layout import COMPRESSIONS

DENSITY: Final = 0.01
RANK: Final = 4
BLOCK: Final = 256
_ENCODE_BYTES: Final = 12  # a value: itself, its residual, and that written

Matrices = tuple[tuple[int, int, int], ...]  # (rows, columns, how many)


class Payload(NamedTuple):
    """Bytes that stand for all gradients of a device; ``way``: "owned", "gathered" or "summed"."""

    nbytes: float
    way: str
    touched_bytes: float  # of memory, in encoding and decoding
    flops: float = 0.0
    flags: tuple[str, ...] = ()

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of encoding and decoding on a device of ``cluster``."""
        device = cluster.device
        moved_s = self.touched_bytes / (device.memory_bytes_per_s * device.memory_share)
        peak = device.peak_flops.get("float32", 0.0)
        return max(moved_s, self.flops / peak) if peak else moved_s


@lru_cache(maxsize=1 << 14)
def payload(compression: str, values: float, ranks: int, units: int = 1, matrices: Matrices = ()) -> Payload | None:
    """Return what ``compression`` makes of so many ``values`` in ``units`` of one device; None for "none".

    Raises UsageError for a name that is none.
    """
    if compression == "none":
        return None
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}; choose one of {', '.join(COMPRESSIONS)}")
    if compression == "topk":
        nbytes = 8 * DENSITY * values
        return Payload(nbytes, "gathered", _ENCODE_BYTES * values + nbytes + ranks * nbytes + 4 * values)
    if compression == "powersgd":
        return _low_rank(values, units, matrices)
    scales = 4 * values / BLOCK
    nbytes = {
        "bfloat16": 2 * values,
        "int8": values + scales,
        "int4": values / 2 + scales,
        "onebit": values / 8 + 4 * ranks * units,
    }[compression]
    # Encoded for the owners, who read what comes, add, and encode the sums; then decoded.
    return Payload(nbytes, "owned", _ENCODE_BYTES * values + 3 * nbytes + 2 * 4 * values)


def _low_rank(values: float, units: int, matrices: Matrices) -> Payload:
    flags: tuple[str, ...] = ()
    if matrices:
        inside = sum(a * b * count for a, b, count in matrices)
        sent = sum(RANK * (a + b) * count for a, b, count in matrices) + max(0.0, values - inside)
    else:
        side = (values / units) ** 0.5
        sent = units * RANK * 2 * side
        flags = ("powersgd: each unit is taken to be one square matrix",)
    # Read for M Q, for M^T P and for the residual, which is written; P Q^T is written.
    return Payload(4 * sent, "summed", 5 * 4 * values, 3 * 2 * RANK * values, flags)
