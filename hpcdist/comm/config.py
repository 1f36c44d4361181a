"""The ``[communication]`` section of a recipe. Imports only errors and `reporting`, so that it loads fast."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.constants import DEADLINE_S
from hpcdist.errors import ConfigurationError
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.rules import rule
from hpcdist.reporting.schema import check_section, key

ALGORITHMS: Final = (
    "auto",
    "native",
    "ring",
    "ring_bidirectional",
    "recursive_doubling",
    "rabenseifner",
    "circulant",
    "double_tree",
    "node_shared",
    "hierarchical",
    "all_to_all",
    "nccl",
)


_LIMIT: Final = re.compile(r"0|[1-9][0-9]{0,17}")
OVERLAPS: Final = ("none", "thread", "poll")
COMPRESSIONS: Final = (
    "none",
    "auto",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "adaptive",
    "qsgd",
    "sign",
    "topk",
    "randomk",
    "powersgd",
    "dgc",
    "onebit",
)
POLLED: Final = ("ring",)  # algorithms that can be polled step by step, with bitwise equal results
BUCKET_BYTES: Final = 4 << 20
RULES: Final = (
    rule(
        "communication.overlap=poll with communication.algorithm!={polled}",
        "it cannot be polled step by step",
        f"choose the algorithm {' or '.join(POLLED)}, or the overlap 'thread'",
        polled=POLLED,
    ),
    rule(
        "communication.delayed with communication.overlap=none",
        "gradients cannot be summed during the next step",
        "choose the overlap 'thread' or 'poll'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Section ``[communication]``: how ranks exchange gradients."""

    algorithm: str = key(
        "auto",
        'Algorithm of reductions, or of an allreduce a table as "native<=4096,ring". auto: measured at the start.',
        choices=ALGORITHMS,
        expected="a table",
    )
    compression: str = key(
        "none",
        "Compression of the gradients that replicas exchange. auto: measured at the start.",
        choices=COMPRESSIONS,
    )
    bucket_bytes: int = key(BUCKET_BYTES, "Size in bytes of the gradient buckets that are sent.", ge=1)
    overlap: str = key(
        "none", "Exchange gradients during the backward pass: in a thread, or between layers (poll).", choices=OVERLAPS
    )
    delayed: bool = key(False, "Apply each gradient one step late, so that its sum overlaps the next step.")
    deadline_s: float = key(DEADLINE_S, "Timeout of a communication in seconds. After it the job ends.", gt=0)
    ranks_per_node: int = key(0, "Number of consecutive ranks to treat as a node, for tests. 0: the real nodes.", ge=0)
    checked: bool = key(False, "Check before every collective that all ranks make the same call, to find bugs.")

    def __post_init__(self) -> None:
        fault = fault_in_table(self.algorithm, ALGORITHMS[1:]) if self.algorithm not in ALGORITHMS else ""
        if fault:
            raise ConfigurationError(
                f"communication.algorithm is invalid: {fault}; choose one of {', '.join(ALGORITHMS)}, or a "
                "table of algorithms by buffer size in bytes as `hpcdist tune` prints it, such as 'native<=4096,ring'"
            )
        check_section(RULES, "communication", self)


def fault_in_table(text: str, names: Sequence[str]) -> str:
    """Return "" if ``text`` is one of ``names`` or a table "NAME<=BYTES,...,NAME", else an error message. Local."""
    rows, before = text.split(","), -1
    for number, row in enumerate(rows, 1):
        name, sign, limit = row.partition("<=")
        shown = f"row {row!r}" if len(rows) > 1 or sign else repr(row)
        if name not in names:
            near = nearest(name, names)
            return f"{shown} is unknown" + (f", did you mean {near}" if near else "")
        if bool(sign) != (number < len(rows)):
            return f"{shown}: {'the last row must have no' if sign else 'every row but the last needs a'} size"
        if sign and not _LIMIT.fullmatch(limit):
            return f"{shown}: sizes are plain bytes: 4096, not 4K"
        if sign and int(limit) <= before:
            return f"{shown}: sizes must ascend, but the previous row has {before}"
        before = int(limit or 0)
    return ""
