"""What the fused kernels of this folder share."""

from typing import Any, Final

# Flags of LLVM under which sums over a row become vector code, and which keep NaN and infinity as they are: a diverged
# run must show.
REORDER: Final[Any] = {"reassoc", "contract", "arcp", "nsz"}
SAMPLE_DTYPES: Final = ("float32", "float64")  # what `hpcdist warmup` compiles every kernel for
