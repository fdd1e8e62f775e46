"""One step of the model: all layers over all rows, in one call.

The step is a sequence of phases. A phase is divided among threads by `_run`, which is told how many there are and which
one it is; nobody reads within a phase what another thread writes in it. Who computes what changes no bit.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba import types

from crucible.engine.cpu.attention import PAGE, attend, attend_chunks, has_few_blocks, merge_chunks, page_at
from crucible.engine.cpu.compiling import entry, jit
from crucible.engine.cpu.functions import gelu, layer_norm, rms_norm, rotate, silu
from crucible.engine.cpu.lanes import LANES, load, store
from crucible.engine.cpu.linear import SUMS, TILE, multiply
from crucible.engine.cpu.state import F32, Linear, State, share, shared, state_type

# Phases: before the first layer, in the order of a layer, after the last one. Numba compiles a function anew for each
# constant of Python that it is called with; numbers of numpy are not constants to it.
_BEGIN: Final = np.int64(0)
_QKV: Final = np.int64(1)
_PLACE: Final = np.int64(2)
_ATTEND: Final = np.int64(3)
_ATTEND_CHUNKS: Final = np.int64(4)
_O: Final = np.int64(5)
_JOIN_ATTENTION: Final = np.int64(6)
_MLP_IN: Final = np.int64(7)
_MLP_OUT: Final = np.int64(8)
_JOIN_MLP: Final = np.int64(9)
_HEAD: Final = np.int64(10)

_ZERO: Final = np.int64(0)
_ONE: Final = np.int64(1)

_FEW_ROWS: Final = 4
"""Up to so many rows, a phase that goes row by row takes less time on one thread than waking the others does."""


def scratch_size(num_rows: int) -> int:
    """Floats of scratch that a thread needs for the linear layers of so many rows."""
    return SUMS + num_rows * TILE


@jit
def _columns(
    weights: Any, linear: Linear, layer: int, x: F32, x_stride: int, num_rows: int, y: F32, state: State,
    thread: int, num_threads: int,
) -> None:  # fmt: skip
    """This thread's share of a linear layer's outputs."""
    stride, scratch_at = linear.tiles * TILE, thread * state.memory.scratch_size
    for tile in range(linear.tiles * thread // num_threads, linear.tiles * (thread + 1) // num_threads):
        multiply(weights, linear, layer, tile, x, x_stride, num_rows, y, tile * TILE, stride,
                 state.memory.scratch, scratch_at)  # fmt: skip


@jit
def _mlp_in(weights: Any, layer: int, x: F32, num_rows: int, state: State, thread: int, num_threads: int) -> None:
    """This thread's share of silu(gate) * up, tiles of which take turns in the matrix, or of gelu(up)."""
    model, scratch = state.model, state.memory.scratch
    linear, hidden = model.mlp_in, state.memory.hidden
    sums_at = thread * state.memory.scratch_size
    up_at = sums_at + SUMS
    step = 2 if model.is_gated else 1
    shares = linear.tiles // step
    for share_index in range(shares * thread // num_threads, shares * (thread + 1) // num_threads):
        tile, column = share_index * step, share_index * TILE
        multiply(weights, linear, layer, tile, x, model.d_stride, num_rows, hidden, column, model.f_stride,
                 scratch, sums_at)  # fmt: skip
        if model.is_gated:
            multiply(weights, linear, layer, tile + 1, x, model.d_stride, num_rows, scratch, up_at, TILE,
                     scratch, sums_at)  # fmt: skip
        for row in range(num_rows):
            for i in range(0, TILE, LANES):
                at = row * model.f_stride + column + i
                if model.is_gated:
                    store(hidden, at, silu(load(hidden, at)) * load(scratch, up_at + row * TILE + i))
                else:
                    store(hidden, at, gelu(load(hidden, at)))


@jit
def _norm(state: State, index: int, at: int, out: F32, out_at: int) -> None:
    """Norm number `index` of a row of the residual stream."""
    model, x = state.model, state.memory.x
    weight_at = index * 2 * model.d_stride
    if model.is_rmsnorm:
        rms_norm(x, at, model.d, model.norms, weight_at, model.eps, out, out_at)
    else:
        layer_norm(x, at, model.d, model.norms, weight_at, weight_at + model.d_stride, model.eps, out, out_at)


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
    _norm(state, norm, at, memory.x if model.is_post else memory.h, at)


@jit
def _place(state: State, layer: int, row: int, scratch_at: int) -> None:
    """Bias, head norms and rotation of a row's q and k, then k and v into the cache."""
    model, memory, batch = state.model, state.memory, state.batch
    k, qkv, at = model.k, memory.qkv, row * model.qkv_stride
    position = batch.position[row]
    page, slot = batch.pages[batch.table[row] + position // PAGE], position % PAGE
    if model.qkv_bias.size > 0:
        for i in range(model.qkv_stride):
            qkv[at + i] += model.qkv_bias[layer * model.qkv_stride + i]
    for head in range(model.num_heads + model.num_kv_heads):
        head_at = at + head * k
        if model.head_norms.size > 0:
            norm = 2 * layer + (1 if head >= model.num_heads else 0)
            rms_norm(qkv, head_at, k, model.head_norms, norm * model.k_stride, model.eps, memory.scratch, scratch_at)
            for i in range(k):
                qkv[head_at + i] = memory.scratch[scratch_at + i]
        if model.cos.size > 0:
            rotate(qkv, head_at, k, model.cos, model.sin, position * (k // 2))
    for head in range(model.num_kv_heads):
        key_at = at + (model.num_heads + head) * k
        value_at = key_at + model.num_kv_heads * k
        key_target = page_at(model, memory, layer, page, head, k) + slot
        value_target = page_at(model, memory, layer, page, head, model.k_stride) + slot * model.k_stride
        for i in range(k):
            memory.keys[key_target + i * PAGE] = qkv[key_at + i]
            memory.values[value_target + i] = qkv[value_at + i]


@jit
def _rows(phase: int, layer: int, first: int, last: int, state: State, scratch_at: int) -> None:
    """A phase that goes row by row, over some of the rows."""
    model, memory = state.model, state.memory
    for row in range(first, last):
        at = row * model.d_stride
        if phase == _BEGIN:
            if not model.is_post:
                _norm(state, 0, at, memory.h, at)
        elif phase == _PLACE:
            _place(state, layer, row, scratch_at)
        elif phase == _JOIN_ATTENTION:
            norm = 2 * layer + (0 if model.is_post else 1)
            _join(state, row, norm, model.o_bias.size > 0, layer * model.d_stride)
        elif phase == _JOIN_MLP:
            norm = 2 * layer + (1 if model.is_post else 2)
            _join(state, row, norm, False, 0)


@jit
def _end(state: State) -> None:
    """Gather the wanted rows of the last norm's output at the front of h."""
    model, memory = state.model, state.memory
    source = memory.x if model.is_post else memory.h
    for index in range(state.batch.wanted.size):
        at = state.batch.wanted[index] * model.d_stride
        for i in range(0, model.d, LANES):
            store(memory.h, index * model.d_stride + i, load(source, at + i))


@jit
def _run(phase: int, layer: int, thread: int, num_threads: int, weights: Any, address: int) -> None:
    """One thread's share of a phase."""
    state = shared(address)
    model, memory, batch = state.model, state.memory, state.batch
    num_rows, d = batch.position.size, model.d_stride
    source = memory.x if model.is_post else memory.h
    if phase == _QKV:
        _columns(weights, model.qkv, layer, source, d, num_rows, memory.qkv, state, thread, num_threads)
    elif phase == _ATTEND:
        attend(state, layer, thread, num_threads)
    elif phase == _ATTEND_CHUNKS:
        attend_chunks(state, layer, thread, num_threads)
    elif phase == _O:
        _columns(weights, model.o, layer, memory.attended, model.o.inputs, num_rows, memory.y, state,
                 thread, num_threads)  # fmt: skip
    elif phase == _MLP_IN:
        _mlp_in(weights, layer, source, num_rows, state, thread, num_threads)
    elif phase == _MLP_OUT:
        _columns(weights, model.mlp_out, layer, memory.hidden, model.f_stride, num_rows, memory.y, state,
                 thread, num_threads)  # fmt: skip
    elif phase == _HEAD:
        _columns(weights, model.head, _ZERO, memory.h, d, batch.wanted.size, batch.logits, state, thread, num_threads)
    else:
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        _rows(phase, layer, first, last, state, thread * memory.scratch_size)


@numba.njit(error_model="numpy", nogil=True, parallel=True)
def _team(phase: int, layer: int, num_threads: int, weights: Any, address: int) -> None:
    """All threads' shares of a phase, at once."""
    for thread in numba.prange(num_threads):
        _run(phase, layer, np.int64(thread), num_threads, weights, address)


@jit
def _phase(phase: int, layer: int, num_threads: int, weights: Any, address: int) -> None:
    """A phase, on as many threads as it is worth."""
    by_row = phase in (_BEGIN, _PLACE, _JOIN_ATTENTION, _JOIN_MLP)
    if num_threads == 1 or (by_row and shared(address).batch.position.size <= _FEW_ROWS):
        _run(phase, layer, _ZERO, _ONE, weights, address)
    else:
        _team(phase, layer, num_threads, weights, address)


@entry
def step(weights: Any, state: State, num_threads: int) -> None:
    """Take the rows of `batch`, whose embeddings are in `x`, through the model; see `Batch`, `Memory`."""
    address = share(state)
    ref = shared(address)
    divide_chunks = has_few_blocks(ref, num_threads)
    _phase(_BEGIN, _ZERO, num_threads, weights, address)
    for layer in range(state.model.num_layers):
        _phase(_QKV, layer, num_threads, weights, address)
        _phase(_PLACE, layer, num_threads, weights, address)
        if divide_chunks:
            _phase(_ATTEND_CHUNKS, layer, num_threads, weights, address)
            merge_chunks(ref)
        else:
            _phase(_ATTEND, layer, num_threads, weights, address)
        _phase(_O, layer, num_threads, weights, address)
        _phase(_JOIN_ATTENTION, layer, num_threads, weights, address)
        _phase(_MLP_IN, layer, num_threads, weights, address)
        _phase(_MLP_OUT, layer, num_threads, weights, address)
        _phase(_JOIN_MLP, layer, num_threads, weights, address)
    if state.batch.wanted.size > 0:
        _end(ref)
        _phase(_HEAD, _ZERO, num_threads, weights, address)


def step_signature(weights: Any) -> tuple[Any, ...]:
    """The types that `step` is compiled for, by the array of matrices."""
    return numba.typeof(weights), state_type, types.intp
