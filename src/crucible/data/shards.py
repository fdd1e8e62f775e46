"""Token shards: one header, one flat array of tokens; reader and writer side by side so that they cannot disagree.

The format is llm.c's (Karpathy 2024, `dev/data/data_common.py`), which modded-nanogpt uses too; the words they leave
zero say here which tokenizer made the tokens. docs/formats.md, "Token shards and prepared folders", is the definition.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crucible.errors import CrucibleError
from crucible.files import partial_path, sync_folder

MAGIC: Final = 20240520
HEADER_BYTES: Final = 1024
TOKENIZER_ID_BYTES: Final = 8
MAX_SHARD_TOKENS: Final = 2**31 - 1
"""The token count is a signed 32-bit word."""

_DTYPES: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
"""Token type by format version."""
_COUNT, _VOCAB, _TOKENIZER = 2, 3, 4


class DataError(CrucibleError):
    """Text, shards or a prepared folder that cannot be used: the message names the file and what is wrong with it."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Element type of shards for a vocabulary of this size: little-endian uint16 or uint32."""
    return _DTYPES[1 if vocab_size <= 2**16 else 2]


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """A checked shard file. Opening reads the header alone; each use of `tokens` maps the file anew."""

    path: Path
    num_tokens: int
    dtype: np.dtype[Any]
    vocab_size: int
    """0 where the file does not say, as in shards written by llm.c."""
    tokenizer_id: bytes
    """First 8 bytes of the SHA-256 of the tokenizer's canonical JSON; b"" where the file does not say."""

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Checks header and file size against each other before any token is touched.

        Token values are not read: `ShardWriter` refuses ids outside the vocabulary and `Loader` checks each batch.

        Raises:
            DataError: no file, a wrong magic number, an unknown version, or a size that is not the header's.
        """
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if size < HEADER_BYTES:
            raise DataError(f"{path}: {size} bytes are no shard, the header alone takes {HEADER_BYTES}")
        words = np.frombuffer(header, "<i4")
        magic, version, count, vocab_size = (int(words[i]) for i in (0, 1, _COUNT, _VOCAB))
        if magic != MAGIC:
            raise DataError(f"{path}: not a token shard: magic number {magic}, expected {MAGIC}")
        if version not in _DTYPES:
            raise DataError(f"{path}: shard version {version} is unknown, expected 1 (uint16) or 2 (uint32)")
        dtype = _DTYPES[version]
        expected = HEADER_BYTES + count * dtype.itemsize
        if size != expected:
            fault = "truncated" if size < expected else "trailing bytes"
            raise DataError(f"{path}: {fault}: {count} tokens make {expected} bytes, the file has {size}")
        if not 0 <= vocab_size <= 2 ** (8 * dtype.itemsize):
            raise DataError(f"{path}: a vocabulary of {vocab_size} does not fit tokens of {dtype.itemsize} bytes")
        tokenizer_id = words[_TOKENIZER:].tobytes()[:TOKENIZER_ID_BYTES]
        return cls(path, count, dtype, vocab_size, tokenizer_id if any(tokenizer_id) else b"")

    @property
    def tokens(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """A read-only memory map of the tokens, [num_tokens]."""
        if self.num_tokens == 0:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", HEADER_BYTES, (self.num_tokens,))


def list_shards(data_dir: Path, split: str) -> list[Path]:
    """The shards of a split in order: `train_000000.bin`, also llm.c's `fineweb_train_000001.bin` and `x_train.bin`.

    Raises:
        DataError: there is no such folder or no such shard in it.
    """
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder")
    pattern = re.compile(rf"(.+_)?{re.escape(split)}(_\d+)?\.bin")
    shards = sorted(path for path in data_dir.iterdir() if pattern.fullmatch(path.name))
    if not shards:
        raise DataError(f"{data_dir}: no shards of the split {split!r} ({split}_000000.bin, ...)")
    return shards


# ---- writing ----------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one shard as its tokens come; nothing carries the shard's name before it is whole and on disk.

    Tokens go to `.NAME.partial` beside it. `close` leaves that file for a later writer to continue (`keep` tokens of
    it), `finish` gives it its name. As a context manager it finishes, or removes the partial file on an exception.

    Raises:
        DataError: `vocab_size` or `tokenizer_id` cannot be written, or `keep` tokens are not there.
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer_id: bytes = b"", keep: int = 0) -> None:
        if not 0 < vocab_size <= MAX_SHARD_TOKENS:
            raise DataError(f"{path}: vocab_size must be from 1 to {MAX_SHARD_TOKENS}, not {vocab_size}")
        if len(tokenizer_id) not in (0, TOKENIZER_ID_BYTES):
            raise DataError(f"{path}: tokenizer_id must be {TOKENIZER_ID_BYTES} bytes or none, not {len(tokenizer_id)}")
        self.path, self.vocab_size, self.tokenizer_id = path, vocab_size, tokenizer_id
        self.num_tokens = keep
        self._dtype = token_dtype(vocab_size)
        self._partial = partial_path(path)
        length = HEADER_BYTES + keep * self._dtype.itemsize
        if keep and (not self._partial.exists() or self._partial.stat().st_size < length):
            raise DataError(f"{self._partial}: does not hold the {keep} tokens to continue from")
        self._file = self._partial.open("r+b" if keep else "wb")
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, tokens: npt.ArrayLike) -> None:
        """Adds tokens, a 1-D array of integers.

        Raises:
            DataError: a token is outside the vocabulary, or the shard would pass 2^31 - 1 tokens.
        """
        array = np.asarray(tokens)
        if array.size == 0:
            return
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{self.path}: tokens must be a flat array of integers, not {array.dtype}{array.shape}")
        for token in (int(array.min()), int(array.max())):
            if not 0 <= token < self.vocab_size:
                raise DataError(f"{self.path}: token {token} is outside the vocabulary of {self.vocab_size}")
        if self.num_tokens + array.size > MAX_SHARD_TOKENS:
            raise DataError(f"{self.path}: {self.num_tokens + array.size} tokens, a shard holds {MAX_SHARD_TOKENS}")
        self._file.write(array.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += array.size

    def sync(self) -> None:
        """Returns once everything appended is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Writes the header and gives the shard its name."""
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[: _VOCAB + 1] = MAGIC, self._dtype.itemsize // 2, self.num_tokens, self.vocab_size
        header[_TOKENIZER : _TOKENIZER + len(self.tokenizer_id) // 4] = np.frombuffer(self.tokenizer_id, "<i4")
        self._file.seek(0)
        self._file.write(header.tobytes())
        self.sync()
        self._file.close()
        self._partial.replace(self.path)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Stops writing and leaves the partial file."""
        self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
            self._partial.unlink(missing_ok=True)


def write_shard(path: Path, tokens: npt.ArrayLike, *, vocab_size: int, tokenizer_id: bytes = b"") -> None:
    """Writes a whole shard at once. Raises DataError as `ShardWriter` does."""
    with ShardWriter(path, vocab_size=vocab_size, tokenizer_id=tokenizer_id) as writer:
        writer.append(tokens)
