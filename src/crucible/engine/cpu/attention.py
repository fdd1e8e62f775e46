"""Attention over the paged cache in chunks of 64 positions (docs/arithmetic.md, section 3).

A *query* is one head of one row. Queries that share a key/value head and belong to the same request are numbered row
by row, i = row * R + r with R = H / G, and taken in blocks of four, so that a key is loaded once for four of them. For
scores a lane is a position and adds its products over head_dim in ascending order; for values a lane is an element of
the head and adds over positions in ascending order. Positions past a query's own are never added to it, so keys and
values there may be anything.

A partial result is K' + 16 floats: the weighted values o, then the maximum m and the sum l.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from crucible.engine.cpu.compiling import HAS_WIDE_REGISTERS, jit
from crucible.engine.cpu.functions import exp
from crucible.engine.cpu.lanes import (
    LANES,
    accumulate,
    fma,
    keep,
    largest,
    load,
    put,
    ramp,
    splat,
    store,
    total,
    where_below,
    zeros,
)
from crucible.engine.cpu.state import F32, Memory, Model, State

CHUNK: Final = 64
PAGE: Final = 16
BLOCK: Final = 4
"""Queries of a block."""

FEW_BLOCKS: Final = 2
"""Fewer blocks than this per thread are divided by chunks."""

_CHUNK_PAGES: Final = CHUNK // PAGE
_VECTORS: Final = 2 if HAS_WIDE_REGISTERS else 1
_ZERO: Final = np.float32(0)
_MINUS_INFINITY: Final = np.float32(-np.inf)


def scratch_size(k_stride: int) -> int:
    """Floats of scratch of a block: its queries, their weights in one chunk, and two partial results of each."""
    return BLOCK * (k_stride + CHUNK + 2 * (k_stride + LANES))


@jit
def load_queries(state: State, head: int, span: int, first: int, count: int, scratch: F32, at: int) -> None:
    """Copy the queries `first` to `first` + `count` - 1 of a span, read by key/value head `head`, side by side."""
    model, memory, batch = state.model, state.memory, state.batch
    size, group = model.k, model.num_heads // model.num_kv_heads
    for i in range(count):
        row = batch.first_row[span] + (first + i) // group
        source = row * model.qkv_stride + (head * group + (first + i) % group) * size
        for k in range(size):
            scratch[at + i * model.k_stride + k] = memory.qkv[source + k]
    # The rest of a block is computed too and never read; numbers keep it from being slow, as subnormals would be.
    for i in range(count * model.k_stride, BLOCK * model.k_stride):
        scratch[at + i] = _ZERO


@jit
def attend_chunk(
    state: State, layer: int, head: int, span: int, first: int, count: int, chunk: int, scratch: F32, at: int,
    out: F32, out_at: int,
) -> None:  # fmt: skip
    """Partial results over one chunk for queries that `load_queries` left at `at`, one after the other in `out`.

    The last of the queries reaches the chunk. Those before may not; their results mean nothing.
    """
    model, memory, batch = state.model, state.memory, state.batch
    size, group = model.k, model.num_heads // model.num_kv_heads
    width, partial = model.k_stride, model.k_stride + LANES
    weights_at = at + BLOCK * width
    # Positions of the chunk that query i may read: `reach` + its row, if not negative and at most 64.
    reach = batch.start[span] + 1 - chunk * CHUNK
    most = min(reach + (first + count - 1) // group, CHUNK)
    least = max(0, min(reach + first // group, CHUNK))
    table = batch.table[batch.first_row[span]] + chunk * _CHUNK_PAGES

    for page in range((most + PAGE - 1) // PAGE):
        keys_at = page_at(model, memory, layer, batch.pages[table + page], head, size)
        scores = zeros(BLOCK)
        for k in range(size):
            scores = accumulate(scores, 1, memory.keys, keys_at + k * PAGE, scratch, at + k, width)
        put(scores, 1, scratch, weights_at + page * PAGE, CHUNK)

    for i in range(count):
        allowed = min(reach + (first + i) // group, CHUNK)
        if allowed > 0:
            query_head = head * group + (first + i) % group
            weigh(model, query_head, allowed, reach + (first + i) // group - 1, scratch, weights_at + i * CHUNK,
                  out, out_at + i * partial + width)  # fmt: skip

    element = 0
    while element < width:
        if element + LANES * _VECTORS <= width:
            _many_values(state, layer, head, table, least, element, scratch, weights_at, out, out_at)
            element += LANES * _VECTORS
        else:
            _some_values(state, layer, head, table, least, element, scratch, weights_at, out, out_at)
            element += LANES

    # Queries of later rows read further than the first one of the block.
    for i in range(count):
        for j in range(least, min(reach + (first + i) // group, CHUNK)):
            weight = splat(scratch[weights_at + i * CHUNK + j])
            values_at = page_at(model, memory, layer, batch.pages[table + j // PAGE], head, width) + j % PAGE * width
            for element in range(0, width, LANES):
                target = out_at + i * partial + element
                store(out, target, fma(load(memory.values, values_at + element), weight, load(out, target)))


@jit
def page_at(model: Model, memory: Memory, layer: int, page: int, head: int, width: int) -> int:
    """Where the keys (width K) or values (width K') of one page and head begin."""
    return ((layer * model.num_kv_heads + head) * memory.num_pages + page) * PAGE * width


@jit
def weigh(model: Model, query_head: int, allowed: int, last: int, scratch: F32, at: int, out: F32, out_at: int) -> None:
    """Turn the 64 scores at `at` into softmax weights, 0 from the `allowed`-th on; maximum and sum to `out`.

    `last` is the query's position, counted from the chunk's first.
    """
    scale, minus_infinity = splat(model.softmax_scale), splat(_MINUS_INFINITY)
    slope = splat(_ZERO)
    if model.slopes.size > 0:
        slope = splat(model.slopes[query_head])
    highest = minus_infinity
    for j in range(0, CHUNK, LANES):
        score = load(scratch, at + j) * scale
        if model.slopes.size > 0:
            score = score - slope * (splat(np.float32(last - j)) - ramp())
        score = keep(score, allowed - j, minus_infinity)
        store(scratch, at + j, score)
        highest = where_below(highest, score, score, highest)
    maximum = largest(highest)
    for j in range(0, CHUNK, LANES):
        weight = keep(exp(load(scratch, at + j) - splat(maximum)), allowed - j, splat(_ZERO))
        store(scratch, at + j, weight)
    first = load(scratch, at) + load(scratch, at + LANES)
    second = load(scratch, at + 2 * LANES) + load(scratch, at + 3 * LANES)
    out[out_at] = maximum
    out[out_at + 1] = total(first + second)


def _make_values(vectors: int) -> Any:
    """A function that sums values times weights over the first `least` positions, `vectors` lanes of them at a time."""
    tile_size = BLOCK * vectors

    @jit
    def sum_values(
        state: State, layer: int, head: int, table: int, least: int, element: int, scratch: F32, weights_at: int,
        out: F32, out_at: int,
    ) -> None:  # fmt: skip
        memory = state.memory
        width = state.model.k_stride
        sums = zeros(tile_size)
        for start in range(0, least, PAGE):
            page = state.batch.pages[table + start // PAGE]
            values_at = page_at(state.model, memory, layer, page, head, width) + element
            for j in range(start, min(start + PAGE, least)):
                sums = accumulate(sums, vectors, memory.values, values_at, scratch, weights_at + j, CHUNK)
                values_at += width
        put(sums, vectors, out, out_at + element, width + LANES)

    return sum_values


_many_values = _make_values(_VECTORS)
_some_values = _make_values(1)


@jit
def merge(out: F32, at: int, later: F32, later_at: int, width: int) -> None:
    """Add the partial result of a later chunk to that of all chunks before it."""
    maximum, later_maximum = out[at + width], later[later_at + width]
    highest = max(maximum, later_maximum)
    scale = exp(splat(maximum - highest))
    later_scale = exp(splat(later_maximum - highest))
    for element in range(0, width, LANES):
        value = load(later, later_at + element) * later_scale
        store(out, at + element, fma(load(out, at + element), scale, value))
    sums = fma(splat(out[at + width + 1]), scale, splat(later[later_at + width + 1]) * later_scale)
    out[at + width] = highest
    out[at + width + 1] = largest(sums)


@jit
def finish(state: State, head: int, span: int, query: int, out: F32, at: int) -> None:
    """Write o / l of a query to its place in `attended`."""
    model, memory, batch = state.model, state.memory, state.batch
    size, group = model.k, model.num_heads // model.num_kv_heads
    row, query_head = batch.first_row[span] + query // group, head * group + query % group
    target = (row * model.num_heads + query_head) * size
    inverse = out[at + model.k_stride + 1]
    for k in range(size):
        memory.attended[target + k] = out[at + k] / inverse


# ---- who computes what ----------------------------------------------------------------------------------------------


@jit
def num_blocks(state: State, span: int) -> int:
    """Blocks of queries of each key/value head."""
    group = state.model.num_heads // state.model.num_kv_heads
    return (state.batch.length[span] * group + BLOCK - 1) // BLOCK


@jit
def last_chunk(state: State, span: int, first: int, count: int) -> int:
    """The last chunk that one of these queries reads."""
    group = state.model.num_heads // state.model.num_kv_heads
    return (state.batch.start[span] + (first + count - 1) // group) // CHUNK


@jit
def attend(state: State, layer: int, thread: int, num_threads: int) -> None:
    """This thread's blocks of queries, each over all its chunks; blocks go to the threads in turn."""
    model, memory, batch = state.model, state.memory, state.batch
    group, partial = model.num_heads // model.num_kv_heads, model.k_stride + LANES
    scratch, at = memory.scratch, thread * memory.scratch_size
    merged_at = at + BLOCK * (model.k_stride + CHUNK)
    chunk_at = merged_at + BLOCK * partial
    turn = 0
    for span in range(batch.length.size):
        for head in range(model.num_kv_heads):
            for block in range(num_blocks(state, span)):
                turn += 1
                if turn % num_threads != thread:
                    continue
                first = block * BLOCK
                count = min(BLOCK, batch.length[span] * group - first)
                load_queries(state, head, span, first, count, scratch, at)
                for chunk in range(last_chunk(state, span, first, count) + 1):
                    target = merged_at if chunk == 0 else chunk_at
                    attend_chunk(state, layer, head, span, first, count, chunk, scratch, at, scratch, target)
                    for i in range(count):
                        position = batch.start[span] + (first + i) // group
                        if 0 < chunk <= position // CHUNK:
                            merge(scratch, merged_at + i * partial, scratch, chunk_at + i * partial, model.k_stride)
                for i in range(count):
                    finish(state, head, span, first + i, scratch, merged_at + i * partial)


@jit
def attend_chunks(state: State, layer: int, thread: int, num_threads: int) -> None:
    """The same for few blocks: chunks go to the threads in turn, their partial results to `partials`."""
    model, memory, batch = state.model, state.memory, state.batch
    group, partial = model.num_heads // model.num_kv_heads, model.k_stride + LANES
    at = thread * memory.scratch_size
    turn = 0
    for span in range(batch.length.size):
        for head in range(model.num_kv_heads):
            for block in range(num_blocks(state, span)):
                first = block * BLOCK
                count = min(BLOCK, batch.length[span] * group - first)
                for chunk in range(last_chunk(state, span, first, count) + 1):
                    if turn % num_threads == thread:
                        load_queries(state, head, span, first, count, memory.scratch, at)
                        attend_chunk(state, layer, head, span, first, count, chunk, memory.scratch, at,
                                     memory.partials, turn * BLOCK * partial)  # fmt: skip
                    turn += 1


@jit
def merge_chunks(state: State) -> None:
    """Merge what `attend_chunks` left, and write `attended`."""
    model, memory, batch = state.model, state.memory, state.batch
    group, partial = model.num_heads // model.num_kv_heads, model.k_stride + LANES
    at = 0
    for span in range(batch.length.size):
        for head in range(model.num_kv_heads):
            for block in range(num_blocks(state, span)):
                first = block * BLOCK
                count = min(BLOCK, batch.length[span] * group - first)
                num_chunks = last_chunk(state, span, first, count) + 1
                for i in range(count):
                    own = (batch.start[span] + (first + i) // group) // CHUNK + 1
                    for chunk in range(1, own):
                        later = at + (chunk * BLOCK + i) * partial
                        merge(memory.partials, at + i * partial, memory.partials, later, model.k_stride)
                    finish(state, head, span, first + i, memory.partials, at + i * partial)
                at += num_chunks * BLOCK * partial


@jit
def has_few_blocks(state: State, num_threads: int) -> bool:
    """Whether blocks are too few to keep the threads equally busy, so that chunks are divided."""
    blocks = 0
    for span in range(state.batch.length.size):
        blocks += num_blocks(state, span) * state.model.num_kv_heads
    return num_threads > 1 and blocks < FEW_BLOCKS * num_threads
