"""Text to a prepared folder: shards of both splits, the tokenizer that made them, and what they were made of.

    sources -> documents -> batches -> token ids (several processes) -> split by document -> shards

Every stage keeps the documents' order, so the folder's bytes follow from the arguments and the text alone: not from
the number of workers, nor from how often the run was killed and started again. docs/formats.md describes the folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import crucible
from crucible.data.encode import Batch, Ids, encode_in_order
from crucible.data.progress import OnProgress, Progress, Stage
from crucible.data.recipe import META, PROGRESS, TOKENIZER, Notes, Recipe, check_text, clear, find_earlier, save
from crucible.data.shards import TOKENIZER_ID_BYTES, DataError, Shard
from crucible.data.sources import Document, Source, open_source, read_all
from crucible.data.split import SPLITS, SplitWriter, document_key, sample, shard_path, split_of
from crucible.files import write_file
from crucible.tokenizer import Tokenizer, parse_train_spec

_BATCH_BYTES: Final = 2**18
_SYNC_SECONDS: Final = 10.0
_SAMPLE_BYTES: Final = 2**25
"""Text that a tokenizer is trained on at most."""
_POOL_BYTES: Final = 2**30
"""Text from which that sample is drawn at most."""


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A finished folder and its meta.json."""

    folder: Path
    meta: Mapping[str, Any]
    reused: bool
    """Whether it was finished before, so that nothing was done."""


def prepare(
    sources: Sequence[str],
    out_dir: Path,
    *,
    tokenizer: str = "gpt2",
    val_fraction: float = 0.01,
    limit_tokens: int | None = None,
    shard_tokens: int = 10**8,
    workers: int = 1,
    text_field: str = "text",
    seed: int = 0,
    force: bool = False,
    progress: OnProgress | None = None,
) -> PreparedData:
    """Makes a prepared folder, or goes on with one that was interrupted, or finds it finished.

    Args:
        sources: names as in `crucible.data.sources`, read in this order.
        out_dir: a new or empty folder, or one that a call with the same arguments left.
        tokenizer: `gpt2`, a path, or `train:N` to train one of N tokens on a sample of the training documents.
        val_fraction: share of documents to validate on, chosen by their text and `seed`; 0 for none.
        limit_tokens: stop at so many tokens of both splits together, cutting the last document off.
        shard_tokens: tokens in each shard but the last.
        workers: processes that encode. With 1 this process does, on the tokenizer library's threads; more are
            spawned, so a script must then call this under `if __name__ == "__main__"`.
        text_field: the field of .jsonl, .parquet and hub records that holds the text.
        seed: of the split and of the tokenizer's sample.
        force: first delete what an earlier call left in `out_dir`.
        progress: called after each batch; `crucible.data.progress.progress_bar` makes one for terminals.

    Raises:
        DataError: bad arguments, text that cannot be read, too few documents for both splits, or a folder that
            holds something else. Also on Ctrl-C, what was done stays, and the same call goes on from there.
        TokenizerError: no such tokenizer, or too little text to train it on.
    """
    recipe = Recipe(
        sources=tuple(map(str, sources)),
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        limit_tokens=limit_tokens,
        shard_tokens=shard_tokens,
        text_field=text_field,
        seed=seed,
    )
    if workers < 1:
        raise DataError(f"workers must be at least 1, not {workers}")
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}") from None
    if force:
        clear(folder)
    notes = None if force else find_earlier(folder, recipe)
    known = notes["sources"] if notes else [None] * len(recipe.sources)
    opened = [open_source(name, text_field, pin) for name, pin in zip(recipe.sources, known, strict=True)]
    if notes:
        check_text(folder, [source.description for source in opened], notes)
        if "cursor" not in notes:
            return _reuse(folder, notes)
    run = _Run(folder, recipe, opened, notes, progress or (lambda _: None))
    return PreparedData(folder, run.run(workers), reused=False)


def _reuse(folder: Path, meta: Mapping[str, Any]) -> PreparedData:
    """A finished folder, once each of its shards has been found whole."""
    for name, counts in meta["splits"].items():
        for index in range(counts["shards"]):
            Shard.open(shard_path(folder, name, index))
    (folder / PROGRESS).unlink(missing_ok=True)
    return PreparedData(folder, meta, reused=True)


