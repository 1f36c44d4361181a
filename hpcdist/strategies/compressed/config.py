"""The ``[compression]`` section of a recipe, and the names of compressors. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import must
from hpcdist.reporting.schema import check_section, key

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
    must(
        "compression.candidates",
        lambda names: names and len(set(names)) == len(names),
        "list at least one compressor, each once",
    ),
)


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Section ``[compression]``: options of the gradient compressor that ``communication.compression`` names."""

    error_feedback: bool = key(True, "Add the compression error of a gradient to the next gradient.")
    warmup_steps: int = key(
        0, "Updates without compression. dgc: updates of falling density. onebit: to measure the variance.", ge=0
    )
    across_nodes: bool = key(False, "Sum in float32 within a node, and compress only traffic between nodes.")
    density: float = key(0.01, "Fraction of the elements to send.", gt=0, le=1)
    rank: int = key(4, "Rank of the factors: their number of columns.", ge=1)
    bits: int = key(8, "Bits per element.", choices=(2, 4, 8))
    candidates: tuple[str, ...] = key(
        ("int8",), "Compressors that auto compares with no compression.", choices=COMPRESSORS
    )
    parameters: str = key(
        "none", "Compression of the parameters that zero3 gathers. int8: qwZ of ZeRO++.", choices=PARAMETERS
    )

    def __post_init__(self) -> None:
        check_section(RULES, "compression", self)
