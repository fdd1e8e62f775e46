"""One step of the model: all layers over all rows, by any number of threads.

A step is a sequence of *phases*, each a number of *units* that can be computed at once by anyone: a tile of a linear
layer's outputs, a row of a norm, a block of queries. Every thread takes the next few units until none is left, and
whoever finishes the last ones opens the next phase. So a core that is slow, or lent to another process, or joins late,
does less; and who computes what changes no bit. Against a parallel loop of OpenMP for each phase, a decode step on two
cores took 4.6 ms instead of 5.4, and with another process on one of them a prompt took a quarter of the time.

    counters[0] = number of the phase * 2^32 + units taken
    counters[8] = units finished; in another cache line
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from crucible.engine.cpu.atomics import fetch_add, store_release, wait_beyond
from crucible.engine.cpu.attention import (
    attend_block,
    attend_chunk,
    divides_chunks,
    merge_chunks,
    num_blocks,
    num_chunks,
    write,
)
from crucible.engine.cpu.compiling import entry, jit
from crucible.engine.cpu.functions import gelu, layer_norm, rms_norm, rotate, silu
from crucible.engine.cpu.lanes import LANES, load, store
from crucible.engine.cpu.linear import SUMS, TILE, multiply
from crucible.engine.cpu.state import F32, I64, Linear, State, share, shared, state_type

# Phases of a layer, in order; then that before the first layer and those after the last one. Numba compiles a function
# anew for each constant of Python that it is called with; numbers of numpy are not constants to it.
_QKV: Final = np.int64(0)
_PLACE: Final = np.int64(1)
_ATTEND: Final = np.int64(2)
_MERGE: Final = np.int64(3)
_O: Final = np.int64(4)
_JOIN_ATTENTION: Final = np.int64(5)
_MLP_IN: Final = np.int64(6)
_MLP_OUT: Final = np.int64(7)
_JOIN_MLP: Final = np.int64(8)
_PER_LAYER: Final = np.int64(9)
_BEGIN: Final = np.int64(10)
_GATHER: Final = np.int64(11)
_HEAD: Final = np.int64(12)
_OVER: Final = np.int64(13)

_NEXT: Final = np.int64(0)
_FINISHED: Final = np.int64(8)
NUM_COUNTERS: Final = 16
_ONE: Final = np.int64(1)
_SHIFT: Final = np.int64(32)

_FEW_ROWS: Final = 4
"""Up to so many rows, a phase that goes row by row takes less time than to tell another thread of it."""

_SHARES: Final = 2
"""Shares per thread of a phase over few rows. Taking one, and reading somewhere else in memory, costs about 1 us."""


def scratch_size(num_rows: int) -> int:
    """Floats of scratch that a thread needs for the linear layers of so many rows."""
    return SUMS + num_rows * TILE


# ---- units ----------------------------------------------------------------------------------------------------------


@jit
def _columns(
    weights: Any, linear: Linear, layer: int, tile: int, x: F32, x_stride: int, num_rows: int, y: F32, state: State,
    scratch_at: int,
) -> None:  # fmt: skip
    """A tile of a linear layer's outputs for all rows."""
    multiply(weights, linear, layer, tile, x, x_stride, num_rows, y, tile * TILE, linear.tiles * TILE,
             state.memory.scratch, scratch_at)  # fmt: skip


@jit
def _mlp_in(weights: Any, layer: int, unit: int, x: F32, num_rows: int, state: State, scratch_at: int) -> None:
    """A tile of silu(gate) * up, tiles of which take turns in the matrix, or of gelu(up)."""
    model, hidden, scratch = state.model, state.memory.hidden, state.memory.scratch
    column, up_at = unit * TILE, scratch_at + SUMS
    tile = 2 * unit if model.is_gated else unit
    # The gate's tile comes first in memory; read the other way round, the two took twice as long.
    multiply(weights, model.mlp_in, layer, tile, x, model.d_stride, num_rows, hidden, column, model.f_stride,
             scratch, scratch_at)  # fmt: skip
    if model.is_gated:
        multiply(weights, model.mlp_in, layer, tile + 1, x, model.d_stride, num_rows, scratch, up_at, np.int64(TILE),
                 scratch, scratch_at)  # fmt: skip
    for row in range(num_rows):
        for i in range(0, TILE, LANES):
            at = row * model.f_stride + column + i
            if model.is_gated:
                store(hidden, at, silu(load(hidden, at)) * load(scratch, up_at + row * TILE + i))
            else:
                store(hidden, at, gelu(load(hidden, at)))


