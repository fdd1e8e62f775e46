"""SamplingParams: what is refused at the door, by which name, and what is a value although it looks like none."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from crucible.engine.request import DEFAULT_SEED, MAX_STOP_IDS, RequestError, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
NAN, INF = math.nan, math.inf
NUMBERS = {
    "temperature": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
INTEGERS = {
    "top_k": (0, 2**31 - 1),
    "n": (1, 128),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 128),
    "logprobs": (0, 20),
}


def make(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})


def test_nothing_given_is_greedy_with_the_documented_seed() -> None:
    params = SamplingParams()
    assert (params.temperature, params.seed, params.logprobs) == (0, DEFAULT_SEED, None)
    assert DEFAULT_SEED == 1234
    assert not params.counts_tokens


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400, -(10**400)])
def test_what_is_not_finite_is_refused(field: str, value: float) -> None:
    """A NaN passes any test of the form `value < low`, and an integer beyond float64 makes isfinite raise."""
    with pytest.raises(RequestError, match=f"^{field} must be a finite number"):
        make(**{field: value})


@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS, "seed"])
@pytest.mark.parametrize("value", [True, False, "1", None, [1], 1j])
def test_other_types_are_refused(field: str, value: object) -> None:
    if field == "logprobs" and value is None:
        return
    kind = "a number" if field in NUMBERS else "an integer"
    with pytest.raises(RequestError, match=f"^{field} must be {kind}, not "):
        make(**{field: value})


@pytest.mark.parametrize(("field", "low", "high"), [(field, *ends) for field, ends in (NUMBERS | INTEGERS).items()])
def test_ends_of_a_range_are_allowed_and_what_lies_beyond_is_refused(field: str, low: Any, high: Any) -> None:
    step = 1 if field in INTEGERS else 0.001
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    for value in (low, high):
        if value is not None:
            assert getattr(make(**{field: value}), field) == value
    for value in (low - step, None if high is None else high + step):
        if value is not None:
            with pytest.raises(RequestError, match=f"^{field} must be .*{allowed}, not {value}"):
                make(**{field: value})


@pytest.mark.parametrize("field", [field for field in INTEGERS if field != "n"])
def test_counts_are_not_floats(field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be an integer, not 1.0"):
        make(**{field: 1.0})


@pytest.mark.parametrize(
    ("seed", "taken"), [(0, 0), (-1, 2**64 - 1), (2**64, 0), (10**20, 10**20 - 5 * 2**64), (2**63, 2**63)]
)
def test_any_integer_is_a_seed(seed: int, taken: int) -> None:
    assert SamplingParams(seed=seed).seed == taken


def test_choice_i_of_n_uses_seed_plus_i() -> None:
    params = make(n=3, seed=2**64 - 2, top_k=5, logit_bias={1: 2.0})
    choices = params.choices()
    assert [choice.seed for choice in choices] == [2**64 - 2, 2**64 - 1, 0]
    assert {choice.n for choice in choices} == {1}
    assert dataclasses.replace(choices[0], n=3) == params


@pytest.mark.parametrize(("field", "value", "no_op"), [("top_k", 1, 0), ("top_p", 0, 1), ("min_p", 0.1, 0)])
def test_filters_need_a_temperature_unless_they_keep_all(field: str, value: float, no_op: float) -> None:
    with pytest.raises(RequestError, match=f"^{field}={value} needs a positive temperature.*{no_op}"):
        SamplingParams(**{field: value})
    assert getattr(SamplingParams(**{field: no_op}), field) == no_op
    assert getattr(make(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"AI": -100}, "a token id of logit_bias must be an integer, not 'AI'"),
        ({"1": 1.0}, "a token id of logit_bias must be an integer, not '1'"),
        ({True: 1.0}, "a token id of logit_bias must be an integer, not True"),
        ({-1: 1.0}, "a token id of logit_bias must be from 0 to 262143, not -1"),
        ({1: None}, "logit_bias of token 1 must be a number, not None"),
        ({1: True}, "logit_bias of token 1 must be a number, not True"),
        ({1: NAN}, "logit_bias of token 1 must be a finite number from -100 to 100, not nan"),
        ({1: 100.5}, "logit_bias of token 1 must be a finite number from -100 to 100, not 100.5"),
        ([1, 2], r"logit_bias must map token ids to numbers, not be \[1, 2\]"),
        (None, "logit_bias must map token ids to numbers, not be None"),
    ],
)
def test_logit_bias_is_checked(bias: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "stop_token_ids must be a list of token ids, not 5"),
        ("12", "stop_token_ids must be a list of token ids, not '12'"),
        ([1, "2"], "an id of stop_token_ids must be an integer, not '2'"),
        ([1.0], "an id of stop_token_ids must be an integer, not 1.0"),
        ([-1], "an id of stop_token_ids must be from 0 to 262143, not -1"),
        (list(range(17)), "stop_token_ids takes at most 16 ids, not 17"),
    ],
)
def test_stop_token_ids_are_checked(ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        SamplingParams(stop_token_ids=ids)


def test_ids_outside_the_vocabulary_are_named() -> None:
    SamplingParams(stop_token_ids=[66], logit_bias={66: 1}).check_vocabulary(67)
    with pytest.raises(RequestError, match=r"^stop_token_ids has token id 67; the model's are 0 to 66$"):
        SamplingParams(stop_token_ids=[1, 67]).check_vocabulary(67)
    with pytest.raises(RequestError, match=r"^logit_bias has token id 191222; the model's are 0 to 66$"):
        SamplingParams(logit_bias={191222: 1}).check_vocabulary(67)


def test_end_ids_join_the_models_and_the_requests() -> None:
    params = SamplingParams(stop_token_ids=[9, 3])
    assert params.end_ids([7, 3]) == (3, 7, 9)
    assert dataclasses.replace(params, ignore_eos=True).end_ids([7, 3]) == (3, 9)
    full = SamplingParams(stop_token_ids=list(range(MAX_STOP_IDS)))
    assert len(full.end_ids([0])) == MAX_STOP_IDS
    with pytest.raises(RequestError, match="1 end-of-text ids are 17 together, 16 are allowed"):
        full.end_ids([99])


@pytest.mark.parametrize("field", ["ignore_eos", "prompt_logprobs"])
@pytest.mark.parametrize("value", [1, "true", None])
def test_truth_values_are_nothing_else(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field} must be true or false, not {value!r}"):
        make(**{field: value})


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(RequestError, match=r"^min_tokens must be from 0 to 5, not 6$"):
        SamplingParams(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}]
)
def test_a_penalty_counts_tokens(penalty: dict[str, float]) -> None:
    assert SamplingParams(**penalty).counts_tokens  # type: ignore[arg-type]


def test_a_callers_later_change_does_not_reach_the_checked_values() -> None:
    ids, bias = [1], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(-5)
    bias[1] = NAN
    assert (params.stop_token_ids, params.logit_bias) == ((1,), {1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", [10**5000, "x" * 100_000], ids=["long integer", "long text"])
def test_an_error_message_stays_short(value: object) -> None:
    for field in ("top_k", "temperature"):
        with pytest.raises(RequestError) as error:
            make(**{field: value})
        assert len(str(error.value)) < 150


def test_params_survive_a_round_trip_as_plain_values() -> None:
    params = make(seed=-1, top_k=3, stop_token_ids=[4], logit_bias={2: -1}, logprobs=0)
    assert SamplingParams(**dataclasses.asdict(params)) == params


def test_the_page_lists_every_field_with_its_default() -> None:
    rows = [
        line.split("|") for line in PAGE.read_text("utf-8").split("## 15.")[1].splitlines() if line.startswith("| `")
    ]
    written = {name.strip(" `"): row[2].strip() for row in rows for name in row[1].split(",")}
    assert written.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    defaults = SamplingParams()
    empty = {"stop_token_ids": "none", "logit_bias": "none", "logprobs": "not given"}
    empty |= {"ignore_eos": "false", "prompt_logprobs": "false"}
    for name, text in written.items():
        assert text == empty.get(name) or float(text) == getattr(defaults, name), name
