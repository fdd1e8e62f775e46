"""What an engine refuses at the door, by name, leaving no trace; and what is odd and served."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from engine_session import LONG, Session
from null_backend import VOCAB_SIZE, NullBackend

from crucible.engine.engine import Engine
from crucible.engine.request import RequestError, SamplingParams
from crucible.errors import CrucibleError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "the prompt is empty; at least one token is needed"),
        ((), {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([200_000], {}, "the prompt has token id 200000; the model's are 0 to 66"),
        ([3, -1], {}, "the prompt has token id -1; the model's are 0 to 66"),
        ([VOCAB_SIZE], {}, "the prompt has token id 67"),
        ([10**5000], {}, "the prompt has token id an integer of thousands of digits"),
        ([[]], {}, r"a prompt is integer token ids; this one has \[\]"),
        ("text", {}, "a prompt is integer token ids; this one has 't'"),
        ([1.0], {}, "a prompt is integer token ids; this one has 1.0"),
        ([NAN], {}, "a prompt is integer token ids; this one has nan"),
        ([True], {}, "a prompt is integer token ids; this one has True"),
        ([None], {}, "a prompt is integer token ids; this one has None"),
        ([3] * 90, {}, "the prompt's 90 tokens and max_tokens=20 do not fit the context of 96"),
        ([3] * 97, {"max_tokens": 1}, "the prompt's 97 tokens and max_tokens=1 do not fit the context of 96"),
        ([3] * 96, {"max_tokens": 1}, "the prompt's 96 tokens and max_tokens=1 do not fit the context of 96"),
        ([3], {"max_tokens": 2**31 - 1}, "the prompt's 1 tokens and max_tokens=2147483647 do not fit"),
        ([3], {"n": 2}, r"n must be 1 here, not 2; add each of the parameters' choices\(\)"),
        ([3], {"logit_bias": {191222: 1.0}}, "logit_bias has token id 191222; the model's are 0 to 66"),
        ([3], {"stop_token_ids": (151645,)}, "stop_token_ids has token id 151645; the model's are 0 to 66"),
        ([3], {"stop_token_ids": tuple(range(10, 26)), "ignore_eos": False}, "18 together, 16 are allowed"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_no_trace(prompt: Any, changes: dict[str, Any], message: str) -> None:
    session = Session(NullBackend())
    session.add("neighbour", [1, 2, 3], LONG)
    session.step(3)
    with pytest.raises(RequestError, match=message):
        session.engine.add("bad", prompt, dataclasses.replace(LONG, **changes))
    session.cancel("bad")
    session.settle()
    assert "bad" not in session.events


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {"AI": -100}}, "a token id of logit_bias must be an integer, not 'AI'"),
        ({"logit_bias": {1: None}}, "logit_bias of token 1 must be a number, not None"),
        ({"logit_bias": {1: True}}, "logit_bias of token 1 must be a number, not True"),
        ({"logit_bias": {1: NAN}}, "logit_bias of token 1 must be a finite number"),
        ({"seed": "100"}, "seed must be an integer, not '100'"),
        ({"temperature": NAN}, "temperature must be a finite number at least 0, not nan"),
        ({"temperature": INF}, "temperature must be a finite number at least 0, not inf"),
        ({"temperature": -0.1}, "temperature must be a finite number at least 0, not -0.1"),
        ({"temperature": 1.0, "top_p": NAN}, "top_p must be a finite number from 0 to 1, not nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be from 0 to 2147483647, not -1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number from 0.01 to 100, not 0"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to"),
        ({"prompt_logprobs": 1}, "prompt_logprobs must be true or false, not 1"),
    ],
)
def test_bad_parameters_never_reach_the_engine(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**64},
        {"seed": 10**20},
        {"seed": -1},
        {"temperature": 1.0, "top_k": 10**9},
        {"temperature": 1e-300},
        {"logit_bias": {0: -100, 66: 100}},
        {"max_tokens": 93},
    ],
)
def test_odd_but_good_requests_are_served(changes: dict[str, Any]) -> None:
    session = Session(NullBackend())
    session.add("a", [1, 2, 3], dataclasses.replace(LONG, **changes))
    session.settle()


def test_ids_may_be_numpy_s() -> None:
    session = Session(NullBackend())
    session.add("a", np.array([1, 2, 3]), LONG)  # type: ignore[arg-type]
    session.settle()
    assert session.backend.plans[0].segments[0].ids == (1, 2, 3)


def test_an_id_in_use_is_refused() -> None:
    session = Session(NullBackend())
    session.add("a", [1], LONG)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        session.engine.add("a", [2], LONG)
    session.settle()


@pytest.mark.parametrize("option", ["prefill_budget", "prefill_chunk", "look_ahead"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(CrucibleError, match=f"{option} must be at least"):
        Engine(NullBackend(), **{option: -1})


@pytest.mark.parametrize("eos_id", [-1, VOCAB_SIZE])
def test_end_of_text_ids_are_the_model_s(eos_id: int) -> None:
    with pytest.raises(CrucibleError, match=f"end-of-text id {eos_id} is not one of the model's, 0 to 66"):
        Engine(NullBackend(), eos_ids=(3, eos_id))
