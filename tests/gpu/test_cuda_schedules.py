"""A thousand random schedules on the GPU: whatever comes when, in whatever pieces, and leaves when, no bit changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from cuda_models import make_backend, small

from crucible.engine.validate import NUM_SLOTS, Request, Validator, pages_needed

SCHEDULES = 1_000


def serve_at_random(validator: Validator, requests: Sequence[Request], rng: random.Random) -> None:
    """Some of the requests, in any order, cut and budgeted anyhow, some of them cancelled."""
    some = rng.sample(requests, rng.randrange(1, len(requests)))
    steps = rng.choice([1, 4, 12])
    arrivals = [rng.randrange(steps) for _ in some]
    cancels = {index: rng.randrange(steps + 6) for index in range(len(some)) if rng.random() < 0.2}
    chunk = rng.choice([1, 5, 16, 33, 64, 130, 512])
    pages = list(range(validator.witness.num_pages))
    rng.shuffle(pages)
    validator.witness.page_order = pages
    validator.serve(some, arrivals=arrivals, cancels=cancels, chunk=chunk, budget=chunk * rng.randrange(1, 12))


@pytest.mark.parametrize("weight_format", ["int8", "f16"])
def test_no_schedule_changes_a_bit(weight_format: str) -> None:
    config = small(num_hidden_layers=1)
    backend = make_backend(config, weight_format=weight_format, num_slots=NUM_SLOTS, num_pages=pages_needed(config))
    validator, rng = Validator(backend), random.Random(0)
    requests = validator.requests([1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 128, 40, 5], max_tokens=5)
    for number in range(SCHEDULES // 2):
        serve_at_random(validator, requests, rng)
        assert validator.tally.differing == 0, f"schedule {number}: {validator.tally.first}"
    assert validator.tally.compared > 0.99 * validator.tally.rows
    assert backend.saturations == 0
