"""Whole models on the GPU: logits against the reference, and bits that nothing but the request's own tokens changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_models import CONFIGS, assert_same_bits, draw_ids, in_chunks, make_backend, open_slot, run, small
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.engine.backend import NONE, StepPlan, decode, prefill
from crucible.engine.cuda.backend import MAX_ROWS, CudaBackend
from crucible.engine.quant import WEIGHT_FORMATS, WeightFormat, convert, dense
from crucible.engine.reference import ReferenceBackend
from crucible.engine.request import SamplingParams
from crucible.engine.runner import logits
from crucible.engine.validate import NUM_SLOTS, pages_needed, validate

LENGTH = 150
CHUNKS = [1, 7, 16, 37, 64, 100]

BOUNDS = {"f32": 2e-5, "f16": 2e-2, "int8": 2e-2}
"""Largest error of a logit relative to the root mean square of its row, against float64 on the same weights. Attention
is sharp on purpose: scores of some tens, each off by the rounding of a key to f16."""


def reference(config: ModelConfig, ids: list[int], weight_format: WeightFormat) -> Any:
    held = convert(config, toy_weights(config), weight_format)
    return logits(ReferenceBackend(config, {name: dense(weight) for name, weight in held.items()}), ids)


def alone(config: ModelConfig, ids: list[int], **changes: Any) -> Any:
    """The standard: one request, one row per step, no graph."""
    backend = make_backend(config, use_graphs=False, **changes)
    open_slot(backend, 0, range(-(-len(ids) // 16)))
    return in_chunks(backend, ids, 1)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_references(name: str, weight_format: WeightFormat) -> None:
    config = CONFIGS[name]
    ids = draw_ids(config, 0, 90)
    expected = reference(config, ids, weight_format)
    backend = make_backend(config, weight_format=weight_format)
    found = logits(backend, ids)
    error = np.abs(found - expected) / np.sqrt((expected.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    print(f"{name} {weight_format}: {error.max():.2e}")
    assert error.max() < BOUNDS[weight_format], f"{error.max()} in row {error.max(axis=1).argmax()}"
    assert backend.saturations == 0


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_graphs_do_not_matter(name: str, weight_format: WeightFormat) -> None:
    """And decode is prefill, at every position."""
    config = CONFIGS[name]
    ids = draw_ids(config, 1, LENGTH)
    expected = alone(config, ids, weight_format=weight_format)
    backend = make_backend(config, weight_format=weight_format)
    for size in [*CHUNKS, LENGTH]:
        backend.fill_cache(np.nan)
        open_slot(backend, 0, range(10))
        assert_same_bits(in_chunks(backend, ids, size), expected)
        backend.close_slot(0)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_neighbours_do_not_matter(name: str, weight_format: WeightFormat) -> None:
    """Five requests in different states, in chunks of different sizes, in changing order, on scattered pages."""
    config, rng = CONFIGS[name], np.random.default_rng(2)
    requests = {slot: draw_ids(config, slot, length) for slot, length in enumerate((LENGTH, 1, 50, 65, 17))}
    backend = make_backend(config, weight_format=weight_format, num_slots=5, num_pages=60)
    pages = rng.permutation(60).tolist()
    for slot in requests:
        open_slot(backend, slot, [pages.pop() for _ in range(10)])
    found: dict[int, list[Any]] = {slot: [] for slot in requests}
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


@pytest.mark.parametrize("weight_format", ["int8", "f16"])
@pytest.mark.parametrize("size", [16, 17, 64, 100])
def test_the_size_of_a_decode_batch_does_not_matter(weight_format: WeightFormat, size: int) -> None:
    config = CONFIGS["group 3, o in chunks of 64"]
    ids = [draw_ids(config, seed, 40) for seed in range(size)]
    backend = make_backend(config, weight_format=weight_format, num_slots=size, num_pages=3 * size)
    for slot in range(size):
        open_slot(backend, slot, range(3 * slot, 3 * slot + 3))
    run(backend, *(prefill(slot, ids[slot][: 20 + slot % 13], last=NONE) for slot in range(size)))
    start = [20 + slot % 13 for slot in range(size)]
    found: list[list[Any]] = [[] for _ in range(size)]
    for step in range(6):
        rows = run(backend, *(prefill(s, [ids[s][start[s] + step]], start[s] + step, last=NONE) for s in range(size)))
        for slot in range(size):
            found[slot].append(rows[slot])
    for slot in (0, 1, size // 2, size - 1):
        expected = alone(config, ids[slot][: start[slot] + 6], weight_format=weight_format)[start[slot] :]
        assert_same_bits(np.concatenate(found[slot]), expected)


def test_a_long_request_by_decode_and_by_prefill() -> None:
    """More chunks of attention than a block has warps."""
    config = small(num_hidden_layers=1)
    ids = draw_ids(config, 5, 620)
    backend = make_backend(config)
    open_slot(backend, 0, range(40))
    whole = in_chunks(backend, ids, len(ids))
    assert_same_bits(in_chunks_from(backend, ids, 505), whole[505:])


def in_chunks_from(backend: CudaBackend, ids: list[int], start: int) -> Any:
    backend.rewind_slot(0, start)
    return in_chunks(backend, ids, 1, start=start)


def test_more_rows_than_fit_the_buffers() -> None:
    config = small(max_position_embeddings=MAX_ROWS + 100, num_hidden_layers=1, intermediate_size=144)
    ids = draw_ids(config, 6, MAX_ROWS + 60)
    backend = make_backend(config)
    pages = -(-(MAX_ROWS + 100) // 16)
    open_slot(backend, 0, range(pages))
    backend.submit(StepPlan((prefill(0, ids, last=NONE),))).wait()
    rewound = in_chunks_from(backend, ids, MAX_ROWS - 5)
    backend.rewind_slot(0, 0)
    for start in range(0, len(ids), 777):
        backend.submit(StepPlan((prefill(0, ids[start : start + 777], start, last=NONE),)))
    assert_same_bits(in_chunks_from(backend, ids, MAX_ROWS - 5), rewound)


def test_several_steps_draw_what_single_steps_draw() -> None:
    config = small()
    prompt, params = draw_ids(config, 11, 20), SamplingParams(temperature=1.5, seed=5)
    drawn = []
    for steps, use_graphs in ((1, True), (12, True), (12, False)):
        backend = make_backend(config, use_graphs=use_graphs)
        open_slot(backend, 0, range(10), params=params, limit=20 + 13)
        ids = [int(backend.submit(StepPlan((prefill(0, prompt),))).wait().ids[0, 0])]
        while len(ids) < 13:
            result = backend.submit(StepPlan((decode(0, 20 + len(ids) - 1),), steps=steps)).wait()
            ids += result.ids[: result.counts[0], 0].tolist()
        assert result.finish == ("length",)
        drawn.append(ids)
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_validation_finds_it_exact(weight_format: WeightFormat) -> None:
    config = small(num_hidden_layers=1)
    backend = make_backend(config, weight_format=weight_format, num_slots=NUM_SLOTS, num_pages=pages_needed(config))
    for check in validate(backend):
        print(check.name, check.tally.rows, check.tally.compared, f"{check.seconds:.1f}")
        assert check.tally.differing == 0, f"{check.name}: {check.tally.first}"
        assert check.tally.rows or check.tally.tokens