class _Run:
    """An unfinished folder on its way to being finished."""

    def __init__(
        self, folder: Path, recipe: Recipe, sources: Sequence[Source], notes: Notes | None, progress: OnProgress
    ) -> None:
        self._folder, self._recipe, self._sources, self._progress = folder, recipe, sources, progress
        sizes = [source.total_bytes for source in sources]
        self._total_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._cursor: Any = notes["cursor"] if notes else None
        self._tokenizer = self._make_tokenizer(notes)
        size, identity = self._tokenizer.vocab_size, self._tokenizer.sha256[:TOKENIZER_ID_BYTES]
        self._splits = {name: SplitWriter(folder, name, recipe.shard_tokens, size, identity) for name in SPLITS}
        if notes:
            for name, split in self._splits.items():
                split.resume(notes["splits"][name])

    def run(self, workers: int) -> dict[str, Any]:
        """Writes what is left to write; returns the content of meta.json."""
        try:
            self._sync()  # first of all, so that whatever lies in the folder has notes beside it
            write_file(self._folder / TOKENIZER, self._tokenizer.to_json())
            self._write(workers)
            self._check_splits()
            for split in self._splits.values():
                split.finish()
        finally:
            for split in self._splits.values():
                split.close()
        ids = {"vocab_size": self._tokenizer.vocab_size, "eot_id": self._tokenizer.eot_id}
        counts = {name: split.counts() for name, split in self._splits.items()}
        meta = self._common_notes() | ids | {"splits": counts, "crucible": crucible.__version__}
        save(self._folder, META, meta)
        (self._folder / PROGRESS).unlink(missing_ok=True)
        return meta

    # ---- documents to shards ----------------------------------------------------------------------------------

    def _write(self, workers: int) -> None:
        synced, shards = time.monotonic(), self._total("shards")
        with closing(encode_in_order(self._batches(), self._tokenizer, workers)) as encoded:
            for batch, ids in encoded:
                limit_reached = any(map(self._add, batch, ids))  # which adds no document after the one that does
                self._report("tokens", batch[-1].position, self._total("documents"))
                if limit_reached:
                    return
                self._cursor = batch[-1].cursor
                if self._total("shards") > shards or time.monotonic() - synced > _SYNC_SECONDS:
                    self._sync()
                    synced, shards = time.monotonic(), self._total("shards")

    def _batches(self) -> Iterator[Batch]:
        batch: Batch = []
        num_bytes = 0
        for document in read_all(self._sources, self._cursor):
            batch.append(document)
            num_bytes += len(document.utf8)
            if num_bytes >= _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch

    def _add(self, document: Document, ids: Ids) -> bool:
        """Adds a document to its split, cut off at the limit of tokens; whether that is reached."""
        key = document_key(document.utf8, self._recipe.seed)
        split = self._splits[split_of(key, self._total("documents"), self._recipe.val_fraction)]
        num_bytes = len(document.utf8)
        room = (self._recipe.limit_tokens or sys.maxsize) - self._total("tokens")
        if len(ids) > room:
            ids = ids[:room]
            num_bytes = sum(len(self._tokenizer.token_bytes(int(token))) for token in ids[1:])
        split.add(ids, num_bytes)
        return len(ids) == room

    def _total(self, count: str) -> int:
        """Documents, tokens, bytes or shards of both splits together."""
        return sum(getattr(split, count) for split in self._splits.values())

    def _check_splits(self) -> None:
        if self._total("documents") == 0:
            raise DataError(f"{', '.join(self._recipe.sources)}: no document with any text in it")
        if self._recipe.val_fraction and self._splits["val"].documents == 0:
            raise DataError(
                "one document cannot be divided into training and validation: give more documents (form feeds make "
                "several of a text file), a higher token limit, or no validation split (--val-fraction 0)"
            )

    # ---- the tokenizer ----------------------------------------------------------------------------------------

    def _make_tokenizer(self, notes: Notes | None) -> Tokenizer:
        recipe = self._recipe
        if notes:
            tokenizer = Tokenizer.from_file(self._folder / TOKENIZER)
            if tokenizer.sha256.hex() != notes["tokenizer_sha256"]:
                raise DataError(f"{self._folder / TOKENIZER} is not what the shards beside it were begun with")
            return tokenizer
        size = parse_train_spec(recipe.tokenizer)
        if size is None:
            return Tokenizer.load(recipe.tokenizer)
        texts = sample(self._pool(), seed=recipe.seed, val_fraction=recipe.val_fraction, max_bytes=_SAMPLE_BYTES)
        return Tokenizer.train((utf8.decode() for utf8 in texts), size)

    def _pool(self) -> Iterator[bytes]:
        """The documents that a tokenizer's sample is drawn from: of a limited run about as many as it will use."""
        # A token stands for less than 8 bytes on average, so the limit is reached within that much text.
        room = min(_POOL_BYTES, 8 * (self._recipe.limit_tokens or _POOL_BYTES))
        for index, document in enumerate(read_all(self._sources)):
            yield document.utf8
            room -= len(document.utf8)
            if room <= 0:
                return
            if index % 100 == 0:
                self._report("tokenizer", document.position, index + 1)

    # ---- notes ------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Makes what is written so far the point from which the next run goes on."""
        splits = {name: split.sync() for name, split in self._splits.items()}
        save(self._folder, PROGRESS, self._common_notes() | {"cursor": self._cursor, "splits": splits})

    def _common_notes(self) -> dict[str, Any]:
        return {
            "arguments": self._recipe.to_dict(),
            "sources": [source.description for source in self._sources],
            "tokenizer_sha256": self._tokenizer.sha256.hex(),
        }

    def _report(self, stage: Stage, position: int, documents: int) -> None:
        tokens = self._total("tokens") if stage == "tokens" else 0
        done = [position / self._total_bytes] if self._total_bytes else []
        if self._recipe.limit_tokens and stage == "tokens":
            done.append(tokens / self._recipe.limit_tokens)
        fraction = min(1.0, max(done)) if done else None
        self._progress(Progress(stage=stage, documents=documents, tokens=tokens, fraction=fraction))
