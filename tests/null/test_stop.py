"""The stop matcher against the obvious definition, over every way to cut a text into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import toy_json

from crucible.errors import CrucibleError
from crucible.tokenizer import IncrementalDecoder, Tokenizer
from crucible.tokenizer.stop import MAX_STOP_LENGTH, MAX_STOPS, StopError, StopMatcher, checked_stops


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before its stop string, and that stop: the longest one with which the text ends at the first place
    where it ends with one at all."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def streamed(pieces: Iterable[str], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join([matcher.push(piece) for piece in pieces]) + matcher.flush()
    return out, matcher.matched


def cut(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


# Few letters, so that stops overlap each other and themselves.
LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
UNICODE = st.text(st.sampled_from("aé\u0301世🙂\n\ufffd\u200d"), max_size=14)
UNICODE_STOPS = st.lists(st.text(st.sampled_from("aé\u0301世🙂\n\ufffd\u200d"), min_size=1, max_size=3), max_size=4)
PLACES = st.lists(st.integers(0, 99), max_size=8)
CASES = st.one_of(st.tuples(LETTERS, STOPS, PLACES), st.tuples(UNICODE, UNICODE_STOPS, PLACES))


@settings(max_examples=1500, deadline=None)
@given(CASES)
def test_any_cutting_gives_what_the_whole_text_gives(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, places = case
    assert streamed(cut(text, places), stops) == naive(text, stops)


@pytest.mark.parametrize(
    "stops", [["abab"], ["a", "ab", "abb"], ["abb", "bb", "b"], ["aab", "ab", "ba"], ["bab", "abba"], ["aaa", "aa"], []]
)
def test_every_text_of_seven_letters_cut_in_every_way(stops: list[str]) -> None:
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        expected = naive(text, stops)
        for mask in range(2**6):
            pieces = cut(text, [place + 1 for place in range(6) if mask >> place & 1])
            assert streamed(pieces, stops) == expected, (text, pieces)


@settings(max_examples=500, deadline=None)
@given(CASES)
def test_what_is_held_is_what_could_become_a_stop(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, places = case
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in cut(text, places):
        seen += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
        beginnings = [stop[:n] for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert seen == out + max(beginnings, key=len, default="")


def test_nothing_comes_after_a_stop_and_nothing_twice() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text E") == "text "
    assert (matcher.push("ND more"), matcher.matched) == ("", "END")
    assert matcher.push("END more") + matcher.flush() == ""
    matcher = StopMatcher(["END"])
    assert [matcher.push("EN"), matcher.flush(), matcher.flush()] == ["", "EN", ""]


# Public reports of other engines' bugs, each with the text and stops of the report.


def test_a_stop_over_several_tokens_is_found() -> None:
    letters = [f" {letter}" for letter in "LMNOPQRSTUVWXYZ"]
    assert streamed(letters, ["O P Q"]) == (" L M N ", "O P Q")


def test_text_before_a_stop_in_the_same_piece_is_kept() -> None:
    assert streamed(["?\n"], ["\n"]) == ("?", "\n")


def test_held_text_is_released_once() -> None:
    matcher = StopMatcher(["\n", "Alice:"])
    assert [matcher.push(piece) for piece in ("Hi", " Alice", "!", " Bob")] == ["Hi", " ", "Alice!", " Bob"]


def test_of_stops_that_end_together_the_longest_counts() -> None:
    assert streamed(["xab"], ["b", "ab"]) == ("x", "ab")


def test_the_stop_that_is_complete_first_counts_whatever_the_cutting() -> None:
    for pieces in (["xabcd"], list("xabcd")):
        assert streamed(pieces, ["abcd", "bc"]) == ("xa", "bc")


def test_a_character_over_several_tokens_is_matched_when_it_is_whole() -> None:
    tokenizer = Tokenizer.from_bytes(toy_json("byte_level"))
    ids = tokenizer.encode("ab 🙂 世 cd")
    decoder = IncrementalDecoder(tokenizer)
    matcher = StopMatcher(["🙂 世"])
    assert "".join(matcher.push(decoder.push(token_id)) for token_id in ids) == "ab "
    assert matcher.matched == "🙂 世"


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "stop is empty"),
        (["a", ""], r"stop\[1\] is empty"),
        ([1], r"stop\[0\] must be a string, not 1"),
        ([None], r"stop\[0\] must be a string"),
        ({"a": 1}, "stop must be a string or a list of strings"),
        (3, "stop must be a string or a list of strings, not 3"),
        (["a"] * (MAX_STOPS + 1), f"at most {MAX_STOPS} strings, not {MAX_STOPS + 1}"),
        (["a" * (MAX_STOP_LENGTH + 1)], f"{MAX_STOP_LENGTH + 1} characters; {MAX_STOP_LENGTH} are allowed"),
    ],
)
def test_what_is_no_stop_is_refused_by_name(stop: object, message: str) -> None:
    with pytest.raises(StopError, match=message):
        checked_stops(stop)
    assert issubclass(StopError, CrucibleError)


def test_one_string_is_a_list_of_one_and_null_none() -> None:
    assert checked_stops("ab") == ("ab",)
    assert checked_stops(["ab", "c"]) == checked_stops(("ab", "c")) == ("ab", "c")
    assert checked_stops(None) == checked_stops([]) == ()


def test_the_work_per_character_does_not_grow_with_the_stops() -> None:
    """Counts lookups, on the text and stops that make a matcher without fallbacks quadratic."""
    lookups = 0

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    matcher = StopMatcher(["a" * n + "b" for n in range(MAX_STOP_LENGTH - MAX_STOPS, MAX_STOP_LENGTH)])
    waiting = [matcher._root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        node.children = Counted(node.children)
    text = ("a" * (MAX_STOP_LENGTH - MAX_STOPS - 1) + "c") * 20
    assert matcher.push(text) == text
    assert lookups <= 2 * len(text)
