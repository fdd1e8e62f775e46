"""The library API on a toy artifact: one text whichever way it is asked for, and whoever else asks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_artifact import PADDED_VOCAB_SIZE, VOCAB_SIZE, write_toy_artifact

from crucible import LLM, SamplingParams
from crucible.completion import Completion, Piece
from crucible.engine import request
from crucible.engine.artifact import ArtifactError
from crucible.engine.request import RequestError
from crucible.errors import CrucibleError
from crucible.tokenizer import Tokenizer
from crucible.tokenizer.chat import ChatError, ChatTemplate

SAMPLED = SamplingParams(temperature=1.3, seed=5, max_tokens=40)
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("llm") / "toy")


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(folder, backend="reference", num_slots=4)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """A model that must be left idle, with every page free."""
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    gc.collect()
    engine = llm._engine
    assert not llm._requests
    engine.step()
    assert not engine.has_work
    assert engine.scheduler.num_free_pages == engine.backend.num_pages


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def sampled(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.3, "seed": seed, "max_tokens": 30, **fields})


# ---- one text, however it is asked for --------------------------------------------------------------------------


def test_streamed_text_is_the_completion_s_text(llm: LLM) -> None:
    for seed in range(20):
        params = sampled(seed, max_tokens=40)
        (completion,) = llm.generate(PROMPT, params)
        pieces = list(llm.stream(PROMPT, params))
        assert joined(pieces) == completion.text
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


def test_text_and_its_ids_are_one_prompt(llm: LLM) -> None:
    ids = llm.encode("the quick fox")
    assert llm.generate("the quick fox", SAMPLED) == llm.generate(list(ids), SAMPLED)
    assert llm.generate([np.array(ids)], SAMPLED) == llm.generate(ids, SAMPLED)
    np.testing.assert_array_equal(llm.logits("the quick fox"), llm.logits(ids))


def test_prompts_and_choices_come_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=8)
    completions = llm.generate(["the cat", [1, 2, 3]], params)
    assert [c.seed for c in completions] == [9, 10, 9, 10]
    assert [c.prompt_ids for c in completions] == [llm.encode("the cat")] * 2 + [(1, 2, 3)] * 2
    alone = llm.generate([1, 2, 3], SamplingParams(temperature=1.0, seed=10, max_tokens=8))
    assert completions[3] == alone[0]


def test_more_prompts_than_slots_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = ["the", "the dog sat on the mat", [7], "a", "naïve café: 你好", [5] * 40, "the cat"]
    params = [sampled(seed, max_tokens=3 + 5 * seed, logprobs=2) for seed in range(len(prompts))]
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert llm.generate(prompts, params) == alone


def test_logprobs_come_with_tokens_and_prompts_when_asked_for(llm: LLM) -> None:
    params = sampled(3, logprobs=2, prompt_logprobs=True)
    (completion,) = llm.generate(PROMPT, params)
    pieces = list(llm.stream(PROMPT, params))
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert tuple(piece.logprobs for piece in pieces) == completion.logprobs
    assert pieces[0].prompt_logprobs == completion.prompt_logprobs
    ids = completion.prompt_ids + completion.token_ids
    logits = llm.logits(ids[:-1]).astype(np.float64)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    expected = [row[token_id] for row, token_id in zip(logprobs, ids[1:], strict=True)]
    found = [*completion.prompt_logprobs, *(each.logprob for each in completion.logprobs)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert all(len(each.top_ids) == 2 for each in completion.logprobs)
    (without,) = llm.generate(PROMPT, sampled(3))
    assert (without.logprobs, without.prompt_logprobs) == (None, None)


# ---- stop strings -----------------------------------------------------------------------------------------------


def until_stop(llm: LLM, full: Completion, stops: Sequence[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string by the definition: the text of ever more tokens, until it holds one."""
    ids = full.token_ids[: -1 if full.finish_reason == "stop" else None]

    def text_of(count: int) -> str:
        return llm.tokenizer.decode([i for i in ids[:count] if i < VOCAB_SIZE], continuing=True).rstrip("\ufffd")

    unmatched = text_of(min_tokens)
    text = full.text[len(unmatched) :]
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            visible = len(unmatched) + end
            tokens = next((n for n in range(len(ids) + 1) if len(text_of(n)) >= visible), len(full.token_ids))
            return full.text[: visible - len(stop)], max(tokens, min_tokens + 1), stop
    return full.text, len(full.token_ids), None


