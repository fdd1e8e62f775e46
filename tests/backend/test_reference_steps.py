"""The step model: what plans do to slots, when requests end, and which plans are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cells import toy
from toy_weights import toy_weights

from crucible.engine.backend import (
    NO_TOKEN,
    NONE,
    SAMPLE,
    PlanError,
    Segment,
    SlotSpec,
    StepPlan,
    StepResult,
    decode,
    prefill,
)
from crucible.engine.reference import ReferenceBackend
from crucible.engine.request import RequestError, SamplingParams
from crucible.engine.runner import logits
from crucible.engine.sampling import logprobs, sample, top_tokens

CONFIG = toy(tie_word_embeddings=False)
WEIGHTS = toy_weights(CONFIG)
# Distributions with several likely tokens, so that draws differ from one another.
WEIGHTS["lm_head.weight"] *= np.float32(0.3)
PROMPT = [5, 61, 17, 5, 40, 2, 33, 19, 8, 1, 0, 66, 23, 23, 9, 12, 50, 3]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {7: 3.0}}
WARM = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=99, max_tokens=60, **PENALTIES)
GREEDY = SamplingParams(max_tokens=60)


def make_backend(num_slots: int = 3, num_pages: int = 18) -> ReferenceBackend:
    return ReferenceBackend(CONFIG, WEIGHTS, num_slots=num_slots, num_pages=num_pages)


def spec(params: SamplingParams = GREEDY, *, pages: Sequence[int] = range(6), **changes: Any) -> SlotSpec:
    values: dict[str, Any] = {
        "page_table": tuple(pages),
        "limit": 96,
        "prompt_ids": tuple(PROMPT),
        "params": params,
        **changes,
    }
    return SlotSpec(**values)


def submit(backend: ReferenceBackend, *segments: Segment, **changes: Any) -> StepResult:
    return backend.submit(StepPlan(segments, **changes)).wait()


def draws_of_definition(prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The slow twin: for every token the logits of the whole sequence so far, alone, and one call of the sampler."""
    output: list[int] = []
    for _ in range(count):
        row = logits(ReferenceBackend(CONFIG, WEIGHTS), prompt + output)[-1]
        counts = [np.bincount(ids, minlength=CONFIG.vocab_size) for ids in (prompt, np.array(output, dtype=int))]
        draw = sample(row, params, len(prompt + output), prompt_counts_V=counts[0], output_counts_V=counts[1])
        output.append(draw.token_id)
    return output


# ---- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_drawn_tokens_are_those_of_the_definition(params: SamplingParams) -> None:
    expected = draws_of_definition(PROMPT, params, 12)
    assert len(set(expected)) > 4
    backend = make_backend()
    backend.open_slot(1, spec(params))
    found = submit(backend, prefill(1, PROMPT)).ids[:, 0].tolist()
    for position in range(len(PROMPT), len(PROMPT) + 11):
        found += submit(backend, decode(1, position)).ids[:, 0].tolist()
    assert found == expected


@pytest.mark.parametrize("steps", [2, 5, 11])
def test_several_steps_per_plan_are_single_steps(steps: int) -> None:
    expected = draws_of_definition(PROMPT, WARM, 1 + steps)
    backend = make_backend()
    backend.open_slot(0, spec(WARM))
    first = submit(backend, prefill(0, PROMPT))
    result = submit(backend, decode(0, len(PROMPT)), steps=steps, want_logits=True)
    assert [*first.ids[:, 0].tolist(), *result.ids[:, 0].tolist()] == expected
    assert result.counts.tolist() == [steps]
    assert result.finish == (None,)
    assert result.logits is not None
    alone = logits(ReferenceBackend(CONFIG, WEIGHTS), PROMPT + expected[:-1])
    np.testing.assert_array_equal(result.logits[:, 0], alone[len(PROMPT) :])


def test_prefill_decode_and_scores_share_a_step() -> None:
    backend = make_backend()
    for slot in range(3):
        backend.open_slot(slot, spec(WARM, pages=range(6 * slot, 6 * slot + 6)))
    first = submit(backend, prefill(0, PROMPT)).ids[0, 0]
    scored = Segment(2, 0, (*PROMPT[1:], SAMPLE), tuple(PROMPT))
    mixed = submit(backend, prefill(1, PROMPT[:10], last=NONE), decode(0, len(PROMPT)), scored)
    last = submit(backend, prefill(1, PROMPT[10:], 10))
    expected = draws_of_definition(PROMPT, WARM, 2)
    assert [first, *mixed.ids[0], *last.ids[0]] == [expected[0], expected[1], expected[0], expected[0]]
    alone = logits(ReferenceBackend(CONFIG, WEIGHTS), PROMPT)
    expected_scores = [logprobs(row)[target] for row, target in zip(alone, PROMPT[1:], strict=False)]
    np.testing.assert_array_equal(mixed.scores, expected_scores)


