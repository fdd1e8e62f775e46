"""Training or validation: which split a document belongs to, and writing a split as shards."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy.typing as npt

from crucible.data.shards import Shard, ShardWriter
from crucible.files import partial_path

Split = Literal["train", "val"]
SPLITS: Final[tuple[Split, ...]] = ("train", "val")


def document_key(utf8: bytes, seed: int) -> float:
    """A number in [0, 1) from a document's text and the seed: BLAKE2b of the text with the seed as salt."""
    digest = hashlib.blake2b(utf8, digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def split_of(key: float, index: int, val_fraction: float) -> Split:
    """The split of document `index` with that key.

    The first two of all go one to each split, so that two are enough for both. Of the others equal texts have equal
    keys, so that no document is trained on and, repeated, validated on.
    """
    if val_fraction == 0 or index == 0:
        return "train"
    return "val" if index == 1 or key < val_fraction else "train"


def sample(documents: Iterable[bytes], *, seed: int, val_fraction: float, max_bytes: int) -> list[bytes]:
    """Training documents with the smallest keys, just enough to reach `max_bytes`, in their own order.

    Which documents these are depends on the texts alone, so that no order of the sources biases the sample.
    """
    kept: list[tuple[float, int, bytes]] = []  # a heap that gives the largest key first
    num_bytes = 0
    for index, utf8 in enumerate(documents):
        key = document_key(utf8, seed)
        if split_of(key, index, val_fraction) == "train":
            heapq.heappush(kept, (-key, index, utf8))
            num_bytes += len(utf8)
        while kept and num_bytes - len(kept[0][2]) >= max_bytes:
            num_bytes -= len(heapq.heappop(kept)[2])
    return [utf8 for _, _, utf8 in sorted(kept, key=lambda entry: entry[1])]


def shard_path(folder: Path, split: Split, index: int) -> Path:
    """Where a prepared folder has a shard."""
    return folder / f"{split}_{index:06d}.bin"


@dataclass
class SplitWriter:
    """The shards of one split: each of `shard_tokens` tokens but for the last, documents running on across them."""

    folder: Path
    name: Split
    shard_tokens: int
    vocab_size: int
    tokenizer_id: bytes
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """UTF-8 bytes of the text, what bits per byte divide by; end-of-text tokens stand for none."""
    shards: int = 0
    """Whole shards so far."""
    _writer: ShardWriter | None = field(default=None, init=False)

    def add(self, ids: npt.NDArray[Any], num_bytes: int) -> None:
        """Appends one document's tokens, finishing every shard that they fill."""
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += num_bytes
        while len(ids):
            writer = self._writer or self._open(keep=0)
            room = self.shard_tokens - writer.num_tokens
            writer.append(ids[:room])
            ids = ids[room:]
            if writer.num_tokens == self.shard_tokens:
                self._finish_shard(writer)

    def sync(self) -> dict[str, int]:
        """Returns once everything added is on disk: the state to `resume` from."""
        if self._writer:
            self._writer.sync()
        return self.counts() | {"unfinished": self._writer.num_tokens if self._writer else 0}

    def resume(self, state: dict[str, int]) -> None:
        """Goes back to what `sync` returned, dropping what was written since.

        Raises:
            DataError: a finished shard is gone or damaged, or the unfinished one shorter than it was.
        """
        self.documents, self.tokens, self.bytes, self.shards = (state[k] for k in self.counts())
        for index in range(self.shards):
            Shard.open(shard_path(self.folder, self.name, index))
        if keep := state["unfinished"]:
            path = shard_path(self.folder, self.name, self.shards)
            if not partial_path(path).exists() and path.exists():  # it was finished after the sync
                path.rename(partial_path(path))
            self._open(keep)

    def finish(self) -> None:
        """Finishes the last shard."""
        if self._writer:
            self._finish_shard(self._writer)

    def close(self) -> None:
        """Stops writing; the unfinished shard stays for `resume`."""
        if self._writer:
            self._writer.close()

    def counts(self) -> dict[str, int]:
        """Documents, tokens, bytes and whole shards so far."""
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes, "shards": self.shards}

    def _open(self, keep: int) -> ShardWriter:
        path = shard_path(self.folder, self.name, self.shards)
        self._writer = ShardWriter(path, vocab_size=self.vocab_size, tokenizer_id=self.tokenizer_id, keep=keep)
        return self._writer

    def _finish_shard(self, writer: ShardWriter) -> None:
        writer.finish()
        self._writer = None
        self.shards += 1