@jit
def _norm(state: State, index: int, at: int, out: F32) -> None:
    """Norm number `index` of a row of the residual stream."""
    model, x = state.model, state.memory.x
    weight_at = index * 2 * model.d_stride
    if model.is_rmsnorm:
        rms_norm(x, at, model.d, model.norms, weight_at, model.eps, out, at)
    else:
        layer_norm(x, at, model.d, model.norms, weight_at, weight_at + model.d_stride, model.eps, out, at)


@jit
def _join(state: State, row: int, norm: int, has_bias: bool, bias_at: int) -> None:
    """x = x + (y + bias) in a row, then norm number `norm`: of x itself where norms come after, else as h."""
    model, memory = state.model, state.memory
    at = row * model.d_stride
    for i in range(0, model.d, LANES):
        value = load(memory.y, at + i)
        if has_bias:
            value = value + load(model.o_bias, bias_at + i)
        store(memory.x, at + i, load(memory.x, at + i) + value)
    _norm(state, norm, at, memory.x if model.is_post else memory.h)


@jit
def _place(state: State, layer: int, row: int, scratch_at: int) -> None:
    """Bias, head norms and rotation of a row's q and k, then k and v into the cache."""
    model, qkv, scratch = state.model, state.memory.qkv, state.memory.scratch
    at = row * model.qkv_stride
    if model.qkv_bias.size > 0:
        for i in range(model.qkv_stride):
            qkv[at + i] += model.qkv_bias[layer * model.qkv_stride + i]
    for head in range(model.num_heads + model.num_kv_heads):
        head_at = at + head * model.k
        if model.head_norms.size > 0:
            norm_at = (2 * layer + (1 if head >= model.num_heads else 0)) * model.k_stride
            rms_norm(qkv, head_at, model.k, model.head_norms, norm_at, model.eps, scratch, scratch_at)
            for i in range(model.k):
                qkv[head_at + i] = scratch[scratch_at + i]
        if model.cos.size > 0:
            rotate(qkv, head_at, model.k, model.cos, model.sin, state.batch.position[row] * (model.k // 2))
    write(state, layer, row, at + model.num_heads * model.k)


@jit
def _gather(state: State) -> None:
    """Bring the wanted rows of the last norm's output to the front of h."""
    model, memory, wanted = state.model, state.memory, state.batch.wanted
    source = memory.x if model.is_post else memory.h
    for index in range(wanted.size):
        for i in range(0, model.d, LANES):
            store(memory.h, index * model.d_stride + i, load(source, wanted[index] * model.d_stride + i))


@jit
def _num_units(phase: int, state: State, num_threads: int) -> int:
    model, batch = state.model, state.batch
    units = batch.position.size
    if phase == _QKV:
        units = model.qkv.tiles
    elif phase == _ATTEND:
        units = num_blocks(state)
        if divides_chunks(state, num_threads):
            units *= num_chunks(state)
    elif phase == _MERGE:
        units = 1 if divides_chunks(state, num_threads) else 0
    elif phase == _O:
        units = model.o.tiles
    elif phase == _MLP_IN:
        units = model.f_stride // TILE
    elif phase == _MLP_OUT:
        units = model.mlp_out.tiles
    elif phase == _GATHER:
        units = 1
    elif phase == _HEAD:
        units = model.head.tiles if batch.wanted.size > 0 else 0
    return units


@jit
def _units_per_share(units: int, state: State, num_threads: int) -> int:
    """Units that a thread takes at once."""
    if state.batch.position.size > _FEW_ROWS:
        return 1
    return (units + _SHARES * num_threads - 1) // (_SHARES * num_threads)


@jit
def _is_small(phase: int, state: State) -> bool:
    """Whether a phase is not worth sharing."""
    if phase in (_BEGIN, _PLACE, _JOIN_ATTENTION, _JOIN_MLP):
        return state.batch.position.size <= _FEW_ROWS
    return phase in (_MERGE, _GATHER)


@jit
def _compute(phase: int, layer: int, unit: int, weights: Any, state: State, scratch_at: int, num_threads: int) -> None:
    """One unit of a phase."""
    model, memory, batch = state.model, state.memory, state.batch
    num_rows, d = batch.position.size, model.d_stride
    source = memory.x if model.is_post else memory.h
    if phase == _QKV:
        _columns(weights, model.qkv, layer, unit, source, d, num_rows, memory.qkv, state, scratch_at)
    elif phase == _PLACE:
        _place(state, layer, unit, scratch_at)
    elif phase == _ATTEND:
        if divides_chunks(state, num_threads):
            attend_chunk(state, layer, unit, scratch_at)
        else:
            attend_block(state, layer, unit, scratch_at)
    elif phase == _MERGE:
        merge_chunks(state)
    elif phase == _O:
        _columns(weights, model.o, layer, unit, memory.attended, model.o.inputs, num_rows, memory.y, state, scratch_at)
    elif phase == _JOIN_ATTENTION:
        _join(state, unit, 2 * layer + (0 if model.is_post else 1), model.o_bias.size > 0, layer * d)
    elif phase == _MLP_IN:
        _mlp_in(weights, layer, unit, source, num_rows, state, scratch_at)
    elif phase == _MLP_OUT:
        _columns(weights, model.mlp_out, layer, unit, memory.hidden, model.f_stride, num_rows, memory.y, state,
                 scratch_at)  # fmt: skip
    elif phase == _JOIN_MLP:
        _join(state, unit, 2 * layer + (1 if model.is_post else 2), phase != _JOIN_MLP, layer * d)
    elif phase == _BEGIN:
        if not model.is_post:
            _norm(state, layer * 0, unit * d, memory.h)
    elif phase == _GATHER:
        _gather(state)
    elif phase == _HEAD:
        _columns(weights, model.head, layer * 0, unit, memory.h, d, batch.wanted.size, batch.logits, state, scratch_at)


# ---- the sequence ---------------------------------------------------------------------------------------------------


@jit
def _phase(number: np.int64, num_layers: int) -> np.int64:
    """Which phase is the `number`-th of the step: 0 begins, then come the layers."""
    after = number - 1 - num_layers * _PER_LAYER
    if number == 0:
        return _BEGIN
    if after < 0:
        return (number - 1) % _PER_LAYER
    return min(_GATHER + after, _OVER)


@jit
def _open_next(number: np.int64, weights: Any, state: State, scratch_at: int, num_threads: int, counters: I64) -> None:
    """Open the first phase after the `number`-th that is worth sharing, computing those between; -1 starts a step."""
    while True:
        number += 1
        phase, layer = _phase(number, state.model.num_layers), (number - 1) // _PER_LAYER
        if phase == _OVER:
            break
        units = _num_units(phase, state, num_threads)
        if units > 0 and not _is_small(phase, state):
            break
        for unit in range(units):
            _compute(phase, layer, unit, weights, state, scratch_at, num_threads)
    store_release(counters, _FINISHED, np.int64(0))
    store_release(counters, _NEXT, number << _SHIFT)


@entry
def take_part(weights: Any, state: State, thread: int, num_threads: int, counters: I64) -> None:
    """Compute units until the step is over. Every thread calls this once per step, and thread 0 starts it.

    Args:
        weights: all matrices.
        state: the model, the rows of `batch`, and in `x` their embeddings; see `Batch` for what is written.
        thread: which one calls, from 0 to num_threads - 1.
        num_threads: how many may call; the step needs none but thread 0.
        counters: int64 [NUM_COUNTERS], this step's own, zero but counters[0] = -1.
    """
    ref = shared(share(state))
    scratch_at = thread * ref.memory.scratch_size
    if thread == 0:
        _open_next(np.int64(-1), weights, ref, scratch_at, num_threads, counters)
    else:
        wait_beyond(counters, _NEXT, np.int64(0))
    while True:
        taken = fetch_add(counters, _NEXT, _ONE)
        number, unit = taken >> _SHIFT, taken & np.int64(0xFFFFFFFF)
        phase = _phase(number, ref.model.num_layers)
        if phase == _OVER:
            break
        units = _num_units(phase, ref, num_threads)
        each = _units_per_share(units, ref, num_threads)
        first, last = unit * each, min((unit + 1) * each, units)
        if first >= units:
            wait_beyond(counters, _NEXT, (number + 1) << _SHIFT)
            continue
        for unit in range(first, last):
            _compute(phase, (number - 1) // _PER_LAYER, unit, weights, ref, scratch_at, num_threads)
        if fetch_add(counters, _FINISHED, last - first) + last - first == units:
            _open_next(number, weights, ref, scratch_at, num_threads, counters)


def step_signature(weights: Any) -> tuple[Any, ...]:
    """The types that `take_part` is compiled for, by the array of matrices."""
    counters = np.empty(NUM_COUNTERS, dtype=np.int64)
    return numba.typeof(weights), state_type, numba.intp, numba.intp, numba.typeof(counters)
