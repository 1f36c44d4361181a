"""CRC-32C (Castagnoli) of many records at once: what guards the records of TensorBoard's event files.

In pure Python it takes 0.15 us a byte, a percent of a quick step; here the bytes at one place of all records are one
operation of numpy.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np

POLYNOMIAL: Final = 0x82F63B78  # reflected
MASK_DELTA: Final = 0xA282EAD8  # https://github.com/google/crc32c and TFRecord: a CRC of what holds CRCs would be weak


@cache
def _table() -> np.ndarray:
    """Return what each byte does to the remainder, (256,) uint32."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def crc32c(records: Sequence[bytes]) -> np.ndarray:
    """Return the CRC-32C of each record, (records,) uint32."""
    table = _table()
    lengths = np.array([len(record) for record in records], np.int64)
    order = np.argsort(-lengths, kind="stable")  # longest first: those that go on are always the first ones
    longest = int(lengths.max(initial=0))
    matrix = np.zeros((len(records), longest), np.uint8)
    for row, index in enumerate(order):
        matrix[row, : lengths[index]] = np.frombuffer(records[index], np.uint8)
    columns = np.ascontiguousarray(matrix.T)
    going_on = np.searchsorted(-lengths[order], -np.arange(longest), side="left")
    remainder = np.full(len(records), 0xFFFFFFFF, np.uint32)
    for column, count in zip(columns, going_on, strict=True):
        part = remainder[:count]
        remainder[:count] = table[(part ^ column[:count]) & 0xFF] ^ (part >> np.uint32(8))
    found = np.empty_like(remainder)
    found[order] = remainder ^ np.uint32(0xFFFFFFFF)
    return found


def masked(crcs: np.ndarray) -> np.ndarray:
    """Return ``crcs``, uint32, as TFRecord files keep them: rotated by 15 bits, plus a constant."""
    rotated = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    return (rotated.astype(np.uint64) + MASK_DELTA).astype(np.uint32)