def test_a_drawn_token_can_be_given_back_as_an_id() -> None:
    expected = draws_of_definition(PROMPT, WARM, 3)
    backend = make_backend()
    backend.open_slot(0, spec(WARM))
    submit(backend, prefill(0, PROMPT))
    assert submit(backend, prefill(0, [expected[0]], len(PROMPT))).ids[0, 0] == expected[1]
    assert submit(backend, decode(0, len(PROMPT) + 1)).ids[0, 0] == expected[2]


def test_a_resumed_request_continues_with_the_same_tokens() -> None:
    """Closed after 4 tokens, opened elsewhere with what it had: penalties, noise and min_tokens go on."""
    expected = draws_of_definition(PROMPT, WARM, 12)
    end = next(i for i in range(6, 12) if expected[i] not in expected[:i])
    params = dataclasses.replace(WARM, min_tokens=6)
    computed = PROMPT + expected[:4]
    backend = make_backend()
    backend.open_slot(2, spec(params, pages=range(10, 16), output_ids=tuple(expected[:4]), end_ids=(expected[end],)))
    submit(backend, prefill(2, computed[:20], last=NONE))
    first = submit(backend, prefill(2, computed[20:], 20))
    rest = submit(backend, decode(2, len(computed)), steps=10)
    assert [first.ids[0, 0], *rest.ids[: rest.counts[0], 0]] == expected[4 : end + 1]
    assert rest.finish == ("stop",)


def test_logprobs_are_reported_where_asked() -> None:
    backend = make_backend()
    backend.open_slot(0, spec(dataclasses.replace(WARM, logprobs=3)))
    backend.open_slot(1, spec(WARM, pages=range(6, 12)))
    result = submit(backend, prefill(0, PROMPT), prefill(1, PROMPT))
    row = logits(ReferenceBackend(CONFIG, WEIGHTS), PROMPT)[-1]
    (found, nothing) = result.logprobs[0]
    assert nothing is None
    assert found is not None
    assert found.logprob == logprobs(row)[result.ids[0, 0]]
    assert list(found.top_ids) == top_tokens(row, 3).tolist()
    assert list(found.top_logprobs) == logprobs(row)[list(found.top_ids)].tolist()
    backend.open_slot(2, spec(dataclasses.replace(WARM, logprobs=0), pages=range(12, 18)))
    (only,) = submit(backend, prefill(2, PROMPT)).logprobs[0]
    assert only is not None
    assert (only.logprob, only.top_ids, only.top_logprobs) == (found.logprob, (), ())


# ---- how requests end -----------------------------------------------------------------------------------------------


def test_an_end_id_ends_and_what_was_queued_behind_it_is_dead() -> None:
    expected = draws_of_definition(PROMPT, WARM, 8)
    end = next(i for i in range(2, 8) if expected[i] not in expected[:i])
    backend = make_backend()
    backend.open_slot(0, spec(WARM, end_ids=(expected[end], 65)))
    backend.open_slot(1, spec(WARM, pages=range(6, 12)))
    submit(backend, prefill(0, PROMPT), prefill(1, PROMPT))
    rows = [decode(slot, len(PROMPT)) for slot in (0, 1)]
    result = submit(backend, *rows, steps=7, want_logits=True)
    dead = [NO_TOKEN] * (7 - end)
    assert result.ids[:, 0].tolist() == expected[1 : end + 1] + dead
    assert result.ids[:, 1].tolist() == expected[1:]
    assert result.counts.tolist() == [end, 7]
    assert result.finish == ("stop", None)
    assert result.logits is not None
    assert np.isnan(result.logits[end:, 0]).all()
    assert not np.isnan(result.logits[:, 1]).any()

    before = backend.cache.keys.copy()
    behind = submit(backend, decode(0, len(PROMPT) + 7))
    assert (behind.ids.tolist(), behind.counts.tolist(), behind.finish) == ([[NO_TOKEN]], [0], ("stop",))
    scored = submit(backend, Segment(0, len(PROMPT) + 8, (4, NONE), (1, 2)))
    assert np.isnan(scored.scores).all()
    np.testing.assert_array_equal(backend.cache.keys, before)
    unwritten = np.isnan(backend.cache.keys[:, :6]).all(axis=(0, 3, 4))
    assert (~unwritten).sum() == len(PROMPT) + end


