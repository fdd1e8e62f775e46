"""OpenAI's endpoints over HTTP, byte by byte: an SDK papers over what is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "the cat"}]
PROMPT = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "the cat"}}

each_path = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture(scope="module")
def client(server: Any):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model_id(server: Any) -> str:
    return server.model_id


@pytest.fixture
def post(client: httpx.Client, model_id: str):
    def post(path: str, **fields: Any) -> httpx.Response:
        return client.post(path, json={"model": model_id, **fields})

    return post


@pytest.fixture
def ask(post: Any):
    """The body of a whole reply."""

    def ask(path: str, **fields: Any) -> Any:
        reply = post(path, **{**PROMPT[path], **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("application/json")
        return reply.json()

    return ask


@pytest.fixture
def stream(post: Any):
    """The chunks of a stream."""

    def stream(path: str, **fields: Any) -> list[Any]:
        reply = post(path, **{**PROMPT[path], "stream": True, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, rest = reply.content.decode().split("\n\n")
        assert rest == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return stream


@pytest.fixture
def refuse(post: Any):
    """The error of a refused request."""

    def refuse(path: str, status: int = 400, **fields: Any) -> Any:
        reply = post(path, **{**PROMPT[path], **fields})
        return error_of(reply, status)

    return refuse


def error_of(reply: httpx.Response, status: int) -> Any:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) < 400
    return body["error"]


def text_of(choice: Any) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content", "")


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + text_of(choice)
    return texts


# ---- models -----------------------------------------------------------------------------------------------------


def test_the_served_model_is_listed_and_found(client: httpx.Client, model_id: str):
    body = client.get("/v1/models").json()
    (entry,) = body["data"]
    assert (body["object"], entry["object"], entry["id"], entry["owned_by"]) == ("list", "model", model_id, "crucible")
    assert isinstance(entry["created"], int)
    assert client.get(f"/v1/models/{model_id}").json() == entry
    assert client.get(f"/v1/models/{model_id.replace('/', '%2F')}").json() == entry


@pytest.mark.parametrize("name", ["other", "a/b", "a%2Fb"])
def test_another_model_is_not_found(client: httpx.Client, name: str):
    error = error_of(client.get(f"/v1/models/{name}"), 404)
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")


@each_path
def test_another_model_does_not_answer(refuse: Any, path: str):
    error = refuse(path, 404, model="gpt-5")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@each_path
def test_an_alias_is_answered_for_under_the_name_of_the_model(ask: Any, client: httpx.Client, path: str, model_id: str):
    assert ask(path, model="gpt-4o", max_tokens=1)["model"] == model_id
    assert client.get("/v1/models/gpt-4o").json()["id"] == model_id


# ---- replies ----------------------------------------------------------------------------------------------------


@each_path
def test_a_whole_reply(ask: Any, path: str, model_id: str):
    body = ask(path, max_tokens=5, ignore_eos=True)
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert body["object"] == {CHAT: "chat.completion", COMPLETIONS: "text_completion"}[path]
    assert body["id"].startswith({CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}[path])
    assert body["model"] == model_id
    assert isinstance(body["system_fingerprint"], str)
    (choice,) = body["choices"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    if path == CHAT:
        assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
        assert set(choice["message"]) == {"role", "content", "refusal"}
        assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    else:
        assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5


@each_path
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_adds_up_to_the_whole_reply(ask: Any, stream: Any, path: str, seed: int):
    """The toy model draws bytes at random, so that characters are cut in every way."""
    fields = {"max_tokens": 40, "temperature": 3.0, "seed": seed, "n": 2, "ignore_eos": True}
    whole = ask(path, **fields)
    *chunks, usage = stream(path, **fields, stream_options={"include_usage": True})
    assert texts_of(chunks) == {choice["index"]: text_of(choice) for choice in whole["choices"]}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    reasons = [(choice["index"], choice["finish_reason"]) for chunk in chunks for choice in chunk["choices"]]
    assert sorted(reason for reason in reasons if reason[1]) == [(0, "length"), (1, "length")]


def test_the_chunks_of_a_chat(stream: Any):
    chunks = stream(CHAT, max_tokens=3, ignore_eos=True)
    opening, *pieces, closing = [chunk["choices"][0] for chunk in chunks]
    assert opening["delta"] == {"role": "assistant", "content": ""}
    assert all(set(piece["delta"]) == {"content"} and piece["finish_reason"] is None for piece in pieces)
    assert (closing["delta"], closing["finish_reason"]) == ({}, "length")
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


@each_path
def test_usage_in_every_chunk(stream: Any, path: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in stream(path, max_tokens=6, ignore_eos=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@each_path
def test_a_text_ends_before_a_stop_string(ask: Any, stream: Any, path: str):
    fields = {"max_tokens": 30, "temperature": 3.0, "seed": 11, "ignore_eos": True}
    (choice,) = ask(path, **fields)["choices"]
    text = text_of(choice)
    stop = text[5:8]
    (choice,) = ask(path, **fields, stop=["\0never", stop])["choices"]
    assert (text_of(choice), choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    *chunks, closing = stream(path, **fields, stop=stop)
    assert texts_of([*chunks, closing]) == {0: text[: text.index(stop)]}
    assert closing["choices"][0]["finish_reason"] == "stop"


@each_path
def test_absent_temperature_is_greedy_and_seeds_are_kept(ask: Any, path: str):
    def text(**fields: Any) -> str:
        return text_of(ask(path, max_tokens=12, ignore_eos=True, **fields)["choices"][0])

    assert text() == text(temperature=0) == text(temperature=0, seed=7, top_p=1) == text(temperature=None, top_p=None)
    assert text(temperature=3, seed=7) == text(temperature=3, seed=7, top_p=1.0, top_k=0)
    assert text(temperature=3, seed=7) != text(temperature=3, seed=8)


@each_path
def test_without_a_limit_the_context_is_filled(ask: Any, client: httpx.Client, path: str):
    context = client.get("/health").json()["context"]
    usage = ask(path, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == context


# ---- prompts ----------------------------------------------------------------------------------------------------


def test_prompts_in_all_their_shapes(ask: Any):
    fields = {"max_tokens": 6, "ignore_eos": True}
    texts = {prompt: text_of(ask(COMPLETIONS, prompt=prompt, **fields)["choices"][0]) for prompt in ("the cat", "mat")}
    body = ask(COMPLETIONS, prompt=["the cat", "mat"], **fields)
    assert [text_of(choice) for choice in body["choices"]] == list(texts.values())
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    ids = [[66, 67, 68], [70, 71]]
    body = ask(COMPLETIONS, prompt=ids, n=2, **fields)
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    first, _, second, _ = (text_of(choice) for choice in body["choices"])
    assert first == text_of(ask(COMPLETIONS, prompt=ids[0], **fields)["choices"][0])
    assert second == text_of(ask(COMPLETIONS, prompt=[ids[1]], **fields)["choices"][0])


def test_messages_in_all_their_shapes(ask: Any):
    def told(*messages: Any) -> tuple[int, str]:
        body = ask(CHAT, messages=list(messages), max_tokens=6, ignore_eos=True)
        return body["usage"]["prompt_tokens"], text_of(body["choices"][0])

    user = {"role": "user", "content": "the cat"}
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    assert told(user) == told({"role": "user", "content": parts})
    system = {"role": "system", "content": "sat"}
    assert told(system, user) == told({"role": "developer", "content": "sat"}, user) != told(user)
    silent = [{"role": "assistant", "content": None}, {"role": "assistant", "content": ""}, {"role": "assistant"}]
    replies = [told(user, turn, user) for turn in silent]
    assert replies == replies[:1] * 3
    begun = told(user, {"role": "assistant", "content": "on the"})
    assert begun != told(user), "an assistant's last message is gone on from"


# ---- log-probabilities ------------------------------------------------------------------------------------------


def test_log_probabilities_of_a_chat(ask: Any, stream: Any):
    fields = {"max_tokens": 12, "temperature": 3.0, "seed": 4, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    (choice,) = ask(CHAT, **fields)["choices"]
    assert set(choice["logprobs"]) == {"content", "refusal"}
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 3
        chances = [top["logprob"] for top in token["top_logprobs"]]
        assert chances == sorted(chances, reverse=True)
        assert token["logprob"] <= chances[0] <= 0
        assert all(math.isfinite(chance) for chance in chances)
    spelled = b"".join(bytes(token["bytes"]) for token in content)
    assert spelled.decode(errors="replace") == text_of(choice)
    chunks = stream(CHAT, **fields)
    assert [
        row for chunk in chunks for row in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ] == content


def test_log_probabilities_of_a_completion(ask: Any, stream: Any):
    fields = {"max_tokens": 12, "temperature": 3.0, "seed": 4, "logprobs": 2, "ignore_eos": True}
    (choice,) = ask(COMPLETIONS, **fields)["choices"]
    table = choice["logprobs"]
    assert list(table) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert {len(column) for column in table.values()} == {12}
    for offset, chance, token, top in zip(*table.values(), strict=True):
        if not token.startswith("bytes:"):
            assert text_of(choice)[offset : offset + len(token)] == token
        assert top[token] == chance
        assert 2 <= len(top) <= 3
    chunks = stream(COMPLETIONS, **fields)
    for name, column in table.items():
        pieces = [chunk["choices"][0]["logprobs"] or {name: []} for chunk in chunks]
        assert [row for piece in pieces for row in piece[name]] == column


@pytest.mark.parametrize("forced", [70, 101, 200])
def test_an_echoed_prompt_is_scored_as_its_tokens_are_when_they_are_drawn(ask: Any, forced: int):
    prompt = [66, 67, 68]
    bias = {str(forced): 100}
    drawn = ask(COMPLETIONS, prompt=prompt, max_tokens=1, logprobs=0, logit_bias=bias)["choices"][0]["logprobs"]
    body = ask(COMPLETIONS, prompt=[*prompt, forced], max_tokens=0, echo=True, logprobs=0)
    (choice,) = body["choices"]
    scored = choice["logprobs"]
    assert scored["tokens"][-1] == drawn["tokens"][0]
    # Log-probabilities of a row of a prompt and of one that draws are computed apart.
    assert scored["token_logprobs"][-1] == pytest.approx(drawn["token_logprobs"][0], rel=1e-6)
    assert scored["token_logprobs"][0] is None
    assert scored["top_logprobs"][0] is None
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}


def test_an_echo_with_tokens_after_it(ask: Any, stream: Any):
    fields = {"prompt": ["the cat", "the mat"], "max_tokens": 3, "ignore_eos": True}
    plain = ask(COMPLETIONS, **fields)
    body = ask(COMPLETIONS, **fields, echo=True, logprobs=1)
    assert body["usage"] == plain["usage"]
    for prompt, with_echo, without in zip(fields["prompt"], body["choices"], plain["choices"], strict=True):
        assert text_of(with_echo) == prompt + text_of(without)
        table = with_echo["logprobs"]
        assert table["text_offset"][0] == 0
        assert table["text_offset"][-3] == len(prompt)
        assert table["token_logprobs"][0] is None
        assert all(chance <= 0 for chance in table["token_logprobs"][1:])
        written = [token for token in table["tokens"] if not token.startswith("bytes:")]
        assert "".join(written[: len(table["tokens"]) - 3]) == prompt
    assert texts_of(stream(COMPLETIONS, **fields, echo=True, logprobs=1)) == {
        choice["index"]: text_of(choice) for choice in body["choices"]
    }


# ---- refusals ---------------------------------------------------------------------------------------------------


@each_path
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 0.5}, "top_p", "invalid_value"),
        ({"top_k": 5}, "top_k", "invalid_value"),
        ({"temperature": 1, "top_p": 5}, "top_p", "invalid_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ],
)
def test_values_out_of_range_are_refused_in_the_name_of_their_field(
    refuse: Any, path: str, fields: Any, param: str, code: str
):
    error = refuse(path, **fields)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@each_path
def test_fields_that_are_not_known_or_not_supported(refuse: Any, path: str):
    error = refuse(path, frobnicate=1)
    assert (error["param"], error["code"]) == ("frobnicate", "unknown_parameter")
    error = refuse(path, stream=True, stream_options={"frobnicate": True})
    assert (error["param"], error["code"]) == ("stream_options.frobnicate", "unknown_parameter")
    name, value = ("tools", [{"type": "function"}]) if path == CHAT else ("suffix", "end")
    error = refuse(path, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@each_path
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_prompt_and_limit_over_the_context_are_refused_with_the_numbers(
    refuse: Any, client: httpx.Client, path: str, name: str
):
    context = client.get("/health").json()["context"]
    error = refuse(path, **{name: context})
    assert error["code"] == "context_length_exceeded"
    assert str(context) in error["message"]
    assert error["param"] == name
    long = "x " * 9999
    error = refuse(
        path, **{CHAT: {"messages": [{"role": "user", "content": long}]}, COMPLETIONS: {"prompt": long}}[path]
    )
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([-1], "prompt"),
        ([99999], "prompt"),
        ([[5], [99999]], "prompt[1]"),
    ],
)
def test_prompts_that_are_none(refuse: Any, prompt: Any, param: str):
    assert refuse(COMPLETIONS, prompt=prompt)["param"] == param
    assert refuse(COMPLETIONS, prompt=prompt, stream=True, echo=True)["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
        ([*MESSAGES, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"content": "x"}], "messages[0].role"),
    ],
)
def test_messages_that_are_none(refuse: Any, messages: Any, param: str):
    assert refuse(CHAT, messages=messages)["param"] == param


@each_path
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"model": NaN}', b'{"model": "\\ud800"}', b"\xff", b"[" * 5000],
    ids=range(9),
)
def test_what_is_no_request_at_all(client: httpx.Client, path: str, body: bytes):
    error = error_of(client.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"
