"""The HTTP process' side of the engine: starts its process, gives it requests, and notices when it dies or freezes.

An engine that stops takes its requests with it: each is told once. Another one is started in its place, after a pause
that grows while none lives long.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final, Literal, Protocol, TypeVar

import zmq

from crucible.errors import CrucibleError
from crucible.serve.channel import (
    Add,
    Cancel,
    Detail,
    EngineConfig,
    Failed,
    FromEngine,
    Loading,
    Ping,
    Pong,
    Ready,
    Refused,
    Start,
    Stats,
    Step,
)
from crucible.serve.process import EngineProcess
from crucible.serve.protocol import ApiError

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

STARTUP_DEADLINE: Final = 600.0
PING_DEADLINE: Final = 30.0
"""Seconds that an engine may be silent. It answers between steps, so this must be longer than any step."""

_PING_INTERVAL: Final = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_HEALTHY_AFTER: Final = 60.0
"""Seconds of service after which the pause before a restart is the first one again."""
_STOP_SECONDS: Final = 2.0

_log: Final = logging.getLogger(__name__)

_Told = TypeVar("_Told")


class Receiver(Protocol):
    """Who a request is for. All are called in the event loop, must return soon, and nothing follows `end` or `lost`."""

    def tokens(self, ids: list[int], details: Sequence[Detail]) -> None:
        """Tokens drawn since, in order; the receiver keeps the list.

        A token that ends the request by "stop" is among them; `end` then follows before anything else runs in the
        event loop.
        """

    def end(self, finish: str) -> None:
        """No more tokens come: "stop", "length", or "error" where no logit was usable."""

    def lost(self, error: ApiError) -> None:
        """The request came to nothing: the engine refused it or has stopped."""


class Supervisor:
    """An engine in a process of its own, at any time in the state that `state` says.

    Belongs to one event loop, whose thread must live as long as the engine: on Linux the engine dies with it.

    Args:
        config: what the engine is started with.
        startup_deadline: seconds in which it must be ready.
        ping_deadline: seconds that it may be silent once it is ready; longer than any step.
        on_progress: is told each stage of a start, and how far it is, from 0 to 1 where that is known.

    Attributes:
        state: "failed" means that no engine can be started, for the reason `failure`.
        ready: what the engine says of itself; of the one before while another one is started. None before the first.
        stats: of the engine's last step; all zero while there is none. Counters begin anew with each engine.
        restarts: engines that were started after the first.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        startup_deadline: float = STARTUP_DEADLINE,
        ping_deadline: float = PING_DEADLINE,
        on_progress: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self.config = config
        self.startup_deadline = startup_deadline
        self.ping_deadline = ping_deadline
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.stats = Stats()
        self.restarts = 0
        self.failure: str | None = None
        self._on_progress = on_progress
        self._receivers: dict[int, Receiver] = {}
        self._numbers = count()
        self._engine: EngineProcess | None = None
        self._first_start: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The start's deadline, the next ping or the next start: never two of them."""
        self._pause = _FIRST_PAUSE
        self._ready_at = 0.0
        self._silence = 0.0
        self._sequence = 0

    @property
    def in_flight(self) -> int:
        """Requests that have neither ended nor been cancelled or lost."""
        return len(self._receivers)

    @property
    def engine_pid(self) -> int | None:
        """Of the engine's process, if there is one."""
        return None if self._engine is None else self._engine.pid

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int], params: dict[str, Any], receiver: Receiver) -> int:
        """Give the engine a request.

        Args:
            prompt_ids: its tokens.
            params: the fields of the engine's SamplingParams that are not at their defaults; n must be 1.
            receiver: is told what becomes of it, never before this returns.

        Returns:
            The number to cancel it by.

        Raises:
            ApiError: "unavailable", unless the state is "ready".
        """
        number = next(self._numbers)
        if self.state != "ready" or self._engine is None:
            raise self._unavailable()
        if not self._engine.send(Add(number, list(prompt_ids), params)):
            raise self._unavailable()  # it has just died
        self._receivers[number] = receiver
        return number

    def cancel(self, number: int) -> None:
        """Forget a request: its receiver hears nothing more. No effect on one that has ended."""
        if self._receivers.pop(number, None) is not None and self._engine is not None:
            self._engine.send(Cancel(number))

    def _unavailable(self) -> ApiError:
        if self.state == "failed":
            return ApiError("unavailable", f"the engine cannot be started: {self.failure}")
        if self.state == "stopped":
            return ApiError("unavailable", "the server is stopping")
        words = "starting" if self.state == "starting" else "being restarted"
        return ApiError("unavailable", f"the engine is {words}", retry_after=math.ceil(self._pause))

    # ---- start and stop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine; returns when it is ready. To be called once.

        Raises:
            CrucibleError: it cannot be started, has ended meanwhile, or was not ready in time.
        """
        self._first_start = asyncio.get_running_loop().create_future()
        self._launch()
        try:
            await self._first_start
        except CrucibleError:
            await self._end_process(0.0)
            raise
        except BaseException:  # it is not waited for any longer
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine for good; no process is left. Requests in flight are lost."""
        was_ready = self.state == "ready"
        self.state = "stopped"
        self._set_timer(None)
        self._lose_all(ApiError("unavailable", "the server is stopping"))
        await self._end_process(_STOP_SECONDS if was_ready else 0.0)

    async def _end_process(self, seconds: float) -> None:
        if self._engine is not None:
            await self._engine.stop(seconds)

    def _launch(self) -> None:
        """Start a process, which has until the deadline to be ready."""
        self._set_timer(self.startup_deadline, self._is_late)
        try:
            self._engine = EngineProcess(self._received, self._exited)
        except (OSError, zmq.ZMQError) as error:
            self._exited(f"has no process: {error}")

    def _is_late(self) -> None:
        self._give_up_on(f"was not ready within {self.startup_deadline:g} seconds")

    def _set_timer(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, then)

    # ---- messages -----------------------------------------------------------------------------------------------

    def _received(self, message: FromEngine) -> None:
        self._silence = 0.0
        match message:
            case Step():
                self._dispatch(message)
            case Pong():
                pass
            case Refused(number, text):
                if (receiver := self._receivers.pop(number, None)) is not None:
                    _tell(receiver.lost, ApiError("invalid", text))
            case Loading(stage, done):
                self._loading(stage, done)
            case Ready():
                self._begin(message)
            case Failed(text):
                self._fail(text)

    def _dispatch(self, step: Step) -> None:
        """Hand the columns of a step to those whom they are for. Nothing here is done more often than this."""
        self.stats = step.stats
        receivers = self._receivers
        details: dict[int, list[Detail]] = {detail.number: [detail] for detail in step.details}
        for number, token_id in zip(step.numbers, step.ids, strict=True):
            receiver = receivers.get(number)
            if receiver is not None:
                try:
                    receiver.tokens([token_id], details.get(number, ()))
                except Exception:
                    self._drop(number)
        for number, finish in step.ends:
            receiver = receivers.pop(number, None)
            if receiver is not None:
                _tell(receiver.end, finish)

    def _drop(self, number: int) -> None:
        """A receiver failed; the others shall have their tokens all the same."""
        _log.exception("a request is dropped: its receiver failed")
        receiver = self._receivers[number]
        self.cancel(number)
        _tell(receiver.lost, ApiError("internal", "the server failed"))

    def _loading(self, stage: str, done: float | None) -> None:
        assert self._engine is not None
        if not self._engine.is_told:
            self._engine.tell(Start(self.config))
        if self._on_progress is not None:
            self._on_progress(stage, done)

    def _begin(self, ready: Ready) -> None:
        self.state, self.ready, self.stats = "ready", ready, Stats(free_pages=ready.num_pages)
        self._ready_at = asyncio.get_running_loop().time()
        self._ping()
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_result(None)

    def _fail(self, reason: str) -> None:
        """No engine can be started, now or later."""
        self.state, self.failure = "failed", reason
        self._set_timer(None)
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(CrucibleError(reason))
        else:
            _log.error("the engine cannot be started again: %s", reason)

    # ---- life and death -----------------------------------------------------------------------------------------

    def _ping(self) -> None:
        """Once per interval: ask for a sign of life, or give up on an engine that gave none for too long.

        Silence is counted in intervals that this process lived through, so that none is held against the engine while
        this process itself did not run.
        """
        assert self._engine is not None
        self._engine.read()
        if self.state != "ready":
            return
        if self._silence >= self.ping_deadline:
            self._give_up_on(f"did not answer for {self.ping_deadline:g} seconds")
            return
        interval = min(_PING_INTERVAL, self.ping_deadline / 4)
        self._silence += interval
        self._sequence += 1
        self._engine.send(Ping(self._sequence))
        self._set_timer(interval, self._ping)

    def _give_up_on(self, why: str) -> None:
        """Kill an engine that is of no use. `_exited` follows, which may take a moment; nobody shall wait for it."""
        assert self._engine is not None
        self._engine.kill(why)
        self._is_down(why)

    def _exited(self, why: str) -> None:
        """The process is gone, for whatever reason."""
        self._engine = None
        if self.state in ("failed", "stopped"):
            return
        self._is_down(why)
        if self.state == "restarting":
            _log.error("the engine %s; the next one is started in %g seconds", why, self._pause)
            self._set_timer(self._pause, self._restart)

    def _is_down(self, why: str) -> None:
        """Tell everyone who waits. No effect the second time."""
        if self.state == "starting":
            self._fail(f"the engine {why}")
            return
        if self.state == "ready" and asyncio.get_running_loop().time() - self._ready_at >= _HEALTHY_AFTER:
            self._pause = _FIRST_PAUSE
        self.state, self.stats = "restarting", Stats()
        self._set_timer(None)
        error = ApiError("unavailable", f"the engine {why} before it was done", retry_after=math.ceil(self._pause))
        self._lose_all(error)

    def _restart(self) -> None:
        self.restarts += 1
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._launch()

    def _lose_all(self, error: ApiError) -> None:
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            _tell(receiver.lost, error)


def _tell(receive: Callable[[_Told], None], what: _Told) -> None:
    """The last call of a receiver. If it fails, the others shall be told all the same."""
    try:
        receive(what)
    except Exception:
        _log.exception("a receiver failed at the end of its request")
