"""The library API on a toy artifact: one text whichever way it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy_artifact import PADDED_VOCAB_SIZE, VOCAB_SIZE, write_toy_artifact

from crucible import LLM, SamplingParams
from crucible.engine.artifact import ArtifactError
from crucible.engine.request import RequestError

SAMPLED = SamplingParams(temperature=1.3, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_toy_artifact(tmp_path_factory.mktemp("llm") / "toy"))


def test_streamed_text_is_the_completion_s_text(llm: LLM) -> None:
    for seed in range(20):
        params = SamplingParams(temperature=1.3, seed=seed, max_tokens=40)
        (completion,) = llm.generate("the cat sat", params)
        pieces = list(llm.stream("the cat sat", params))
        assert "".join(piece.text for piece in pieces) == completion.text
        assert tuple(piece.token_id for piece in pieces) == completion.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert completion.finish_reason == pieces[-1].finish_reason
        text_ids = completion.token_ids[: -1 if completion.finish_reason == "stop" else None]
        kept = [token_id for token_id in text_ids if token_id < VOCAB_SIZE]
        assert completion.text == llm.tokenizer.decode(kept, continuing=True)


def test_padding_ids_are_drawn_and_add_no_text(llm: LLM) -> None:
    params = SamplingParams(logit_bias={PADDED_VOCAB_SIZE - 1: 100.0}, max_tokens=3)
    (completion,) = llm.generate("the", params)
    assert completion.token_ids == (PADDED_VOCAB_SIZE - 1,) * 3
    assert completion.text == ""


def test_without_a_cache_the_text_is_the_same(llm: LLM) -> None:
    with_cache = [piece.token_id for piece in llm.stream("the dog", SAMPLED)]
    without = [piece.token_id for piece in llm.stream("the dog", SAMPLED, use_cache=False)]
    assert with_cache == without
    assert len(with_cache) > 5


def test_text_and_its_ids_are_one_prompt(llm: LLM) -> None:
    ids = llm.encode("the quick fox")
    assert llm.generate("the quick fox", SAMPLED) == llm.generate(list(ids), SAMPLED)
    np.testing.assert_array_equal(llm.logits("the quick fox"), llm.logits(ids))


def test_prompts_and_choices_come_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=8)
    completions = llm.generate(["the cat", [1, 2, 3]], params)
    assert [c.seed for c in completions] == [9, 10, 9, 10]
    assert [c.prompt_ids for c in completions] == [llm.encode("the cat")] * 2 + [(1, 2, 3)] * 2
    alone = llm.generate([1, 2, 3], SamplingParams(temperature=1.0, seed=10, max_tokens=8))
    assert completions[3] == alone[0]


@pytest.mark.parametrize("prompt", ["", [], [[]]])
def test_an_empty_prompt_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"90 tokens and max_tokens=7 .* context of 96"):
        llm.stream([1] * 90, SamplingParams(max_tokens=7))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere: no such folder"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"config\.json: no such file"):
        LLM(tmp_path)
    artifact = write_toy_artifact(tmp_path / "small", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ArtifactError, match="its tokenizer has 300 tokens, its model 299"):
        LLM(artifact)
    with pytest.raises(RequestError, match="backend must be one of reference, not 'tpu'"):
        LLM(write_toy_artifact(tmp_path / "toy"), backend="tpu")  # type: ignore[arg-type]


def test_a_model_runs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from crucible import LLM, SamplingParams\n"
        "print(LLM(sys.argv[1]).generate('the', SamplingParams(max_tokens=4))[0].token_ids)"
    )
    artifact = write_toy_artifact(tmp_path / "toy")
    result = subprocess.run([sys.executable, "-c", code, artifact], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("(")
