"""Anthropic's requests: what each field becomes, and what is refused in whose name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import FAMILIES

from crucible.serve.anthropic import COUNT_TOKENS, MESSAGES, check_version, model, models
from crucible.serve.anthropic.requests import MessagesRequest
from crucible.serve.protocol import ApiError, Call, Generate, Served
from crucible.tokenizer.chat import ChatTemplate

SERVED = Served(
    model_id="toy",
    aliases=frozenset({"claude-x"}),
    created=1_700_000_000,
    context=128,
    vocab_size=300,
    fingerprint="fp_abc",
    decode=lambda ids: "".join(chr(97 + token_id) for token_id in ids),
)
TURNS = [{"role": "user", "content": "Hi"}]
LEAST = {"model": "toy", "max_tokens": 5, "messages": TURNS}


def read(**fields: Any) -> Generate:
    (call,), _ = MESSAGES.read(json.dumps({**LEAST, **fields}).encode(), SERVED)
    return call.request


def read_count(**fields: Any) -> Call:
    return COUNT_TOKENS.read(json.dumps({"model": "toy", "messages": TURNS, **fields}).encode(), SERVED)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


def fields_of(request: Generate) -> dict[str, Any]:
    """Those that are given."""
    return {name: value for name in request.__struct_fields__ if (value := getattr(request, name)) is not None}


# ---- what is honoured -------------------------------------------------------------------------------------------


def test_the_least_request_leaves_everything_else_to_the_server():
    assert fields_of(read()) == {"messages": TURNS, "max_tokens": 5}


def test_max_tokens_may_be_more_than_the_context_leaves():
    (call,), _ = MESSAGES.read(json.dumps({**LEAST, "max_tokens": 128_000}).encode(), SERVED)
    assert call.clamps_max_tokens
    assert call.request.max_tokens == 128_000


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "min_tokens": 2,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_fields_are_the_native_ones(name: str):
    assert fields_of(read(**{name: SAMPLING[name]})) == {**fields_of(read()), name: SAMPLING[name]}


def test_keys_of_a_logit_bias_are_token_ids():
    assert read(logit_bias={"4": -2}).logit_bias == {4: -2.0}


def test_stop_sequences_are_stop_strings_under_a_name_of_their_own():
    (call,), _ = MESSAGES.read(json.dumps({**LEAST, "stop_sequences": ["a", "b"]}).encode(), SERVED)
    assert call.request.stop == ["a", "b"]
    assert call.names == {"stop": "stop_sequences"}


@pytest.mark.parametrize(("value", "streams"), [(None, False), (False, False), (True, True)])
def test_a_stream_is_what_was_asked_for(value: bool | None, streams: bool):
    _, reply = MESSAGES.read(json.dumps({**LEAST, "stream": value}).encode(), SERVED)
    assert reply.streams is streams


def test_an_alias_is_answered_to():
    assert read(model="claude-x") == read()


def test_null_is_a_field_left_out():
    names = [name for name in MessagesRequest.__struct_fields__ if name not in LEAST]
    assert read(**dict.fromkeys(names)) == read()


# ---- conversations ----------------------------------------------------------------------------------------------


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_blocks_are_put_together_with_nothing_in_between():
    blocks = [text("One, "), text("two\n", cache_control={"type": "ephemeral", "scope": "x"}), text("", citations=None)]
    turns = [{"role": "user", "content": blocks}]
    assert read(system=blocks, messages=turns).messages == [
        {"role": "system", "content": "One, two\n"},
        {"role": "user", "content": "One, two\n"},
    ]


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_an_empty_system_prompt_is_none(system: Any):
    assert read(system=system).messages == TURNS


def test_system_comes_first_and_turns_keep_their_places():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert read(system="s", messages=turns).messages == [{"role": "system", "content": "s"}, *turns]


def test_counting_reads_the_same_conversation():
    turns = [*TURNS, {"role": "assistant", "content": [text("He")]}]
    call = read_count(system=[text("s")], messages=turns, tools=[], thinking={"type": "disabled"})
    assert call.request.messages == read(system=[text("s")], messages=turns).messages
    assert COUNT_TOKENS.reply(12) == b'{"input_tokens":12}'


@pytest.mark.parametrize("family", ["chatml", "llama3", "zephyr"])
def test_a_conversation_has_the_tokens_of_the_same_messages_in_one_list(family: str):
    own = FAMILIES[family]
    template = ChatTemplate(own.tokenizer(), own.source, own.special)
    turns = [
        {"role": "user", "content": "a <|im_end|> b"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "The answer (  "},
    ]
    in_blocks = [{**turn, "content": [text(turn["content"][:3]), text(turn["content"][3:])]} for turn in turns]
    expected = template.encode([{"role": "system", "content": "Be brief."}, *turns])
    assert template.encode(read(system="Be brief.", messages=in_blocks).messages or []) == expected


# ---- what is without effect, and what is refused ----------------------------------------------------------------

INERT = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "user_profile_id": "u",
    "diagnostics": {"previous_message_id": None},
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "thinking": {"type": "disabled"},
    "tools": [],
    "mcp_servers": [],
    "container": {},
    "context_management": {"edits": []},
    "speed": "standard",
}


@pytest.mark.parametrize("name", INERT)
def test_what_asks_for_nothing_changes_nothing(name: str):
    assert read(**{name: INERT[name]}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", {"type": "none"}),
        ("tool_choice", {"type": "auto"}),
        ("tool_choice", {"type": "auto", "disable_parallel_tool_use": None}),
        ("output_config", {"effort": "high", "format": None}),
        ("output_config", {"format": None}),
    ],
)
def test_a_value_that_is_the_default_changes_nothing(name: str, value: Any):
    assert read(**{name: value}) == read()
    assert read_count(**{name: value}) == read_count()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("thinking", {"type": "adaptive"}),
        ("tools", [{"name": "t", "input_schema": {"type": "object"}}]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "t"}),
        ("mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}]),
        ("container", "container_1"),
        ("context_management", {"edits": [{"type": "clear_tool_uses"}]}),
        ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
        ("output_config", {"effort": "low"}),
        ("output_format", {"type": "json_schema", "schema": {}}),
        ("speed", "fast"),
        ("inference_geo", "us"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(name: str, value: Any):
    error = refused(**{name: value})
    assert (error.kind, error.param) == ("unsupported", name)
    assert error.message.startswith(f"{name} is not supported: ")


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
        {"type": "tool_result", "tool_use_id": "t", "content": "r"},
        {"type": "tool_use", "id": "t", "name": "t", "input": {}},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
    ],
)
def test_blocks_that_are_no_text_are_refused_by_their_type(block: dict[str, Any]):
    error = refused(messages=[{"role": "user", "content": [text("What is this?"), block]}])
    assert (error.kind, error.param) == ("unsupported", "messages[0].content[1]")
    assert block["type"] in error.message


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": None}, ".text"),
        ({"type": "text", "text": 3}, ".text"),
        ({"text": "a"}, ".type"),
        ({"type": "secret", "text": "a"}, ".type"),
        ({"type": ["text"], "text": "a"}, ".type"),
        (text("a", colour="red"), ""),
    ],
)
def test_malformed_blocks_are_refused(block: dict[str, Any], param: str):
    turns = [*TURNS, {"role": "user", "content": [block]}]
    for fields, at in (({"system": [block]}, "system[0]"), ({"messages": turns}, "messages[1].content[0]")):
        error = refused(**fields)
        assert (error.kind, error.param) == ("invalid", at + param)
        assert at in error.message
        assert "secret" not in error.message


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [], "system": "s"}, "messages"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "n"}]}, "name"),
        ({"system": {"type": "text"}}, "system"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [None]}, "stop_sequences[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"model": 3}, "model"),
        ({"top_n_sigma": 1}, "top_n_sigma"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_types_and_unknown_fields_are_refused_by_name(fields: dict[str, Any], name: str):
    error = refused(**fields)
    assert error.status == 400
    assert name in error.message


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "stream", "stop_sequences"])
def test_counting_takes_the_prompt_alone(name: str):
    with pytest.raises(ApiError, match=name):
        read_count(**{name: 1})


def test_an_unknown_model_is_not_answered_for():
    error = refused(model="claude-secret")
    assert (error.kind, error.status, error.param) == ("not_found", 404, "model")
    assert "toy" in error.message
    assert "secret" not in error.message
    with pytest.raises(ApiError):
        read_count(model="claude-secret")


# ---- version and models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "2023-06-01", "2024-02-29", "2026-10-21"])
def test_any_date_from_the_first_version_on_is_taken(value: str | None):
    check_version(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "2023-05-31",
        "2023-01-01",
        "2025-02-29",
        "2026-13-01",
        "20261021",
        "2026-W43-3",
        "latest",
        "２０２６-10-21",
        "2026-10-21 ",
    ],
)
def test_what_is_no_such_date_is_refused(value: str):
    with pytest.raises(ApiError, match="anthropic-version must be a date") as caught:
        check_version(value)
    assert (caught.value.status, caught.value.param) == (400, "anthropic-version")


def test_models_lists_the_one_that_is_served():
    entry = {
        "type": "model",
        "id": "toy",
        "display_name": "toy",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 128,
        "max_tokens": 128,
    }
    assert models(SERVED) == {"data": [entry], "has_more": False, "first_id": "toy", "last_id": "toy"}
    assert model(SERVED, "toy") == model(SERVED, "claude-x") == entry
    with pytest.raises(ApiError) as caught:
        model(SERVED, "other")
    assert caught.value.status == 404
