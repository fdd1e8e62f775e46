"""The CPU backend's logits are a function of the weights and the request's own tokens: nothing else changes a bit.

The standard in every test is the request alone in a fresh backend on one thread, one row per plan.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from architectures import architectures
from cells import axis_cells, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_weights import toy_weights

pytest.importorskip("numba")

from crucible.config import ModelConfig
from crucible.engine.backend import NONE, PAGE_SIZE, Segment, SlotSpec, StepPlan, decode, prefill
from crucible.engine.cpu import CpuBackend
from crucible.engine.cpu.backend import MAX_ROWS
from crucible.engine.cpu.step import take_part
from crucible.engine.quant import WEIGHT_FORMATS, WeightFormat
from crucible.engine.request import SamplingParams
from crucible.engine.runner import logits
from crucible.errors import CrucibleError

F32 = npt.NDArray[np.float32]

LENGTH = 150
CHUNKS = [7, 16, 37, 64, 100]
NUM_PAGES = 60


def long(**changes: Any) -> ModelConfig:
    """A toy config with room for three chunks of attention."""
    return toy(**{"max_position_embeddings": 160, **changes})


CONFIGS = [pytest.param(cell.values[0].vary(max_position_embeddings=160), id=cell.id) for cell in axis_cells()]
LARGER = long(
    vocab_size=300,
    hidden_size=200,
    intermediate_size=500,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=40,
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
)
CONFIGS.append(pytest.param(LARGER, id="larger"))


def draw_ids(config: ModelConfig, seed: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


def make_backend(config: ModelConfig, **changes: Any) -> CpuBackend:
    return CpuBackend(config, toy_weights(config), **{"num_threads": 1, **changes})


def open_slot(backend: CpuBackend, slot: int, pages: Sequence[int], **changes: Any) -> None:
    limit = min(len(pages) * PAGE_SIZE, backend.config.max_position_embeddings)
    spec = {"page_table": tuple(pages), "limit": limit, "prompt_ids": (), "params": SamplingParams(), **changes}
    backend.open_slot(slot, SlotSpec(**spec))


def run(backend: CpuBackend, *segments: Segment) -> list[F32]:
    """The logits of each segment's rows."""
    rows = backend.submit(StepPlan(segments, want_logits=True)).wait().logits
    assert rows is not None
    return np.split(rows[0], np.cumsum([len(segment.kinds) for segment in segments])[:-1])


def in_chunks(backend: CpuBackend, ids: list[int], size: int, *, slot: int = 0, start: int = 0) -> F32:
    chunks = [(at, ids[at : at + size]) for at in range(start, len(ids), size)]
    return np.concatenate([run(backend, prefill(slot, chunk, at, last=NONE))[0] for at, chunk in chunks])


