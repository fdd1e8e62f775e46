"""Attention over the paged cache in chunks of 64 positions (docs/arithmetic.md, section 3).

A *query* is one head of one row. Queries of one request that share a key/value head are numbered row by row,
row * R + r with R = H / G, and taken in blocks of four, so that a key is loaded once for four of them. For scores a
lane is a position and adds its products over head_dim in ascending order; for values a lane is an element of the head
and adds over positions in ascending order. Positions past a query's own are never added to it, so keys and values
there may be anything.

A partial result is K' + 16 floats: the weighted values o, then the maximum m and the sum l.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
_TILE: Final = BLOCK * _VECTORS
_ZERO: Final = np.float32(0)
_MINUS_INFINITY: Final = np.float32(-np.inf)


class Block(NamedTuple):
    """Up to four queries of a span that share a key/value head.

    Attributes:
        head: the key/value head.
        first, size: its queries are number `first` to `first` + `size` - 1.
        row: the span's first row.
        start: that row's position.
        table: index in `pages` of the request's page table.
    """

    head: int
    first: int
    size: int
    row: int
    start: int
    table: int


def scratch_size(k_stride: int) -> int:
    """Floats of scratch of a block: its queries, their weights in one chunk, and two partial results of each."""
    return BLOCK * (k_stride + CHUNK + 2 * (k_stride + LANES))


# ---- blocks ---------------------------------------------------------------------------------------------------------


@jit
def _group_size(state: State) -> int:
    return state.model.num_heads // state.model.num_kv_heads


@jit
def _blocks_per_head(state: State, span: int) -> int:
    return (state.batch.length[span] * _group_size(state) + BLOCK - 1) // BLOCK


@jit
def num_blocks(state: State) -> int:
    """Blocks of a step in all."""
    blocks = 0
    for span in range(state.batch.length.size):
        blocks += _blocks_per_head(state, span) * state.model.num_kv_heads
    return blocks


@jit
def num_chunks(state: State) -> int:
    """Chunks that the row furthest on in its request reads."""
    longest = 0
    for span in range(state.batch.length.size):
        longest = max(longest, state.batch.start[span] + state.batch.length[span])
    return (longest + CHUNK - 1) // CHUNK


@jit
def _find_block(state: State, index: int) -> Block:
    """The block with a number below `num_blocks`."""
    batch, span = state.batch, 0
    while index >= _blocks_per_head(state, span) * state.model.num_kv_heads:
        index -= _blocks_per_head(state, span) * state.model.num_kv_heads
        span += 1
    head, first = index // _blocks_per_head(state, span), index % _blocks_per_head(state, span) * BLOCK
    size = min(BLOCK, batch.length[span] * _group_size(state) - first)
    row = batch.first_row[span]
    return Block(head, first, size, row, batch.start[span], batch.table[row])


@jit
def _position(state: State, block: Block, i: int) -> int:
    """Of the block's i-th query."""
    return block.start + (block.first + i) // _group_size(state)


@jit
def _query_head(state: State, block: Block, i: int) -> int:
    """Of the block's i-th query."""
    return block.head * _group_size(state) + (block.first + i) % _group_size(state)


@jit
def _page_at(model: Model, memory: Memory, layer: int, head: int, page: int, width: int) -> int:
    """Where the keys (width K) or values (width K') of one page and head begin."""
    return ((layer * model.num_kv_heads + head) * memory.num_pages + page) * PAGE * width