@pytest.fixture(scope="module")
def ascii_bias(shared: LLM) -> dict[int, float]:
    """Bias by which only tokens of whole characters are drawn, so that the definition can be stated in characters."""
    keeps = {i for i in range(VOCAB_SIZE) if shared.tokenizer.token_bytes(i).isascii()}
    return {i: -100.0 for i in range(PADDED_VOCAB_SIZE) if i not in keeps}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stop_strings_end_streams_and_completions_alike(
    shared: LLM, ascii_bias: dict[int, float], data: st.DataObject
) -> None:
    params = sampled(data.draw(st.integers(0, 5)), logit_bias=ascii_bias)
    (full,) = shared.generate(PROMPT, params)
    starts = st.integers(0, len(full.text))
    stops = [
        full.text[start : start + length] or "the"
        for start, length in data.draw(st.lists(st.tuples(starts, st.integers(1, 5)), min_size=1, max_size=3))
    ]
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 7]))
    with_stops = dataclasses.replace(params, stop=stops, min_tokens=min_tokens)
    if min_tokens:
        (full,) = shared.generate(PROMPT, dataclasses.replace(params, min_tokens=min_tokens))
    (completion,) = shared.generate(PROMPT, with_stops)
    pieces = list(shared.stream(PROMPT, with_stops))
    text, num_tokens, stop = until_stop(shared, full, stops, min_tokens)
    assert (completion.text, len(completion.token_ids), completion.stop_reason) == (text, num_tokens, stop)
    assert completion.token_ids == full.token_ids[:num_tokens]
    assert completion.finish_reason == ("stop" if stop else full.finish_reason)
    assert (joined(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason, len(pieces)) == (
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        num_tokens,
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_stops_of_any_characters_cut_streams_as_completions(shared: LLM, data: st.DataObject) -> None:
    params = sampled(data.draw(st.integers(0, 9)))
    (full,) = shared.generate(PROMPT, params)
    place = data.draw(st.integers(0, max(0, len(full.text) - 1)))
    stop = full.text[place : place + data.draw(st.integers(1, 4))] or "x"
    with_stop = dataclasses.replace(params, stop=stop)
    (completion,) = shared.generate(PROMPT, with_stop)
    assert completion.text == full.text[: full.text.find(stop) if stop in full.text else None]
    assert completion.finish_reason == ("stop" if stop in full.text else full.finish_reason)
    assert joined(list(shared.stream(PROMPT, with_stop))) == completion.text


def test_a_stopped_request_leaves_the_engine_at_once(llm: LLM) -> None:
    (full,) = llm.generate(PROMPT, SAMPLED)
    params = dataclasses.replace(SAMPLED, stop=full.text[:1])
    stream = llm.stream(PROMPT, params)
    pieces = [next(stream)]
    while pieces[-1].finish_reason is None:
        pieces.append(next(stream))
    assert not llm._requests, "the stream is still held, the request is not"
    assert (joined(pieces), pieces[-1].stop_reason) == ("", full.text[:1])
    stream.close()


def test_the_id_that_ends_a_request_is_its_reason(llm: LLM) -> None:
    (full,) = llm.generate(PROMPT, SAMPLED)
    token_id = full.token_ids[6]
    (completion,) = llm.generate(PROMPT, dataclasses.replace(SAMPLED, stop_token_ids=[token_id]))
    end = full.token_ids.index(token_id) + 1
    assert completion.token_ids == full.token_ids[:end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token_id)
    (ended,) = llm.generate(PROMPT, SamplingParams(logit_bias={llm.eos_ids[0]: 100.0}, max_tokens=9))
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", None)


def test_parameters_of_the_engine_will_do_too(llm: LLM) -> None:
    params = request.SamplingParams(temperature=1.3, seed=5, max_tokens=40)
    assert llm.generate(PROMPT, params) == llm.generate(PROMPT, SAMPLED)


def test_stop_strings_are_checked_and_kept_by_choices() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert [choice.stop for choice in SamplingParams(stop=["a", "b"], n=2).choices()] == [("a", "b")] * 2
    with pytest.raises(CrucibleError, match=r"stop\[1\] is empty"):
        SamplingParams(stop=["a", ""])
    with pytest.raises(RequestError, match="temperature must be"):
        SamplingParams(stop=["a"], temperature=-1)


# ---- several streams at once ------------------------------------------------------------------------------------


def started(llm: LLM) -> tuple[list[Callable[[], Iterator[Piece]]], list[list[Piece]]]:
    """Streams of many kinds, as functions that begin them, and what each yields alone."""
    seed, text = max(
        ((seed, llm.generate(PROMPT, sampled(seed))[0].text) for seed in range(9)), key=lambda x: len(x[1])
    )
    asked: list[tuple[Any, SamplingParams]] = [
        (PROMPT, sampled(0, logprobs=3)),
        (PROMPT, SamplingParams(max_tokens=25)),
        ([3] * 50, sampled(1, max_tokens=10)),
        (PROMPT, sampled(seed, stop=text[-4:-2])),
        ("the dog", sampled(3, repetition_penalty=1.3, prompt_logprobs=True)),
        ([{"role": "user", "content": "the"}], sampled(4, top_k=20)),
    ]
    begin = [lambda prompt=prompt, params=params: llm.stream(prompt, params) for prompt, params in asked]
    return begin, [list(each()) for each in begin]


@pytest.mark.parametrize("seed", range(4))
def test_interleaved_streams_yield_what_each_yields_alone(llm: LLM, seed: int) -> None:
    begin, alone = started(llm)
    rng = random.Random(seed)
    # Each twice, the second of which is closed or dropped somewhere.
    streams = dict(enumerate(each() for each in begin + begin))
    got: dict[int, list[Piece]] = {index: [] for index in streams}
    while streams:
        index = rng.choice(list(streams))
        if index >= len(begin) and rng.random() < 0.2:
            stream = streams.pop(index)
            if rng.random() < 0.5:
                stream.close()  # type: ignore[attr-defined]
            del stream
            continue
        try:
            got[index].append(next(streams[index]))
        except StopIteration:
            del streams[index]
    for index, pieces in got.items():
        expected = alone[index % len(begin)]
        assert pieces == (expected if index < len(begin) else expected[: len(pieces)])


def test_streams_of_several_threads_yield_what_each_yields_alone(llm: LLM) -> None:
    begin, alone = started(llm)
    got: dict[int, list[Piece]] = {}

    def run(index: int) -> None:
        got[index] = list(begin[index % len(begin)]())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2 * len(begin))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {index: alone[index % len(begin)] for index in range(2 * len(begin))}


def test_completions_and_logits_between_the_pieces_of_a_stream_change_nothing(llm: LLM) -> None:
    alone, logits = list(llm.stream(PROMPT, SAMPLED)), llm.logits("the dog")
    stream = llm.stream(PROMPT, SAMPLED)
    pieces = list(itertools.islice(stream, 3))
    assert joined(alone) == llm.generate(PROMPT, SAMPLED)[0].text
    pieces += itertools.islice(stream, 2)
    np.testing.assert_array_equal(llm.logits("the dog"), logits)
    assert pieces + list(stream) == alone


def test_a_stream_that_is_closed_or_dropped_leaves_the_engine(llm: LLM) -> None:
    for steps in (0, 1, 5):
        stream = llm.stream(PROMPT, SAMPLED)
        assert len(list(itertools.islice(stream, steps))) == steps
        assert len(llm._requests) == 1
        stream.close()
        assert_idle(llm)
        dropped = llm.stream(PROMPT, SAMPLED)
        list(itertools.islice(dropped, steps))
        del dropped
        assert_idle(llm)


def test_a_stream_dropped_in_the_midst_of_a_step_waits_for_no_lock(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SAMPLED)
    with llm._lock:
        stream.close()
        assert len(llm._requests) == 1
    llm.generate("the", SamplingParams(max_tokens=1))
    assert_idle(llm)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_fails_ends_what_was_under_way_and_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    alone = list(llm.stream(PROMPT, SAMPLED))
    streams = [llm.stream(PROMPT, SAMPLED) for _ in range(6)]  # more than there are slots
    for _ in range(steps):
        assert [next(stream) for stream in streams[:4]]
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.backend, "submit", lambda plan: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            list(streams[0])
    for stream in streams[1:]:
        got: list[Piece] = []
        with pytest.raises(RuntimeError, match="the engine failed in a step of another request"):
            got.extend(stream)
    assert list(llm.stream(PROMPT, SAMPLED)) == alone


def test_without_a_cache_the_text_is_the_same(llm: LLM) -> None:
    params = dataclasses.replace(SAMPLED, stop=["zz", "\ufffd\ufffd\ufffd"])
    alone = list(llm.stream("the dog", params))
    assert list(llm.stream("the dog", params, use_cache=False)) == alone
    assert len(alone) > 5


def test_a_stream_without_a_cache_has_the_model_for_itself(llm: LLM) -> None:
    alone = list(llm.stream(PROMPT, SAMPLED))
    earlier = llm.stream(PROMPT, SAMPLED)
    pieces = [next(earlier)]
    uncached = llm.stream(PROMPT, SAMPLED, use_cache=False)
    assert next(uncached) == alone[0]
    for refused in (lambda: llm.stream("the"), lambda: llm.generate("the"), lambda: llm.logits("the")):
        with pytest.raises(RequestError, match="use_cache=False is open"):
            refused()
    uncached.close()
    assert pieces + list(earlier) == alone
    with pytest.raises(RequestError, match="prompt_logprobs needs the cache"):
        llm.stream(PROMPT, sampled(0, prompt_logprobs=True), use_cache=False)


# ---- conversations ----------------------------------------------------------------------------------------------


def test_a_conversation_in_the_plain_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]
    as_text = llm.generate("System: Be brief.\n\nUser: the cat\n\nAssistant:", SAMPLED)
    assert llm.chat(messages, SAMPLED) == as_text
    assert joined(list(llm.stream(messages, SAMPLED))) == as_text[0].text
    several = llm.chat([messages, messages[1:]], SAMPLED)
    assert several == as_text + llm.generate("User: the cat\n\nAssistant:", SAMPLED)
    opened = [*messages, {"role": "assistant", "content": "It"}]
    assert llm.chat(opened, SAMPLED) == llm.generate("System: Be brief.\n\nUser: the cat\n\nAssistant: It", SAMPLED)


