"""What people point at Anthropic's API, pointed at this one: the official client, LangChain, LiteLLM."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

TURNS: Any = [{"role": "user", "content": "The quick brown fox"}]
NUM_TOKENS = 12
AT_RANDOM = {"temperature": 3.0, "ignore_eos": True}
"""The toy model then draws bytes at random; the official client has no arguments for these."""


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ask(server: Any) -> dict[str, Any]:
    return {"model": server.model_id, "max_tokens": NUM_TOKENS, "messages": TURNS, "extra_body": AT_RANDOM}


@pytest.fixture(scope="module")
def reply(client: Any, ask: dict[str, Any]) -> Any:
    return client.messages.create(**ask)


def same(message: Any) -> dict[str, Any]:
    """A message without its own id."""
    return message.to_dict(exclude_none=True) | {"id": ""}


# ---- the official client ----------------------------------------------------------------------------------------


def test_a_message(client: Any, ask: dict[str, Any], reply: Any):
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", ask["model"])
    (block,) = reply.content
    assert block.type == "text"
    assert block.text
    assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)
    assert reply.usage.output_tokens == NUM_TOKENS
    assert reply.usage.input_tokens == client.messages.count_tokens(model=ask["model"], messages=TURNS).input_tokens
    assert reply._request_id


def test_the_streaming_helper_adds_up_to_the_same_message(client: Any, ask: dict[str, Any], reply: Any):
    with client.messages.stream(**ask) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == reply.content[0].text
    assert same(message) == same(reply)
    assert stream.response.headers["request-id"]


def test_raw_events(client: Any, ask: dict[str, Any], reply: Any):
    events = list(client.messages.create(**ask, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events[2:-3]) == reply.content[0].text
    assert events[0].message.usage.input_tokens == events[-2].usage.input_tokens == reply.usage.input_tokens
    assert events[-2].usage.output_tokens == reply.usage.output_tokens


def test_async_whole_streamed_and_side_by_side(server: Any, ask: dict[str, Any], reply: Any):
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="any", max_retries=0) as client:
            whole, streamed, count = await asyncio.gather(
                client.messages.create(**ask),
                streamed_text(client),
                client.messages.count_tokens(model=ask["model"], messages=TURNS),
            )
        assert count.input_tokens == whole.usage.input_tokens
        return [whole.content[0].text, *streamed]

    async def streamed_text(client: Any) -> list[str]:
        async with client.messages.stream(**ask) as stream:
            text = "".join([text async for text in stream.text_stream])
            return [text, await stream.get_final_text()]

    assert asyncio.run(run()) == [reply.content[0].text] * 3


def test_what_the_client_has_no_argument_for_goes_by_extra_body(client: Any, ask: dict[str, Any]):
    def text(**fields: Any) -> str:
        return client.messages.create(**ask | {"extra_body": {"ignore_eos": True, **fields}}).content[0].text

    greedy = text()
    filters = {"top_p": 0.95, "top_k": 200, "min_p": 0.001}
    drawn = text(temperature=1.0, seed=3, **filters)
    assert drawn == text(temperature=1.0, seed=3, **filters)
    assert drawn not in (greedy, text(temperature=1.0, seed=4, **filters))
    assert text(temperature=0, seed=5, top_p=1) == greedy
    assert text(repetition_penalty=3, frequency_penalty=2, presence_penalty=2) != greedy


def test_a_stop_sequence_is_reported(client: Any, ask: dict[str, Any], reply: Any):
    text = reply.content[0].text
    stop = text[4:6]
    with client.messages.stream(**ask, stop_sequences=["never in it", stop]) as stream:
        streamed = stream.get_final_message()
    message = client.messages.create(**ask, stop_sequences=["never in it", stop])
    for found in (message, streamed):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
        assert found.content[0].text == text[: text.index(stop)]
    assert message.usage == streamed.usage
    assert message.usage.output_tokens <= NUM_TOKENS


def test_replies_can_be_sent_back(client: Any, ask: dict[str, Any], reply: Any):
    with client.messages.stream(**ask) as stream:
        helped = stream.get_final_message()
    ways = [reply.content[0].text, reply.content, helped.content, reply.to_param()["content"]]
    more = [
        client.messages.create(
            **ask
            | {"messages": [*TURNS, {"role": "assistant", "content": content}, {"role": "user", "content": "Go on"}]}
        )
        for content in ways
    ]
    assert len({(message.content[0].text, message.usage.input_tokens) for message in more}) == 1
    assert more[0].usage.input_tokens > reply.usage.input_tokens


def test_system_blocks_cache_control_and_metadata(client: Any, ask: dict[str, Any]):
    marked: Any = {"cache_control": {"type": "ephemeral"}}
    plain = client.messages.create(**ask, system="Be brief. Be kind.")
    blocks: Any = [{"type": "text", "text": "Be brief. "}, {"type": "text", "text": "Be kind.", **marked}]
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": TURNS[0]["content"], **marked}]}]
    marked_up = client.messages.create(
        **ask | {"messages": turns},
        system=blocks,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        tools=[],
        **marked,
    )
    assert same(marked_up) == same(plain)


def test_the_beta_side_of_the_client(client: Any, ask: dict[str, Any], reply: Any):
    more: Any = {"betas": ["interleaved-thinking-2025-05-14"], "extra_query": {"beta": "true"}}
    assert client.beta.messages.create(**ask, **more).content[0].text == reply.content[0].text
    with client.beta.messages.stream(**ask, **more) as stream:
        assert stream.get_final_text() == reply.content[0].text
    count = client.beta.messages.count_tokens(model=ask["model"], messages=TURNS, **more)
    assert count.input_tokens == reply.usage.input_tokens


def test_models(client: Any, server: Any):
    (found,) = client.models.list()
    assert (found.type, found.id, found.display_name, found.lifecycle) == ("model", *[server.model_id] * 2, "active")
    assert client.models.retrieve(server.model_id) == found
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none-such")


@pytest.mark.parametrize(
    ("fields", "status", "name"),
    [
        ({"model": "none-such"}, 404, "model"),
        ({"tools": [{"name": "t", "input_schema": {"type": "object"}}]}, 400, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "thinking"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"extra_body": {"top_k": 5}}, 400, "top_k"),
        ({"extra_body": {"temperature": -1}}, 400, "temperature"),
        ({"extra_body": {"colour": "red"}}, 400, "colour"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_refusals_reach_the_caller_in_the_clients_own_types(
    client: Any, ask: dict[str, Any], fields: dict[str, Any], status: int, name: str, streams: bool
):
    error = {400: anthropic.BadRequestError, 404: anthropic.NotFoundError}[status]
    with pytest.raises(error) as caught:
        client.messages.create(**ask | fields, stream=streams)
    assert caught.value.status_code == status
    assert caught.value.body["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert name in caught.value.body["error"]["message"]
    assert caught.value.request_id == caught.value.body["request_id"]


def test_a_format_for_the_output_is_refused_by_its_name(client: Any, ask: dict[str, Any]):
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: int

    with pytest.raises(anthropic.BadRequestError, match="output_config"):
        client.messages.parse(**ask, output_format=Answer)


# ---- what is built on it ----------------------------------------------------------------------------------------


def test_langchain(server: Any, reply: Any):
    langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")

    def chat(**fields: Any) -> Any:
        return langchain_anthropic.ChatAnthropic(
            model=server.model_id,
            base_url=server.url,
            api_key="any",
            max_retries=0,
            temperature=AT_RANDOM["temperature"],
            model_kwargs={"extra_body": {"ignore_eos": True}},
            **fields,
        )

    own = chat(max_tokens=NUM_TOKENS)
    prompt = TURNS[0]["content"]
    message = own.invoke(prompt)
    assert message.content == reply.content[0].text
    assert message.response_metadata["stop_reason"] == "max_tokens"
    assert message.usage_metadata["input_tokens"] == reply.usage.input_tokens
    assert message.usage_metadata["output_tokens"] == NUM_TOKENS
    assert "".join(chunk.content for chunk in own.stream(prompt)) == reply.content[0].text
    assert asyncio.run(own.ainvoke([("system", "s"), ("human", prompt)])).content
    # Its default for max_tokens is far beyond the context.
    assert chat(stop=[reply.content[0].text[2:4]]).invoke(prompt).response_metadata["stop_reason"] == "stop_sequence"


def test_litellm(server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        common: Any = {
            "model": f"anthropic/{server.model_id}",
            "api_base": server.url,
            "api_key": "any",
            "messages": TURNS,
            "num_retries": 0,
            **AT_RANDOM,
        }
        whole = litellm.completion(**common, max_tokens=NUM_TOKENS)
        text = whole.choices[0].message.content
        assert text == reply.content[0].text
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == NUM_TOKENS
        assert whole.usage.prompt_tokens == reply.usage.input_tokens
        chunks = list(litellm.completion(**common, max_tokens=NUM_TOKENS, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        # Without max_tokens it sends 128,000.
        stopped = litellm.completion(**common, stop=[text[2:4]])
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].message.content == text[: text.index(text[2:4])]
