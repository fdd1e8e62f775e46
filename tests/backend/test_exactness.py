"""One request alone and the same request in any company: equal bits of logits and equal tokens, on every backend.

The witness of `engine/validate.py` remembers the logits after every sequence of tokens. A module's worth of requests is
first served one by one; each test then serves them in another way, in which every row must be known and equal.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from cells import toy
from toy_weights import toy_weights

from crucible.engine import runner
from crucible.engine.backend import NONE, PlanError, Segment, SlotSpec, StepPlan, Ticket, decode, prefill
from crucible.engine.backends import make_backend
from crucible.engine.engine import Engine
from crucible.engine.request import SamplingParams
from crucible.engine.validate import (
    CHUNKS,
    MAX_TOKENS,
    NUM_SLOTS,
    PROMPT_LENGTHS,
    Request,
    Tally,
    Validator,
    fill_cache,
    pages_needed,
)

CONFIG = toy(max_position_embeddings=640, tie_word_embeddings=False)
WEIGHTS = toy_weights(CONFIG)
WEIGHTS["lm_head.weight"] *= np.float32(0.3)  # several likely tokens, so that draws differ from one another
NUM_PAGES = 2 * pages_needed(CONFIG)

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="the cpu backend needs numba")
BACKENDS = [
    pytest.param(("reference", "f32"), id="reference"),
    pytest.param(("cpu", "f32"), id="cpu-f32", marks=needs_numba),
    pytest.param(("cpu", "int8"), id="cpu-int8", marks=needs_numba),
]


class Spied(Validator):
    """Remembers how many requests each step served."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[int] = []
        submit = self.witness.submit

        def spy(plan: StepPlan) -> Ticket:
            self.batches.append(len(plan.segments))
            return submit(plan)

        self.witness.submit = spy  # type: ignore[method-assign]

    def expect_exact(self, num_rows: int | None = None, *, all_known: bool = True) -> None:
        tally = self.tally
        assert tally.differing == 0, tally.first
        assert tally.rows > 0
        assert num_rows is None or tally.rows == num_rows
        assert not all_known or tally.compared == tally.rows


@dataclasses.dataclass
class Served:
    validator: Spied
    requests: list[Request]
    tokens: list[tuple[int, ...]]

    @property
    def num_rows(self) -> int:
        return sum(len(request.prompt_ids) + MAX_TOKENS - 1 for request in self.requests)


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request: pytest.FixtureRequest) -> Served:
    """The sixteen requests, each served alone and whole."""
    name, weight_format = request.param
    backend = make_backend(name, CONFIG, WEIGHTS, weight_format=weight_format, num_slots=NUM_SLOTS, num_pages=NUM_PAGES)
    validator = Spied(backend)
    requests = validator.requests(PROMPT_LENGTHS)
    tokens = [validator.serve([one], chunk=512)[0] for one in requests]
    assert set(validator.batches) == {1}
    validator.expect_exact(all_known=False)
    assert len({token for drawn in tokens for token in drawn}) > 20
    return Served(validator, requests, tokens)


@pytest.fixture
def served(alone: Served) -> Served:
    alone.validator.witness.tally = Tally()
    alone.validator.witness.page_order = range(NUM_PAGES)
    alone.validator.batches.clear()
    return alone


# ---- company --------------------------------------------------------------------------------------------------------


def test_sixteen_at_once(served: Served) -> None:
    assert served.validator.serve(served.requests, chunk=512, budget=5_000) == served.tokens
    served.validator.expect_exact(served.num_rows)
    assert served.validator.batches == [16] * MAX_TOKENS


@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_one_after_another(served: Served, gap: int, order: str) -> None:
    requests = served.requests[:: 1 if order == "forwards" else -1]
    served.validator.serve(requests, arrivals=range(0, gap * 16, gap), chunk=90, budget=200)
    served.validator.expect_exact(served.num_rows)
    assert len(set(served.validator.batches)) > 2


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompts_in_chunks(served: Served, chunk: int) -> None:
    served.validator.serve(served.requests, chunk=chunk, budget=5 * chunk)
    served.validator.expect_exact(served.num_rows)


@pytest.mark.parametrize("seed", [1, 2])
def test_page_tables_shuffled(served: Served, seed: int) -> None:
    pages = list(range(NUM_PAGES))
    random.Random(seed).shuffle(pages)
    served.validator.witness.page_order = pages
    served.validator.serve(served.requests, chunk=64, budget=300)
    served.validator.expect_exact(served.num_rows)