def test_the_limit_ends() -> None:
    expected = draws_of_definition(PROMPT, WARM, 5)
    backend = make_backend()
    backend.open_slot(0, spec(WARM, limit=len(PROMPT) + 5))
    first = submit(backend, prefill(0, PROMPT))
    rest = submit(backend, decode(0, len(PROMPT)), steps=8)
    assert [*first.ids[:, 0], *rest.ids[:, 0]] == [*expected, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert (rest.counts.tolist(), rest.finish) == ([4], ("length",))
    with pytest.raises(PlanError, match="would pass limit=23"):
        submit(backend, decode(0, len(PROMPT) + 4))


def test_the_limit_can_be_the_whole_context_and_one_token() -> None:
    backend = make_backend()
    backend.open_slot(0, spec())
    result = submit(backend, prefill(0, [1] * 95))
    assert (result.counts.tolist(), result.finish) == ([1], ("length",))
    backend.open_slot(1, spec(pages=range(6, 12)))
    assert submit(backend, prefill(1, [1] * 96, last=NONE)).ids.shape == (1, 0)


def test_an_end_id_at_the_limit_is_a_stop() -> None:
    expected = draws_of_definition(PROMPT, WARM, 1)
    backend = make_backend()
    backend.open_slot(0, spec(WARM, limit=len(PROMPT) + 1, end_ids=(expected[0],)))
    assert submit(backend, prefill(0, PROMPT)).finish == ("stop",)


def test_no_end_id_is_drawn_before_min_tokens() -> None:
    (end,) = draws_of_definition(PROMPT, GREEDY, 1)
    backend = make_backend()
    backend.open_slot(0, spec(dataclasses.replace(GREEDY, min_tokens=3), end_ids=(end,)))
    first = submit(backend, prefill(0, PROMPT))
    rest = submit(backend, decode(0, len(PROMPT)), steps=20)
    drawn = [*first.ids[:, 0], *rest.ids[:, 0]]
    assert end not in drawn[:3]
    row = logits(ReferenceBackend(CONFIG, WEIGHTS), PROMPT)[-1].copy()
    row[end] = -np.inf
    assert drawn[0] == row.argmax()


def test_a_row_without_a_usable_logit_is_an_error_that_leaves_others_alone() -> None:
    weights = {name: weight.copy() for name, weight in WEIGHTS.items()}
    # Untied: only a prompt with token 66 meets the NaN.
    weights["model.embed_tokens.weight"][66] = np.nan
    backend = ReferenceBackend(CONFIG, weights, num_slots=2)
    backend.open_slot(0, spec())
    backend.open_slot(1, spec(pages=range(6, 12)))
    result = submit(backend, prefill(0, [1, 66]), prefill(1, [1, 2]))
    assert result.finish == ("error", None)
    assert submit(backend, decode(0, 2), decode(1, 2)).ids[0, 0] == NO_TOKEN


def test_a_closed_slot_and_its_pages_serve_the_next_request() -> None:
    backend = make_backend(num_slots=1, num_pages=6)
    expected = draws_of_definition(PROMPT, WARM, 4)
    for _ in range(3):
        backend.open_slot(0, spec(WARM))
        found = [*submit(backend, prefill(0, PROMPT)).ids[:, 0]]
        found += [*submit(backend, decode(0, len(PROMPT)), steps=3).ids[:, 0]]
        assert found == expected
        backend.close_slot(0)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(()), "at least one segment"),
        (StepPlan((decode(0, 18),), steps=0), "steps must be at least 1, not 0"),
        (StepPlan((decode(1, 0),)), "slot 1 is not open"),
        (StepPlan((decode(0, 18), decode(0, 19))), "one segment per slot"),
        (StepPlan((Segment(0, 18, ()),)), "slot 0: a segment needs at least one row"),
        (StepPlan((Segment(0, 18, (), ()),)), "slot 0: a segment needs at least one row"),
        (StepPlan((decode(0, 17),)), "slot 0 is at position 18; rows cannot start at 17"),
        (StepPlan((decode(0, 19),)), "slot 0 is at position 18; rows cannot start at 19"),
        (StepPlan((prefill(0, [1] * 79, 18, last=NONE),)), "79 rows from position 18 pass limit=96"),
        (StepPlan((prefill(0, [1] * 78, 18),)), "drawn after position 95 would pass limit=96"),
        (StepPlan((Segment(0, 18, (NONE, SAMPLE)),)), "the token drawn last is one row, not 2"),
        (StepPlan((decode(2, 4),)), "slot 2: no token was drawn"),
        (StepPlan((Segment(0, 18, (NONE, SAMPLE), (1, 2, 3)),)), "3 ids and 2 kinds"),
        (StepPlan((Segment(0, 18, (SAMPLE,), (67,)),)), "ids must be from 0 to 66, not 67"),
        (StepPlan((Segment(0, 18, (SAMPLE,), (-1,)),)), "ids must be from 0 to 66, not -1"),
        (StepPlan((Segment(0, 18, (67,), (1,)),)), "score row's kind must be from 0 to 66, not 67"),
        (StepPlan((Segment(0, 18, (-3,), (1,)),)), "score row's kind must be from 0 to 66, not -3"),
        (StepPlan((Segment(0, 18, (SAMPLE, SAMPLE), (1, 2)),)), "only the last row"),
        (StepPlan((prefill(0, [1, 2], 18),), steps=2), "with steps=2 a segment is one SAMPLE row, not 2 rows"),
        (StepPlan((decode(0, 18), prefill(2, [1], 4, last=NONE)), steps=2), "slot 2: with steps=2"),
    ],
)
def test_a_malformed_plan_is_refused_and_changes_nothing(plan: StepPlan, message: str) -> None:
    backend = make_backend()
    backend.open_slot(0, spec(WARM))
    backend.open_slot(2, spec(WARM, pages=range(6, 12)))
    first = submit(backend, prefill(0, PROMPT), prefill(2, PROMPT[:4], last=NONE)).ids[0, 0]
    before = backend.cache.keys.copy()
    with pytest.raises(PlanError, match=message):
        backend.submit(plan)
    np.testing.assert_array_equal(backend.cache.keys, before)
    second = submit(backend, decode(0, 18), prefill(2, PROMPT[4:], 4)).ids[0]
    expected = draws_of_definition(PROMPT, WARM, 2)
    assert [first, *second] == [*expected, expected[0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "limit must be from 1 to the context of 96, not 0"),
        ({"limit": 97, "pages": range(7)}, "limit must be from 1 to the context of 96, not 97"),
        ({"limit": 20, "position": 20}, "position must be below limit=20 and not negative, not 20"),
        ({"position": -1}, "not negative, not -1"),
        ({"pages": range(5)}, "5 pages of 16 do not hold limit=96"),
        ({"pages": [0, 1, 2, 3, 4, 18]}, "page_table must be from 0 to 17, not 18"),
        ({"pages": [0, 1, 2, 3, 4, -1]}, "page_table must be from 0 to 17, not -1"),
        ({"pages": [0, 1, 2, 3, 4, 4]}, "page_table names a page twice"),
        ({"prompt_ids": (67,)}, "prompt_ids must be from 0 to 66, not 67"),
        ({"output_ids": (-1,)}, "output_ids must be from 0 to 66, not -1"),
        ({"end_ids": (67,)}, "end_ids must be from 0 to 66, not 67"),
        ({"end_ids": tuple(range(17))}, "end_ids takes at most 16 ids, not 17"),
    ],
)
def test_a_malformed_spec_is_refused_and_leaves_the_slot_free(changes: dict[str, Any], message: str) -> None:
    backend = make_backend()
    with pytest.raises(PlanError, match=message):
        backend.open_slot(0, spec(**changes))
    backend.open_slot(0, spec())


