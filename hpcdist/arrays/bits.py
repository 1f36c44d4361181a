"""The bits of a float32 as an integer and back, for compiled loops: moves between registers, nothing is computed.

The names can be called inside functions under `arrays.jit`, not from Python.
"""

from typing import Any

from hpcdist.arrays.jit import Primitive


def _reinterpreted(numba: Any, source: str, target: str) -> Any:
    source_type, target_type = getattr(numba.types, source), getattr(numba.types, target)

    def intrinsic(context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target_type))

        return target_type(source_type), generate

    return numba.extending.intrinsic(intrinsic)


bits_of = Primitive(lambda numba: _reinterpreted(numba, "float32", "uint32"), "(float32) -> uint32: its bits")
float_of = Primitive(lambda numba: _reinterpreted(numba, "uint32", "float32"), "(uint32) -> float32: of these bits")
