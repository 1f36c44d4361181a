"""The ``[compression]`` section of a recipe, and the names of compressors.

Light: reads recipes only, imports nothing but `reporting`. Which compressor is used is ``communication.compression``;
these keys say how.
"""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import at_least, check_section, must, one_of

QUANTISED: Final = ("float16", "bfloat16", "int8", "int4", "adaptive", "qsgd", "sign")
SPARSE: Final = ("topk", "randomk")
SUMMED: Final = ("randomk",)  # of SPARSE: payloads of all ranks have the same indices, and are summed as they are
LOW_RANK: Final = ("powersgd",)
COMPRESSORS: Final = (*QUANTISED, *SPARSE, *LOW_RANK)
OPTIMIZING: Final = ("dgc", "onebit")  # exchanges of their own: they take the place of an optimizer's momentum
PARAMETERS: Final = ("none", "float16", "bfloat16", "int8", "int4")
MOMENTUM_OPTIMIZERS: Final = {"dgc": "sgd", "onebit": "adamw"}
# Which compressors read a key, of the keys that not all of them read.
READ_BY: Final = {
    "error_feedback": COMPRESSORS,
    "density": ("topk", "randomk", "dgc"),
    "rank": LOW_RANK,
    "bits": ("qsgd",),
    "candidates": ("auto",),
}
RULES: Final = (
    *at_least(0, "compression.warmup_steps"),
    must(
        "compression.density",
        lambda share: 0 < share <= 1,
        "the share of elements to send is above 0 and at most 1, e.g. 0.01",
    ),
    *at_least(1, "compression.rank", expected="the factors of powersgd have at least 1 column"),
    must("compression.bits", (2, 4, 8).__contains__, "qsgd has codes of 2, 4 or 8 bits"),
    must(
        "compression.candidates",
        lambda names: names and len(set(names)) == len(names),
        "name one compressor or more, each once",
    ),
    must("compression.candidates", set(COMPRESSORS).issuperset, f"choose among {', '.join(COMPRESSORS)}"),
    one_of("compression.parameters", PARAMETERS),
)


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Section ``[compression]``: options of the compressor that ``communication.compression`` names.

    With ``error_feedback`` what a compressor loses of a gradient is added to the next one. The first ``warmup_steps``
    updates are not compressed; of dgc they are the steps in which the density falls to the one asked for, of onebit
    those in which the variance is measured. With ``across_nodes`` the ranks of a node sum in float32, and only what
    leaves the node is compressed. ``density`` is the share of elements that is sent, ``rank`` that of the factors of
    powersgd, ``bits`` those of a code of qsgd. ``auto`` measures ``candidates`` against no compression and takes the
    fastest. ``parameters`` is how zero3 sends what it gathers: "int8" is qwZ of ZeRO++.
    """

    error_feedback: bool = True
    warmup_steps: int = 0
    across_nodes: bool = False
    density: float = 0.01
    rank: int = 4
    bits: int = 8
    candidates: tuple[str, ...] = ("int8",)
    parameters: str = "none"

    def __post_init__(self) -> None:
        check_section(RULES, "compression", self)