def test_batches_of_sixteen_one_eight_and_two(served: Served) -> None:
    validator = served.validator
    lasting = validator.requests([33, 17], max_tokens=30)
    many = validator.requests([*PROMPT_LENGTHS[:12], 20, 21, 22], max_tokens=2)
    more = validator.requests([31, 32, 33, 63, 64, 65], max_tokens=5)
    group = [lasting[0], *many, lasting[1], *more]
    validator.serve(group, arrivals=[0] * 16 + [9] * 7, budget=2_000)
    batches = [size for i, size in enumerate(validator.batches) if i == 0 or size != validator.batches[i - 1]]
    assert batches == [16, 1, 8, 2, 1]
    for one in group:
        validator.serve([one])
    validator.expect_exact(all_known=False)
    assert validator.tally.compared >= validator.tally.rows // 2


def test_company_whose_parameters_differ_in_everything(served: Served) -> None:
    """Every other request sampled otherwise: rows of its prompt stay what they were, and all of its neighbours'."""
    others = [
        Request(request.prompt_ids, dataclasses.replace(request.params, temperature=2.0, seed=seed, logprobs=3))
        for seed, request in enumerate(served.requests)
    ]
    group = [*served.requests[::2], *others[1::2]]
    served.validator.serve(group, chunk=128)
    served.validator.expect_exact(all_known=False)
    known = sum(len(request.prompt_ids) for request in group) + (MAX_TOKENS - 1) * 8
    assert served.validator.tally.compared >= known


# ---- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3, 7, 12], ids=["unbegun", "one chunk", "midway", "last chunk", "last token"])
def test_neighbours_cancelled(served: Served, step: int) -> None:
    """Prompts of 255 in chunks of 32 take 8 steps, and their 6 tokens 5 more; every other request is such a one."""
    validator = served.validator
    leaving = validator.requests([255] * 7)
    staying = [request for request in served.requests if len(request.prompt_ids) != 511][:9]
    group = [request for pair in zip(staying, leaving, strict=False) for request in pair] + staying[7:]
    cancels = {index: step for index, request in enumerate(group) if request in leaving}
    tokens = validator.serve(group, cancels=cancels, chunk=32, budget=1_000)
    assert {len(tokens[index]) for index in cancels} == {max(0, step - 7)}
    validator.expect_exact(all_known=False)
    assert validator.tally.compared >= sum(len(request.prompt_ids) + MAX_TOKENS - 1 for request in staying)


def test_everyone_leaves_at_another_time(served: Served) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        cancels = {index: rng.randrange(14) for index in range(16) if rng.random() < 0.6}
        served.validator.serve(served.requests, cancels=cancels, chunk=50, budget=400)
    served.validator.expect_exact()


def test_what_a_cancelled_request_left_behind(served: Served) -> None:
    """Its slot and pages serve the next request from the very next step on."""
    validator = served.validator
    backend = validator.witness.backend
    engine = Engine(validator.witness, prefill_chunk=40)
    for request in served.requests:
        engine.add("leaves", request.prompt_ids[::-1], request.params)
        engine.step()
        engine.cancel("leaves")
        engine.add("stays", request.prompt_ids, request.params)
        assert engine.scheduler.num_free_pages == backend.num_pages
        while engine.has_work:
            engine.step()
    validator.expect_exact(all_known=False)
    assert validator.tally.compared >= served.num_rows


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_what_decode_wrote_is_what_prefill_writes(served: Served) -> None:
    """Prompt and output of each request come back as one prompt, whose rows read keys written otherwise."""
    longer = [
        Request(request.prompt_ids + tokens, SamplingParams(max_tokens=1))
        for request, tokens in zip(served.requests, served.tokens, strict=True)
    ]
    served.validator.serve(longer, chunk=100)
    served.validator.expect_exact(all_known=False)
    assert served.validator.tally.compared >= served.num_rows