def test_slots_are_opened_rewound_and_closed_in_order() -> None:
    backend = make_backend()
    for slot in (-1, 3):
        with pytest.raises(PlanError, match=f"slot {slot} does not exist; there are 3"):
            backend.open_slot(slot, spec())
    for call in (backend.close_slot, lambda slot: backend.rewind_slot(slot, 0)):
        with pytest.raises(PlanError, match="slot 0 is not open"):
            call(0)
    backend.open_slot(0, spec())
    with pytest.raises(PlanError, match="slot 0 is open"):
        backend.open_slot(0, spec())
    submit(backend, prefill(0, PROMPT))
    for position in (-1, len(PROMPT) + 1):
        with pytest.raises(PlanError, match=f"slot 0 is at position 18 and cannot rewind to {position}"):
            backend.rewind_slot(0, position)
    backend.rewind_slot(0, 18)
    with pytest.raises(PlanError, match="no token was drawn"):
        submit(backend, decode(0, 18))


def test_params_that_name_a_token_beyond_the_vocabulary_are_refused() -> None:
    backend = make_backend()
    with pytest.raises(RequestError, match="logit_bias has token id 67"):
        backend.open_slot(0, spec(SamplingParams(logit_bias={67: 1.0})))
    backend.open_slot(0, spec())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_must_be_those_of_the_config(name: str) -> None:
    with pytest.raises(ValueError, match=f"the weights lack {name}"):
        ReferenceBackend(CONFIG, {key: weight for key, weight in WEIGHTS.items() if key != name})
    with pytest.raises(ValueError, match=f"{name} must have shape .*, not "):
        ReferenceBackend(CONFIG, {**WEIGHTS, name: WEIGHTS[name][:-1]})
    with pytest.raises(ValueError, match=r"the weights have model\.embed_positions\.weight, which"):
        ReferenceBackend(CONFIG, {**WEIGHTS, "model.embed_positions.weight": WEIGHTS[name]})
