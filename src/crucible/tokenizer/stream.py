"""Text from tokens as they come: nothing shown that a later token could change, nothing held back longer."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crucible.tokenizer.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one stream of tokens. All that `push` and the last `flush` return, joined, is `decode` of the ids.

    A character may be spread over several tokens: its bytes are held until it is whole or cannot become one, then
    replaced by U+FFFD as a decoding of the whole would replace them. A token costs time in proportion to its own
    bytes, however long the stream.

    Args:
        tokenizer: whose ids are pushed.
        skip_special, continuing: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._strip_next = tokenizer.strips_leading_space and not continuing
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often a word, sometimes "".

        Raises:
            TokenizerError: the tokenizer has no such id; the stream may go on as if it had not been pushed.
        """
        data = self._tokenizer.token_bytes(token_id)
        if token_id in self._skipped:
            return ""
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Ends the stream: U+FFFD for a character begun and not finished, else ""."""
        return self._utf8.decode(b"", final=True)