def alone(config: ModelConfig, ids: list[int], **changes: Any) -> F32:
    """The standard."""
    backend = make_backend(config, **changes)
    open_slot(backend, 0, range(-(-len(ids) // PAGE_SIZE)))
    return in_chunks(backend, ids, 1)


def assert_same_bits(found: F32, expected: F32) -> None:
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_do_not_matter(config: ModelConfig) -> None:
    """And keys and values are the same, whether written row by row or in a prompt."""
    ids = draw_ids(config, 0)
    expected_backend = make_backend(config)
    open_slot(expected_backend, 0, range(10))
    expected = in_chunks(expected_backend, ids, 1)
    backend = make_backend(config)
    for size in [*CHUNKS, LENGTH]:
        backend.keys[...] = backend.values[...] = 0
        open_slot(backend, 0, range(10))
        assert_same_bits(in_chunks(backend, ids, size), expected)
        assert_same_bits(backend.keys, expected_backend.keys)
        assert_same_bits(backend.values, expected_backend.values)
        backend.close_slot(0)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("config", CONFIGS)
def test_batch_neighbours_do_not_matter(config: ModelConfig, weight_format: WeightFormat) -> None:
    """Five requests in different states, in chunks of different sizes, in changing order, on scattered pages."""
    rng = np.random.default_rng(2)
    requests = {slot: draw_ids(config, slot, length) for slot, length in enumerate((LENGTH, 1, 50, 65, 17))}
    backend = make_backend(config, weight_format=weight_format, num_slots=5, num_pages=NUM_PAGES)
    pages = rng.permutation(NUM_PAGES).tolist()
    for slot in requests:
        open_slot(backend, slot, [pages.pop() for _ in range(10)])
    found: dict[int, list[F32]] = {slot: [] for slot in requests}
    done = dict.fromkeys(requests, 0)
    while unfinished := [slot for slot in requests if done[slot] < len(requests[slot])]:
        rng.shuffle(unfinished)
        segments = []
        for slot in unfinished:
            chunk = requests[slot][done[slot] : done[slot] + int(rng.choice([1, 1, 3, 30]))]
            segments.append(prefill(slot, chunk, done[slot], last=NONE))
            done[slot] += len(chunk)
        for segment, rows in zip(segments, run(backend, *segments), strict=True):
            found[segment.slot].append(rows)
    for slot, ids in requests.items():
        assert_same_bits(np.concatenate(found[slot]), alone(config, ids, weight_format=weight_format))


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("config", [pytest.param(long(), id="gqa"), pytest.param(LARGER, id="larger")])
def test_threads_do_not_matter(config: ModelConfig, num_threads: int) -> None:
    """Rows alone divide attention by chunks among threads, many rows by heads and queries."""
    ids = draw_ids(config, 3)
    expected = alone(config, ids)
    backend = make_backend(config, num_threads=num_threads, num_slots=2)
    open_slot(backend, 0, range(10))
    assert_same_bits(in_chunks(backend, ids, 1), expected)
    open_slot(backend, 1, range(10, 20))
    assert_same_bits(in_chunks(backend, ids, 90, slot=1), expected)


def test_a_step_does_without_helpers_that_never_come() -> None:
    """As after a fork, which no thread but the caller survives."""
    config = long()
    ids = draw_ids(config, 12)
    backend = make_backend(config, num_threads=4)
    for queue in backend._crew._queues:
        queue.put(None)
    open_slot(backend, 0, range(10))
    assert_same_bits(in_chunks(backend, ids, 40), alone(config, ids))


def test_helpers_end_with_their_backend() -> None:
    before = set(threading.enumerate())
    backend = make_backend(toy(), num_threads=3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del backend
    gc.collect()
    for helper in helpers:
        helper.join(timeout=10)
        assert not helper.is_alive()


@settings(max_examples=25, deadline=None)
@given(
    architectures(long),
    st.sampled_from(WEIGHT_FORMATS),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 149),
    st.integers(1, 2),
)
def test_no_size_matters(
    config: ModelConfig, weight_format: WeightFormat, cuts: list[int], neighbour: int, num_threads: int
) -> None:
    """A prompt in chunks that end where `cuts` say, the first one beside a neighbour of so many rows."""
    edges = [0, *(edge for edge in np.cumsum(cuts).tolist() if edge < LENGTH), LENGTH]
    ids = draw_ids(config, 10)
    backend = make_backend(config, weight_format=weight_format, num_slots=2, num_threads=num_threads)
    open_slot(backend, 0, range(10, 20))
    open_slot(backend, 1, range(10))
    chunks = [prefill(0, ids[start:end], start, last=NONE) for start, end in itertools.pairwise(edges)]
    first, _ = run(backend, chunks[0], prefill(1, ids[:neighbour], last=NONE))
    found = np.concatenate([first, *(run(backend, chunk)[0] for chunk in chunks[1:])])
    assert_same_bits(found, alone(config, ids, weight_format=weight_format))


@pytest.mark.parametrize("config", CONFIGS)
def test_pages_and_what_they_held_do_not_matter(config: ModelConfig) -> None:
    ids = draw_ids(config, 4)
    expected = alone(config, ids)
    backend = make_backend(config, num_pages=NUM_PAGES)
    for seed, held in enumerate((np.nan, np.inf, 1e30)):
        backend.keys[...] = backend.values[...] = held
        open_slot(backend, 0, np.random.default_rng(seed).permutation(NUM_PAGES)[:10].tolist())
        assert_same_bits(in_chunks(backend, ids, 37), expected)
        backend.close_slot(0)


def test_only_computed_positions_are_written() -> None:
    config = long()
    backend = make_backend(config, num_pages=NUM_PAGES)
    backend.keys[...] = backend.values[...] = np.nan
    open_slot(backend, 0, (9, 3, 30))
    in_chunks(backend, draw_ids(config, 5, 37), 37)
    written = np.zeros((NUM_PAGES, PAGE_SIZE), dtype=bool)
    written[9], written[3], written[30, :5] = True, True, True
    assert (np.isnan(backend.keys).all(axis=(0, 1, 3)) == ~written).all()
    assert (np.isnan(backend.values).all(axis=(0, 1, 4)) == ~written).all()


@pytest.mark.parametrize("config", [*CONFIGS[:5], pytest.param(LARGER, id="larger")])
def test_a_later_token_without_a_number_leaves_earlier_rows_alone(config: ModelConfig) -> None:
    """In one plan, at every place within a page and a block of queries; a NaN embedding, so NaN keys and values."""
    config = config.vary(tie_word_embeddings=False)
    weights = toy_weights(config)
    weights["model.embed_tokens.weight"][1] = np.nan
    ids = [token_id if token_id != 1 else 0 for token_id in draw_ids(config, 6, 80)]
    backend = CpuBackend(config, weights, num_threads=1)
    expected = logits(backend, ids)
    assert not np.isnan(expected).any()
    for place in range(56, 80):
        found = logits(backend, [*ids[:place], 1, *ids[place + 1 :]])
        assert_same_bits(found[:place], expected[:place])
        assert np.isnan(found[place]).all()


def test_a_prefix_of_another_request_and_rewound_rows_give_the_same_bits() -> None:
    config = long()
    ids = draw_ids(config, 7)
    expected = alone(config, ids)
    backend = make_backend(config, num_slots=2, num_pages=NUM_PAGES)
    open_slot(backend, 0, range(10))
    in_chunks(backend, [*ids[:96], 1, 2, 3], 16)
    open_slot(backend, 1, [0, 1, 2, 3, 4, 5, 11, 12, 13, 14], position=96)
    assert_same_bits(in_chunks(backend, ids, 9, slot=1, start=96), expected[96:])
    backend.rewind_slot(0, 70)
    assert_same_bits(in_chunks(backend, ids, 50, start=70), expected[70:])


def test_rows_beyond_what_fits_the_buffers_are_computed_in_parts() -> None:
    config = toy(max_position_embeddings=MAX_ROWS + 60, hidden_size=16, num_hidden_layers=1)
    ids, other = draw_ids(config, 8, MAX_ROWS + 50), draw_ids(config, 9, 40)
    backend = make_backend(config, num_slots=2)
    pages = -(-(MAX_ROWS + 60) // PAGE_SIZE)
    open_slot(backend, 0, range(pages))
    open_slot(backend, 1, range(pages, 2 * pages))
    first, second = run(backend, prefill(1, other, last=NONE), prefill(0, ids, last=NONE))
    assert_same_bits(first, alone(config, other))
    assert_same_bits(second, alone(config, ids))


def test_several_steps_draw_what_single_steps_draw_and_end_alike() -> None:
    config = long()
    prompt, params = draw_ids(config, 11, 20), SamplingParams(temperature=1.5, seed=5)
    drawn = []
    for steps in (1, 12):
        backend = make_backend(config)
        open_slot(backend, 0, range(10), params=params, limit=20 + 13)
        ids = [int(backend.submit(StepPlan((prefill(0, prompt),))).wait().ids[0, 0])]
        while len(ids) < 13:
            result = backend.submit(StepPlan((decode(0, 20 + len(ids) - 1),), steps=steps)).wait()
            ids += result.ids[: result.counts[0], 0].tolist()
        assert result.finish == ("length",)
        drawn.append(ids)
    assert drawn[0] == drawn[1]


def test_one_compilation_serves_every_model_of_a_format() -> None:
    """A read-only or strided array among the arguments would make Numba compile another version."""
    for weight_format in WEIGHT_FORMATS:
        alone(LARGER, [1, 2], weight_format=weight_format)
    assert len(take_part.signatures) <= len(WEIGHT_FORMATS)


def test_threads_must_be_positive() -> None:
    with pytest.raises(CrucibleError, match="num_threads must be at least 1, not 0"):
        make_backend(toy(), num_threads=0)


def test_weights_must_be_those_of_the_config() -> None:
    weights = toy_weights(toy())
    with pytest.raises(CrucibleError, match=r"the weights lack model\.norm\.weight"):
        CpuBackend(toy(), {name: weight for name, weight in weights.items() if name != "model.norm.weight"})
