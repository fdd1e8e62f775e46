"""From a vocabulary's pieces to the bytes they stand for.

Two families write bytes as strings. Byte-level vocabularies (GPT-2, Llama 3, Qwen) spell each byte as one printable
character. SentencePiece vocabularies (Llama 2, TinyLlama, Gemma) hold plain text with U+2581 for a space, and spell a
byte of a character that is not in the vocabulary `<0xNN>`. A tokenizer.json tells which it is by its decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from crucible.tokenizer.spec import SPACE_MARK, TokenizerError

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))

BYTE_CHARACTERS: Final[Mapping[int, str]] = {
    **{byte: chr(byte) for byte in _PRINTABLE},
    **{byte: chr(0x100 + n) for n, byte in enumerate(b for b in range(0x100) if b not in _PRINTABLE)},
}
"""GPT-2's spelling of the 256 bytes (its encoder.py, `bytes_to_unicode`), in the order of its ids 0 to 255."""

_BYTE_OF: Final = {character: byte for byte, character in BYTE_CHARACTERS.items()}

BYTE_PIECE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece spells a single byte."""


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How one tokenizer's pieces spell bytes.

    `strips_leading_space`: the tokenizer puts a space before a text when it encodes, so that decoding takes one
    off the front of the whole text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    strips_leading_space: bool = False

    def piece_bytes(self, piece: str) -> bytes:
        """Bytes of a piece of the model's vocabulary; UTF-8 of it where it spells none."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in piece])
            except KeyError:
                return piece.encode()
        if self.byte_fallback and (byte := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return self.added_bytes(piece)

    def added_bytes(self, content: str) -> bytes:
        """Bytes of an added token, which is plain text but for SentencePiece's spaces."""
        return (content if self.byte_level else content.replace(SPACE_MARK, " ")).encode()


def read_decoder(decoder: Any) -> PieceDecoder:
    """The family that the `decoder` entry of a tokenizer.json describes.

    Raises:
        TokenizerError: it is neither family's, or holds a step that neither needs.
    """
    steps = list(_steps(decoder))
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return PieceDecoder(byte_level=True)
    for step in steps:
        if not _is_metaspace_step(step):
            raise _unsupported(step)
    if not kinds & {"Metaspace", "Replace"}:
        raise _unsupported(decoder)
    return PieceDecoder(byte_fallback="ByteFallback" in kinds, strips_leading_space=any(map(_strips, steps)))


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    match decoder:
        case {"type": "Sequence", "decoders": [*decoders]}:
            for inner in decoders:
                yield from _steps(inner)
        case {"type": str()}:
            yield decoder
        case _:
            raise _unsupported(decoder)


def _is_metaspace_step(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Metaspace"}:
            return bool(step.get("replacement", SPACE_MARK) == SPACE_MARK)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "}:
            return pattern == SPACE_MARK
        case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
            return True
    return False


def _strips(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        # Files from before prepend_scheme have add_prefix_space alone.
        return bool(step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never")
    return bool(step["type"] == "Strip" and step["start"])


def _unsupported(decoder: Any) -> TokenizerError:
    return TokenizerError(f"decoder must be byte-level (ByteLevel) or SentencePiece's (Metaspace), not {decoder!r:.80}")
