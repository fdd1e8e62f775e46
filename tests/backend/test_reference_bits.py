"""Logits are bitwise a pure function of the weights and the request's own tokens: nothing else changes a bit.

The standard in every test is the request alone in a fresh backend, one row per plan. Rounding to f32 would hide nearly
every difference of order in a float64 sum, so the cache is made float64 here and the residual stream is compared too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from architectures import architectures
from cells import axis_cells, foreign_cells, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.engine.backend import NONE, PAGE_SIZE, Segment, SlotSpec, StepPlan, prefill
from crucible.engine.reference import ReferenceBackend, ops
from crucible.engine.request import SamplingParams

F64 = npt.NDArray[np.float64]

LENGTH = 96
CHUNKS = [1, 7, 16, 37, 64]
NUM_PAGES = 40


def draw_ids(config: ModelConfig, seed: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


def open_slot(backend: Observed, slot: int, pages: Sequence[int], **changes: Any) -> None:
    limit = min(len(pages) * PAGE_SIZE, backend.config.max_position_embeddings)
    spec = {"page_table": tuple(pages), "limit": limit, "prompt_ids": (), "params": SamplingParams(), **changes}
    backend.open_slot(slot, SlotSpec(**spec))


class Observed(ReferenceBackend):
    """A reference backend that rounds nothing and keeps the residual stream of its last plan."""

    def __init__(self, config: ModelConfig, **sizes: int) -> None:
        super().__init__(config, toy_weights(config), **sizes)
        self.cache.keys, self.cache.values = self.cache.keys.astype(np.float64), self.cache.values.astype(np.float64)
        forward = self.decoder.forward

        def observed(*arguments: Any) -> F64:
            self.residual = forward(*arguments)
            return self.residual

        self.decoder.forward = observed


def run(backend: Observed, *segments: Segment) -> list[F64]:
    """For each segment what came out of its rows: the residual stream and the logits, side by side."""
    logits = backend.submit(StepPlan(segments, want_logits=True)).wait().logits
    assert logits is not None
    rows = np.concatenate([backend.residual, logits[0]], axis=1)
    return np.split(rows, np.cumsum([len(segment.kinds) for segment in segments])[:-1])


def in_chunks(backend: Observed, ids: list[int], size: int, *, slot: int = 0, start: int = 0) -> F64:
    chunks = [(at, ids[at : at + size]) for at in range(start, len(ids), size)]
    return np.concatenate([run(backend, prefill(slot, chunk, at, last=NONE))[0] for at, chunk in chunks])


def alone(config: ModelConfig, ids: list[int]) -> F64:
    """The standard."""
    backend = Observed(config)
    open_slot(backend, 0, range(-(-len(ids) // PAGE_SIZE)))
    return in_chunks(backend, ids, 1)


def assert_same_bits(found: F64, expected: F64) -> None:
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(found.view(np.uint64), expected.view(np.uint64))


LARGER = toy(
    vocab_size=512,
    max_position_embeddings=160,
    hidden_size=192,
    intermediate_size=500,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
)
"""Rows long enough that BLAS, and numpy's pairwise sums, take other paths than at toy size."""

CONFIGS = [*axis_cells(), *foreign_cells(), pytest.param(LARGER, id="larger")]


@pytest.mark.parametrize("config", CONFIGS)
def test_chunks_do_not_matter(config: ModelConfig) -> None:
    """Also: keys written by prefill and by decode are the same, or later rows would differ."""
    ids = draw_ids(config, 0)
    expected = alone(config, ids)
    backend = Observed(config, num_slots=2)
    for size in [*CHUNKS, LENGTH]:
        open_slot(backend, 0, range(6))
        assert_same_bits(in_chunks(backend, ids, size), expected)
        backend.close_slot(0)


@pytest.mark.parametrize("config", CONFIGS)
def test_keys_and_values_of_prefill_and_decode_are_the_same_bits(config: ModelConfig) -> None:
    ids = draw_ids(config, 1)
    backends = [Observed(config), Observed(config)]
    for backend, size in zip(backends, (1, LENGTH), strict=True):
        open_slot(backend, 0, range(6))
        in_chunks(backend, ids, size)
    for one, other in zip(*([b.cache.keys[:, :6], b.cache.values[:, :6]] for b in backends), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("config", CONFIGS)
def test_batch_neighbours_do_not_matter(config: ModelConfig) -> None:
    """Four requests in different states, in chunks of different sizes, in changing order, on scattered pages."""
    rng = np.random.default_rng(2)
    requests = {slot: draw_ids(config, slot, length) for slot, length in enumerate((LENGTH, 1, 50, 65))}
    backend = Observed(config, num_slots=4, num_pages=NUM_PAGES)
    pages = rng.permutation(NUM_PAGES).tolist()
    for slot in requests:
        open_slot(backend, slot, [pages.pop() for _ in range(6)])
    found: dict[int, list[F64]] = {slot: [] for slot in requests}
    done = dict.fromkeys(requests, 0)
    while unfinished := [slot for slot in requests if done[slot] < len(requests[slot])]:
        rng.shuffle(unfinished)
        segments = []
        for slot in unfinished:
            chunk = requests[slot][done[slot] : done[slot] + int(rng.integers(1, 30))]
            segments.append(prefill(slot, chunk, done[slot], last=NONE))
            done[slot] += len(chunk)
        for segment, logits in zip(segments, run(backend, *segments), strict=True):
            found[segment.slot].append(logits)
    for slot, ids in requests.items():
        assert_same_bits(np.concatenate(found[slot]), alone(config, ids))


@settings(max_examples=15, deadline=None)
@given(architectures(), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 95))
def test_no_size_matters(config: ModelConfig, cuts: list[int], neighbour: int) -> None:
    """A prompt in chunks that end where `cuts` say, the first one beside a neighbour of so many rows."""
    edges = [0, *(edge for edge in np.cumsum(cuts).tolist() if edge < LENGTH), LENGTH]
    ids = draw_ids(config, 10)
    backend = Observed(config, num_slots=2)
    open_slot(backend, 0, range(6, 12))
    open_slot(backend, 1, range(6))
    chunks = [prefill(0, ids[start:end], start, last=NONE) for start, end in itertools.pairwise(edges)]
    first, _ = run(backend, chunks[0], prefill(1, ids[:neighbour], last=NONE))
    assert_same_bits(np.concatenate([first, *(run(backend, chunk)[0] for chunk in chunks[1:])]), alone(config, ids))


