"""Sixteen f32 lanes as one value inside compiled functions: the only vectors that this backend computes with.

A compiler that vectorises a sum by itself chooses who is added to whom. Here the lanes are written out. LLVM maps them
to one register of 512 bits, two of 256 or four of 128, and every lane gets the same bits on each of them, because each
operation is IEEE 754's, rounded once: +, -, *, / and the fused multiply-add. A sum over the lanes of one value adds
halves, quarters, eighths and pairs, in this order.

Arrays are one-dimensional and C-contiguous; indices count elements and are not checked. Elements may be f32, int8, or
f16 held as uint16 (Numba has no f16 on CPUs); the last two are widened as they are loaded, which is exact.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, Protocol

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

LANES: Final = 16

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_INDEX = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)

_STORED: Final = {
    types.float32: _VECTOR,
    types.int8: ir.VectorType(ir.IntType(8), LANES),
    types.uint16: ir.VectorType(ir.HalfType(), LANES),
}
"""What sixteen elements of an array are in memory, by the array's dtype."""


class Lanes(Protocol):
    """Stands for sixteen lanes in annotations. The value exists inside compiled functions alone."""

    def __add__(self, other: Lanes) -> Lanes: ...
    def __sub__(self, other: Lanes) -> Lanes: ...
    def __mul__(self, other: Lanes) -> Lanes: ...
    def __truediv__(self, other: Lanes) -> Lanes: ...


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes_type: Final = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, _VECTOR)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _define_operator(function: Callable[..., Any], instruction: str) -> None:
    @infer_global(function)
    class _Template(ConcreteTemplate):
        cases = (signature(lanes_type, lanes_type, lanes_type),)

    @lower_builtin(function, lanes_type, lanes_type)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in each lane, rounded once."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fma(builder, *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), generate


@intrinsic
def power_of_two(typing: Any, n: Any) -> Any:
    """2^m where the last bits of n's mantissa hold the integer m, which n = m + 1.5 * 2^23 does, for -127 < m < 128."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.shl(builder.bitcast(args[0], _INTEGERS), ir.Constant(_INTEGERS, [23] * LANES))
        return builder.bitcast(builder.add(shifted, ir.Constant(_INTEGERS, [127 << 23] * LANES)), _VECTOR)

    return lanes_type(lanes_type), generate


# ---- comparing and choosing -----------------------------------------------------------------------------------------


@intrinsic
def where_below(typing: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """`then` in lanes where a < b, else `otherwise`, which a NaN chooses too."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b, then, otherwise = args
        return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)

    return lanes_type(*[lanes_type] * 4), generate


@intrinsic
def keep(typing: Any, a: Any, count: Any, otherwise: Any) -> Any:
    """The first `count` lanes of a, any number, and the rest from `otherwise`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, count, otherwise = args
        integers = ir.VectorType(_INDEX, LANES)
        mask = builder.icmp_signed("<", ir.Constant(integers, list(range(LANES))), _splat(builder, count, integers))
        return builder.select(mask, a, otherwise)

    return lanes_type(lanes_type, types.intp, lanes_type), generate


# ---- between lanes and scalars --------------------------------------------------------------------------------------


def _splat(builder: Any, value: Any, kind: Any = _VECTOR) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTEGERS, [0] * LANES))


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    """A f32 number in every lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return lanes_type(types.float32), generate


@intrinsic
def ramp(typing: Any) -> Any:
    """0, 1, ..., 15."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, [float(lane) for lane in range(LANES)])

    return lanes_type(), generate


def _reduce(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves combined until one lane is left: 0 with 8, 1 with 9, ...; then 0 with 4, ..."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(value, undefined, ir.Constant(ir.VectorType(_I32, width), list(lanes)))
            for lanes in (range(width), range(width, 2 * width))
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes as a f32 number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _reduce(builder, args[0], builder.fadd)

    return types.float32(lanes_type), generate


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """The maximum of the lanes as a f32 number; whether a NaN is passed over depends on its lane alone."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def larger(low: Any, high: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", low, high), high, low)

        return _reduce(builder, args[0], larger)

    return types.float32(lanes_type), generate


# ---- memory ---------------------------------------------------------------------------------------------------------


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    stored = _STORED[array_type.dtype]
    address = _address(context, builder, array_type, array, index)
    value = builder.load(builder.bitcast(address, stored.as_pointer()), align=array_type.dtype.bitwidth // 8)
    if array_type.dtype == types.int8:
        return builder.sitofp(value, _VECTOR)
    return value if array_type.dtype == types.float32 else builder.fpext(value, _VECTOR)


def _store(context: Any, builder: Any, array_type: Any, array: Any, index: Any, value: Any) -> None:
    address = _address(context, builder, array_type, array, index)
    builder.store(value, builder.bitcast(address, _VECTOR.as_pointer()), align=4)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + 16]."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(context, builder, sig.args[0], *args)

    return lanes_type(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + 16] = value, in a f32 array."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(context, builder, sig.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), generate


# ---- tiles: several lanes at once, in registers ---------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def zeros(typing: Any, count: Any) -> Any:
    """A tuple of `count` (a constant) lanes, all zero: a tile of rows of vectors, row after row."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(_VECTOR, sig.return_type.count), None)

    return types.UniTuple(lanes_type, count.literal_value)(count), generate


@intrinsic(prefer_literal=True)
def accumulate(typing: Any, tile: Any, vectors: Any, weights: Any, at: Any, x: Any, x_at: Any, x_stride: Any) -> Any:
    """One step of an outer product: tile[r][v] = fma(weights[at + 16 v :][:16], x[x_at + r * x_stride], tile[r][v]).

    The tile's rows have `vectors` (a constant) vectors each. `weights` are of any dtype that `load` takes, `x` is f32.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        tile, _, weights, at, x, x_at, x_stride = args
        width = sig.args[1].literal_value
        columns = [
            _load(context, builder, sig.args[2], weights, builder.add(at, ir.Constant(_INDEX, LANES * v)))
            for v in range(width)
        ]
        for first in range(0, sig.args[0].count, width):
            factor = _splat(builder, builder.load(_address(context, builder, sig.args[4], x, x_at)))
            for v, column in enumerate(columns):
                term = _fma(builder, column, factor, builder.extract_value(tile, first + v))
                tile = builder.insert_value(tile, term, first + v)
            x_at = builder.add(x_at, x_stride)
        return tile

    return tile(tile, vectors, weights, types.intp, x, types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def put(typing: Any, tile: Any, vectors: Any, array: Any, at: Any, stride: Any) -> Any:
    """Store a tile as `accumulate` knows it in a f32 array: row r from at + r * stride on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        tile, _, array, at, stride = args
        width = sig.args[1].literal_value
        for index in range(sig.args[0].count):
            column = builder.add(at, ir.Constant(_INDEX, LANES * (index % width)))
            _store(context, builder, sig.args[2], array, column, builder.extract_value(tile, index))
            if index % width == width - 1:
                at = builder.add(at, stride)
        return context.get_dummy_value()

    return types.void(tile, vectors, array, types.intp, types.intp), generate
