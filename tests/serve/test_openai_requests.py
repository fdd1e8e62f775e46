"""OpenAI's requests: what each field becomes, and what is refused in whose name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crucible.serve.openai import CHAT, COMPLETIONS, model, models, refusal
from crucible.serve.protocol import ApiError, Call, Generate, Served

SERVED = Served(
    model_id="org/toy",
    aliases=frozenset({"gpt-4o"}),
    created=1_700_000_000,
    context=128,
    vocab_size=300,
    fingerprint="fp_abc",
    decode=lambda ids: "".join(chr(97 + token_id) for token_id in ids),
)
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDPOINTS = {"chat": (CHAT, {"messages": MESSAGES}), "completions": (COMPLETIONS, {"prompt": "Hi"})}

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS)


def read(endpoint: str, **fields: Any) -> list[Call]:
    surface, least = ENDPOINTS[endpoint]
    calls, _ = surface.read(json.dumps({"model": "org/toy", **least, **fields}).encode(), SERVED)
    return calls


def read_one(endpoint: str, **fields: Any) -> Generate:
    (call,) = read(endpoint, **fields)
    assert not call.clamps_max_tokens
    return call.request


def refused(endpoint: str, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(endpoint, **fields)
    return caught.value


def fields_of(request: Generate) -> dict[str, Any]:
    """Those that are given."""
    return {name: value for name in request.__struct_fields__ if (value := getattr(request, name)) is not None}


# ---- fields of both endpoints -----------------------------------------------------------------------------------


def test_the_least_requests_leave_everything_to_the_server():
    assert fields_of(read_one("chat")) == {"messages": MESSAGES}
    assert fields_of(read_one("completions")) == {"prompt": "Hi", "prompt_logprobs": False}


SAMPLING = {
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": -3,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": -0.3,
}


@each_endpoint
def test_sampling_fields_are_the_native_ones(endpoint: str):
    request = read_one(endpoint, **SAMPLING, max_tokens=9, logit_bias={"12": -100, "3": 0.5})
    got = fields_of(request)
    assert got.items() >= {**SAMPLING, "max_tokens": 9, "logit_bias": {12: -100.0, 3: 0.5}}.items()
    assert read_one(endpoint, stop="one").stop == "one"


@each_endpoint
def test_null_stands_for_a_field_that_is_left_out(endpoint: str):
    _, least = ENDPOINTS[endpoint]
    optional = [name for name in type_of(endpoint).__struct_fields__ if name not in ("model", *least)]
    assert fields_of(read_one(endpoint, **dict.fromkeys(optional))) == fields_of(read_one(endpoint))
    assert refused(endpoint, model=None).kind == "invalid"


def type_of(endpoint: str) -> Any:
    from crucible.serve.openai import chat, completions

    return {"chat": chat.ChatRequest, "completions": completions.CompletionRequest}[endpoint]


INERT = {
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
}


@each_endpoint
def test_fields_about_billing_and_storing_have_no_effect(endpoint: str):
    assert read_one(endpoint, **INERT) == read_one(endpoint)


@each_endpoint
def test_defaults_that_clients_spell_out_are_passed_on_as_they_are(endpoint: str):
    fields = {"n": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "stream": False, "stop": []}
    assert fields_of(read_one(endpoint, **fields)).items() >= {"n": 1, "top_p": 1.0, "stop": []}.items()


@each_endpoint
def test_both_names_of_the_limit_are_taken_and_must_agree(endpoint: str):
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        (call,) = read(endpoint, **fields)
        assert call.request.max_tokens == 5
        assert call.names["max_tokens"] == list(fields)[-1], "errors name the field that was sent"
    error = refused(endpoint, max_tokens=5, max_completion_tokens=6)
    assert (error.status, error.param) == (400, "max_completion_tokens")
    assert "5" in error.message
    assert "6" in error.message


@each_endpoint
def test_an_unknown_model_is_not_answered_for(endpoint: str):
    error = refused(endpoint, model="gpt-5")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "org/toy" in error.message
    assert "gpt-5" not in error.message
    assert read_one(endpoint, model="gpt-4o") == read_one(endpoint)


@each_endpoint
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": "2"}, "n"),
        ({"seed": "100"}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"model": 7}, "model"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_wrong_types_and_unknown_fields_are_refused(endpoint: str, fields: dict[str, Any], param: str):
    error = refused(endpoint, **fields)
    assert error.kind == "invalid"
    assert error.param is not None
    assert error.param.endswith(param)


@each_endpoint
@pytest.mark.parametrize("bias", [{"AI": -100}, {"1": None}, {"1": True}, {"1": "x"}, [1]])
def test_a_logit_bias_is_numbers_by_token_ids(endpoint: str, bias: Any):
    assert refused(endpoint, logit_bias=bias).kind == "invalid"


@each_endpoint
def test_stream_options_are_for_streams(endpoint: str):
    error = refused(endpoint, stream_options={"include_usage": True})
    assert (error.kind, error.param) == ("invalid", "stream_options")
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, {}):
        assert read_one(endpoint, stream=True, stream_options=options) == read_one(endpoint)
    assert read_one(endpoint, stream=True, stream_options={"include_obfuscation": False}) == read_one(endpoint)
    error = refused(endpoint, stream=True, stream_options={"include_obfuscation": True})
    assert (error.kind, error.param) == ("unsupported", "stream_options.include_obfuscation")
    error = refused(endpoint, stream=True, stream_options={"continuous_usage_stats": True})
    assert (error.kind, error.param) == ("invalid", "stream_options.continuous_usage_stats")


@each_endpoint
@pytest.mark.parametrize("streams", [False, True])
def test_the_reply_streams_if_that_was_asked_for(endpoint: str, streams: bool):
    surface, least = ENDPOINTS[endpoint]
    _, reply = surface.read(json.dumps({"model": "org/toy", **least, "stream": streams}).encode(), SERVED)
    assert reply.streams is streams


# ---- chat -------------------------------------------------------------------------------------------------------


def test_logprobs_of_a_chat():
    assert read_one("chat", logprobs=False).logprobs is None
    assert read_one("chat", logprobs=True).logprobs == 0
    assert read_one("chat", logprobs=True, top_logprobs=5).logprobs == 5
    assert read_one("chat", top_logprobs=0).logprobs is None
    error = refused("chat", top_logprobs=5)
    assert (error.kind, error.param) == ("invalid", "top_logprobs")
    (call,) = read("chat", logprobs=True, top_logprobs=21)
    assert call.names["logprobs"] == "top_logprobs", "the native field's range is that of this one"


@pytest.mark.parametrize(
    "field",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"functions": []},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"reasoning_effort": "none"},
        {"verbosity": "medium"},
        {"parallel_tool_calls": True},
        {"prediction": {"type": "content", "content": "x"}},
    ],
)
def test_what_asks_for_nothing_is_accepted(field: dict[str, Any]):
    assert read_one("chat", **field) == read_one("chat")


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"reasoning_effort": "low"},
        {"verbosity": "high"},
        {"web_search_options": {}},
        {"moderation": {"model": "m"}},
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(field: dict[str, Any]):
    error = refused("chat", **field)
    (name,) = field
    assert (error.status, error.kind, error.param) == (400, "unsupported", name)
    assert error.message.startswith(name)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_no_text_is_refused_by_name(kind: str):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    error = refused("chat", messages=[*MESSAGES, {"role": "user", "content": parts}])
    assert (error.kind, error.param) == ("unsupported", "messages[1].content[1]")
    assert kind in error.message


def test_messages_lose_only_what_says_nothing():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = read_one(
        "chat",
        messages=[
            {"role": "developer", "content": parts},
            {"role": "user", "content": "", "name": None},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": [call]},
            {"role": "tool", "content": "c", "tool_call_id": "c"},
            {"role": "assistant", "content": [], "tool_calls": []},
        ],
    )  # fmt: skip
    assert request.messages == [
        {"role": "developer", "content": parts},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "c"},
        {"role": "assistant", "content": []},
    ]


@pytest.mark.parametrize("messages", ["Hi", None, ["Hi"], {}, [[]]])
def test_messages_are_a_list_of_objects(messages: Any):
    assert refused("chat", messages=messages).kind == "invalid"


@pytest.mark.parametrize("part", [None, 1, "x", [], {}, {"type": None}, {"type": []}, {"type": {}}, {"text": "x"}])
def test_malformed_parts_are_left_to_the_template(part: Any):
    assert read_one("chat", messages=[{"role": "user", "content": [part]}]).messages is not None


# ---- completions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [
        ("Hi", [(None, "Hi")]),
        ("", [(None, "")]),
        ([1, 2], [(None, [1, 2])]),
        (["a"], [("prompt[0]", "a")]),
        (["a", ""], [("prompt[0]", "a"), ("prompt[1]", "")]),
        ([[1], [2, 3], []], [("prompt[0]", [1]), ("prompt[1]", [2, 3]), ("prompt[2]", [])]),
    ],
)
def test_prompts_are_text_or_ids_or_lists_of_them(prompt: Any, calls: list[tuple[str | None, Any]]):
    assert [(call.at, call.request.prompt) for call in read("completions", prompt=prompt, seed=5)] == calls


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], ["a", 1], [1, [1]], ["a", [1]], [True], [[True]], [1.5], [[["a"]]]]
)
def test_other_prompts_are_refused(prompt: Any):
    error = refused("completions", prompt=prompt)
    assert error.kind == "invalid"
    assert error.param is not None
    assert error.param.startswith("prompt")


def test_logprobs_of_a_completion():
    request = read_one("completions", logprobs=3)
    assert (request.logprobs, request.prompt_logprobs) == (3, False)
    request = read_one("completions", logprobs=0, echo=True)
    assert (request.logprobs, request.prompt_logprobs) == (0, True)
    request = read_one("completions", echo=True)
    assert (request.logprobs, request.prompt_logprobs) == (None, False)
    assert refused("completions", logprobs=True).param == "logprobs"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_prompt_is_scored_by_drawing_one_token(name: str):
    assert read_one("completions", echo=True, **{name: 0}).max_tokens == 1
    assert read_one("completions", **{name: 0}).max_tokens == 0, "which the native request refuses"
    assert read_one("chat", **{name: 0}).max_tokens == 0


def test_best_of_can_only_be_n():
    assert read_one("completions", best_of=1) == read_one("completions")
    assert read_one("completions", best_of=3, n=3) == read_one("completions", n=3)
    for fields in ({"best_of": 2}, {"best_of": 4, "n": 3}, {"best_of": 2, "n": 3}, {"best_of": 0}):
        error = refused("completions", **fields)
        assert (error.kind, error.param) == ("unsupported", "best_of")


def test_a_suffix_is_refused():
    assert read_one("completions", suffix="") == read_one("completions")
    error = refused("completions", suffix="end")
    assert (error.kind, error.param) == ("unsupported", "suffix")


def test_each_endpoint_has_its_own_fields():
    assert refused("completions", messages=MESSAGES).param == "messages"
    assert refused("chat", prompt="Hi").param == "prompt"
    assert refused("chat", echo=True).param == "echo"


# ---- errors and models ------------------------------------------------------------------------------------------


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ApiError("invalid", "n", param="n"), 400, INVALID, "invalid_value"),
        (ApiError("invalid", "n", param="n", code="unknown_field"), 400, INVALID, "unknown_parameter"),
        (ApiError("invalid", "n", param="n", code="missing_field"), 400, INVALID, "missing_required_parameter"),
        (ApiError("unsupported", "n", param="n"), 400, INVALID, "unsupported_parameter"),
        (ApiError("too_long", "n", param="n"), 400, INVALID, "context_length_exceeded"),
        (ApiError("not_found", "n", code="model_not_found"), 404, INVALID, "model_not_found"),
        (ApiError("authentication", "n"), 401, INVALID, "invalid_api_key"),
        (ApiError("overloaded", "n", retry_after=2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ApiError("unavailable", "n", retry_after=5), 503, "server_error", "service_unavailable"),
        (ApiError("internal", "n"), 500, "server_error", "internal_error"),
    ],
)
def test_errors_carry_message_type_param_and_code(error: ApiError, status: int, kind: str, code: str):
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if status == 500:
        headers["x-should-retry"] = "false"
    body = {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
    got_status, got_headers, got_body = refusal(error, "req_1")
    assert (got_status, got_headers, json.loads(got_body)) == (status, headers, body)


def test_the_model_is_listed_once_and_found_by_its_aliases():
    entry = {"id": "org/toy", "object": "model", "created": 1_700_000_000, "owned_by": "crucible"}
    assert models(SERVED) == {"object": "list", "data": [entry]}
    assert model(SERVED, "org/toy") == model(SERVED, "gpt-4o") == entry
    with pytest.raises(ApiError) as caught:
        model(SERVED, "toy")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