@jit
def write(state: State, layer: int, row: int, source: int) -> None:
    """Store a row's key and value heads, which begin at `qkv`[source], in the cache."""
    model, memory, batch = state.model, state.memory, state.batch
    position = batch.position[row]
    page, slot = batch.pages[batch.table[row] + position // PAGE], position % PAGE
    for head in range(model.num_kv_heads):
        key_at, value_at = source + head * model.k, source + (model.num_kv_heads + head) * model.k
        key_target = _page_at(model, memory, layer, head, page, model.k) + slot
        value_target = _page_at(model, memory, layer, head, page, model.k_stride) + slot * model.k_stride
        for i in range(model.k):
            memory.keys[key_target + i * PAGE] = memory.qkv[key_at + i]
            memory.values[value_target + i] = memory.qkv[value_at + i]


# ---- one block and chunk --------------------------------------------------------------------------------------------


@jit
def _load_queries(state: State, block: Block, scratch: F32, at: int) -> None:
    """Copy a block's queries, side by side."""
    model, memory = state.model, state.memory
    for i in range(block.size):
        row = block.row + (block.first + i) // _group_size(state)
        source = row * model.qkv_stride + _query_head(state, block, i) * model.k
        for k in range(model.k):
            scratch[at + i * model.k_stride + k] = memory.qkv[source + k]
    # The rest of a block is computed too and never read; numbers keep it from being slow, as subnormals would be.
    for i in range(block.size * model.k_stride, BLOCK * model.k_stride):
        scratch[at + i] = _ZERO


@jit
def _attend_chunk(
    state: State, layer: int, block: Block, chunk: int, scratch: F32, at: int, out: F32, out_at: int
) -> None:
    """Partial results over one chunk for the queries that lie at `at`, one after the other in `out`.

    The last of the queries reaches the chunk. Those before may not; their results mean nothing.
    """
    model, memory, pages = state.model, state.memory, state.batch.pages
    width, partial = model.k_stride, model.k_stride + LANES
    weights_at, table = at + BLOCK * width, block.table + chunk * _CHUNK_PAGES
    # How many positions of the chunk the first and the last query may read.
    least = max(0, min(_position(state, block, 0) + 1 - chunk * CHUNK, CHUNK))
    most = min(_position(state, block, block.size - 1) + 1 - chunk * CHUNK, CHUNK)

    for page in range((most + PAGE - 1) // PAGE):
        keys_at = _page_at(model, memory, layer, block.head, pages[table + page], model.k)
        scores = zeros(BLOCK)
        for k in range(model.k):
            scores = accumulate(scores, 1, memory.keys, keys_at + k * PAGE, scratch, at + k, width)
        put(scores, 1, scratch, weights_at + page * PAGE, CHUNK)

    for i in range(block.size):
        distance = _position(state, block, i) - chunk * CHUNK
        if distance >= 0:
            _weigh(model, _query_head(state, block, i), distance, scratch, weights_at + i * CHUNK,
                   out, out_at + i * partial + width)  # fmt: skip

    for element in range(0, width, LANES * _VECTORS):
        sums = zeros(_TILE)
        for start in range(0, least, PAGE):
            page = pages[table + start // PAGE]
            values_at = _page_at(model, memory, layer, block.head, page, width) + element
            for j in range(start, min(start + PAGE, least)):
                sums = accumulate(sums, _VECTORS, memory.values, values_at, scratch, weights_at + j, CHUNK)
                values_at += width
        put(sums, _VECTORS, out, out_at + element, partial)

    # Queries of later rows read further than the first one of the block.
    for i in range(block.size):
        for j in range(least, min(_position(state, block, i) + 1 - chunk * CHUNK, CHUNK)):
            weight = splat(scratch[weights_at + i * CHUNK + j])
            values_at = _page_at(model, memory, layer, block.head, pages[table + j // PAGE], width) + j % PAGE * width
            for element in range(0, width, LANES):
                target = out_at + i * partial + element
                store(out, target, fma(load(memory.values, values_at + element), weight, load(out, target)))


@jit
def _weigh(model: Model, query_head: int, distance: int, scratch: F32, at: int, out: F32, out_at: int) -> None:
    """Turn the 64 scores at `at` into softmax weights, 0 past the query's position; maximum and sum to `out`.

    `distance` is from the chunk's first position to the query's, which is not negative.
    """
    scale, minus_infinity, allowed = splat(model.softmax_scale), splat(_MINUS_INFINITY), distance + 1
    slope = splat(_ZERO)
    if model.slopes.size > 0:
        slope = splat(model.slopes[query_head])
    highest = minus_infinity
    for j in range(0, CHUNK, LANES):
        score = load(scratch, at + j) * scale
        if model.slopes.size > 0:
            score = score - slope * (splat(np.float32(distance - j)) - ramp())
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


@jit
def _merge(out: F32, at: int, later: F32, later_at: int, width: int) -> None:
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
def _finish(state: State, block: Block, i: int, out: F32, at: int) -> None:
    """Write o / l of a query to its place in `attended`."""
    model, attended = state.model, state.memory.attended
    row = block.row + (block.first + i) // _group_size(state)
    target = (row * model.num_heads + _query_head(state, block, i)) * model.k
    divisor = out[at + model.k_stride + 1]
    for k in range(model.k):
        attended[target + k] = out[at + k] / divisor


# ---- shares of the work ---------------------------------------------------------------------------------------------


@jit
def attend_block(state: State, layer: int, index: int, scratch_at: int) -> None:
    """One block over all its chunks."""
    model, scratch = state.model, state.memory.scratch
    block, partial = _find_block(state, index), model.k_stride + LANES
    merged_at = scratch_at + BLOCK * (model.k_stride + CHUNK)
    chunk_at = merged_at + BLOCK * partial
    _load_queries(state, block, scratch, scratch_at)
    for chunk in range(_position(state, block, block.size - 1) // CHUNK + 1):
        target = merged_at if chunk == 0 else chunk_at
        _attend_chunk(state, layer, block, chunk, scratch, scratch_at, scratch, target)
        for i in range(block.size):
            if 0 < chunk <= _position(state, block, i) // CHUNK:
                _merge(scratch, merged_at + i * partial, scratch, chunk_at + i * partial, model.k_stride)
    for i in range(block.size):
        _finish(state, block, i, scratch, merged_at + i * partial)


@jit
def attend_chunk(state: State, layer: int, index: int, scratch_at: int) -> None:
    """One chunk of one block, number chunk + block * `num_chunks`, to its place in `partials`."""
    memory, chunks = state.memory, num_chunks(state)
    block, chunk = _find_block(state, index // chunks), index % chunks
    if chunk <= _position(state, block, block.size - 1) // CHUNK:
        _load_queries(state, block, memory.scratch, scratch_at)
        target = index * BLOCK * (state.model.k_stride + LANES)
        _attend_chunk(state, layer, block, chunk, memory.scratch, scratch_at, memory.partials, target)


@jit
def merge_chunks(state: State) -> None:
    """Merge what `attend_chunk` left of all blocks, and write `attended`."""
    partials, chunks, partial = state.memory.partials, num_chunks(state), state.model.k_stride + LANES
    for index in range(num_blocks(state)):
        block = _find_block(state, index)
        for i in range(block.size):
            at = (index * chunks * BLOCK + i) * partial
            for chunk in range(1, _position(state, block, i) // CHUNK + 1):
                _merge(partials, at, partials, at + chunk * BLOCK * partial, state.model.k_stride)
            _finish(state, block, i, partials, at)


@jit
def divides_chunks(state: State, num_threads: int) -> bool:
    """Whether blocks are too few to keep the threads equally busy, so that chunks are divided."""
    return num_threads > 1 and num_blocks(state) < FEW_BLOCKS * num_threads
