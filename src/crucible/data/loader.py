"""Batches of next-token windows from token shards, in an order that is a pure function of (seed, position).

    shard     t0 t1 t2 t3 t4 t5 t6 t7          context_length 3
    window 0  t0 t1 t2    -> t1 t2 t3
    window 1           t3 t4 t5    -> t4 t5 t6
    window 2                    t6    -> t7    short: inputs padded with 0, targets with -1

Every token but a shard's first is a target exactly once an epoch, and no window looks across a shard's border. The
windows of all epochs form one endless sequence; a step takes the next world_size * batch_size of it and each rank its
own slice of them, so batches run on across shards and epochs and the order does not depend on how it is cut.

Shape letters: B batch, T positions.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crucible.data.shards import DataError, Shard

PAD_TARGET: Final = -1
"""A target that no loss counts."""

Ints = npt.NDArray[np.int64]
Batch = tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class LoaderState:
    """A position in the endless sequence of windows, the same for every rank, batch size and rank count.

    `shard` counts along the epoch's permuted order of the shards that hold a window, `offset` along the permuted
    windows of that shard; `seed` makes both permutations.

    Raises:
        DataError: a field is not a whole number in range.
    """

    epoch: int
    shard: int
    offset: int
    seed: int

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise DataError(f"loader state: {name} must be a whole number from 0 to 2^64 - 1, not {value!r}")

    def to_dict(self) -> dict[str, int]:
        """Every field by name, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoaderState:
        """The inverse of `to_dict`. Raises DataError where the keys are not exactly the fields."""
        fields = [field.name for field in dataclasses.fields(cls)]
        if sorted(values) != sorted(fields):
            raise DataError(f"loader state: the keys must be {', '.join(fields)}, not {', '.join(map(str, values))}")
        return cls(**values)


Step = tuple[Batch, LoaderState]
"""A rank's batch and the state after it."""


def permutation(count: int, *, seed: int, epoch: int, stream: int) -> Ints:
    """A permutation of range(count): the stable order of `count` Philox draws.

    The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the key
    (seed, epoch) and a counter whose highest word is `stream`. Raw draws and a stable sort are the same in every
    numpy; `Generator.permutation` is not promised to be.
    """
    generator = np.random.Philox(
        key=np.array([seed, epoch], dtype=np.uint64), counter=np.array([0, 0, 0, stream], dtype=np.uint64)
    )
    return np.argsort(generator.random_raw(count), kind="stable")


