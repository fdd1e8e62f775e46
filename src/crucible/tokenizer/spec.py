"""What a tokenizer.json says: read once, checked once, with one canonical form to hash and to save."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from crucible.errors import CrucibleError

SPACE_MARK: Final = "▁"
"""U+2581, which SentencePiece vocabularies write for a space."""

_MAX_ID: Final = 2**24
"""Far above any real vocabulary: a larger id is a damaged file, and would size tables."""

_T = TypeVar("_T")


class TokenizerError(CrucibleError):
    """A tokenizer that cannot be read, made or used as asked: the message names the file, field or id."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of `added_tokens`: a string that tokenizer libraries cut out of the text before the model sees it."""

    id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool

    @property
    def is_text(self) -> bool:
        """Whether text may turn into this token.

        Nothing in the file tells a chat marker such as `<tool_call>` (not marked special by Qwen) from a word or a
        run of spaces (GPT-NeoX, Gemma), so it goes by what the content is made of: letters, digits and white space
        are text unless marked special, and one character always is, since text that holds it must stay encodable.
        """
        if len(self.content) == 1:
            return True
        return not self.special and all(c.isalnum() or c.isspace() or c == SPACE_MARK for c in self.content)


@dataclass(frozen=True)
class Spec:
    """A checked tokenizer.json.

    `pieces` maps id to string for the model's own vocabulary, `added` for the added tokens, which win where both
    have an id. Every id lies in 0..vocab_size-1, but not each of these need have a token.
    """

    document: Mapping[str, Any]
    model_type: str
    pieces: Mapping[int, str]
    added: Mapping[int, AddedToken]

    @classmethod
    def from_json(cls, raw: bytes) -> Spec:
        """Raises TokenizerError for anything but a tokenizer.json with a BPE or Unigram model."""
        try:
            document = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"not JSON: {error}") from None
        return cls.from_document(_typed(document, dict, "the file"))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Spec:
        """As `from_json`, from the parsed JSON object."""
        model = _typed(document.get("model"), dict, "model")
        # Early files leave the type out; only BPE has merges.
        model_type = model.get("type") or ("BPE" if "merges" in model else None)
        if model_type == "BPE":
            pieces = _bpe_pieces(model)
        elif model_type == "Unigram":
            pieces = _unigram_pieces(model)
        else:
            raise TokenizerError(f"model.type must be BPE or Unigram, not {model_type!r}")
        added = _added_tokens(document.get("added_tokens") or [])
        if not pieces and not added:
            raise TokenizerError("the vocabulary is empty")
        _check_consistent(pieces, added)
        return cls(document, model_type, pieces, added)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return 1 + max(max(self.pieces, default=-1), max(self.added, default=-1))

    @functools.cached_property
    def control_tokens(self) -> Mapping[str, AddedToken]:
        """By content, the added tokens that text never turns into."""
        return {token.content: token for token in self.added.values() if not token.is_text}

    def to_json(self) -> bytes:
        """The same JSON value in canonical form: keys sorted, no white space, ASCII."""
        return json.dumps(self.document, sort_keys=True, separators=(",", ":")).encode("ascii")


def _bpe_pieces(model: Mapping[str, Any]) -> dict[int, str]:
    vocab = _typed(model.get("vocab"), dict, "model.vocab")
    for piece, token_id in vocab.items():
        if not _is_id(token_id):
            raise _not_an_id(token_id, f"model.vocab[{piece!r}]")
    pieces = {token_id: piece for piece, token_id in vocab.items()}
    if len(pieces) != len(vocab):
        twice = next(piece for piece, token_id in vocab.items() if pieces[token_id] != piece)
        raise TokenizerError(f"model.vocab gives id {vocab[twice]} to both {twice!r} and {pieces[vocab[twice]]!r}")
    return pieces


def _unigram_pieces(model: Mapping[str, Any]) -> dict[int, str]:
    entries = _typed(model.get("vocab"), list, "model.vocab")
    for index, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _is_number(entry[1])):
            raise TokenizerError(f"model.vocab[{index}] must be [piece, score], not {entry!r:.60}")
    return {index: piece for index, (piece, _) in enumerate(entries)}


def _added_tokens(entries: Any) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    for index, entry in enumerate(_typed(entries, list, "added_tokens")):
        at = f"added_tokens[{index}]"
        fields = _typed(entry, dict, at)
        if not _is_id(fields.get("id")):
            raise _not_an_id(fields.get("id"), f"{at}.id")
        content = _typed(fields.get("content"), str, f"{at}.content")
        if not content or any("\ud800" <= character <= "\udfff" for character in content):
            raise TokenizerError(f"{at}.content must be some text, not {content!r:.60}")
        flags = {
            name: _typed(fields.get(name, default), bool, f"{at}.{name}")
            for name, default in _ADDED_TOKEN_DEFAULTS.items()
        }
        if fields["id"] in added:
            raise TokenizerError(f"{at} has the id {fields['id']}, which is {added[fields['id']].content!r} already")
        added[fields["id"]] = AddedToken(id=fields["id"], content=content, **flags)
    return added


_ADDED_TOKEN_DEFAULTS: Final = {
    "special": False,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


def _check_consistent(pieces: Mapping[int, str], added: Mapping[int, AddedToken]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    for token in added.values():
        if ids.setdefault(token.content, token.id) != token.id:
            raise TokenizerError(f"{token.content!r} has two ids, {ids[token.content]} and {token.id}")
        if pieces.get(token.id, token.content) != token.content:
            raise TokenizerError(f"id {token.id} is both {pieces[token.id]!r} and {token.content!r}")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _not_an_id(value: Any, at: str) -> TokenizerError:
    return TokenizerError(f"{at} must be an id from 0 to {_MAX_ID - 1}, not {value!r:.60}")


def _typed(value: Any, kind: type[_T], at: str) -> _T:
    if not isinstance(value, kind):
        name = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}[kind]
        raise TokenizerError(
            f"{at} must be {name}" + (f", not {value!r:.60}" if value is not None else "; it is missing")
        )
    return value
