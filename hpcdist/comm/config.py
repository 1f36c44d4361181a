"""The ``[communication]`` section of a recipe. Imports only errors and `reporting`, so that it loads fast."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.nearest import nearest
from hpcdist.reporting.rules import at_least, check_section, finite, one_of, rule

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
    one_of("communication.overlap", OVERLAPS),
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
    one_of("communication.compression", COMPRESSIONS),
    *at_least(1, "communication.bucket_bytes"),
    finite("communication.deadline_s", lambda seconds: seconds > 0, "above 0"),
    *at_least(0, "communication.ranks_per_node", expected="give a number of ranks, or 0 for the real nodes"),
)


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Section ``[communication]``: how ranks exchange gradients.

    - ``algorithm``: an allreduce algorithm, a table of algorithms by buffer size (see `hpcdist.collectives.dispatch`),
      or ``auto``, which measures the algorithms at the start.
    - ``compression``: compressor of gradients, or ``auto``, which compresses if a measurement shows that it is faster.
    - ``bucket_bytes``: bucket size of the strategy "allreduce".
    - ``overlap``: send a bucket during the backward pass, in a thread ("thread") or between layers ("poll").
    - ``delayed``: apply gradients one step late (strategy "allreduce" only).
    - ``deadline_s``: an operation that takes longer ends the job.
    - ``ranks_per_node``: simulate nodes of that many consecutive ranks. 0 uses the real nodes.
    - ``checked``: all ranks fail when their collective calls differ.
    """

    algorithm: str = "auto"
    compression: str = "none"
    bucket_bytes: int = BUCKET_BYTES
    overlap: str = "none"
    delayed: bool = False
    deadline_s: float = 300.0
    ranks_per_node: int = 0
    checked: bool = False

    def __post_init__(self) -> None:
        fault = fault_in_table(self.algorithm, ALGORITHMS[1:]) if self.algorithm not in ALGORITHMS else ""
        if fault:
            raise ConfigurationError(
                f"communication.algorithm is invalid: {fault}; choose one of {', '.join(ALGORITHMS)}, or a "
                "table of algorithms by buffer size in bytes as `hpcdist tune` prints it, such as 'native<=4096,ring'"
            )
        check_section(RULES, "communication", self)


def fault_in_table(text: str, names: Sequence[str]) -> str:
    """Return an error message if the algorithm setting ``text`` is invalid, or "" if it is valid. Local.

    ``text`` is one of ``names``, or gives a name for each range of buffer sizes: "NAME<=BYTES,...,NAME".
    """
    rows, before = text.split(","), -1
    for number, row in enumerate(rows, 1):
        name, sign, limit = row.partition("<=")
        shown = f"row {row!r}" if len(rows) > 1 or sign else repr(row)
        if name not in names:
            near = nearest(name, names)
            return f"{shown} is unknown" + (f", did you mean {near}" if near else "")
        if bool(sign) != (number < len(rows)):
            return f"{shown}: {'the last row has' if sign else 'only the last row has'} no size"
        if sign and not _LIMIT.fullmatch(limit):
            return f"{shown}: sizes are plain bytes: 4096, not 4K"
        if sign and int(limit) <= before:
            return f"{shown}: sizes must ascend, but the previous row has {before}"
        before = int(limit or 0)
    return ""
