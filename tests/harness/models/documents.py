"""Random documents that are packed into samples, for tests of packed models."""

import numpy as np

from hpcdist.models.documents import Documents, PackedTokens, unpacked


def random_places(rng: np.random.Generator, samples: int, context: int, most: int = 0) -> np.ndarray:
    """Return the token positions in documents of random lengths, up to ``most`` (0: the context)."""
    rows = []
    for _ in range(samples):
        row: list[int] = []
        while len(row) < context:
            row += range(min(int(rng.integers(1, (most or context) + 1)), context - len(row)))
        rows.append(row)
    return np.array(rows, np.int64).reshape(samples, context)


def documents_of(places: np.ndarray) -> Documents:
    """Return the documents of samples with these token positions."""
    documents = unpacked(PackedTokens.of(np.zeros(places.shape, np.uint8), places))[1]
    assert documents is not None
    return documents


def spans(places: np.ndarray) -> list[tuple[int, slice]]:
    """Return the sample and the token range of each document."""
    return [
        (sample, slice(start, end))
        for sample, borders in enumerate(documents_of(places).borders)
        for start, end in zip(borders, borders[1:], strict=False)
    ]


def visibility_mask(places: np.ndarray, causal: bool) -> np.ndarray:
    """Return a mask (samples, queries, keys): True if the query sees the key."""
    number = np.cumsum(places == 0, axis=1)
    same = number[:, :, None] == number[:, None, :]
    return same & np.tri(places.shape[1], dtype=bool) if causal else same