class Loader:
    """Endless batches of one rank, read ahead by a thread.

    `state` continues where another loader's `state` stood, with its seed in place of `seed`; batch size and rank
    count may differ from that loader's. With `shuffle=False` shards and windows come in their plain order. `prefetch`
    batches are read ahead; 0 reads in the caller's thread. Use it as a context manager or call `close`.

    Raises:
        DataError: a shard is malformed, no shard holds two tokens, two shards name different tokenizers or
            vocabularies, or an argument or the state is out of range.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        batch_size: int,
        context_length: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state: LoaderState | None = None,
        shuffle: bool = True,
        prefetch: int = 2,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("context_length", context_length), ("world_size", world_size)):
            if value < 1:
                raise DataError(f"loader: {name} must be at least 1, not {value}")
        if prefetch < 0:
            raise DataError(f"loader: prefetch must be at least 0, not {prefetch}")
        if not 0 <= rank < world_size:
            raise DataError(f"loader: rank must be from 0 to {world_size - 1}, not {rank}")
        self._shards = _usable([Shard.open(Path(path)) for path in shards])
        self._window_counts = [-(-(shard.num_tokens - 1) // context_length) for shard in self._shards]
        self._batch_size, self._context_length = batch_size, context_length
        self._rank, self._world_size, self._shuffle = rank, world_size, shuffle
        self._state = state or LoaderState(0, 0, 0, seed)
        self._seed = self._state.seed
        self._at: tuple[int, int] | None = None
        self._check_state()
        self._prefetcher = _Prefetcher(self._batch_at, self._state, prefetch) if prefetch else None

    @property
    def state(self) -> LoaderState:
        """Where the next `next_batch` starts; what was only read ahead does not count."""
        return self._state

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of one epoch over all ranks: every token but each shard's first."""
        return sum(shard.num_tokens - 1 for shard in self._shards)

    def next_batch(self) -> Batch:
        """Inputs and targets, two int64 arrays [B, T]; a target of -1 is padding and counts in no loss.

        Raises:
            DataError: a token lies outside the vocabulary that its shard states.
        """
        if self._prefetcher:
            batch, self._state = self._prefetcher.get()
        else:
            batch, self._state = self._batch_at(self._state)
        return batch

    def close(self) -> None:
        """Stops reading ahead; a later `next_batch` is an error."""
        if self._prefetcher:
            self._prefetcher.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    # ---- the sequence of windows ------------------------------------------------------------------------------

    def _batch_at(self, state: LoaderState) -> Step:
        """This rank's batch of the step that starts at `state`, and the state after that step."""
        rows, width = self._batch_size, self._context_length
        tokens_BT, targets_BT = np.empty((rows, width), np.int64), np.empty((rows, width), np.int64)
        first, step_windows, done = self._rank * rows, self._world_size * rows, 0
        epoch, shard, offset = state.epoch, state.shard, state.offset
        while done < step_windows:
            self._open(epoch, shard)
            taken = min(step_windows - done, len(self._order) - offset)
            # Of the step's windows [done, done + taken) this rank's own are those in [first, first + rows).
            low, high = max(done, first), min(done + taken, first + rows)
            if low < high:
                windows, at = self._order[offset + low - done : offset + high - done], slice(low - first, high - first)
                self._gather(windows, tokens_BT[at], targets_BT[at])
            done, offset = done + taken, offset + taken
            if offset == len(self._order):
                shard, offset = shard + 1, 0
            if shard == len(self._shards):
                epoch, shard = epoch + 1, 0
        return (tokens_BT, targets_BT), LoaderState(epoch, shard, offset, state.seed)

    def _open(self, epoch: int, position: int) -> None:
        """Maps the shard at a position of an epoch's order. One is kept: a step asks for the same one many times."""
        if self._at != (epoch, position):
            index = int(self._permutation(len(self._shards), epoch, stream=0)[position])
            self._order = self._permutation(self._window_counts[index], epoch, stream=index + 1)
            self._shard, self._tokens = self._shards[index], np.asarray(self._shards[index].tokens)
            self._at = epoch, position

    def _permutation(self, count: int, epoch: int, stream: int) -> Ints:
        return permutation(count, seed=self._seed, epoch=epoch, stream=stream) if self._shuffle else np.arange(count)

    def _gather(self, windows: Ints, tokens_BT: Ints, targets_BT: Ints) -> None:
        """Fills both arrays with some windows of the open shard, one a row."""
        last = self._shard.num_tokens - 1
        index = windows[:, None] * self._context_length + np.arange(self._context_length + 1)
        block = self._tokens.take(index, mode="clip")
        largest, vocab_size = block.max(), self._shard.vocab_size
        if vocab_size and largest >= vocab_size:
            raise DataError(f"{self._shard.path}: token {largest} is outside its vocabulary of {vocab_size}")
        tokens_BT[:], targets_BT[:] = block[:, :-1], block[:, 1:]
        if index[:, -1].max() > last:
            padding = index[:, 1:] > last
            tokens_BT[padding], targets_BT[padding] = 0, PAD_TARGET

    def _check_state(self) -> None:
        state, count = self._state, len(self._shards)
        if state.shard >= count:
            raise DataError(f"loader state: shard {state.shard} of {count}: other shards")
        self._open(state.epoch, state.shard)
        if state.offset >= len(self._order):
            raise DataError(
                f"loader state: window {state.offset} of {len(self._order)}: other shards or context length"
            )


def _usable(shards: list[Shard]) -> list[Shard]:
    """The shards that hold a window, after checking that all were made with one tokenizer."""
    for field in ("vocab_size", "tokenizer_id"):
        named = [shard for shard in shards if getattr(shard, field)]
        for shard in named[1:]:
            if getattr(shard, field) != getattr(named[0], field):
                raise DataError(f"{shard.path} and {named[0].path} were made with different tokenizers ({field})")
    usable = [shard for shard in shards if shard.num_tokens >= 2]
    if not usable:
        raise DataError(f"none of {len(shards)} shards holds the two tokens that make a window")
    return usable


class _Prefetcher:
    """Takes steps in a thread, at most `depth` ahead. What a step raises, its `get` and every later one raises."""

    def __init__(self, step: Callable[[LoaderState], Step], state: LoaderState, depth: int) -> None:
        self._step, self._state = step, state
        self._room = threading.Semaphore(depth)
        self._ready: queue.SimpleQueue[Step | BaseException] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> Step:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if self._failure:
            raise self._failure
        if self._thread is None:  # started by the first use, so that a loader which only tells its state leaves none
            self._thread = threading.Thread(target=self._run, name="crucible-loader", daemon=True)
            self._thread.start()
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        self._room.release()
        return item

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._closed:
                    raise RuntimeError("this loader is closed")
                step = self._step(self._state)
                self._state = step[1]
                self._ready.put(step)
        except BaseException as error:
            self._ready.put(error)

    def close(self) -> None:
        self._closed = True
        self._room.release()
        if self._thread:
            self._thread.join()