def test_a_conversation_in_the_model_s_own_template(tmp_path: Path) -> None:
    family = FAMILIES["chatml"]
    artifact = write_toy_artifact(
        tmp_path / "toy", chat_template=family.source, control=family.control, max_position_embeddings=256
    )
    llm = LLM(artifact, backend="reference")
    messages = [{"role": "user", "content": "a <|im_end|>"}]
    (completion,) = llm.chat(messages, SAMPLED)
    template = ChatTemplate(Tokenizer.from_file(artifact), family.source)
    assert list(completion.prompt_ids) == template.encode(messages)
    assert completion == llm.generate(completion.prompt_ids, SAMPLED)[0]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([[]], "messages is empty"),
        ("hello", "messages must be a list of messages"),
        ([{"role": "tool", "content": "a"}], r"messages\[0\]\.role is 'tool'"),
    ],
)
def test_malformed_conversations_are_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        llm.chat(messages)


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(prompt)


def test_one_bad_prompt_is_named_and_nothing_is_computed(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompts\[2\]: the prompt has token id 999"):
        llm.generate(["the", "cat", [999], ""], SAMPLED)
    with pytest.raises(RequestError, match=r"^the prompt has token id 999"):
        llm.generate([999])
    with pytest.raises(RequestError, match="a prompt must be text or token ids, not None"):
        llm.generate(["the", None])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="a prompt must be text or token ids, not b'the'"):
        llm.generate([b"the"])


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"90 tokens and max_tokens=7 .* context of 96"):
        llm.stream([1] * 90, SamplingParams(max_tokens=7))


