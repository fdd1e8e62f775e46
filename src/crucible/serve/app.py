"""The routes, and what holds for all: request ids, the checks of `security`, errors in the caller's envelope."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crucible import __version__
from crucible.serve import anthropic, openai, security, web
from crucible.serve.exchange import GONE, respond
from crucible.serve.native import GENERATE, GENERATE_STREAM, Detokenize, Tokenize
from crucible.serve.native import refusal as native_refusal
from crucible.serve.protocol import ApiError, Call, Generate, Refusal, Surface
from crucible.serve.reading import read_body
from crucible.serve.service import Service
from crucible.serve.wire import read_json

_REQUEST_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_JSON: Final = {"content-type": "application/json"}
_log: Final = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """How the application answers.

    Attributes:
        api_key: that requests must carry; None for none.
        allowed_hosts: names in Host beside addresses and this machine's own.
        cors_origins: web pages of these origins may call.
        max_body_bytes: of a request.
        web: the page at `/` is there.
    """

    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    web: bool = True


def create_app(service: Service, settings: AppSettings) -> FastAPI:
    """The application; whoever runs it starts and stops the service's engine."""
    # The pages that show the schema load scripts from elsewhere.
    app = FastAPI(title="Crucible", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, surface in (
        ("/v1/generate", GENERATE),
        ("/v1/generate/stream", GENERATE_STREAM),
        ("/v1/chat/completions", openai.CHAT),
        ("/v1/completions", openai.COMPLETIONS),
    ):
        app.add_api_route(path, _generates(surface, service, settings), methods=["POST"])
    app.add_api_route("/v1/messages", _messages(service, settings), methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", _answers(service, settings, _count_tokens), methods=["POST"])
    app.add_api_route("/v1/tokenize", _answers(service, settings, _tokenize), methods=["POST"])
    app.add_api_route("/v1/detokenize", _answers(service, settings, _detokenize), methods=["POST"])
    app.add_api_route("/v1/models", _models(service), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", _model(service), methods=["GET"])
    app.add_api_route("/health", _health(service), methods=["GET"])
    app.add_api_route("/health", _health(service), methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/metrics", _metrics(service), methods=["GET"])
    if settings.web:
        web.add_web(app)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Gate, service=service, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


# ---- every request ----------------------------------------------------------------------------------------------


class Gate:
    """What comes before and after every request, whatever its path."""

    def __init__(self, app: ASGIApp, *, service: Service, settings: AppSettings) -> None:
        self._app, self._service, self._settings = app, service, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        request.state.request_id = request_id
        ids = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
        status = 0

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            self._check(request)
            await self._app(scope, receive, send_with_ids)
        except ApiError as error:
            await _refused(error, request)(scope, receive, send_with_ids)
        except ClientDisconnect:  # before its request was complete
            status = GONE
        except Exception:
            _log.exception("a request failed")
            if status:
                raise
            await _refused(ApiError("internal", "the server failed"), request)(scope, receive, send_with_ids)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._service.metrics.http_requests[path, _known_method(request.method), status] += 1

    def _check(self, request: Request) -> None:
        security.check_host(request.headers, self._settings.allowed_hosts)
        path = request.scope["path"]  # not that of request.url, into which Host is pasted
        if path not in security.PUBLIC_PATHS and not (self._settings.web and path in web.PATHS):
            security.check_key(request.headers, self._settings.api_key)


def _known_method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "other"


def _refused(error: ApiError, request: Request) -> Response:
    """An error in the envelope of the API that a path is of."""
    path = request.url.path.removeprefix("/v1") if request.url.path.startswith("/v1/v1/") else request.url.path
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and _is_anthropic(request)):
        refuse: Refusal = anthropic.refusal
    elif path.startswith(("/v1/chat", "/v1/completions", "/v1/models")):
        refuse = openai.refusal
    else:
        refuse = native_refusal
    status, headers, body = refuse(error, request.state.request_id)
    if error.kind == "too_large":
        headers["connection"] = "close"  # rather than read on to its end
    return Response(body, status, {**_JSON, **headers})


async def _no_route(request: Request, error: Exception) -> Response:
    """No such path or method, in words that help."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        response = _refused(
            ApiError("method", f"{_known_method(request.method)} is not a method of this path"), request
        )
        response.headers.update(error.headers or {})
        return response
    hint = ""
    if path.startswith("/v1/v1/"):
        hint = f"; for {_known_path(path[3:])} a client's base address must end without /v1"
    elif path.startswith(("/chat", "/completions", "/models", "/messages")):
        hint = f"; for {_known_path('/v1' + path)} a client's base address must end with /v1"
    return _refused(ApiError("not_found", f"there is no such path{hint}"), request)


def _known_path(path: str) -> str:
    known = ("/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/models")
    return next((one for one in known if path.startswith(one)), "the paths of /v1")


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


# ---- routes -----------------------------------------------------------------------------------------------------


def _generates(surface: Surface, service: Service, settings: AppSettings) -> Handler:
    async def generate(request: Request) -> Response:
        return await respond(surface, request, service, settings.max_body_bytes)

    return generate


def _messages(service: Service, settings: AppSettings) -> Handler:
    async def messages(request: Request) -> Response:
        anthropic.check_version(request.headers.get("anthropic-version"))
        return await respond(anthropic.MESSAGES, request, service, settings.max_body_bytes)

    return messages


Answer = Callable[[Service, bytes], Awaitable[bytes]]


def _answers(service: Service, settings: AppSettings, answer: Answer) -> Handler:
    async def handle(request: Request) -> Response:
        if request.url.path.startswith("/v1/messages"):
            anthropic.check_version(request.headers.get("anthropic-version"))
        return Response(await answer(service, await read_body(request, settings.max_body_bytes)), 200, _JSON)

    return handle


async def _count_tokens(service: Service, body: bytes) -> bytes:
    call = anthropic.COUNT_TOKENS.read(body, service.served)
    return anthropic.COUNT_TOKENS.reply(len(await service.encode(call)))


async def _tokenize(service: Service, body: bytes) -> bytes:
    request = read_json(body, Tokenize)
    ids = await service.encode(Call(request=Generate(prompt=request.prompt, messages=request.messages)))
    return msgspec.json.encode({"token_ids": ids, "count": len(ids), "context": service.served.context})


async def _detokenize(service: Service, body: bytes) -> bytes:
    ids = read_json(body, Detokenize).token_ids
    vocab_size = service.served.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise ApiError(
            "invalid", f"token_ids has an id that is none of the model's, 0 to {vocab_size - 1}", param="token_ids"
        )
    return msgspec.json.encode({"text": service.decode(ids)})


def _models(service: Service) -> Handler:
    async def models(request: Request) -> Response:
        api = anthropic if _is_anthropic(request) else openai
        anthropic.check_version(request.headers.get("anthropic-version"))
        return Response(msgspec.json.encode(api.models(service.served)), 200, _JSON)

    return models


def _model(service: Service) -> Handler:
    async def model(request: Request) -> Response:
        api = anthropic if _is_anthropic(request) else openai
        anthropic.check_version(request.headers.get("anthropic-version"))
        return Response(msgspec.json.encode(api.model(service.served, request.path_params["name"])), 200, _JSON)

    return model


def _health(service: Service) -> Handler:
    async def health(request: Request) -> Response:
        status, body = _state(service)
        headers = _JSON if status == 200 else {**_JSON, "retry-after": "1"}
        return Response(msgspec.json.encode(body), status, headers)

    return health


def _state(service: Service) -> tuple[int, dict[str, Any]]:
    supervisor = service.supervisor
    state = "draining" if service.is_draining else supervisor.state
    body: dict[str, Any] = {"status": "ok" if state == "ready" else state, "version": __version__}
    if supervisor.failure is not None:
        body["reason"] = supervisor.failure
    if (ready := supervisor.ready) is not None:
        served = service.served
        body |= {
            "model": served.model_id,
            "aliases": sorted(served.aliases),
            "device": ready.device,
            "backend": ready.backend,
            "weights": ready.weights,
            "fingerprint": ready.fingerprint,
            "max_batch": ready.max_batch,
            "max_in_flight": service.max_in_flight,
            "context": served.context,
            "vocab_size": served.vocab_size,
            "pages": ready.num_pages,
            "sampling": service.sampling,
        }
    return 200 if state == "ready" else 503, body


def _metrics(service: Service) -> Handler:
    async def metrics(request: Request) -> Response:
        supervisor = service.supervisor
        state = supervisor.ready, supervisor.stats, supervisor.in_flight, supervisor.restarts
        if "application/json" in request.headers.get("accept", ""):
            return Response(msgspec.json.encode(service.metrics.json(*state)), 200, _JSON)
        return Response(service.metrics.text(*state), 200, {"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    return metrics
