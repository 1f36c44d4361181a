"""The ``[compression]`` section of a recipe, and the names of compressors. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import at_least, check_section, must, one_of

QUANTISED: Final = ("float16", "bfloat16", "int8", "int4", "adaptive", "qsgd", "sign")
SPARSE: Final = ("topk", "randomk")
SUMMED: Final = ("randomk",)  # sparse compressors with equal indices on all ranks, whose payloads are summed directly
LOW_RANK: Final = ("powersgd",)
COMPRESSORS: Final = (*QUANTISED, *SPARSE, *LOW_RANK)
OPTIMIZING: Final = ("dgc", "onebit")  # exchanges that replace the optimizer's momentum
PARAMETERS: Final = ("none", "float16", "bfloat16", "int8", "int4")
MOMENTUM_OPTIMIZERS: Final = {"dgc": "sgd", "onebit": "adamw"}
# Key -> compressors that read it, for keys that not all compressors read.
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
        "the fraction of elements to send must be above 0 and at most 1, e.g. 0.01",
    ),
    *at_least(1, "compression.rank", expected="the factors of powersgd have at least 1 column"),
    must("compression.bits", (2, 4, 8).__contains__, "qsgd has codes of 2, 4 or 8 bits"),
    must(
        "compression.candidates",
        lambda names: names and len(set(names)) == len(names),
        "list at least one compressor, each once",
    ),
    must("compression.candidates", set(COMPRESSORS).issuperset, f"choose among {', '.join(COMPRESSORS)}"),
    one_of("compression.parameters", PARAMETERS),
)


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Section ``[compression]``: options of the gradient compressor that ``communication.compression`` names.

    - ``error_feedback``: add the compression error of a gradient to the next gradient.
    - ``warmup_steps``: number of uncompressed updates at the start. For dgc, the density decreases during this time.
    - ``across_nodes``: compress only the traffic between nodes.
    - ``density``: fraction of gradient elements to send. ``rank``: rank of powersgd's factors. ``bits``: bits per
      element of qsgd.
    - ``candidates``: compressors from which "auto" chooses.
    - ``parameters``: compression of zero3's parameter gathers, such as "int8".
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
