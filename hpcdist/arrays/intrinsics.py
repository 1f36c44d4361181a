"""Primitives for functions under `arrays.jit`: ordered memory access between processes, and bits of a float32.

numba assumes that no other process writes a loop's memory, so flags need the atomics `store_release` and
`load_acquire`. Both are plain moves on x86-64: a missing primitive fails first on ARM.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.jit import Primitive

MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)  # all bits of a float32 except its sign
INFINITE: Final = np.uint32(0x7F80_0000)  # bits of the float32 infinity


def _load_acquire(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.load_atomic(pointer, "acquire", 8)

        return numba.types.int64(numba.types.intp), generate

    return numba.extending.intrinsic(intrinsic)


def _store_release(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            builder.store_atomic(args[1], pointer, "release", 8)
            return context.get_dummy_value()

        return numba.types.void(numba.types.intp, numba.types.int64), generate

    return numba.extending.intrinsic(intrinsic)


def _yield_core(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [])
            function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
            builder.call(function, [])
            return context.get_dummy_value()

        return numba.types.void(), generate

    return numba.extending.intrinsic(intrinsic)


def _pause(numba: Any) -> Any:
    import platform

    from llvmlite import ir

    # Marks a spin wait: without the hint the loop's speculative loads flush the pipeline when the loop ends.
    name = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint"}.get(platform.machine())

    def intrinsic(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if name is not None:
                hint = [ir.Constant(ir.IntType(32), 1)] if name.endswith("hint") else []  # 1: YIELD
                kind = ir.FunctionType(ir.VoidType(), [value.type for value in hint])
                builder.call(numba.core.cgutils.get_or_insert_function(builder.module, kind, name), hint)
            return context.get_dummy_value()

        return numba.types.void(), generate

    return numba.extending.intrinsic(intrinsic)


def _array_at(numba: Any) -> Any:
    def intrinsic(context: Any, address: Any, size: Any, like: Any) -> Any:
        kind = numba.types.Array(like.dtype, 1, "C")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
            return _view(numba, context, builder, kind, pointer, args[1])

        return kind(numba.types.intp, numba.types.intp, like), generate

    return numba.extending.intrinsic(intrinsic)


def _array_behind(numba: Any) -> Any:
    def intrinsic(context: Any, pointer: Any, size: Any) -> Any:
        kind = numba.types.Array(pointer.dtype, 1, "C")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _view(numba, context, builder, kind, *args)

        return kind(pointer, numba.types.intp), generate

    return numba.extending.intrinsic(intrinsic)


def _call(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = numba.core.cgutils.unpack_tuple(builder, args[1])
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
            return context.get_dummy_value()

        return numba.types.void(numba.types.intp, arguments), generate

    return numba.extending.intrinsic(intrinsic)


def _copy_bytes(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any, source: Any, target: Any, nbytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointers = [builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2]]
            numba.core.cgutils.raw_memcpy(builder, pointers[1], pointers[0], args[2], 1)
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.intp] * 3), generate

    return numba.extending.intrinsic(intrinsic)


def _prefer_wide_vectors(numba: Any) -> Any:
    def intrinsic(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # llvmlite knows no attributes with a value, so `add` of its own class would refuse this one.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return numba.types.void(), generate

    return numba.extending.intrinsic(intrinsic)


def _prefetch(numba: Any) -> Any:
    from llvmlite import ir

    def intrinsic(context: Any, address: Any, nbytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            function = numba.core.cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            line = ir.Constant(ir.IntType(64), 64)
            with numba.core.cgutils.for_range(builder, builder.udiv(args[1], line)) as loop:
                target = builder.add(args[0], builder.mul(loop.index, line))
                builder.call(function, [builder.inttoptr(target, pointer), number(0), number(3), number(1)])
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.intp] * 2), generate

    return numba.extending.intrinsic(intrinsic)


def _view(numba: Any, context: Any, builder: Any, kind: Any, pointer: Any, size: Any) -> Any:
    array = numba.np.arrayobj.make_array(kind)(context, builder)
    step = context.get_constant(numba.types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    numba.np.arrayobj.populate_array(array, data=pointer, shape=[size], strides=[step], itemsize=step, meminfo=None)
    return array._getvalue()


load_acquire = Primitive(_load_acquire, "(address) -> int64: load with acquire order from an aligned address")
store_release = Primitive(_store_release, "(address, value): store an int64 with release order, after earlier writes")
pause = Primitive(_pause, "(): CPU pause hint for the body of a spin loop")
yield_core = Primitive(_yield_core, "(): let another process run on this core (sched_yield)")
array_at = Primitive(_array_at, "(address, size, like): 1-D view of memory, with the dtype of the array `like`")
array_behind = Primitive(_array_behind, "(pointer, size): 1-D view of memory, with the dtype of the pointer")
call = Primitive(_call, "(address, arguments): call the machine code at an address from `Kernel.address`")
copy_bytes = Primitive(_copy_bytes, "(source, target, nbytes): memcpy between addresses that do not overlap")

prefetch = Primitive(_prefetch, "(address, nbytes): hint that these bytes, from an address on, are read soon")
prefer_wide_vectors = Primitive(_prefer_wide_vectors, "(): use 512-bit vectors in this function on x86")


def _reinterpreted(numba: Any, source: str, target: str) -> Any:
    source_type, target_type = getattr(numba.types, source), getattr(numba.types, target)

    def intrinsic(context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target_type))

        return target_type(source_type), generate

    return numba.extending.intrinsic(intrinsic)


bits_of = Primitive(lambda numba: _reinterpreted(numba, "float32", "uint32"), "(float32) -> uint32: bits of a float")
float_of = Primitive(lambda numba: _reinterpreted(numba, "uint32", "float32"), "(uint32) -> float32 with these bits")
