"""What speaks OpenAI's API in the field: the official SDK, LiteLLM, LangChain and the `llm` command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

openai = pytest.importorskip("openai", reason="the openai package is not installed")

MESSAGES = [{"role": "user", "content": "the cat"}]
SHORT = {"max_tokens": 8, "seed": 5, "temperature": 3.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def sdk(server: Any):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def expected(server: Any):
    """The text of a reply without an SDK."""

    def expected(path: str, **fields: Any) -> str:
        reply = httpx.post(f"{server.url}/v1/{path}", json={"model": server.model_id, **fields}, timeout=60)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    return expected


@pytest.fixture
def short(expected: Any) -> str:
    return expected("chat/completions", messages=MESSAGES, max_tokens=8, seed=5, temperature=3.0, ignore_eos=True)


# ---- the official SDK -------------------------------------------------------------------------------------------


def test_the_sdk(sdk: Any, server: Any, short: str):
    reply = sdk.chat.completions.create(model=server.model_id, messages=MESSAGES, **SHORT)
    assert reply.choices[0].message.content == short
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8
    assert reply._request_id


def test_a_stream_of_the_sdk(sdk: Any, server: Any, short: str):
    options = {"include_usage": True}
    chunks = list(
        sdk.chat.completions.create(
            model=server.model_id, messages=MESSAGES, stream=True, stream_options=options, **SHORT
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == short
    assert chunks[-1].usage.completion_tokens == 8
    with sdk.chat.completions.create(model=server.model_id, messages=MESSAGES, stream=True, **SHORT) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == short


def test_the_streaming_helper_of_the_sdk(sdk: Any, server: Any, short: str):
    """It takes "length" for a failure, and so it is given a text that ends with a stop string."""
    stop = short[4:]
    with sdk.chat.completions.stream(
        model=server.model_id, messages=MESSAGES, stop=stop, logprobs=True, top_logprobs=1, **SHORT
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = short[: short.index(stop)]
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert [event.content for event in events if event.type == "content.done"] == [text]
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (text, "stop")
    num_tokens = len([event for event in events if event.type == "logprobs.content.delta"])
    assert 1 <= num_tokens == len(final.choices[0].logprobs.content)


def test_completions_of_the_sdk(sdk: Any, server: Any, expected: Any):
    fields = {"max_tokens": 6, "temperature": 0}
    whole = sdk.completions.create(model=server.model_id, prompt=["the cat", "mat"], echo=True, logprobs=2, **fields)
    texts = [expected("completions", prompt=prompt, **fields) for prompt in ("the cat", "mat")]
    assert [choice.text for choice in whole.choices] == ["the cat" + texts[0], "mat" + texts[1]]
    assert whole.choices[0].logprobs.text_offset[0] == 0
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    stream = sdk.completions.create(model=server.model_id, prompt="the cat", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == texts[0]


def test_null_for_what_is_left_out(sdk: Any, server: Any):
    nulls = dict.fromkeys(["max_tokens", "n", "stop", "temperature", "top_p", "seed", "logit_bias", "stream_options"])
    reply = sdk.chat.completions.create(model=server.model_id, messages=MESSAGES, **{**nulls, "max_tokens": 2})
    assert reply.usage.completion_tokens <= 2


def test_the_async_sdk(server: Any, short: str):
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            fields = {"model": server.model_id, "messages": MESSAGES, **SHORT}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**fields), client.chat.completions.create(**fields, stream=True)
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            async with client.chat.completions.stream(**fields) as helper:
                deltas = [event.delta async for event in helper if event.type == "content.delta"]
            return [whole.choices[0].message.content, streamed, "".join(deltas)]

    assert asyncio.run(texts()) == [short] * 3


def test_models_of_the_sdk(sdk: Any, server: Any):
    assert [entry.id for entry in sdk.models.list()] == [server.model_id]
    assert sdk.models.retrieve(server.model_id).id == server.model_id
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors_of_the_sdk(sdk: Any, server: Any):
    def refused(kind: type[Exception], **fields: Any) -> Any:
        with pytest.raises(kind) as caught:
            sdk.chat.completions.create(**{"model": server.model_id, "messages": MESSAGES, **fields})
        return caught.value

    error = refused(openai.BadRequestError, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (error.param, error.code, error.type) == ("tools", "unsupported_parameter", "invalid_request_error")
    assert refused(openai.NotFoundError, model="gpt-5").code == "model_not_found"
    assert refused(openai.BadRequestError, max_tokens=10**6).code == "context_length_exceeded"
    assert refused(openai.BadRequestError, max_tokens=10**6, stream=True).code == "context_length_exceeded"


def test_structured_output_is_refused_by_name(sdk: Any, server: Any):
    pydantic = pytest.importorskip("pydantic", reason="the openai package is not installed")
    shape = pydantic.create_model("Shape", sides=(int, ...))
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.parse(model=server.model_id, messages=MESSAGES, response_format=shape)
    assert caught.value.param == "response_format"


# ---- LiteLLM ----------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Else it fetches a price list when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(litellm: Any, server: Any, expected: Any, provider: str):
    fields = {"max_tokens": 8, "temperature": 3.0, "seed": 5, "top_p": 0.9}
    point = {"model": f"{provider}/{server.model_id}", "api_base": f"{server.url}/v1", "api_key": "unused"}
    if provider == "hosted_vllm":
        fields["top_k"] = 40
    text = expected("chat/completions", messages=MESSAGES, **fields)
    reply = litellm.completion(messages=MESSAGES, **point, **fields)
    assert reply.choices[0].message.content == text
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    stream = litellm.completion(messages=MESSAGES, stream=True, **point, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


# ---- LangChain --------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


def test_langchain_chat(langchain: Any, server: Any, short: str):
    model = langchain.ChatOpenAI(
        model=server.model_id,
        base_url=f"{server.url}/v1",
        api_key="unused",
        temperature=3.0,
        seed=5,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    reply = model.invoke([("user", "the cat")])
    assert reply.content == short
    assert reply.usage_metadata["output_tokens"] == 8
    assert reply.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in model.stream([("user", "the cat")])) == short
    assert asyncio.run(model.ainvoke([("user", "the cat")])).content == short


def test_langchain_completions(langchain: Any, server: Any, expected: Any):
    """Its defaults: temperature 0.7, top_p 1, n 1, penalties 0, 256 tokens."""
    model = langchain.OpenAI(model=server.model_id, base_url=f"{server.url}/v1", api_key="unused", max_tokens=8)
    text = expected("completions", prompt="the cat", temperature=0.7, max_tokens=8)
    assert model.invoke("the cat") == text
    assert "".join(model.stream("the cat")) == text


# ---- llm --------------------------------------------------------------------------------------------------------


def test_the_llm_command(server: Any, expected: Any, tmp_path: Path):
    pytest.importorskip("llm", reason="llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {server.model_id}\n  api_base: {server.url}/v1\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "ours", "-o", "max_tokens", "8", "-o", "seed", "5", "the cat"],
        env={
            **os.environ,
            "LLM_USER_PATH": str(tmp_path),
            "OPENAI_API_KEY": "unused",
            "PYTHONUTF8": "1",
            "LLM_LOAD_PLUGINS": "",
        },
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    text = expected("chat/completions", messages=MESSAGES, max_tokens=8, seed=5)
    assert run.stdout.decode() == text + "\n"


# ---- benchmarks, whose requests are known -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "completions",
            {"prompt": "the cat", "max_tokens": 4, "stop": None, "ignore_eos": True,
             "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}],
             "max_completion_tokens": 4, "stop": None, "ignore_eos": True,
             "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        (
            "completions",
            {"prompt": "the cat", "max_tokens": 4, "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None,
             "ignore_eos": True, "stream_options": {"include_usage": True}},
        ),
    ],
    ids=["guidellm", "guidellm-chat", "vllm-bench"],
)  # fmt: skip
def test_requests_of_benchmarks(server: Any, path: str, fields: Any):
    reply = httpx.post(f"{server.url}/v1/{path}", json={"model": server.model_id, "stream": True, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    *_, usage, done, _ = reply.content.decode().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 4
