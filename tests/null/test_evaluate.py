"""Evaluation: which tokens are scored after which, sums and their errors by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import axis_cells, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from toy_artifact import write_toy_artifact
from toy_tokenizers import TRAINING_TEXT
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.data.shards import DataError, write_shard
from crucible.engine.backend import StepPlan, StepResult, Ticket
from crucible.engine.quant import convert, dense
from crucible.engine.reference import ReferenceBackend
from crucible.engine.reference.rounding import ROUNDINGS, rounded_backend, to_half
from crucible.engine.runner import logits
from crucible.evaluate import (
    ERROR_BLOCK,
    VARIANTS,
    EvaluationError,
    Progress,
    count_bytes,
    evaluate,
    evaluate_model,
    mean_and_error,
    read_tokens,
)
from crucible.export.quantise import write_int8
from crucible.models import resolve
from crucible.tokenizer import Tokenizer

NUM_TOKENS = 75


def draw_ids(count: int = NUM_TOKENS + 1, vocab_size: int = 67) -> list[int]:
    return np.random.default_rng(5).integers(vocab_size, size=count).tolist()


def reference(config: ModelConfig, **sizes: int) -> ReferenceBackend:
    return ReferenceBackend(config, toy_weights(config), **sizes)


def slow_losses(config: ModelConfig, ids: Sequence[int], context: int) -> np.ndarray:
    """-log softmax in float64, one fresh sequence per token: what the definition says and nothing shared with it."""
    backend, losses = reference(config), []
    for target in range(1, len(ids)):
        begin = (target - 1) // context * context
        row_V = logits(backend, ids[begin:target])[-1].astype(np.float64)
        losses.append(np.log(np.exp(row_V - row_V.max()).sum()) + row_V.max() - row_V[ids[target]])
    return np.array(losses)


class Recorder(ReferenceBackend):
    """Keeps each score by the position in the text of the token scored, given the number of windows per group."""

    plans: list[StepPlan]

    def submit(self, plan: StepPlan) -> Any:
        self.plans = [*getattr(self, "plans", []), plan]
        return super().submit(plan)


# ---- the number -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", axis_cells())
def test_each_token_is_scored_after_its_window(config: ModelConfig) -> None:
    ids = draw_ids()
    losses = slow_losses(config, ids, 32)
    for path in ("prefill", "decode"):
        report = evaluate({"f32": reference(config, num_slots=2)}, ids, context=32, path=path)  # type: ignore[arg-type]
        assert (report.scored, report.asked, report.num_bytes) == (NUM_TOKENS, NUM_TOKENS, None)
        assert report.rows[0].cross_entropy == pytest.approx(losses.mean(), abs=1e-6)
        assert report.rows[0].perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-6)
        assert report.rows[0].bits_per_byte is None


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 60), st.integers(1, 40), st.integers(1, 5))
def test_windows_tile_the_text_on_both_paths(num_ids: int, context: int, num_slots: int) -> None:
    """Every target once, in windows that begin at multiples of the context, whatever the grouping; equal bits."""
    config = toy(num_hidden_layers=1, max_position_embeddings=40)
    ids = list(range(num_ids))  # the token at place p is p, so plans can be read
    found = []
    for path in ("prefill", "decode"):
        backend = Recorder(config, toy_weights(config), num_slots=num_slots)
        report = evaluate({"x": backend}, ids, context=context, path=path)  # type: ignore[arg-type]
        found.append(report.rows[0].cross_entropy)
        targets = []
        for plan in backend.plans:
            for segment in plan.segments:
                assert segment.ids is not None
                assert segment.ids[0] == segment.ids[0] // context * context + segment.start
                assert [target - 1 for target in segment.kinds] == list(segment.ids)
                targets += segment.kinds
        assert sorted(targets) == list(range(1, num_ids))
        assert report.scored == num_ids - 1
    assert found[0] == found[1]


def test_variants_are_scored_on_the_same_tokens() -> None:
    config, ids = toy(), draw_ids(3 * ERROR_BLOCK + 6)
    weights = toy_weights(config)
    int8 = {name: dense(weight) for name, weight in convert(config, weights, "int8").items()}
    report = evaluate(
        {"f32": reference(config), "again": reference(config), "int8": ReferenceBackend(config, int8)}, ids, context=50
    )
    first, again, rounded = report.rows
    assert (first.extra, first.extra_error) == (0, 0)
    assert (again.cross_entropy, again.extra) == (first.cross_entropy, 0)
    assert rounded.extra == pytest.approx(rounded.cross_entropy - first.cross_entropy, abs=1e-12)
    assert rounded.extra != 0
    assert rounded.extra_error is not None
    assert first.standard_error is not None
    assert 0 < rounded.extra_error < first.standard_error
    assert all(row.seconds > 0 for row in report.rows)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_rounding_alone_costs_little_and_not_nothing(rounding: Any) -> None:
    config, ids = toy(), draw_ids()
    weights = toy_weights(config)
    report = evaluate({"f32": reference(config), "x": rounded_backend(rounding, config, weights)}, ids, context=75)
    assert 0 < abs(report.rows[1].extra) < 0.02
    both_paths = evaluate(
        {"x": rounded_backend(rounding, config, weights, num_slots=3)}, ids, context=75, path="decode"
    )
    assert both_paths.rows[0].cross_entropy == report.rows[1].cross_entropy


def test_half_rounds_to_even_and_saturates() -> None:
    found = to_half(np.array([1 + 2**-11, 1 + 3 * 2**-11, 70000.0, -1e9, 2**-25, 3 * 2**-25]))
    assert found.tolist() == [1.0, 1 + 2**-9, 65504.0, -65504.0, 0.0, 2**-23]


def test_the_standard_error_is_that_of_block_means() -> None:
    values = np.concatenate([np.full(ERROR_BLOCK, 1.0), np.full(ERROR_BLOCK, 2.0), np.full(ERROR_BLOCK, 6.0), [9.0]])
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2 / 3))
    assert mean_and_error(values[: 2 * ERROR_BLOCK - 1])[1] is None
    rng = np.random.default_rng(0)
    independent = rng.standard_normal(100 * ERROR_BLOCK)
    _, error = mean_and_error(independent)
    assert error == pytest.approx(1 / math.sqrt(len(independent)), rel=0.3)


# ---- bytes and tokens -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TRAINING_TEXT], 300)


def test_bits_per_byte_count_text_and_not_control_tokens(tokenizer: Tokenizer) -> None:
    text = "It is a truth universally acknowledged, naïve…"
    ids = np.array([tokenizer.eot_id, *tokenizer.encode(text), tokenizer.eot_id])
    assert count_bytes(tokenizer, ids) == len(text.encode())
    config = toy(vocab_size=300, max_position_embeddings=200)
    report = evaluate({"x": reference(config)}, ids, context=len(ids) - 1, tokenizer=tokenizer)
    row = report.rows[0]
    assert report.num_bytes == len(text.encode())
    assert row.bits_per_byte == pytest.approx(row.cross_entropy * report.scored / math.log(2) / len(text.encode()))


def test_tokens_come_from_shards_folders_and_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = [tokenizer.eot_id, *tokenizer.encode(TRAINING_TEXT)]
    sizes: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "tokenizer_id": tokenizer.sha256[:8]}
    write_shard(tmp_path / "val_000000.bin", ids[:20], **sizes)
    write_shard(tmp_path / "val_000001.bin", ids[20:], **sizes)
    write_shard(tmp_path / "train_000000.bin", [1, 2, 3], **sizes)
    (tmp_path / "meta.json").write_text("{}")
    (tmp_path / "a.txt").write_text(TRAINING_TEXT)
    assert read_tokens(tmp_path / "val_000000.bin", tokenizer, 10).tolist() == ids[:11]
    assert read_tokens(tmp_path / "val_000000.bin", tokenizer, 10**6).tolist() == ids[:20]
    assert read_tokens(tmp_path, tokenizer, 30).tolist() == ids[:31]
    assert read_tokens(str(tmp_path / "a.txt"), tokenizer, 30).tolist() == ids[:31]
    assert read_tokens(str(tmp_path / "a.txt"), tokenizer, 10**9).tolist() == ids
    other = Tokenizer.train([TRAINING_TEXT], 290)
    with pytest.raises(DataError, match="made by tokenizer"):
        read_tokens(tmp_path, other, 30)
    write_shard(tmp_path / "short.bin", [1], **sizes)
    with pytest.raises(DataError, match="too few"):
        read_tokens(tmp_path / "short.bin", tokenizer, 5)
    for missing in ("none.bin", "none.txt"):
        with pytest.raises(DataError, match="none"):
            read_tokens(str(tmp_path / missing), tokenizer, 5)


# ---- interrupts, progress and errors ----------------------------------------------------------------------------


class Interrupted(ReferenceBackend):
    """Presses Ctrl-C in its n-th step, which it does not finish."""

    after: int

    def submit(self, plan: StepPlan) -> Any:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return super().submit(plan)


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_an_interrupt_reports_what_all_variants_have_scored(path: Any) -> None:
    config, ids = toy(), draw_ids()
    calm, hasty = reference(config, num_slots=2), Interrupted(config, toy_weights(config), num_slots=2)
    hasty.after = 4
    report = evaluate({"calm": calm, "hasty": hasty}, ids, context=16, path=path)
    expected = slow_losses(config, ids, 16)
    done = range(64) if path == "prefill" else [0, 1, 2, 3, 16, 17, 18, 19]
    assert report.scored == len(done) < report.asked == NUM_TOKENS
    for row in report.rows:
        assert row.cross_entropy == pytest.approx(expected[list(done)].mean(), abs=1e-6)
    for backend in (calm, hasty):  # slots are free again
        backend.after = 1000  # type: ignore[attr-defined]
    assert evaluate({"calm": calm, "hasty": hasty}, ids, context=16, path=path).scored == NUM_TOKENS
    hasty.after = 0
    with pytest.raises(KeyboardInterrupt):
        evaluate({"calm": calm, "hasty": hasty}, ids, context=16, path=path)


def test_progress_counts_to_the_end() -> None:
    seen: list[Progress] = []
    report = evaluate({"x": reference(toy())}, draw_ids(), context=30, on_progress=seen.append)
    assert [now.scored for now in seen] == [30, 60, 75]
    assert {now.asked for now in seen} == {75}
    means = np.array([now.cross_entropy for now in seen])
    assert means @ [30, 30, 15] / 75 == pytest.approx(report.rows[0].cross_entropy)


class Broken(ReferenceBackend):
    def submit(self, plan: StepPlan) -> Any:
        result = super().submit(plan).wait()
        result.scores[-1] = np.nan

        class Done:
            def wait(self) -> StepResult:
                return result

        ticket: Ticket = Done()
        return ticket


def test_what_cannot_be_evaluated_is_refused_by_name() -> None:
    config, ids = toy(), draw_ids()
    good = reference(config)
    cases: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
        ({}, ids, {"context": 8}, "no backend"),
        ({"x": good}, [1], {"context": 8}, "at least 2 ids"),
        ({"x": good}, [[1, 2], [3, 4]], {"context": 8}, "flat list"),
        ({"x": good}, ids, {"context": 0}, "from 1 to the context of 96, not 0"),
        ({"x": good}, ids, {"context": 97}, "from 1 to the context of 96, not 97"),
        ({"x": good}, ids, {"context": 8, "path": "train"}, "must be one of decode, prefill, not 'train'"),
        ({"x": good}, [0, 67], {"context": 8}, "token 67 is outside the model's vocabulary of 67"),
        ({"x": good}, [0, -1], {"context": 8}, "token -1 is outside"),
        ({"x": reference(config, num_pages=2)}, ids, {"context": 33}, "takes 3 pages, it has 2"),
        ({"x": good, "bad": Broken(config, toy_weights(config))}, ids, {"context": 8}, "bad: the score of token 8 is"),
    ]
    for backends, tokens, options, message in cases:
        with pytest.raises(EvaluationError, match=message):
            evaluate(backends, tokens, **options)


def test_the_report_reads_well() -> None:
    report = evaluate({"f32": reference(toy()), "int8": reference(toy())}, draw_ids(130), context=64)
    console = Console(width=80, record=True)
    console.print(report.render())
    text = console.export_text()
    assert "129 tokens in windows of 64, prefill path" in text
    assert f"{report.rows[0].cross_entropy:.4f} ±" in text
    assert "+0.00000 ±0.00000  +0.000%" in text
    assert "…" not in text
    assert "n/a" in text


# ---- a model by its name ----------------------------------------------------------------------------------------


def test_a_model_is_evaluated_by_its_name(tmp_path: Path) -> None:
    folder = write_toy_artifact(tmp_path / "model", hidden_size=48, intermediate_size=96)
    (tmp_path / "a.txt").write_text(TRAINING_TEXT)
    data = tmp_path / "a.txt"
    options: dict[str, Any] = {"num_tokens": 40, "backend": "reference"}
    report = evaluate_model(folder, data, variants=VARIANTS, path="prefill", context=16, **options)
    assert [row.name for row in report.rows] == list(VARIANTS)
    assert report.scored == 40
    assert report.num_bytes is not None
    assert all(0 < abs(row.extra) < 0.1 for row in report.rows[1:])
    other = evaluate_model(folder, data, variants=("int8", "f32"), context=16, **options)
    assert other.path == "decode"
    assert other.rows[0].cross_entropy == report.rows[2].cross_entropy
    assert evaluate_model(folder, data, **options).context == 96


def test_an_int8_artifact_is_evaluated_as_it_is(tmp_path: Path) -> None:
    folder = write_toy_artifact(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TRAINING_TEXT)
    options: dict[str, Any] = {"num_tokens": 40, "backend": "reference", "variants": ("int8",)}
    plain = evaluate_model(folder, tmp_path / "a.txt", **options)
    stored = evaluate_model(write_int8(resolve(folder), tmp_path / "int8"), tmp_path / "a.txt", **options)
    assert stored.rows[0].cross_entropy == plain.rows[0].cross_entropy


def test_wrong_options_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = write_toy_artifact(tmp_path / "model")
    data = tmp_path / "none.txt"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"variants": ("f32", "int4")}, "must be one of f32, f16, int8, f16-operands, f16-kv, not 'int4'"),
        ({"variants": ("f32", "f32")}, "different ones"),
        ({"variants": ()}, "at least one, not none"),
        ({"num_tokens": 0}, "at least 1, not 0"),
        ({"context": 97}, "from 1 to the context of 96, not 97"),
        ({"context": 0}, "from 1 to the context of 96, not 0"),
        ({"variants": ("f16-kv",), "backend": "cpu"}, "of the reference backend alone"),
    ]
    for options, message in cases:
        with pytest.raises(EvaluationError, match=message):
            evaluate_model(folder, data, **{"num_tokens": 8, "backend": "reference", **options})
