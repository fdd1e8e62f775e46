"""Log-probabilities in the two shapes that OpenAI has had for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from crucible.serve.protocol import TokenChance, TokenScore

# ---- chat -------------------------------------------------------------------------------------------------------


def content(scores: Iterable[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a chat's choice: one entry for each token that was drawn, the one that ended it included."""
    return {
        "content": [
            {**_entry(score.chosen), "top_logprobs": [_entry(chance) for chance in score.top]} for score in scores
        ],
        "refusal": None,
    }


def _entry(chance: TokenChance) -> dict[str, Any]:
    return {"token": chance.text, "logprob": chance.logprob, "bytes": list(chance.bytes)}


# ---- completions ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What is said of one token; of each field a column is made."""

    text_offset: int
    token_logprobs: float | None
    tokens: str
    top_logprobs: dict[str, float] | None


class TokenTable:
    """The tokens of a completion's choice: the rows of the table that its `logprobs` are.

    text_offset is where in the choice's text a token begins, in characters, or where the character does of which it is
    a part. Such a token is written as `bytes:\\xe4\\xbd`, so that no two are written alike. top_logprobs has the
    likeliest tokens and the one at hand; null where they are not known, as for a prompt's tokens.
    """

    def __init__(self) -> None:
        self._begin_text(0)

    def output(self, scores: Iterable[TokenScore]) -> list[Row]:
        """The rows of the next tokens that were drawn."""
        return [
            Row(
                text_offset=self._advance(score.chosen.bytes),
                token_logprobs=score.chosen.logprob,
                tokens=_name(score.chosen.bytes),
                top_logprobs=_ranking([*score.top, score.chosen]),
            )
            for score in scores
        ]

    def prompt(self, text: str, chances: Sequence[TokenChance | None], num_top: int) -> list[Row]:
        """The rows of an echoed prompt, which come first.

        Args:
            text: that the prompt is echoed as.
            chances: of each of its tokens, the first of which has none.
            num_top: likeliest tokens that were asked for. With none of them a token's own entry is all there is.
        """
        spelled = [_first_bytes(text, chances), *(chance.bytes for chance in chances if chance is not None)]
        rows = [
            Row(
                text_offset=self._advance(data),
                token_logprobs=None if chance is None else chance.logprob,
                tokens=_name(data),
                top_logprobs=None if chance is None or num_top else _ranking([chance]),
            )
            for data, chance in zip(spelled, chances, strict=True)
        ]
        self._begin_text(len(text))
        return rows

    def _begin_text(self, offset: int) -> None:
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _advance(self, data: bytes) -> int:
        offset = self._offset
        self._offset += len(self._utf8.decode(data))
        return offset


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """`logprobs` of a completion's choice, or of a part of it."""
    return {name: [getattr(row, name) for row in rows] for name in Row._fields}


def _first_bytes(text: str, chances: Sequence[TokenChance | None]) -> bytes:
    """What the first token spells: the text before the second. Nothing, if it is a beginning-of-text token."""
    rest = b"".join(chance.bytes for chance in chances if chance is not None)
    data = text.encode()
    return data.removesuffix(rest) if data.endswith(rest) else b""


def _ranking(chances: Iterable[TokenChance]) -> dict[str, float]:
    ranking: dict[str, float] = {}
    for chance in chances:
        ranking.setdefault(_name(chance.bytes), chance.logprob)
    return ranking


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
