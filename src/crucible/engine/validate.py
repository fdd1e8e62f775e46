"""Exactness, checked on the model and the machine at hand.

The promise (docs/arithmetic.md, section 1): the logits of a row are a function of the weights and of the request's own
tokens up to that row, bit for bit. So a witness stands between engine and backend and remembers the logits after every
sequence of tokens. Whenever a sequence comes again, alone or among others, in whatever chunks and pages, by prefill or
by decode, the bits must be the same. The checks below only make sequences come again in all these ways.

    backend = make_backend("cpu", config, weights, num_slots=NUM_SLOTS, num_pages=pages_needed(config))
    is_exact = report(validate(backend))
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE, SAMPLE, Backend, SlotSpec, StepPlan, Ticket
from crucible.engine.engine import PREFILL_BUDGET, PREFILL_CHUNK, Engine
from crucible.engine.request import SamplingParams
from crucible.errors import CrucibleError

if TYPE_CHECKING:
    from rich.console import Console

NUM_SLOTS: Final = 16
"""Requests that run together."""

PROMPT_LENGTHS: Final = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 511, 40)
"""On both sides of the borders of pages (16) and of attention's chunks (64)."""

CHUNKS: Final = (1, 7, 16, 37, 64, 100, 256)
"""Prompt tokens per step."""

QUICK_LENGTH: Final = 129
"""The longest prompt of a quick validation: two chunks of attention and a position."""

MAX_TOKENS: Final = 6

MIN_CONTEXT: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and how it is continued, until max_tokens. Served again, the same object must get the same."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Tally:
    """What was computed, and how it compares with what had been before.

    Attributes:
        rows: rows of logits.
        compared: those whose tokens had been computed before.
        tokens: drawn tokens whose request had drawn as many before.
        differing: compared rows that have another bit, rows that are not finite, and draws that differ.
        first: the first of these in words.
    """

    rows: int = 0
    compared: int = 0
    tokens: int = 0
    differing: int = 0
    first: str = ""

    def differ(self, what: str) -> None:
        self.differing += 1
        self.first = self.first or what


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was varied, what came of it, and how long it took."""

    name: str
    tally: Tally
    seconds: float


@dataclass(slots=True)
class _Sequence:
    """The tokens that a slot has computed, as a running hash."""

    hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    length: int = 0
    drawn: int = 0

    def push(self, token_id: int) -> bytes:
        """Append a token. Digest of the sequence."""
        self.hash.update(token_id.to_bytes(4, "little"))
        self.length += 1
        return self.hash.digest()


class Witness:
    """A backend in front of another one that compares the logits of every row with those of the same tokens before.

    Args:
        backend: the one that computes; no slot is open.

    Attributes:
        page_order: a permutation of the pages, through which slots are opened from now on.
        tally: where comparisons are counted.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.page_order: Sequence[int] = range(backend.num_pages)
        self.tally = Tally()
        self._logits_after: dict[bytes, bytes] = {}
        self._sequences: dict[int, _Sequence] = {}

    @property
    def config(self) -> ModelConfig:
        return self.backend.config

    @property
    def num_slots(self) -> int:
        return self.backend.num_slots

    @property
    def num_pages(self) -> int:
        return self.backend.num_pages

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        pages = tuple(self.page_order[page] for page in spec.page_table)
        self.backend.open_slot(slot, dataclasses.replace(spec, page_table=pages))
        self._sequences[slot] = _Sequence()

    def rewind_slot(self, slot: int, position: int) -> None:
        raise NotImplementedError("the engine does not rewind")

    def close_slot(self, slot: int) -> None:
        self.backend.close_slot(slot)

    def submit(self, plan: StepPlan) -> Ticket:
        """Compute the plan, one step, with the logits of all its rows, and compare them."""
        ticket = self.backend.submit(dataclasses.replace(plan, want_logits=True))
        result = ticket.wait()
        assert result.logits is not None, "the plan wants logits"
        rows, drawn = iter(result.logits[0]), iter(result.ids[0].tolist())
        for segment in plan.segments:
            sequence = self._sequences[segment.slot]
            for token_id in (sequence.drawn,) if segment.ids is None else segment.ids:
                self._compare(sequence.push(token_id), sequence.length, next(rows))
            if segment.kinds[-1] == SAMPLE:
                sequence.drawn = next(drawn)
        return ticket

    def _compare(self, tokens: bytes, length: int, logits_V: npt.NDArray[np.float32]) -> None:
        self.tally.rows += 1
        if not np.isfinite(logits_V).all():
            self.tally.differ(f"a logit after {length} tokens is not finite")
        bits = hashlib.blake2b(logits_V.tobytes(), digest_size=16).digest()
        before = self._logits_after.setdefault(tokens, bits)
        # The first time it is the row itself that is found.
        if before is not bits:
            self.tally.compared += 1
            if before != bits:
                self.tally.differ(f"logits after {length} tokens have another bit")