def test_a_long_output_is_as_good_as_a_prompt(served: Served) -> None:
    """200 tokens by decode, across pages and chunks of attention, against the same tokens in one prefill."""
    validator = served.validator
    (short,) = validator.requests([5], max_tokens=200)
    ((*tokens,),) = validator.serve([short])
    validator.serve([Request((*short.prompt_ids, *tokens), SamplingParams(max_tokens=1))], chunk=512)
    validator.expect_exact(all_known=False)
    assert validator.tally.compared >= 5 + 199


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_what_nobody_wrote_is_not_read(served: Served, value: float) -> None:
    assert fill_cache(served.validator.witness.backend, value)
    served.validator.serve(served.requests, chunk=75, budget=300)
    served.validator.expect_exact(served.num_rows)


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_logits_that_nobody_asks_for_and_steps_read_late_change_no_token(served: Served, look_ahead: int) -> None:
    validator = served.validator
    found = validator.serve(served.requests, chunk=80, budget=300, look_ahead=look_ahead, watched=False)
    assert found == served.tokens
    assert validator.tally.differing == 0


def test_the_engine_draws_what_recomputing_everything_draws(served: Served) -> None:
    """The slow twin: one request at a time, for each token the whole sequence from position 0."""
    backend = served.validator.witness.backend
    for request, tokens in zip(served.requests, served.tokens, strict=True):
        if len(request.prompt_ids) <= 65:
            found = runner.generate(backend, request.prompt_ids, request.params, eos_ids=(), use_cache=False)
            assert tuple(token.token_id for token in found) == tokens


def test_an_end_id_changes_nothing_before_it(served: Served) -> None:
    """Each request stops at its third token, alone in its way; rows queued behind the end disturb nobody."""
    engine = Engine(served.validator.witness.backend, look_ahead=2, prefill_chunk=33)
    for index, request in enumerate(served.requests):
        stop_token_ids = (served.tokens[index][2],)
        engine.add(index, request.prompt_ids, dataclasses.replace(request.params, stop_token_ids=stop_token_ids))
    found: dict[Any, list[int]] = {index: [] for index in range(16)}
    while engine.has_work:
        for event in engine.step():
            assert event.token_id is not None
            found[event.request_id].append(event.token_id)
    for index, tokens in enumerate(served.tokens):
        assert found[index] == list(tokens[: tokens.index(tokens[2]) + 1])


def test_prompt_logprobs_do_not_depend_on_chunks(served: Served) -> None:
    def scores(chunk: int, requests: Sequence[Request]) -> dict[Any, tuple[float, ...] | None]:
        engine = Engine(served.validator.witness.backend, prefill_chunk=chunk)
        found = {}
        for index, request in enumerate(requests):
            engine.add(index, request.prompt_ids, dataclasses.replace(request.params, prompt_logprobs=True))
        while engine.has_work:
            for event in engine.step():
                found.setdefault(event.request_id, event.prompt_logprobs)
        return found

    expected = scores(512, served.requests)
    for index, request in enumerate(served.requests):
        prompt_logprobs = expected[index]
        assert prompt_logprobs is not None
        assert len(prompt_logprobs) == len(request.prompt_ids) - 1
        assert all(-30 < score < 0 for score in prompt_logprobs)
    for chunk in (7, 64):
        assert scores(chunk, served.requests) == expected


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(()),
        StepPlan((decode(0, 9),), steps=0),
        StepPlan((decode(0, 9), decode(0, 10))),
        StepPlan((decode(1, 0),)),
        StepPlan((decode(0, 8),)),
        StepPlan((prefill(0, [1] * 40, 9),)),
        StepPlan((Segment(0, 9, (NONE,), (67,)),)),
        StepPlan((Segment(0, 9, (67,), (1,)),)),
        StepPlan((decode(0, 9), Segment(0, 10, (NONE,), (-1,)))),
        StepPlan((decode(2, 0), decode(0, 9))),
    ],
)
def test_a_malformed_plan_is_refused_and_changes_nothing(served: Served, plan: StepPlan) -> None:
    backend = served.validator.witness.backend
    params = SamplingParams(temperature=1.0)
    prompt = list(range(9))

    def drawn(plans: Sequence[StepPlan]) -> list[int]:
        backend.open_slot(0, SlotSpec(page_table=(1, 0, 2), limit=40, prompt_ids=prompt, params=params))
        try:
            ids = [int(backend.submit(StepPlan((prefill(0, prompt),))).wait().ids[0, 0])]
            for bad in plans:
                with pytest.raises(PlanError):
                    backend.submit(bad)
            return ids + [int(backend.submit(StepPlan((decode(0, at),))).wait().ids[0, 0]) for at in range(9, 14)]
        finally:
            backend.close_slot(0)

    assert drawn([plan]) == drawn([])
