"""From the names of a recipe to compressors."""

from collections.abc import Callable
from typing import Final

from hpcdist.compression.adaptive import Adaptive
from hpcdist.compression.blockwise import NEAREST, STOCHASTIC, Blockwise
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor
from hpcdist.compression.qsgd import Qsgd
from hpcdist.compression.randomk import RandomK
from hpcdist.compression.sign import SignSgd
from hpcdist.compression.topk import TopK
from hpcdist.strategies.compressed.config import CompressionConfig

# Integers are rounded to nearest where what that loses is fed back, else by draws: without bias.
_MAKE: Final[dict[str, Callable[[CompressionConfig], Compressor]]] = {
    "float16": lambda config: Float16(),
    "bfloat16": lambda config: BFloat16(),
    "int8": lambda config: Blockwise(bits=8, rounding=NEAREST if config.error_feedback else STOCHASTIC),
    "int4": lambda config: Blockwise(bits=4, rounding=NEAREST if config.error_feedback else STOCHASTIC),
    "adaptive": lambda config: Adaptive(),
    "qsgd": lambda config: Qsgd(bits=config.bits),
    "sign": lambda config: SignSgd(),
    "topk": lambda config: TopK(density=config.density),
    "randomk": lambda config: RandomK(density=config.density, scaled=not config.error_feedback),
}


def compressor(name: str, config: CompressionConfig) -> Compressor:
    """Return the compressor ``name``, one of `config.QUANTISED` or `config.SPARSE` (local)."""
    return _MAKE[name](config)