@pytest.mark.parametrize("config", CONFIGS)
def test_pages_and_what_they_held_do_not_matter(config: ModelConfig) -> None:
    ids = draw_ids(config, 3)
    expected = alone(config, ids)
    backend = Observed(config, num_pages=NUM_PAGES)
    for seed, held in enumerate((np.nan, np.inf, 1e30)):
        backend.cache.keys[...], backend.cache.values[...] = held, held
        open_slot(backend, 0, np.random.default_rng(seed).permutation(NUM_PAGES)[:6].tolist())
        assert_same_bits(in_chunks(backend, ids, 37), expected)
        backend.close_slot(0)


def test_a_new_cache_is_nan_and_only_computed_positions_are_written() -> None:
    config = toy()
    backend = Observed(config, num_pages=NUM_PAGES)
    assert np.isnan(backend.cache.keys).all()
    assert np.isnan(backend.cache.values).all()
    pages = (9, 3, 30)
    open_slot(backend, 0, pages)
    in_chunks(backend, draw_ids(config, 4, 37), 37)
    written = np.zeros((NUM_PAGES, PAGE_SIZE), dtype=bool)
    written[9], written[3], written[30, :5] = True, True, True
    for held in (backend.cache.keys, backend.cache.values):
        assert (np.isnan(held).all(axis=(0, 3, 4)) == ~written).all()


def test_a_prefix_computed_by_another_request_serves_as_well() -> None:
    config = toy()
    ids = draw_ids(config, 5)
    backend = Observed(config, num_slots=2, num_pages=NUM_PAGES)
    open_slot(backend, 0, range(6))
    in_chunks(backend, [*ids[:48], 1, 2, 3], 16)
    open_slot(backend, 1, [0, 1, 2, 11, 12, 13], position=48)
    assert_same_bits(in_chunks(backend, ids, 9, slot=1, start=48), alone(config, ids)[48:])


def test_rewound_rows_are_computed_to_the_same_bits() -> None:
    config = toy()
    ids = draw_ids(config, 6)
    expected = alone(config, ids)
    backend = Observed(config)
    open_slot(backend, 0, range(6))
    in_chunks(backend, [*ids[:50], *draw_ids(config, 7, 30)], 80)
    backend.rewind_slot(0, 50)
    assert_same_bits(in_chunks(backend, ids, 20, start=50), expected[50:])


def test_which_logits_are_asked_for_does_not_matter() -> None:
    """Scores, here in chunks of 37 rows, are log-softmax of the logits."""
    config = toy()
    ids = draw_ids(config, 8)
    targets = np.array([*ids[1:], 0])
    logits = alone(config, ids)[:, config.hidden_size :]
    log_sum = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    expected = logits[np.arange(LENGTH), targets] - log_sum
    backend = Observed(config)
    open_slot(backend, 0, range(6))
    found = []
    for start in range(0, LENGTH, 37):
        rows = slice(start, start + 37)
        kinds = tuple(int(target) if target % 3 else NONE for target in targets[rows])
        found += backend.submit(StepPlan((Segment(0, start, kinds, tuple(ids[rows])),))).wait().scores.tolist()
    # Differences from the best logit are rounded to f32; the masses of 67 tokens are integers of 2^-34.
    np.testing.assert_allclose(found, expected[targets % 3 != 0], rtol=2.0**-24, atol=67 * 2.0**-35)


def test_these_tests_would_see_one_product_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = draw_ids(LARGER, 9)
    expected = alone(LARGER, ids)
    monkeypatch.setattr(ops, "linear", lambda x_MK, weight_KN: x_MK @ weight_KN)
    assert_same_bits(alone(LARGER, ids), expected)
    backend = Observed(LARGER)
    open_slot(backend, 0, range(6))
    residual = slice(LARGER.hidden_size)
    assert np.mean(in_chunks(backend, ids, 37)[:, residual] != expected[:, residual]) > 0.9
