"""The one tokenizer interface of the project, over the `tokenizers` library."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from crucible.files import write_file
from crucible.tokenizer.byte_level import gpt2_document, parse_train_spec, train_document, well_formed
from crucible.tokenizer.ordinary import ordinary_encoder
from crucible.tokenizer.pieces import read_decoder
from crucible.tokenizer.spec import Spec, TokenizerError

FILE_NAME: Final = "tokenizer.json"

_END_OF_TEXT_NAMES: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "</s>",  # after <eos>: in Gemma's vocabulary it is HTML
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<EOS_TOKEN>",
    "[EOS]",
)


class Tokenizer:
    """Text to token ids and back. Immutable; safe to share between threads.

    Encoding is of ordinary text only: `<|endoftext|>` or `<tool_call>` in it are encoded as the characters they are,
    and nothing is put before or after it. Control tokens enter a prompt by their id (`control_tokens`, `eot_id`).
    """

    def __init__(self, spec: Spec) -> None:
        """Takes a checked `Spec`; most callers want `load`, `gpt2`, `from_file` or `from_bytes`."""
        self.spec = spec
        self._decoder = read_decoder(spec.document.get("decoder"))
        self._encoder = ordinary_encoder(spec)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.vocab_size: Final[int] = spec.vocab_size
        """Ids are 0..vocab_size-1. A model's embedding may have more rows, as padding."""
        self.control_tokens: Final[Mapping[str, int]] = {c: token.id for c, token in spec.control_tokens.items()}
        """By content, the ids that `encode` never returns: added tokens, but for those that are ordinary text."""
        self.special_ids: Final = frozenset(token.id for token in spec.control_tokens.values() if token.special)
        """Those control tokens that the file marks special; `decode(skip_special=True)` leaves them out."""
        self.strips_leading_space: Final = self._decoder.strips_leading_space
        """Whether encoding puts a space before a text and `decode` takes it off (Llama 2 and its like)."""

    # ---- making one -------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, spec: str) -> Tokenizer:
        """The tokenizer called `gpt2`, or the one at a path as in `from_file`."""
        if spec == "gpt2":
            return cls.gpt2()
        if parse_train_spec(spec) is not None:
            raise TokenizerError(f"tokenizer {spec!r} is yet to be trained, which preparing data does")
        if not Path(spec).exists():
            raise TokenizerError(f"tokenizer {spec!r}: no such file or folder, and the only one known by name is gpt2")
        return cls.from_file(Path(spec))

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's, which ships with the package: 50,257 tokens, the last of them end-of-text."""
        return cls(Spec.from_document(gpt2_document()))

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """The tokenizer in a tokenizer.json, or in a folder that holds one.

        Any byte-level BPE (GPT-2, Llama 3, Qwen) and any SentencePiece-style BPE or Unigram (Llama 2, Gemma).

        Raises:
            TokenizerError: it is missing, unreadable, damaged or of another family; the message names the file.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        try:
            return cls.from_bytes(path.read_bytes())
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror or error}") from None
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def from_bytes(cls, json_bytes: bytes) -> Tokenizer:
        """As `from_file`, from the file's content."""
        return cls(Spec.from_json(json_bytes))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """A byte-level BPE with GPT-2's word pattern, learned from `texts`; the same texts give the same `sha256`.

        Ids: 0 to 255 the bytes in GPT-2's order, then the merges in the order learned, `<|endoftext|>` last.

        Raises:
            TokenizerError: `vocab_size` is below 257, or more than the texts have repeated pairs for.
        """
        return cls(Spec.from_document(train_document(texts, vocab_size)))

    # ---- text to ids ------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of an ordinary text. Lone surrogates, which no UTF-8 text has, count as U+FFFD.

        Raises:
            TokenizerError: the vocabulary lacks a character and has no token for unknown ones.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on as many threads as the library takes (RAYON_NUM_THREADS, TOKENIZERS_PARALLELISM)."""
        try:
            encodings = self._encoder.encode_batch_fast(list(map(well_formed, texts)), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(f"text cannot be encoded: {error}") from None
        return [encoding.ids for encoding in encodings]

    # ---- ids to text ------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; not always whole characters.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token by itself, None if its bytes are not whole characters. Raises as `token_bytes`."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, continuing: bool = False) -> str:
        """Text of the tokens' bytes joined, with U+FFFD for what is not UTF-8 (as Python's errors="replace").

        Args:
            ids: token ids.
            skip_special: leave out the tokens that the file marks special. By default they show, as
                `<|endoftext|>` and the like: what a model said is then never hidden unasked.
            continuing: the ids go on from earlier text. A tokenizer that `strips_leading_space` then leaves the
                first space where it is; without it, "Paris" would be glued to a prompt that ends in "is".

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        skipped = self.special_ids if skip_special else frozenset[int]()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if self.strips_leading_space and not continuing:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def _compute_bytes(self, token_id: int) -> bytes:
        if (token := self.spec.added.get(token_id)) is not None:
            return self._decoder.added_bytes(token.content)
        if (piece := self.spec.pieces.get(token_id)) is not None:
            return self._decoder.piece_bytes(piece)
        if 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} has no token in this vocabulary of {self.vocab_size}")
        raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")

    # ---- identity ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def eot_id(self) -> int:
        """The end-of-text token, which stands between documents.

        A tokenizer.json does not say which it is, so it is found by the names in use.

        Raises:
            TokenizerError: no control token has one of them.
        """
        for name in _END_OF_TEXT_NAMES:
            if name in self.control_tokens:
                return self.control_tokens[name]
        raise TokenizerError(f"no end-of-text token: none of {', '.join(_END_OF_TEXT_NAMES)} is among the added tokens")

    @functools.cached_property
    def sha256(self) -> bytes:
        """SHA-256 (32 bytes) of `to_json`."""
        return hashlib.sha256(self.to_json()).digest()

    def to_json(self) -> bytes:
        """The tokenizer.json it was made from in canonical form, the same for any spacing and order of keys."""
        return self.spec.to_json()

    def save(self, path: Path | str) -> None:
        """Writes `to_json` to a file, or as tokenizer.json into an existing folder; all of it or nothing."""
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        write_file(path, self.to_json())

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, sha256={self.sha256.hex()[:16]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.from_bytes, (self.to_json(),)
