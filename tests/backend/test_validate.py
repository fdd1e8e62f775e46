"""`validate` on a good backend, and on backends that break the promise in one way each."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cells import toy
from rich.console import Console
from toy_weights import toy_weights

from crucible.engine.backend import SlotSpec, StepPlan, Ticket
from crucible.engine.reference import ReferenceBackend
from crucible.engine.validate import CHECKS, NUM_SLOTS, Check, pages_needed, report, validate
from crucible.errors import CrucibleError

CONFIG = toy(max_position_embeddings=192, tie_word_embeddings=False)
WEIGHTS = toy_weights(CONFIG)
WEIGHTS["lm_head.weight"] *= np.float32(0.3)


def make(kind: type[ReferenceBackend] = ReferenceBackend, **changes: int) -> ReferenceBackend:
    return kind(CONFIG, WEIGHTS, **{"num_slots": NUM_SLOTS, "num_pages": pages_needed(CONFIG), **changes})


def ulp(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.nextafter(logits, np.float32(np.inf))


class ByBatch(ReferenceBackend):
    """One logit of a row changes by its last bit in a batch of at least eight requests."""

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        logits = ticket.wait().logits
        if logits is not None and len(plan.segments) >= 8:
            logits[0, -1, 3] = ulp(logits[0, -1, 3])
        return ticket


class ByChunk(ReferenceBackend):
    """The last row of a chunk of 37 tokens is off by a bit."""

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        logits = ticket.wait().logits
        last_row = -1
        for segment in plan.segments:
            last_row += len(segment.kinds)
            if logits is not None and len(segment.kinds) == 37:
                logits[0, last_row, 3] = ulp(logits[0, last_row, 3])
        return ticket


class ByPage(ReferenceBackend):
    """Page 5 loses the low bits of what it holds."""

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        self.cache.keys[:, 5] = self.cache.keys[:, 5].astype(np.float16)
        return ticket


class ByHistory(ReferenceBackend):
    """The last position of the first slot, which nobody writes, counts with weight zero: NaN shows."""

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        super().open_slot(slot, spec)
        if slot == 0:
            last = spec.limit - 1
            self.unwritten = spec.page_table[last // 16], last % 16

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        logits = ticket.wait().logits
        if logits is not None:
            with np.errstate(invalid="ignore"):
                logits += 0 * self.cache.keys[0, *self.unwritten, 0, 0]
        return ticket


class ByDecode(ReferenceBackend):
    """Keys that decode writes are rounded to f16, those of prefill are not."""

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        for segment in plan.segments:
            if segment.ids is None:
                page, row = self._slots[segment.slot].page_table[segment.start // 16], segment.start % 16
                self.cache.keys[:, page, row] = self.cache.keys[:, page, row].astype(np.float16)
        return ticket


class ByLogits(ReferenceBackend):
    """Draws are others while nobody asks for logits."""

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        if not plan.want_logits:
            ticket.wait().ids[...] ^= 1
        return ticket


class BySlot(ReferenceBackend):
    """The seed is mixed with the slot."""

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        params = dataclasses.replace(spec.params, seed=spec.params.seed + slot)
        super().open_slot(slot, dataclasses.replace(spec, params=params))


def test_the_reference_is_exact() -> None:
    checks = list(validate(make()))
    assert [check.name for check in checks] == list(CHECKS)
    for check in checks:
        assert check.tally.differing == 0, check.tally.first
    compared = {check.name: (check.tally.compared, check.tally.tokens) for check in checks}
    assert compared.pop("each request alone") < (5, 5)
    assert compared.pop("16, only tokens asked for") == (0, 16 * 6)
    assert all(rows > 500 and tokens > 20 for rows, tokens in compared.values()), compared


@pytest.mark.parametrize(
    ("kind", "found_by", "message"),
    [
        (ByBatch, ["16 together"], "logits after"),
        (ByChunk, ["16, one after another", "prompts in chunks of 1 to 256"], "logits after"),
        (ByPage, ["16 together"], "logits after"),
        (ByHistory, ["NaN and inf where unwritten"], "is not finite"),
        (ByDecode, ["decoded as against prefilled"], "logits after"),
        (ByLogits, ["16, only tokens asked for"], "tokens after a prompt of"),
        (BySlot, ["16 together"], "tokens after a prompt of"),
    ],
)
def test_a_broken_promise_is_found(kind: type[ReferenceBackend], found_by: Sequence[str], message: str) -> None:
    backend = make(kind)
    backend.cache.keys[...] = 0  # so that ByHistory's is a number at first
    *passed, failed = validate(backend)
    assert failed.name in found_by
    assert message in failed.tally.first
    assert all(check.tally.differing == 0 for check in passed)


def test_a_quick_validation_leaves_out_the_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.engine.validate.QUICK_LENGTH", 20)
    whole, short = (list(validate(make(), quick=quick)) for quick in (False, True))
    assert [check.name for check in short] == list(CHECKS)
    assert all(check.tally.differing == 0 for check in short)
    assert sum(check.tally.rows for check in short) < 0.7 * sum(check.tally.rows for check in whole)


def test_the_table_says_what_was_found() -> None:
    def printed(backend: ReferenceBackend) -> tuple[bool, str]:
        console = Console(file=io.StringIO(), width=100)
        is_exact = report(validate(backend), console)
        assert isinstance(console.file, io.StringIO)
        return is_exact, console.file.getvalue()

    is_exact, text = printed(make())
    assert is_exact
    assert all(name in text for name in CHECKS)
    is_exact, text = printed(make(ByBatch))
    assert not is_exact
    assert "not exact: logits after" in text
    assert "16, one after another" not in text


def test_a_report_of_nothing_wrong_is_true() -> None:
    checks: list[Check] = []
    assert report(checks, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_slots": 15}, "slots of at least 16, not 15"), ({"num_pages": 20}, "pages of at least .*, not 20")],
)
def test_a_backend_too_small_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CrucibleError, match=f"validation needs {message}"):
        next(validate(make(**changes)))


def test_a_context_too_short_is_refused() -> None:
    config = toy(max_position_embeddings=63)
    with pytest.raises(CrucibleError, match="a context of at least 64, not 63"):
        next(validate(ReferenceBackend(config, toy_weights(config), num_slots=16)))
