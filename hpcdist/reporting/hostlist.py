"""Short lists of numbers and host names, as Slurm writes them: cores 0-3,8, nodes n[001-512]."""

import re
from collections.abc import Sequence
from typing import Final

MOST_GROUPS: Final = 6  # distinct texts that a report shows; the nodes with other texts are counted

_NUMBERED: Final = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def format_ranges(numbers: Sequence[int], separator: str = ",") -> str:
    """Format ascending integers as ranges: (0, 1, 2, 5) becomes 0-2,5 with the default ``separator``."""
    return separator.join(_span(first, last) for first, last in _runs(numbers))


def parse_ranges(text: str) -> tuple[int, ...]:
    """Parse ranges such as 0-2,5 into integers. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def fold_names(names: Sequence[str]) -> str:
    """Fold host names: n1, n2, n4 become n[1-2,4], and n01, n02 become n[01-02]. Other names stay unchanged."""
    plain: list[str] = []
    numbered: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            numbered.setdefault(match[1], []).append(match[2])
    return ",".join([*(part for prefix in numbered for part in _folded(prefix, numbered[prefix])), *plain])


def _folded(prefix: str, digits: list[str]) -> list[str]:
    padded = any(suffix.startswith("0") for suffix in digits if len(suffix) > 1)
    widths: dict[int, list[int]] = {}
    for suffix in digits:
        widths.setdefault(len(suffix) if padded else 0, []).append(int(suffix))
    texts = [
        ",".join(_span(first, last, width) for first, last in _runs(sorted(numbers)))
        for width, numbers in sorted(widths.items())
    ]
    return [f"{prefix}{text}" if text.isdigit() else f"{prefix}[{text}]" for text in texts]


def group_texts(labels: Sequence[str], texts: Sequence[str]) -> str:
    """Join texts of hosts as in "n[1-2]: 4 GPUs; n3: 2 GPUs", with the most frequent text first.

    ``labels``: host names. If all texts are equal, return the text alone.
    """
    groups: dict[str, list[str]] = {}
    for label, text in zip(labels, texts, strict=True):
        groups.setdefault(text, []).append(label)
    if len(groups) == 1:
        return texts[0]
    groups.pop("", None)
    # Empty texts are left out. Hosts beyond the `MOST_GROUPS` most frequent texts are only counted.
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    shown = [f"{fold_names(names)}: {text}" for text, names in ordered[:MOST_GROUPS]]
    left = sum(len(names) for _, names in ordered[MOST_GROUPS:])
    return "; ".join([*shown, *([f"and {left} more, each otherwise"] if left else [])])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _span(first: int, last: int, width: int = 0) -> str:
    return f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
