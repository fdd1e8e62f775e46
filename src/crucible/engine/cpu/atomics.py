"""What threads need of each other inside compiled functions: counters, and waiting for one of them to change."""

from __future__ import annotations

import sys
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from crucible.engine.cpu.compiling import TRIPLE, jit
from crucible.engine.cpu.state import I64

_SPINS: Final = 2000
"""Looks at a counter, some 50 us in all, before a waiting thread gives its core away for a while."""

_SLEEP_US: Final = 50


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def fetch_add(typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """counters[index] += amount as one step for all threads; its value before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counters, index, amount = args
        return builder.atomic_rmw("add", _address(context, builder, sig.args[0], counters, index), amount, "acq_rel")

    return types.int64(counters, types.intp, types.int64), generate


@intrinsic
def load_acquire(typing: Any, counters: Any, index: Any) -> Any:
    """counters[index]; what its writer wrote before it is visible."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_address(context, builder, sig.args[0], *args), "acquire", 8)

    return types.int64(counters, types.intp), generate


@intrinsic
def store_release(typing: Any, counters: Any, index: Any, value: Any) -> Any:
    """counters[index] = value, after all that this thread wrote before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counters, index, value = args
        builder.store_atomic(value, _address(context, builder, sig.args[0], counters, index), "release", 8)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if TRIPLE.startswith(("x86", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _sleep(typing: Any) -> Any:
    """Leave the core for some microseconds, where the system has a function for it."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            function = cgutils.get_or_insert_function(builder.module, kind, "usleep")
            builder.call(function, [ir.Constant(ir.IntType(32), _SLEEP_US)])
        return context.get_dummy_value()

    return types.void(), generate


@jit
def wait_beyond(counters: I64, index: int, bound: int) -> None:
    """Until counters[index] is at least `bound`.

    Whoever is waited for may have lost its core to another process; then spinning on this one only takes longer.
    """
    spins = 0
    while load_acquire(counters, index) < bound:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _sleep()
