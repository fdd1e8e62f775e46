"""Text from tokens as they come: nothing shown that a later token could change, nothing held back longer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from crucible.tokenizer.spec import TokenizerError

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
        self._is_between = not self._strip_next
        """Whether the next token's text is that of the token by itself: no character is begun, no space to be taken."""

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
        text = self._utf8.decode(data)
        self._is_between = not self._strip_next and not self._utf8.getstate()[0]
        return text

    def push_run(self, token_ids: Iterable[int]) -> list[str]:
        """`push` of each, at a fraction of the cost where tokens are whole characters; "" for an id that the tokenizer
        does not have."""
        texts: list[str] = []
        whole_text, skipped = self._tokenizer.whole_text, self._skipped
        for token_id in token_ids:
            text = None
            try:
                if self._is_between and token_id not in skipped:
                    text = whole_text(token_id)
                texts.append(self.push(token_id) if text is None else text)
            except TokenizerError:
                texts.append("")
        return texts

    def flush(self) -> str:
        """Ends the stream: U+FFFD for a character begun and not finished, else ""."""
        return self._utf8.decode(b"", final=True)
