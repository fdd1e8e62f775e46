"""JSON of requests and replies: decoded strictly, refused in words that repeat nothing of it, written once per text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from crucible.serve.protocol import ApiError

Struct = TypeVar("Struct", bound=msgspec.Struct)

_PATH: Final = re.compile(r" - at (?P<key>`key` in )?`\$?\.?(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_EXPECTED: Final = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_NAME_LENGTH: Final = 60
_TYPES: Final = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


_CACHED_TEXTS: Final = 1 << 17
"""Texts of tokens, of which a vocabulary has so many or fewer."""


@lru_cache(_CACHED_TEXTS)
def json_text(text: str) -> bytes:
    """A text as a JSON string. Surfaces write the texts of tokens by this: the same few come again and again."""
    return msgspec.json.encode(text)


def read_json(body: bytes, type: type[Struct]) -> Struct:
    """A body as a struct. Types are taken as they are: no text for a number, no number for true.

    Raises:
        ApiError: it is no JSON (NaN, Infinity and lone surrogates are none), nested too deep, or not of this type; the
            message names the field.
    """
    if not body.strip():
        raise ApiError("invalid", "the body is empty; a JSON object is needed")
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error)) from None
    except RecursionError:
        raise ApiError("invalid", "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError("invalid", "the body is not valid JSON in UTF-8") from None


def _mismatch(text: str) -> ApiError:
    """From msgspec's words, which may hold names and values of the caller's, to ours."""
    at, is_key = "", False
    if (found := _PATH.search(text)) is not None:
        is_key = found["key"] is not None
        at, text = found["path"].replace("[...]", "[]"), text[: found.start()]
    if (found := _UNKNOWN.fullmatch(text)) is not None:
        name = _below(at, _printable(found["name"]))
        return ApiError("invalid", f"unknown field `{name}`", param=name, code="unknown_field")
    if (found := _MISSING.fullmatch(text)) is not None:
        name = _below(at, found["name"])
        return ApiError("invalid", f"{name} is missing", param=name, code="missing_field")
    at = _printable(at)
    what = f"a key of {at}" if is_key else at or "the body"
    if (found := _EXPECTED.fullmatch(text)) is not None:
        expected = [_TYPES.get(name, name) for name in found["expected"].split(" | ") if name != "null"]
        problem = f"must be {' or '.join(expected)}, not {_TYPES.get(found['got'], found['got'])}"
    elif text.endswith("out of range"):
        problem = "is out of range"
    else:
        problem = "is none of the values that are allowed"
    return ApiError("invalid", f"{what} {problem}", param=at or None)


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _printable(name: str) -> str:
    """A name of the caller's as a message may show it."""
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return shown if len(shown) <= _NAME_LENGTH else shown[: _NAME_LENGTH - 3] + "..."
