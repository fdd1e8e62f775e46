"""The generation loop over a backend: which tokens, how it ends, what it refuses, and that it tidies up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cells import toy
from toy_weights import toy_weights

from crucible.engine import runner
from crucible.engine.backend import PAGE_SIZE, SlotSpec, StepPlan, Ticket
from crucible.engine.reference import ReferenceBackend
from crucible.engine.request import RequestError, SamplingParams
from crucible.engine.runner import GeneratedToken, generate, logits
from crucible.engine.sampling import sample

CONFIG = toy(tie_word_embeddings=False)
WEIGHTS = toy_weights(CONFIG)
WEIGHTS["lm_head.weight"] *= np.float32(0.3)  # several likely tokens, so that draws differ from one another
PROMPT = [5, 61, 17, 5, 40, 2, 33, 19, 8, 1, 0, 66, 23, 23, 9, 12, 50, 3]
WARM = SamplingParams(temperature=1.2, top_p=0.95, seed=5, max_tokens=14)
GREEDY = SamplingParams(max_tokens=14)


class Spied(ReferenceBackend):
    """Counts rows and remembers what is open."""

    def __init__(self) -> None:
        super().__init__(CONFIG, WEIGHTS)
        self.rows: list[int] = []
        self.open: set[int] = set()

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        super().open_slot(slot, spec)
        self.open.add(slot)

    def close_slot(self, slot: int) -> None:
        super().close_slot(slot)
        self.open.remove(slot)

    def submit(self, plan: StepPlan) -> Ticket:
        self.rows += [len(segment.kinds) for segment in plan.segments]
        return super().submit(plan)


@pytest.fixture
def backend() -> Spied:
    return Spied()


def run(backend: Spied, params: SamplingParams, prompt: list[int] = PROMPT, **options: Any) -> list[GeneratedToken]:
    options = {"eos_ids": (), **options}
    tokens = list(generate(backend, prompt, params, **options))
    assert [token.finish for token in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert tokens[-1].finish is not None
    assert backend.open == set()
    return tokens


def ids_of(tokens: list[GeneratedToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_tokens_are_those_of_the_definition(backend: Spied, params: SamplingParams) -> None:
    tokens = run(backend, params)
    expected = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + params.max_tokens):
        expected.append(sample(logits(backend, expected)[-1], params, position).token_id)
    assert ids_of(tokens) == expected[len(PROMPT) :]
    assert len(set(ids_of(tokens))) > 4
    assert tokens[-1].finish == "length"


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 63, 64, 65, 82])
def test_the_cache_changes_nothing(backend: Spied, prompt_length: int) -> None:
    """With a penalty, whose counts must not see a token twice."""
    params = dataclasses.replace(WARM, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)
    prompt = (PROMPT * 5)[:prompt_length]
    cached = run(backend, params, prompt)
    assert backend.rows == [prompt_length] + [1] * 13
    backend.rows.clear()
    assert run(backend, params, prompt, use_cache=False) == cached
    assert backend.rows == [prompt_length + i for i in range(14)]


@pytest.mark.parametrize("rows", [1, 7, 18])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
def test_long_prompts_are_computed_in_chunks(
    backend: Spied, rows: int, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_logits = run(backend, WARM), logits(backend, PROMPT)
    backend.rows.clear()
    monkeypatch.setattr(runner, "PREFILL_ROWS", rows)
    assert run(backend, WARM, use_cache=use_cache) == expected
    assert max(backend.rows) == rows
    np.testing.assert_array_equal(logits(backend, PROMPT), expected_logits)


def test_an_end_of_text_or_stop_id_ends_and_is_the_last_token(backend: Spied) -> None:
    free = ids_of(run(backend, WARM))
    at = next(i for i in range(3, 14) if free[i] not in free[:i])
    for params, eos_ids in (
        (WARM, (free[at], 65)),
        (dataclasses.replace(WARM, stop_token_ids=(free[at],)), (64,)),
        (dataclasses.replace(WARM, stop_token_ids=(free[at],), ignore_eos=True), (free[1],)),
    ):
        tokens = run(backend, params, eos_ids=eos_ids)
        assert ids_of(tokens) == free[: at + 1]
        assert tokens[-1].finish == "stop"
    tokens = run(backend, dataclasses.replace(WARM, ignore_eos=True), eos_ids=(free[at],))
    assert ids_of(tokens) == free


def test_max_tokens_may_fill_the_context_exactly(backend: Spied) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=96 - len(PROMPT))
    assert len(run(backend, params)) == 96 - len(PROMPT)


def test_no_usable_logit_ends_with_an_error(backend: Spied) -> None:
    backend.decoder = ReferenceBackend(
        CONFIG, {**WEIGHTS, "lm_head.weight": WEIGHTS["lm_head.weight"] * np.nan}
    ).decoder
    (token,) = run(backend, GREEDY)
    assert token.finish == "error"


def test_tokens_come_as_they_are_drawn_and_closing_early_frees_the_slot(backend: Spied) -> None:
    tokens = generate(backend, PROMPT, GREEDY, eos_ids=())
    assert backend.open == set()
    next(tokens)
    assert backend.rows == [len(PROMPT)]
    next(tokens)
    assert (backend.rows, backend.open) == ([len(PROMPT), 1], {0})
    tokens.close()
    assert backend.open == set()


def test_a_failing_backend_leaves_no_slot_open(backend: Spied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.decoder, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(generate(backend, PROMPT, GREEDY, eos_ids=()))
    with pytest.raises(ZeroDivisionError):
        logits(backend, PROMPT)
    assert backend.open == set()


@pytest.mark.parametrize(
    ("prompt", "changes", "eos_ids", "message"),
    [
        ([], {}, (), "the prompt is empty"),
        ([3] * 90, {}, (), "the prompt's 90 tokens and max_tokens=14 do not fit the context of 96"),
        ([3] * 97, {}, (), "the prompt's 97 tokens and max_tokens=14 do not fit the context of 96"),
        ([3, 67], {}, (), "the prompt has token id 67; the model's are 0 to 66"),
        ([-1], {}, (), "the prompt has token id -1; the model's are 0 to 66"),
        ([3], {"n": 2}, (), "n must be 1 here, not 2"),
        ([3], {"stop_token_ids": (67,)}, (), "stop_token_ids has token id 67"),
        ([3], {"stop_token_ids": tuple(range(16))}, (16,), "17 together, 16 are allowed"),
    ],
)
def test_bad_requests_are_refused_at_the_call(
    backend: Spied, prompt: list[int], changes: dict[str, Any], eos_ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        generate(backend, prompt, dataclasses.replace(GREEDY, **changes), eos_ids=eos_ids)


def test_a_request_beyond_the_cache_is_refused() -> None:
    backend = ReferenceBackend(CONFIG, WEIGHTS, num_pages=2)
    with pytest.raises(RequestError, match="33 tokens need 3 pages of the cache; the backend has 2"):
        generate(backend, [3] * (33 - 14), GREEDY, eos_ids=())
    assert len(list(generate(backend, [3] * (2 * PAGE_SIZE - 14), GREEDY, eos_ids=()))) == 14


@pytest.mark.parametrize("ids", [[], [3] * 97, [67]], ids=["empty", "long", "unknown"])
def test_logits_of_a_bad_prompt_are_refused(backend: Spied, ids: list[int]) -> None:
    with pytest.raises(RequestError):
        logits(backend, ids)


def test_logits_are_one_row_per_token(backend: Spied) -> None:
    found = logits(backend, [3] * 96)
    assert (found.shape, found.dtype) == ((96, 67), np.float32)
    assert np.isfinite(found).all()
    assert backend.open == set()
