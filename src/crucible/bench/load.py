"""The clients of a load, in a process of their own: `python -m crucible.bench.load`.

Each line on standard input is a `Job`, the reply one line with its `Log`. A server that shares an interpreter with
its clients would be measured together with them.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec
import uvloop

from crucible.bench.client import ENDPOINTS, Connection, LoadError, Outcome, request_bytes

REFUSED_PAUSE: Final = 0.02
"""Seconds that a client waits after a refusal: impatient, not frantic."""
STREAMS_WARM_UP: Final = 16
"""Tokens that each of the established streams has before they are interrupted."""

Mode = Literal["closed", "open", "interrupt"]


class Shot(msgspec.Struct, frozen=True):
    """A request of a load.

    Attributes:
        endpoint: one of ENDPOINTS.
        body: JSON.
        at: for Poisson arrivals: seconds after the start at which it is sent, whatever else is under way.
        leaves_after: seconds after which the client closes the connection; None to wait for the end.
    """

    endpoint: str
    body: str
    at: float = 0.0
    leaves_after: float | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are to do.

    Attributes:
        host, port: of the server.
        mode: "closed": each client sends one request after the other, taking the next of `shots`. "open": each shot
            is sent at its own time. "interrupt": the first `clients` shots are streams that go on, the others come
            all at once when these have begun, and then the streams are left.
        shots: the requests.
        clients: as the mode says; an open load has as many as it takes.
        seconds: a closed load takes the shots over and over for so long; None to take each once.
    """

    host: str
    port: int
    mode: Mode
    shots: list[Shot]
    clients: int = 0
    seconds: float | None = None


class Mark(msgspec.Struct):
    """The server's metrics at a time, as Prometheus would read them."""

    at: float
    metrics: str


class Log(msgspec.Struct):
    """What came of a job.

    Attributes:
        outcomes: in the order of their ends.
        begin, end: of a closed load, the time in which every client was at work: from when each had its first token
            to when the first one found nothing more to do, and none if it was too short for that. Of others, all of it.
        cpu_seconds: of the clients' process.
        cut_at: of an interruption, when it came.
        error: why nothing came of it, "" if something did.
    """

    outcomes: list[Outcome]
    begin: Mark
    end: Mark
    cpu_seconds: float = 0.0
    cut_at: float = 0.0
    error: str = ""


class Clients:
    """Runs one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._outcomes: list[Outcome] = []
        self._marks: dict[str, asyncio.Task[Mark]] = {}
        self._requests = [
            request_bytes(job.host, job.port, ENDPOINTS[shot.endpoint].path, shot.body) for shot in job.shots
        ]

    async def run(self) -> Log:
        """Raises LoadError: the server cannot be reached."""
        modes = {"closed": self._closed, "open": self._open, "interrupt": self._interrupt}
        began_cpu = time.process_time()
        cut_at = await modes[self._job.mode]()
        cpu_seconds = time.process_time() - began_cpu
        end = await self._marks["end"]
        begin = await self._marks["begin"] if "begin" in self._marks else end
        return Log(self._outcomes, begin, end, cpu_seconds, cut_at)

    # ---- modes ------------------------------------------------------------------------------------------------

    async def _closed(self) -> float:
        job, waiting = self._job, self._job.clients
        deadline = None if job.seconds is None else time.perf_counter() + job.seconds
        numbers = iter(range(len(job.shots))) if deadline is None else itertools.cycle(range(len(job.shots)))

        def begun() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and "end" not in self._marks:
                self._mark("begin")

        async def client(connection: Connection) -> None:
            on_first: Callable[[], None] | None = begun
            while deadline is None or time.perf_counter() < deadline:
                if (number := next(numbers, None)) is None:
                    break
                if not connection.is_open:
                    connection = await self._connect()
                outcome = await self._shoot(connection, number, on_first=on_first)
                on_first = None
                if outcome.error and not outcome.has_left:
                    await asyncio.sleep(REFUSED_PAUSE)
            self._mark("end")
            connection.close()

        connections = [await self._connect() for _ in range(job.clients)]
        await asyncio.gather(*map(client, connections))
        return 0.0

    async def _open(self) -> float:
        idle: list[Connection] = []

        async def fire(number: int, due: float) -> None:
            while idle and not idle[-1].is_open:  # a server closes what is idle for long
                idle.pop()
            connection = idle.pop() if idle else await self._connect()
            await self._shoot(connection, number, due=due)
            if connection.is_open:
                idle.append(connection)

        self._mark("begin")
        tasks, start = [], time.perf_counter()
        for number, shot in enumerate(self._job.shots):
            due = start + shot.at
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(fire(number, due)))
        await asyncio.gather(*tasks)
        self._mark("end")
        for connection in idle:
            connection.close()
        return 0.0

    async def _interrupt(self) -> float:
        connections = [await self._connect() for _ in self._job.shots]
        shots = [self._shoot(connection, number) for number, connection in enumerate(connections)]
        established = connections[: self._job.clients]
        self._mark("begin")
        streams = [asyncio.create_task(shot) for shot in shots[: self._job.clients]]
        await asyncio.sleep(0)
        while not all(connection.num_tokens >= STREAMS_WARM_UP or connection.is_idle for connection in established):
            await asyncio.sleep(0.001)
        cut_at = time.perf_counter()
        await asyncio.gather(*shots[self._job.clients :])
        for connection in connections:
            connection.leave()
        await asyncio.gather(*streams)
        self._mark("end")
        return cut_at

    # ---- parts ------------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        return await Connection.open(self._job.host, self._job.port)

    async def _shoot(
        self,
        connection: Connection,
        number: int,
        *,
        due: float | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> Outcome:
        shot = self._job.shots[number]
        outcome = await connection.ask(
            self._requests[number],
            ENDPOINTS[shot.endpoint],
            shot=number,
            due=due,
            leaves_after=shot.leaves_after,
            on_first=on_first,
        )
        self._outcomes.append(outcome)
        return outcome

    def _mark(self, name: str) -> None:
        """Takes the metrics now, if that was not done yet."""
        if name not in self._marks:
            self._marks[name] = asyncio.create_task(self._metrics())

    async def _metrics(self) -> Mark:
        at, connection = time.perf_counter(), await self._connect()
        text = await connection.get(request_bytes(self._job.host, self._job.port, "/metrics"))
        connection.close()
        return Mark(at, text)


def main() -> None:
    """Serve jobs until standard input ends."""
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        try:
            log = uvloop.run(Clients(job).run())
        except LoadError as error:
            log = Log([], Mark(0.0, ""), Mark(0.0, ""), error=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(log) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
