"""Documents to token ids on several processes, in the order the documents came in.

End-of-text stands before each document, as in GPT-2's and llm.c's data: what follows it is always a beginning.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crucible.data.shards import DataError, token_dtype
from crucible.data.sources import Document
from crucible.tokenizer import Tokenizer

_BATCHES_AHEAD: Final = 2
"""Batches queued for each process: enough to keep it busy, few enough to bound memory."""

_PIECE_CHARS: Final = 2**16
_PIECES_AT_ONCE: Final = 64
_WORD_END: Final = re.compile(r"(?<=[^\W\d_])(?=\s)")
_PROBES: Final = [("word", " word"), ("word", "\nword"), ("word", "\r\n\n  word"), ("word", "  \t. word")]

Ids = npt.NDArray[Any]
Batch = list[Document]


def encode(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[Ids]:
    """Ids of each document, end-of-text first; arrays of the shards' element type."""
    dtype = token_dtype(tokenizer.vocab_size)
    parts = [[np.array([tokenizer.eot_id], dtype)] for _ in texts]
    pieces = [(owner, piece) for owner, text in enumerate(texts) for piece in _pieces(tokenizer, text.decode())]
    for start in range(0, len(pieces), _PIECES_AT_ONCE):
        owners, some = zip(*pieces[start : start + _PIECES_AT_ONCE], strict=True)
        for owner, ids in zip(owners, tokenizer.encode_batch(some), strict=True):
            parts[owner].append(np.array(ids, dtype))
    return [np.concatenate(part) for part in parts]


def _pieces(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """A long text in pieces whose ids together are the text's: the library takes 100 bytes of memory for each of it.

    Byte-level tokenizers split text into words first, and a word of letters ends where white space begins. Others,
    told by the probes, get the text whole.
    """
    start, ids_of = 0, tokenizer.encode
    if len(text) > _PIECE_CHARS and all(ids_of(a + b) == ids_of(a) + ids_of(b) for a, b in _PROBES):
        while cut := _WORD_END.search(text, start + _PIECE_CHARS):
            yield text[start : cut.start()]
            start = cut.start()
    yield text[start:]


def encode_in_order(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Generator[tuple[Batch, list[Ids]]]:
    """Each batch with `encode` of its texts. One worker is this process; more are spawned, and end with the generator.

    Raises:
        DataError: a worker process died.
    """
    if workers == 1:
        for batch in batches:
            yield batch, encode(tokenizer, [document.utf8 for document in batch])
        return
    # Spawned, not forked: the tokenizer library runs threads, and a fork copies their locks without the threads.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer.to_json(),))
    pending: deque[tuple[Batch, Future[list[Ids]]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_encode_here, [document.utf8 for document in batch])))
            if len(pending) > _BATCHES_AHEAD * workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    except BrokenProcessPool:
        raise DataError(
            'a worker process died: out of memory, or started by a script without `if __name__ == "__main__"`'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer
"""A worker process's own."""


def _start_worker(tokenizer_json: bytes) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _tokenizer = Tokenizer.from_bytes(tokenizer_json)


def _die_with_parent() -> None:
    """Workers hold each other's ends of the task queue open, so none would notice a parent killed by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_here(texts: Sequence[bytes]) -> list[Ids]:
    return encode(_tokenizer, texts)
