"""Many tokens taken at once give the texts that they give one by one, wherever a run is cut and a character is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import TOYS, TRAINING_TEXT, toy_json

from crucible.completion import CompletionText, SamplingParams
from crucible.tokenizer import IncrementalDecoder, Tokenizer, TokenizerError

NAMES = ["gpt2", "trained", *TOYS]
RUNS = st.lists(st.lists(st.integers(0, 999), max_size=12), max_size=6)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    toys = {name: Tokenizer.from_bytes(toy_json(name)) for name in TOYS}
    return {"gpt2": Tokenizer.gpt2(), "trained": Tokenizer.train([TRAINING_TEXT], 340), **toys}


def ids_of(tokenizer: Tokenizer, numbers: Sequence[int]) -> list[int]:
    """Ids of which most are of the first few hundred, bytes among them, and some are past the vocabulary's end."""
    vocabulary = min(tokenizer.vocab_size, 600)
    return [number % vocabulary if number < 950 else tokenizer.vocab_size + number % 7 for number in numbers]


def pushed(decoder: IncrementalDecoder, token_id: int) -> str:
    try:
        return decoder.push(token_id)
    except TokenizerError:
        return ""


@pytest.mark.parametrize("name", NAMES)
@given(runs=RUNS, skip_special=st.booleans(), continuing=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_run_gives_what_its_tokens_give(
    tokenizers: dict[str, Tokenizer], name: str, runs: list[list[int]], skip_special: bool, continuing: bool
) -> None:
    tokenizer = tokenizers[name]
    by_run, by_one = (IncrementalDecoder(tokenizer, skip_special=skip_special, continuing=continuing) for _ in range(2))
    for numbers in runs:
        ids = ids_of(tokenizer, numbers)
        assert by_run.push_run(ids) == [pushed(by_one, token_id) for token_id in ids]
    assert by_run.flush() == by_one.flush()


@pytest.mark.parametrize("name", NAMES)
@given(runs=RUNS, mixed=st.lists(st.booleans(), max_size=6), finish=st.sampled_from(["stop", "length", "error"]))
@settings(max_examples=60, deadline=None)
def test_a_completion_may_take_runs_and_tokens_in_turn(
    tokenizers: dict[str, Tokenizer], name: str, runs: list[list[int]], mixed: list[bool], finish: str
) -> None:
    tokenizer, params = tokenizers[name], SamplingParams(min_tokens=3)
    by_run, by_one = CompletionText(tokenizer, params), CompletionText(tokenizer, params)
    assert not by_run.has_stops
    takes_run = [*mixed, *[True] * len(runs)]
    for numbers, is_run in zip(runs, takes_run, strict=False):
        ids = ids_of(tokenizer, numbers)
        expected = [by_one.push(token_id, None).text for token_id in ids]
        assert (by_run.push_run(ids) if is_run else [by_run.push(i, None).text for i in ids]) == expected
    last = ids_of(tokenizer, [70])[0]
    assert by_run.push(last, finish) == by_one.push(last, finish)
    assert by_run.is_finished
