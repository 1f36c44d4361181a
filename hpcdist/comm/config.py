"""The ``[communication]`` section of a recipe; imports only the errors and `reporting`: it is read fast."""

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
POLLED: Final = ("ring",)  # algorithms that can be polled step by step, with the same bits
BUCKET_BYTES: Final = 4 << 20
RULES: Final = (
    one_of("communication.overlap", OVERLAPS),
    rule(
        "communication.overlap=poll with communication.algorithm!={polled}",
        "it has no steps with the same bits",
        f"choose the algorithm {' or '.join(POLLED)}, or the overlap 'thread'",
        polled=POLLED,
    ),
    rule(
        "communication.delayed with communication.overlap=none",
        "nothing would sum gradients behind the next step",
        "choose the overlap 'thread' or 'poll'",
    ),
    one_of("communication.compression", COMPRESSIONS),
    *at_least(1, "communication.bucket_bytes"),
    finite("communication.deadline_s", lambda seconds: seconds > 0, "above 0"),
    *at_least(0, "communication.ranks_per_node", expected="give a number of ranks, or 0 for nodes as found"),
)


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Section ``[communication]``: the exchange of gradients.

    ``algorithm`` is an allreduce by name, a table of names by size (see `hpcdist.collectives.dispatch`), or ``auto``:
    chosen by measurement at the start of a run and kept in its checkpoints. ``compression`` is the form in which
    gradients travel between replicas (see the section ``[compression]``); with ``auto`` they are compressed where that
    is measured to be faster. With the strategy allreduce a bucket of gradients is sent once ``bucket_bytes`` of it are
    complete; the other strategies send layer by layer. With ``overlap`` a bucket travels while the gradients before it
    are computed: a "thread" of each rank moves it, or the rank itself between two layers ("poll"), with the same bits
    as result. With ``delayed`` (allreduce) a sum is hidden behind the whole next step, and its update comes after that:
    each gradient is one step late. A communication that takes longer than ``deadline_s`` ends the job.
    ``ranks_per_node`` treats that many consecutive ranks as a node, to try code for several nodes on one; 0 takes the
    nodes as they are found. With ``checked`` the ranks compare what they are about to do before each collective, and
    all fail with what each brought where it differs.
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
                f"communication.algorithm: {fault}; choose one of {', '.join(ALGORITHMS)}, or a "
                "table of them by size in bytes as `hpcdist tune` prints it, such as 'native<=4096,ring'"
            )
        check_section(RULES, "communication", self)


def fault_in_table(text: str, names: Sequence[str]) -> str:
    """Return the fault of the first bad row of NAME<=BYTES,...,NAME, or of a NAME alone; "" for none (local)."""
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
            return f"{shown}: sizes ascend, and the row before has {before}"
        before = int(limit or 0)
    return ""