def test_parameters_that_do_not_go_with_the_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params must be one for all prompts or one for each: 2 for 1 prompts"):
        llm.generate("the", [SAMPLED, SAMPLED])
    with pytest.raises(RequestError, match=r"params must be SamplingParams or a list of them, not \{"):
        llm.generate("the", {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="n must be 1 here, not 2"):
        llm.stream("the", SamplingParams(n=2, temperature=1.0))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere: no such file or folder"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"config\.json: no such file"):
        LLM(tmp_path)
    artifact = write_toy_artifact(tmp_path / "small", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ArtifactError, match="its tokenizer has 300 tokens, its model 299"):
        LLM(artifact)
    with pytest.raises(RequestError, match=r"backend must be one of auto, reference, cpu, .*, not 'tpu'"):
        LLM(artifact, backend="tpu")  # type: ignore[arg-type]


def test_weights_are_held_as_asked_for(folder: Path, shared: LLM) -> None:
    dense, int8 = (LLM(folder, backend="reference", weights=weights).logits("the cat") for weights in ("f32", "int8"))
    np.testing.assert_array_equal(dense, shared.logits("the cat"))
    assert 0 < np.abs(int8 - dense).max() < 0.5
    with pytest.raises(CrucibleError, match="int4"):
        LLM(folder, backend="reference", weights="int4")  # type: ignore[arg-type]


# ---- where it runs, and what the guide says ---------------------------------------------------------------------


def test_a_model_runs_without_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from crucible import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], backend='reference')\n"
        "print(llm.generate('the', SamplingParams(max_tokens=4))[0].token_ids)"
    )
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("(")


def test_the_guide_s_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_toy_artifact(tmp_path / "artifacts" / "mine", max_position_embeddings=512)
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace('backend="auto"', 'backend="reference"'), "docs/library.md", "exec"), names)
