"""How well a model predicts held-out tokens, and what each rounding of its numbers costs.

Tokens are cut into windows. Window w reads tokens wC to wC + C - 1, each from the window's beginning on, and is scored
on the tokens that follow them, wC + 1 to wC + C. So every token but the first is scored exactly once, the first of a
window after one token of context, its last after C: the windows that training visits. The last window is shorter.

A score is the engine's own: -log of the probability that it gives the token (docs/sampling.md), by way of its score
rows. The prefill path gives a window's tokens in few large steps, the decode path one at a time, several windows side
by side; where the engine is exact both give the same numbers, so a difference between them is an error of one of them.

Extra shape letters: E evaluated variants, N scored tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from crucible.data.shards import TOKENIZER_ID_BYTES, DataError, Shard, list_shards
from crucible.data.sources import documents
from crucible.engine.backend import PAGE_SIZE, Backend, Segment, SlotSpec, StepPlan
from crucible.engine.backends import make_backend, resolve_backend
from crucible.engine.quant import WEIGHT_FORMATS, WeightFormat, dense
from crucible.engine.reference.rounding import ROUNDINGS, Rounding, rounded_backend
from crucible.engine.request import SamplingParams
from crucible.errors import CrucibleError
from crucible.models import resolve
from crucible.tokenizer import Tokenizer

F64: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

EvalPath = Literal["decode", "prefill"]

PREFILL_ROWS: Final = 128
"""Tokens per step of the prefill path. No result depends on it."""

DECODE_WINDOWS: Final = 8
"""Windows side by side on the decode path, if the backend has the slots. No result depends on it."""

DEFAULT_CONTEXT: Final = 1024

ERROR_BLOCK: Final = 64
"""Consecutive tokens whose mean counts as one observation for the standard error: neighbours are correlated."""


class EvaluationError(CrucibleError):
    """An evaluation that cannot be done, or that met a number that is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What one variant of a model scored.

    Attributes:
        name: the variant, for example its weight format.
        cross_entropy: mean nats per token.
        standard_error: of the cross-entropy as an estimate for such text; None below two blocks of `ERROR_BLOCK`.
        extra: cross-entropy beyond that of the first variant on the same tokens; 0 for the first.
        extra_error: standard error of `extra`, of the paired differences and so much smaller; None as above.
        bits_per_byte: all bits over the bytes of text scored, in which control tokens have none; None without
            tokenizer or without bytes.
        seconds: spent in the backend.
    """

    name: str
    cross_entropy: float
    standard_error: float | None
    extra: float
    extra_error: float | None
    bits_per_byte: float | None
    seconds: float

    @property
    def perplexity(self) -> float:
        """e to the cross-entropy."""
        return math.exp(self.cross_entropy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Variants side by side on the same tokens.

    Attributes:
        path: how the tokens were computed.
        context: tokens per window.
        asked: tokens to score.
        scored: tokens scored by all variants; fewer than `asked` after an interrupt.
        num_bytes: bytes of text that they stand for; None without tokenizer.
        rows: one per variant, in the order asked.
    """

    path: EvalPath
    context: int
    asked: int
    scored: int
    num_bytes: int | None
    rows: tuple[Evaluation, ...]

    def render(self) -> Table:
        """A table for `rich`."""
        title = f"{self.scored:,} tokens in windows of {self.context:,}, {self.path} path"
        if self.scored < self.asked:
            title += f" (interrupted: {self.asked:,} were asked for)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
        table.add_column("", no_wrap=True)
        for heading in ("nats/token", "perplexity", "bits/byte", "over the first", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        first = self.rows[0]
        for row in self.rows:
            share = f"{row.extra / first.cross_entropy:+.3%}" if first.cross_entropy > 0 else ""
            table.add_row(
                row.name,
                f"{row.cross_entropy:.4f}" + _plus_minus(row.standard_error, 4),
                f"{row.perplexity:.3f}",
                "n/a" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
                *(("", "") if row is first else (f"{row.extra:+.5f}" + _plus_minus(row.extra_error, 5), share)),
            )
        return table


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens scored by all variants so far, of how many, and the mean nats of the first variant's latest scores."""

    scored: int
    asked: int
    cross_entropy: float


OnProgress = Callable[[Progress], None]


def evaluate(
    backends: Mapping[str, Backend],
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    context: int,
    path: EvalPath = "prefill",
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress | None = None,
) -> Report:
    """Score all `tokens` but the first with each backend, step by step in turn.

    An interrupt ends it early: the report then covers what all variants have scored.

    Args:
        backends: by the name that the report has for them, at least one; none of their slots is open. All hold
            models of one vocabulary, and need pages for one window per slot used.
        tokens: ids, at least two.
        context: tokens per window, from 1 to the models' context.
        path: "prefill" or "decode".
        tokenizer: whose ids the tokens are, for bits per byte.
        on_progress: called after each step.

    Raises:
        EvaluationError: an argument is out of range, or a backend gives a score that is not finite.
        KeyboardInterrupt: before the first token was scored.
    """
    ids_N1 = _checked(backends, tokens, context, path)
    num_tokens = len(ids_N1) - 1
    losses_EN = np.zeros((len(backends), num_tokens))
    done_N = np.zeros(num_tokens, dtype=bool)
    seconds = [0.0] * len(backends)
    try:
        for group in _groups(backends, num_tokens, context, path):
            with _open_windows(backends.values(), group, context):
                for plan, targets in _steps(group, ids_N1, path):
                    for row, backend in enumerate(backends.values()):
                        began = time.perf_counter()
                        losses_EN[row, targets] = -backend.submit(plan).wait().scores
                        seconds[row] += time.perf_counter() - began
                    _check_finite(tuple(backends), losses_EN[:, targets], targets)
                    done_N[targets] = True
                    if on_progress is not None:
                        on_progress(Progress(int(done_N.sum()), num_tokens, float(losses_EN[0, targets].mean())))
    except KeyboardInterrupt:
        if not done_N.any():
            raise
    num_bytes = None if tokenizer is None else count_bytes(tokenizer, ids_N1[1:][done_N])
    return Report(
        path=path,
        context=context,
        asked=num_tokens,
        scored=int(done_N.sum()),
        num_bytes=num_bytes,
        rows=tuple(_evaluations(tuple(backends), losses_EN[:, done_N], num_bytes, seconds)),
    )


def mean_and_error(values_N: F64) -> tuple[float, float | None]:
    """Mean of correlated values and its standard error by batch means: the spread of the means of whole blocks.

    Batch means (Conway 1963): blocks of `ERROR_BLOCK` consecutive values, of which there must be two, else None.
    """
    num_blocks = len(values_N) // ERROR_BLOCK
    error = None
    if num_blocks >= 2:
        blocks = values_N[: num_blocks * ERROR_BLOCK].reshape(num_blocks, ERROR_BLOCK).mean(axis=1)
        error = float(blocks.std(ddof=1) / math.sqrt(num_blocks))
    return float(values_N.mean()), error


def count_bytes(tokenizer: Tokenizer, ids: npt.NDArray[np.integer]) -> int:
    """Bytes of text that tokens stand for; control tokens are none."""
    unique, counts = np.unique(ids, return_counts=True)
    control = set(tokenizer.control_tokens.values())
    lengths = (0 if token in control else len(tokenizer.token_bytes(token)) for token in unique.tolist())
    return sum(length * count for length, count in zip(lengths, counts.tolist(), strict=True))


# ---- a model by its name --------------------------------------------------------------------------------------------

Variant = WeightFormat | Rounding
VARIANTS: Final[tuple[Variant, ...]] = (*WEIGHT_FORMATS, *ROUNDINGS)


def evaluate_model(
    model: str | Path,
    data: str | Path,
    *,
    num_tokens: int,
    variants: Sequence[str] = ("f32",),
    path: EvalPath = "decode",
    context: int | None = None,
    backend: str = "auto",
    on_progress: OnProgress | None = None,
) -> Report:
    """`evaluate` for a model and a text by their names.

    Args:
        model: as for `crucible.LLM`.
        data: as for `read_tokens`.
        num_tokens: tokens to score, if there are so many.
        variants: weight formats, and of the reference backend the roundings of `engine.reference.rounding`. The first
            is what the others are held against.
        path: "prefill" or "decode".
        context: tokens per window; by default `DEFAULT_CONTEXT`, or the model's context if that is shorter.
        backend: as for `engine.backends.make_backend`.

    Raises:
        EvaluationError: as `evaluate`; also an unknown or repeated variant, or one that the backend cannot do.
        CrucibleError: the model or the text cannot be read.
    """
    names = _checked_variants(variants, backend)
    if num_tokens < 1:
        raise EvaluationError(f"the number of tokens must be at least 1, not {num_tokens}")
    loaded = resolve(model)
    config, tokenizer = loaded.config, loaded.tokenizer
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    _check_context(context, config.max_position_embeddings)
    tokens = read_tokens(data, tokenizer, num_tokens, prefix_ids=loaded.prefix_ids)
    num_slots = DECODE_WINDOWS if path == "decode" else 1
    num_pages = num_slots * _num_pages(context)
    plain = {key: dense(weight) for key, weight in loaded.weights.items()} if set(names) & set(ROUNDINGS) else {}
    backends: dict[str, Backend] = {}
    for name in names:
        if name == "f16-operands" or name == "f16-kv":
            backends[name] = rounded_backend(name, config, plain, num_slots=num_slots, num_pages=num_pages)
        else:
            backends[name] = make_backend(
                backend, config, loaded.weights, weight_format=name, num_slots=num_slots, num_pages=num_pages
            )
    return evaluate(backends, tokens, context=context, path=path, tokenizer=tokenizer, on_progress=on_progress)


def _checked_variants(variants: Sequence[str], backend: str) -> tuple[Variant, ...]:
    known: dict[str, Variant] = {name: name for name in VARIANTS}
    for name in variants:
        if name not in known:
            raise EvaluationError(f"a variant must be one of {', '.join(VARIANTS)}, not {name!r}")
        if name in ROUNDINGS and resolve_backend(backend) != "reference":
            raise EvaluationError(f"{name} is a variant of the reference backend alone")
    if not variants or len(set(variants)) < len(variants):
        raise EvaluationError(f"the variants must be different ones, at least one, not {', '.join(variants) or 'none'}")
    return tuple(known[name] for name in variants)


# ---- held-out tokens ------------------------------------------------------------------------------------------------


def read_tokens(data: str | Path, tokenizer: Tokenizer, num_tokens: int, *, prefix_ids: Sequence[int] = ()) -> Ids:
    """The first tokens of a text: so many to score and one before them, fewer where there are no more.

    Args:
        data: a shard (.bin); a prepared folder, whose validation shards are taken; else any source of text that
            `crucible prepare` reads.
        tokenizer: the model's. A shard that names another is refused.
        num_tokens: tokens to score.
        prefix_ids: what the model knows to stand before each document of a text; by default an end-of-text.

    Raises:
        DataError: there is nothing to read, a shard is malformed, or it was made by another tokenizer.
    """
    path, wanted = Path(data), num_tokens + 1
    if path.suffix == ".bin":
        found = _shard_tokens([path], tokenizer, wanted)
    elif (path / "meta.json").is_file():
        found = _shard_tokens(list_shards(path, "val"), tokenizer, wanted)
    else:
        found = _text_tokens(str(data), tokenizer, prefix_ids or (tokenizer.eot_id,), wanted)
    if len(found) < 2:
        raise DataError(f"{data}: {len(found)} tokens are too few to predict one from another")
    return found


def _shard_tokens(paths: Iterable[Path], tokenizer: Tokenizer, wanted: int) -> Ids:
    parts: list[Ids] = []
    for path in paths:
        shard = Shard.open(path)
        if shard.tokenizer_id and shard.tokenizer_id != tokenizer.sha256[:TOKENIZER_ID_BYTES]:
            raise DataError(
                f"{path}: made by tokenizer {shard.tokenizer_id.hex()}, the model's is "
                f"{tokenizer.sha256[:TOKENIZER_ID_BYTES].hex()}"
            )
        parts.append(np.array(shard.tokens[: wanted - sum(map(len, parts))], dtype=np.int64))
        if sum(map(len, parts)) >= wanted:
            break
    return np.concatenate(parts)


def _text_tokens(name: str, tokenizer: Tokenizer, prefix_ids: Sequence[int], wanted: int) -> Ids:
    ids: list[int] = []
    for document in documents(name):
        ids += [*prefix_ids, *tokenizer.encode(document.utf8.decode("utf-8", errors="replace"))]
        if len(ids) >= wanted:
            break
    return np.array(ids[:wanted], dtype=np.int64)


# ---- windows and steps ----------------------------------------------------------------------------------------------

Window: TypeAlias = tuple[int, int]
"""The first token that a window reads, and one past its last; its targets are one later."""


def _groups(
    backends: Mapping[str, Backend], num_tokens: int, context: int, path: EvalPath
) -> Iterator[Sequence[Window]]:
    """Windows to compute side by side: one on the prefill path, up to `DECODE_WINDOWS` on the decode path."""
    windows = [(first, min(first + context, num_tokens)) for first in range(0, num_tokens, context)]
    room = min(min(b.num_slots, b.num_pages // _num_pages(context)) for b in backends.values())
    size = min(room, DECODE_WINDOWS) if path == "decode" else 1
    for first in range(0, len(windows), size):
        yield windows[first : first + size]


@contextmanager
def _open_windows(backends: Iterable[Backend], windows: Sequence[Window], context: int) -> Iterator[None]:
    """Window i in slot i of every backend."""
    opened: list[tuple[Backend, int]] = []
    try:
        for backend in backends:
            for slot, (begin, end) in enumerate(windows):
                count = _num_pages(context)
                pages = tuple(range(slot * count, (slot + 1) * count))
                spec = SlotSpec(page_table=pages, limit=end - begin, prompt_ids=(), params=SamplingParams())
                backend.open_slot(slot, spec)
                opened.append((backend, slot))
        yield
    finally:
        for backend, slot in opened:
            backend.close_slot(slot)


def _steps(windows: Sequence[Window], ids_N1: Ids, path: EvalPath) -> Iterator[tuple[StepPlan, npt.NDArray[np.intp]]]:
    """Plans that score the windows, each with the places of its scores among the targets."""
    rows = PREFILL_ROWS if path == "prefill" else 1
    for start in range(0, max(end - begin for begin, end in windows), rows):
        segments, targets = [], []
        for slot, (begin, end) in enumerate(windows):
            first, last = begin + start, min(begin + start + rows, end)
            if first < last:
                ids, scored = ids_N1[first:last].tolist(), ids_N1[first + 1 : last + 1].tolist()
                segments.append(Segment(slot, start, tuple(scored), tuple(ids)))
                targets.append(np.arange(first, last))
        yield StepPlan(tuple(segments)), np.concatenate(targets)


def _num_pages(context: int) -> int:
    return -(-context // PAGE_SIZE)


# ---- checks and sums ------------------------------------------------------------------------------------------------


def _checked(
    backends: Mapping[str, Backend], tokens: Sequence[int] | npt.NDArray[np.integer], context: int, path: str
) -> Ids:
    if not backends:
        raise EvaluationError("there is no backend to evaluate")
    if path not in get_args(EvalPath):
        raise EvaluationError(f"the path must be one of {', '.join(get_args(EvalPath))}, not {path!r}")
    ids_N1 = np.asarray(tokens, dtype=np.int64)
    if ids_N1.ndim != 1 or len(ids_N1) < 2:
        raise EvaluationError(f"tokens must be a flat list of at least 2 ids, not of shape {list(ids_N1.shape)}")
    for name, backend in backends.items():
        config = backend.config
        _check_context(context, config.max_position_embeddings)
        if _num_pages(context) > backend.num_pages:
            raise EvaluationError(
                f"{name}: a window of {context} takes {_num_pages(context)} pages, it has {backend.num_pages}"
            )
        for token in (int(ids_N1.min()), int(ids_N1.max())):
            if not 0 <= token < config.vocab_size:
                raise EvaluationError(f"{name}: token {token} is outside the model's vocabulary of {config.vocab_size}")
    return ids_N1


def _check_context(context: int, longest: int) -> None:
    if not 1 <= context <= longest:
        raise EvaluationError(f"the window must be from 1 to the context of {longest}, not {context}")


def _check_finite(names: Sequence[str], losses_EN: F64, targets: npt.NDArray[np.intp]) -> None:
    if not np.isfinite(losses_EN).all():
        row, column = np.argwhere(~np.isfinite(losses_EN))[0]
        raise EvaluationError(f"{names[row]}: the score of token {targets[column] + 1} is not finite")


def _evaluations(
    names: Sequence[str], losses_EN: F64, num_bytes: int | None, seconds: Sequence[float]
) -> Iterator[Evaluation]:
    for name, losses_N, spent in zip(names, losses_EN, seconds, strict=True):
        cross_entropy, error = mean_and_error(losses_N)
        extra, extra_error = mean_and_error(losses_N - losses_EN[0])
        yield Evaluation(
            name=name,
            cross_entropy=cross_entropy,
            standard_error=error,
            extra=extra,
            extra_error=extra_error,
            bits_per_byte=float(losses_N.sum()) / math.log(2) / num_bytes if num_bytes else None,
            seconds=spent,
        )


def _plus_minus(error: float | None, digits: int) -> str:
    return "" if error is None else f" ±{error:.{digits}f}"