class Validator:
    """Serves requests through an engine, under a witness, and compares what they get with what they got before.

    Attributes:
        witness: in front of the backend.
        rng: for prompts and page orders; seeded, so that each run is the same.
    """

    def __init__(self, backend: Backend) -> None:
        self.witness = Witness(backend)
        self.rng = np.random.default_rng(0)
        self._tokens_of: dict[Request, tuple[int, ...]] = {}

    @property
    def tally(self) -> Tally:
        return self.witness.tally

    def requests(self, lengths: Iterable[int], max_tokens: int = MAX_TOKENS) -> list[Request]:
        """Random prompts of these lengths; greedy and sampled in turn, each with parameters of its own."""
        requests = []
        for index, length in enumerate(lengths):
            prompt_ids = tuple(self.rng.integers(0, self.witness.config.vocab_size, length).tolist())
            params = SamplingParams(max_tokens=max_tokens)
            if index % 3:
                params = dataclasses.replace(params, temperature=0.4 + 0.1 * index, seed=index, top_p=0.97)
            if index % 3 == 2:
                params = dataclasses.replace(params, repetition_penalty=1.1, frequency_penalty=0.2, top_k=50)
            requests.append(Request(prompt_ids, params))
        return requests

    def serve(
        self,
        requests: Sequence[Request],
        *,
        arrivals: Sequence[int] = (),
        cancels: Mapping[int, int] | None = None,
        chunk: int = PREFILL_CHUNK,
        budget: int = PREFILL_BUDGET,
        look_ahead: int = 0,
        watched: bool = True,
    ) -> list[tuple[int, ...]]:
        """Serve requests and compare their tokens; with `watched` also the logits of every row.

        Args:
            requests: known by their index below.
            arrivals: the step before which each is added; all before the first by default.
            cancels: the step before which some of them are cancelled.
            chunk, budget, look_ahead: as for `Engine`.

        Returns:
            The tokens of each request.
        """
        arrivals = arrivals or [0] * len(requests)
        cancels = cancels or {}
        engine = Engine(
            self.witness if watched else self.witness.backend,
            prefill_chunk=chunk,
            prefill_budget=budget,
            look_ahead=look_ahead,
        )
        tokens: list[list[int]] = [[] for _ in requests]
        finish: list[str | None] = [None] * len(requests)
        step = 0
        while step <= max(arrivals) or engine.has_work:
            for index, request in enumerate(requests):
                if arrivals[index] == step:
                    engine.add(index, request.prompt_ids, request.params)
                if cancels.get(index) == step:
                    engine.cancel(index)
            for event in engine.step():
                assert isinstance(event.request_id, int)
                finish[event.request_id] = event.finish
                if event.token_id is not None:
                    tokens[event.request_id].append(event.token_id)
            step += 1
        for request, drawn, end in zip(requests, tokens, finish, strict=True):
            if end not in ("length", "cancelled"):
                self.tally.differ(f"a request ended with {end!r}")
            self._compare(request, tuple(drawn))
        return [tuple(drawn) for drawn in tokens]

    def _compare(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Hold tokens against those of the same request before, as far as both go."""
        known = self._tokens_of.get(request, ())
        shared = min(len(known), len(tokens))
        self.tally.tokens += shared
        if tokens[:shared] != known[:shared]:
            self.tally.differ(f"tokens after a prompt of {len(request.prompt_ids)}: {tokens}, before {known}")
        self._tokens_of[request] = max(known, tokens, key=len)


# ---- the checks -----------------------------------------------------------------------------------------------------


def fill_cache(backend: Any, value: float) -> bool:
    """Overwrite all keys and values of an idle backend, if it can or shows them as arrays; whether that was done."""
    if hasattr(backend, "fill_cache"):
        backend.fill_cache(value)
        return True
    cache = getattr(backend, "cache", backend)
    if not (hasattr(cache, "keys") and hasattr(cache, "values")):
        return False
    cache.keys[...] = value
    cache.values[...] = value
    return True


def _of_lengths(requests: Iterable[Request], least: int, most: int) -> list[Request]:
    return [request for request in requests if least <= len(request.prompt_ids) <= most]


def _alone(validator: Validator, requests: Sequence[Request]) -> None:
    for request in requests:
        validator.serve([request])


def _together(validator: Validator, requests: Sequence[Request]) -> None:
    validator.serve(requests)


def _staggered(validator: Validator, requests: Sequence[Request]) -> None:
    validator.serve(requests[::-1], arrivals=range(0, 2 * len(requests), 2), chunk=37, budget=90)


def _unasked(validator: Validator, requests: Sequence[Request]) -> None:
    validator.serve(requests, look_ahead=1, watched=False)


def _chunks(validator: Validator, requests: Sequence[Request]) -> None:
    for chunk in CHUNKS:
        validator.serve(_of_lengths(requests, 17, 65), chunk=chunk)


def _pages(validator: Validator, requests: Sequence[Request]) -> None:
    witness = validator.witness
    witness.page_order = validator.rng.permutation(witness.num_pages).tolist()
    validator.serve(requests, chunk=100)


def _cancelled(validator: Validator, requests: Sequence[Request]) -> None:
    """Every other request leaves: before its first chunk, after it, and so on to the middle of its tokens."""
    cancels = {index: index // 2 for index in range(0, len(requests), 2)}
    validator.serve(requests, cancels=cancels, chunk=64, budget=256)


def _decode_as_prefill(validator: Validator, requests: Sequence[Request]) -> None:
    """What was drawn token by token comes back as part of a prompt."""
    short = _of_lengths(requests, 1, 129)
    drawn = validator.serve(short)
    longer = [
        Request(request.prompt_ids + tokens, SamplingParams(max_tokens=1))
        for request, tokens in zip(short, drawn, strict=True)
    ]
    validator.serve(longer)


def _batch_sizes(validator: Validator, requests: Sequence[Request]) -> None:
    """Sixteen run, of which one is left, then eight, then two."""
    short = [length for length in PROMPT_LENGTHS if length <= 33]
    many = validator.requests([*short, *short, 33][:15], max_tokens=2)
    lasting = validator.requests([33, 17], max_tokens=12)
    more = validator.requests(short[:6], max_tokens=3)
    group = [lasting[0], *many, lasting[1], *more]
    validator.serve(group, arrivals=[0] * 16 + [5] * 7)
    _alone(validator, group)


def _unwritten(validator: Validator, requests: Sequence[Request]) -> None:
    for value in (np.nan, np.inf, -1e30):
        if fill_cache(validator.witness.backend, value):
            validator.serve(_of_lengths(requests, 1, 65), chunk=50)


CHECKS: Final[Mapping[str, Callable[[Validator, Sequence[Request]], None]]] = {
    "each request alone": _alone,
    "16 together": _together,
    "16, one after another": _staggered,
    "16, only tokens asked for": _unasked,
    "prompts in chunks of 1 to 256": _chunks,
    "pages shuffled": _pages,
    "neighbours cancelled midway": _cancelled,
    "decoded as against prefilled": _decode_as_prefill,
    "batches of 16, 1, 8 and 2": _batch_sizes,
    "NaN and inf where unwritten": _unwritten,
}


def pages_needed(config: ModelConfig) -> int:
    """Pages that a backend to validate needs, so that no request has to wait."""
    return sum(-(-(length + MAX_TOKENS) // PAGE_SIZE) for length in _lengths(config))


def _lengths(config: ModelConfig, longest: int = max(PROMPT_LENGTHS)) -> list[int]:
    """Sixteen prompt lengths: those that are no longer and fit the context, some more than once if need be."""
    longest = min(longest, config.max_position_embeddings - MAX_TOKENS - 1)
    fitting = [length for length in PROMPT_LENGTHS if length <= longest]
    return list(itertools.islice(itertools.cycle(fitting), NUM_SLOTS))


def validate(backend: Backend, *, quick: bool = False) -> Iterator[Check]:
    """Make token sequences come again in many ways and compare bits. Ends after the first check with a difference.

    Takes the time of some 15,000 rows, fewer where the context is short; half of them if it is to be quick.

    Args:
        backend: no slot is open; NUM_SLOTS slots and `pages_needed` pages.
        quick: leave out prompts of more than QUICK_LENGTH tokens.

    Raises:
        CrucibleError: it has fewer, or a context of fewer than MIN_CONTEXT positions.
    """
    config = backend.config
    needs = {
        "a context": (MIN_CONTEXT, config.max_position_embeddings),
        "slots": (NUM_SLOTS, backend.num_slots),
        "pages": (pages_needed(config), backend.num_pages),
    }
    for what, (needed, given) in needs.items():
        if given < needed:
            raise CrucibleError(f"validation needs {what} of at least {needed}, not {given}")
    validator = Validator(backend)
    requests = validator.requests(_lengths(config, QUICK_LENGTH) if quick else _lengths(config))
    for name, check in CHECKS.items():
        validator.witness.tally = Tally()
        start = time.perf_counter()
        check(validator, requests)
        yield Check(name, validator.tally, time.perf_counter() - start)
        if validator.tally.differing:
            return


def report(checks: Iterable[Check], console: Console | None = None) -> bool:
    """Run the checks and print them as a table, then the first difference if there is one. Whether there is none."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    console = console or Console()
    table = Table("check", box=None)
    for column in ("rows", "compared", "tokens", "differing", "seconds"):
        table.add_column(column, justify="right")
    first = ""
    with Live(table, console=console):
        for check in checks:
            tally = check.tally
            counts = (f"{count:,}" for count in (tally.rows, tally.compared, tally.tokens, tally.differing))
            table.add_row(check.name, *counts, f"{check.seconds:.1f}", style="bold red" if tally.differing else "")
            first = tally.first
    if first:
        console.print(f"not exact: {first}", style="bold red")
    return not first
