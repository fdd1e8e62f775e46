"""The native API over HTTP, held against the library in this process: the same engine, another road."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_process import Server, events_of

from crucible.completion import Completion, SamplingParams
from crucible.llm import LLM
from crucible.serve.protocol import Generate

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat — 你好 <|im_end|>"}]
AT_RANDOM = {"temperature": 3.0, "ignore_eos": True}
"""The toy model then draws bytes at random, so that characters are cut in every way."""

PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "the cat — 你好"},
    "ids": {"prompt": [5, 6, 7, 8]},
    "messages": {"messages": MESSAGES},
    "ids that only the padding has": {"prompt": [5, 319]},
}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "at random": {"seed": 7, **AT_RANDOM},
    "filters": {"seed": 8, "top_k": 100, "top_p": 0.9, "min_p": 0.001, **AT_RANDOM},
    "penalties": {
        "seed": -9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"70": 4.5, "71": -100},
        **AT_RANDOM,
    },
    "until the end": {"seed": 2**64 + 3, "temperature": 3.0, "min_tokens": 5},
    "logprobs": {"logprobs": 3, "seed": 4, **AT_RANDOM},
    "logprobs without others": {"logprobs": 0, "seed": 5, **AT_RANDOM},
    "prompt logprobs": {"prompt_logprobs": True, "seed": 6, **AT_RANDOM},
    "both": {"prompt_logprobs": True, "logprobs": 20, "seed": 6, **AT_RANDOM},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def llm(toy_model: Path) -> LLM:
    return LLM(toy_model, backend="reference")


@pytest.fixture
def ask(client: httpx.Client):
    """The body of a whole reply."""

    def ask(**fields: Any) -> Any:
        reply = client.post("/v1/generate", json=fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return ask


@pytest.fixture
def stream(client: httpx.Client):
    """The events of a stream."""

    def stream(**fields: Any) -> list[tuple[str, Any]]:
        reply = client.post("/v1/generate/stream", json=fields)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        return events_of(reply.text)

    return stream


def expected(llm: LLM, max_tokens: int, fields: dict[str, Any]) -> list[Completion]:
    """What the library says to the same request."""
    given = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
    params = SamplingParams(max_tokens=max_tokens, **given)
    if "messages" in fields:
        return llm.chat(fields["messages"], params)
    return llm.generate(fields["prompt"], params)


def usage(completion: Completion) -> dict[str, int]:
    num_prompt, num_output = len(completion.prompt_ids), len(completion.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def ending(completion: Completion) -> dict[str, Any]:
    return {
        "finish_reason": completion.finish_reason,
        "stop": completion.stop_reason,
        "seed": completion.seed,
        "usage": usage(completion),
    }


def joined(events: list[tuple[str, Any]], index: int | None = None) -> str:
    """The text of a stream, or of one choice of it."""
    return "".join(data["text"] for _, data in events if data.get("index") == index)


def text_of(llm: LLM, token_id: int) -> str:
    return llm.tokenizer.decode([token_id]) if token_id < llm.tokenizer.vocab_size else ""


# ---- one choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_whole_reply_is_what_the_library_says(ask: Any, llm: LLM, prompt: dict[str, Any], fields: dict[str, Any]):
    (completion,) = expected(llm, 24, prompt | fields)
    reply = ask(max_tokens=24, **prompt, **fields)
    assert reply.pop("id").startswith("gen-")
    assert reply.pop("model") == llm.name
    assert reply.pop("text") == completion.text
    assert reply.pop("token_ids") == list(completion.token_ids)
    scores, prompt_scores = reply.pop("logprobs", None), reply.pop("prompt_logprobs", None)
    assert reply == ending(completion)
    assert (scores is None, prompt_scores is None) == (
        completion.logprobs is None,
        completion.prompt_logprobs is None,
    )
    if scores is not None:
        check_scores(llm, scores, completion)
    if prompt_scores is not None:
        first, *others = prompt_scores
        assert first is None
        assert [one["token_id"] for one in others] == list(completion.prompt_ids[1:])
        assert [one["logprob"] for one in others] == list(completion.prompt_logprobs)


def check_scores(llm: LLM, scores: list[Any], completion: Completion) -> None:
    for token_id, score, own in zip(completion.token_ids, scores, completion.logprobs, strict=True):
        assert (score["token_id"], score["text"], score["logprob"]) == (token_id, text_of(llm, token_id), own.logprob)
        assert [one["token_id"] for one in score["top"]] == list(own.top_ids)
        assert [one["logprob"] for one in score["top"]] == list(own.top_logprobs)
        assert all(one["text"] == text_of(llm, one["token_id"]) for one in score["top"])


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_stream_adds_up_to_the_whole_reply(ask: Any, stream: Any, prompt: dict[str, Any], fields: dict[str, Any]):
    whole = ask(max_tokens=24, **prompt, **fields)
    *tokens, (last, done) = stream(max_tokens=24, **prompt, **fields)
    assert {name for name, _ in tokens} == {"token"}
    assert last == "done"
    assert joined([*tokens, (last, done)]).encode() == whole["text"].encode()
    assert [data["token_id"] for _, data in tokens] == whole["token_ids"]
    assert done == {name: whole[name] for name in ("finish_reason", "stop", "seed", "usage")} | {"text": ""}
    assert tokens[0][1].pop("prompt_logprobs", None) == whole.get("prompt_logprobs")
    if "logprobs" in whole:
        assert [(data["logprob"], data["top"]) for _, data in tokens] == [
            (score["logprob"], score["top"]) for score in whole["logprobs"]
        ]
        extra = {"logprob", "top"}
    else:
        extra = set()
    assert all(data.keys() == {"token_id", "text"} | extra for _, data in tokens)


def test_characters_of_several_tokens_come_whole_and_as_soon_as_they_are(stream: Any, llm: LLM):
    """Each event has what became certain with its token: the stream up to any token is the decoding of the tokens up
    to there, but for a character that is not complete."""
    num_held = 0
    for seed in range(6):
        *tokens, _ = stream(prompt="the cat", max_tokens=60, seed=seed, **AT_RANDOM)
        shown, ids = "", []
        for _, data in tokens[:-1]:
            shown += data["text"]
            ids.append(data["token_id"])
            whole = llm.tokenizer.decode([i for i in ids if i < llm.tokenizer.vocab_size], continuing=True)
            assert whole.startswith(shown)
            assert set(whole[len(shown) :]) <= {"\ufffd"}
            num_held += whole != shown
    assert num_held > 20, "the test has not seen what it is for"


def test_null_is_a_field_left_out(ask: Any):
    nothing = dict.fromkeys(set(Generate.__struct_fields__) - {"prompt", "max_tokens"})
    replies = [ask(prompt="the cat", max_tokens=8, **fields) for fields in ({}, nothing)]
    assert replies[0].pop("id") != replies[1].pop("id")
    assert replies[0] == replies[1]


def test_without_a_limit_the_context_is_filled(ask: Any):
    reply = ask(prompt=[5, 6, 7], ignore_eos=True)
    assert (reply["finish_reason"], reply["usage"]["total_tokens"]) == ("length", 256)


def test_special_tokens_in_a_prompt_are_text(client: httpx.Client, llm: LLM):
    text = "<|endoftext|><|im_start|>"
    reply = client.post("/v1/tokenize", json={"prompt": text}).json()
    assert reply["token_ids"] == list(llm.encode(text))
    assert len(reply["token_ids"]) > 10


# ---- ends ---------------------------------------------------------------------------------------------------------


def test_a_stop_string_over_the_borders_of_tokens_ends_the_text_before_it(ask: Any, stream: Any, llm: LLM):
    num_over_borders = 0
    for seed in range(4):
        fields = {"prompt": "the cat", "seed": seed, **AT_RANDOM}
        text = ask(max_tokens=60, **fields)["text"]
        for begin in range(5, 20, 5):
            stop = [text[begin : begin + 4], "never to be seen"]
            (completion,) = expected(llm, 60, {**fields, "stop": stop})
            reply = ask(max_tokens=60, stop=stop, **fields)
            assert reply["text"] == text[: text.index(stop[0])] == completion.text
            assert {name: reply[name] for name in ("finish_reason", "stop", "seed", "usage")} == ending(completion)
            assert (reply["finish_reason"], reply["stop"]) == ("stop", stop[0])
            # What the engine drew before it heard of the end belongs to nobody.
            assert reply["token_ids"] == list(completion.token_ids)
            *tokens, (_, done) = stream(max_tokens=60, stop=stop, **fields)
            assert joined(tokens) == reply["text"]
            assert [data["token_id"] for _, data in tokens] == reply["token_ids"]
            assert (done["stop"], done["usage"]) == (stop[0], reply["usage"])
            num_over_borders += not any(stop[0] in text_of(llm, token_id) for token_id in reply["token_ids"])
    assert num_over_borders > 3


def test_text_before_a_stop_string_in_the_same_token_is_kept(ask: Any, stream: Any, llm: LLM):
    token_id = next(i for i in range(256, 300) if len(llm.tokenizer.token_bytes(i).strip()) >= 2)
    text = text_of(llm, token_id)
    fields = {"prompt": "the cat", "max_tokens": 8, "stop": text[1:], "logit_bias": {str(token_id): 100}}
    assert ask(**fields)["text"] == text[0]
    assert joined(stream(**fields)) == text[0]


def test_half_a_stop_string_is_text_once_it_cannot_become_one(ask: Any, stream: Any):
    fields = {"prompt": "the cat", "max_tokens": 30, "seed": 1, **AT_RANDOM}
    text = ask(**fields)["text"]
    stop = [text[2:5] + "\0", text[8:11] + "\0", text[-2:] + "\0"]
    assert ask(stop=stop, **fields)["text"] == text
    assert joined(stream(stop=stop, **fields)) == text


def test_a_stop_id_is_reported_counted_and_no_text(ask: Any, stream: Any, llm: LLM):
    fields = {"prompt": "the cat", "max_tokens": 30, "seed": 3, **AT_RANDOM}
    whole = ask(**fields)
    stop_id = next(i for i in whole["token_ids"][10:] if i < 300)
    at = whole["token_ids"].index(stop_id)
    for extra in ({}, {"logprobs": 1}):
        reply = ask(stop_token_ids=[299, stop_id], **fields, **extra)
        assert reply["token_ids"] == whole["token_ids"][: at + 1]
        assert (reply["finish_reason"], reply["stop"]) == ("stop", stop_id)
        assert reply["usage"]["completion_tokens"] == at + 1
        known = [i for i in reply["token_ids"][:-1] if i < 300]
        assert reply["text"] == llm.tokenizer.decode(known, continuing=True)
        assert joined(stream(stop_token_ids=[299, stop_id], **fields, **extra)) == reply["text"]


def test_the_models_own_end_is_no_stop_of_the_callers(ask: Any, llm: LLM):
    bias = {str(llm.eos_ids[0]): 100}
    reply = ask(prompt="the cat", max_tokens=8, logit_bias=bias)
    assert (reply["text"], reply["finish_reason"], reply["stop"]) == ("", "stop", None)
    assert reply["usage"]["completion_tokens"] == 1
    reply = ask(prompt="the cat", max_tokens=8, logit_bias=bias, min_tokens=3)
    assert reply["usage"]["completion_tokens"] == 4


# ---- several choices ----------------------------------------------------------------------------------------------


def test_choices_have_seeds_that_count_up_and_are_told_apart(ask: Any, stream: Any, llm: LLM):
    fields = {"prompt": "the cat", "n": 3, "seed": 2**64 - 1, "logprobs": 1, **AT_RANDOM}
    completions = expected(llm, 12, fields)
    reply = ask(max_tokens=12, **fields)
    assert reply.keys() == {"id", "model", "choices"}
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in reply["choices"]] == [completion.text for completion in completions]
    assert [choice["seed"] for choice in reply["choices"]] == [2**64 - 1, 0, 1]
    assert len({choice["text"] for choice in reply["choices"]}) == 3
    events = stream(max_tokens=12, **fields)
    for choice, completion in zip(reply["choices"], completions, strict=True):
        index = choice["index"]
        own = [(name, data) for name, data in events if data["index"] == index]
        assert joined(own, index) == completion.text
        assert [name for name, _ in own] == ["token"] * 12 + ["done"]
        assert own[-1][1] == {"index": index, **ending(completion), "text": ""}
        assert {name: choice[name] for name in ending(completion)} == ending(completion)


def test_a_choice_alone_is_the_one_with_its_seed(ask: Any):
    fields = {"prompt": "the cat", "max_tokens": 12, **AT_RANDOM}
    for choice in ask(n=3, seed=40, **fields)["choices"]:
        assert ask(seed=choice["seed"], **fields)["text"] == choice["text"]


# ---- seeds --------------------------------------------------------------------------------------------------------


def test_the_default_seed_is_told_and_gives_the_same_again(ask: Any):
    replies = [ask(prompt="the cat", max_tokens=12, **AT_RANDOM, **seed) for seed in ({}, {}, {"seed": 1234})]
    assert [reply["seed"] for reply in replies] == [1234] * 3
    assert len({reply["text"] for reply in replies}) == 1


def test_a_server_that_draws_seeds_tells_each_and_keeps_the_callers(make_server: Any):
    server = make_server("--default-seed", "random")

    def ask(**fields: Any) -> Any:
        return server.post("/v1/generate", json={"prompt": "the cat", "max_tokens": 12, **AT_RANDOM, **fields}).json()

    replies = [ask() for _ in range(4)]
    assert len({reply["seed"] for reply in replies}) == len({reply["text"] for reply in replies}) == 4
    for reply in replies:
        assert ask(seed=reply["seed"])["text"] == reply["text"]
    assert "one drawn for each request" in server.get("/health").json()["sampling"]


# ---- tokens and text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["the cat", " \n\t", "你好 — 👍🏽", "<|im_end|> a <|endoftext|>", "\0\x7f\u2028", "a" * 5000]
)
def test_tokenize_and_detokenize_are_the_librarys(client: httpx.Client, llm: LLM, text: str):
    reply = client.post("/v1/tokenize", json={"prompt": text})
    ids = list(llm.encode(text))
    assert reply.json() == {"token_ids": ids, "count": len(ids), "context": 256}
    assert client.post("/v1/detokenize", json={"token_ids": ids}).json() == {"text": llm.tokenizer.decode(ids)}


def test_tokenize_writes_conversations_as_generate_does(client: httpx.Client, llm: LLM, ask: Any):
    reply = client.post("/v1/tokenize", json={"messages": MESSAGES}).json()
    assert reply["token_ids"] == list(llm.encode_chat(MESSAGES))
    assert ask(messages=MESSAGES, max_tokens=1)["usage"]["prompt_tokens"] == reply["count"]


def test_bytes_that_are_no_text_detokenize_to_replacement_characters(client: httpx.Client, llm: LLM):
    ids = [next(i for i in range(256) if llm.tokenizer.token_bytes(i) == bytes([byte])) for byte in (0x41, 0xF0, 0x9F)]
    assert client.post("/v1/detokenize", json={"token_ids": ids}).json() == {"text": "A\ufffd"}
    assert client.post("/v1/detokenize", json={"token_ids": []}).json() == {"text": ""}
    assert client.post("/v1/detokenize", json={"token_ids": [319]}).json() == {"text": ""}
