"""The engine in a process of its own: what requests get, and what becomes of them when it dies or freezes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from supervised import AT_START, SLOW, SLOW_STEPS, Account, is_gone, submit, supervised, tampering, until
from toy_artifact import PADDED_VOCAB_SIZE, write_toy_artifact

from crucible.engine.backends import make_backend
from crucible.engine.engine import Engine, Event
from crucible.engine.request import SamplingParams
from crucible.models import resolve
from crucible.serve import supervisor as module
from crucible.serve.channel import Stats
from crucible.serve.protocol import ApiError

LONG = {"max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("model") / "toy", max_position_embeddings=2048)


@pytest.fixture
def tamper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return tampering(tmp_path, monkeypatch)


# ---- requests -----------------------------------------------------------------------------------------------------


def test_requests_get_what_the_engine_gives(model: Path) -> None:
    """Tokens, ends, log-probabilities and stats are those of the same engine in this process."""
    asked = [
        ([5, 61, 17], {"max_tokens": 9}),
        ([5, 61, 17], {"max_tokens": 12, "temperature": 0.9, "seed": 2**64 - 3, "logprobs": 2}),
        (list(range(40, 90)), {"max_tokens": 6, "prompt_logprobs": True, "logit_bias": {7: 3.5}, "logprobs": 0}),
        ([9] * 20, {"max_tokens": 300, "temperature": 1.5, "stop_token_ids": [11, 12, 13, *range(100, 110)]}),
    ]
    loaded = resolve(model)
    engine = Engine(make_backend("reference", loaded.config, loaded.weights, num_slots=4), eos_ids=(299,))
    events: list[list[Event]] = [[] for _ in asked]
    for index, (prompt, params) in enumerate(asked):
        engine.add(index, prompt, SamplingParams(**params))
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)

    async def main() -> list[Account]:
        async with supervised(model, backend="reference", max_batch=4) as supervisor:
            ready = supervisor.ready
            assert ready is not None
            assert (ready.backend, ready.weights, ready.max_batch) == ("reference", "f32", 4)
            assert (ready.context, ready.vocab_size, ready.page_size) == (2048, PADDED_VOCAB_SIZE, 16)
            accounts = [submit(supervisor, prompt, **params)[1] for prompt, params in asked]
            assert supervisor.in_flight == 4
            for account in accounts:
                await account.wait()
            assert supervisor.in_flight == 0
            stats = supervisor.stats
            assert stats.tokens == sum(len(account.ids) for account in accounts)
            assert stats.prefill_rows == sum(len(prompt) for prompt, _ in asked)
            assert (stats.prefill_chunks, stats.free_pages, stats.running) == (4, ready.num_pages, 0)
            return accounts

    for account, expected in zip(asyncio.run(main()), events, strict=True):
        assert account.ids == [event.token_id for event in expected]
        assert account.finish == expected[-1].finish
        scores = [event.logprobs for event in expected if event.logprobs is not None]
        got = [detail.logprobs for detail in account.details if detail.logprobs is not None]
        assert [(s.logprob, tuple(s.top_ids), tuple(s.top_logprobs)) for s in got] == [
            (s.logprob, s.top_ids, s.top_logprobs) for s in scores
        ]
        first = account.details[0]
        assert first.prompt_logprobs == (list(p) if (p := expected[0].prompt_logprobs) is not None else None)
        assert first.queue_seconds is not None
        assert first.queue_seconds >= 0
        assert first.prefill_seconds is not None
        assert first.prefill_seconds > 0
        assert {detail.prefill_seconds for detail in account.details[1:]} <= {None}


def test_what_the_engine_refuses_is_lost_with_its_words(model: Path) -> None:
    async def main() -> None:
        async with supervised(model) as supervisor:
            _, account = submit(supervisor, [5, 70000], max_tokens=5)
            error = (await account.wait()).error
            assert error is not None
            assert (error.kind, str(error)) == (
                "invalid",
                "the prompt has token id 70000; the model's are 0 to 319",
            )
            _, account = submit(supervisor, [5, 6], max_tokens=5)
            assert (await account.wait()).finish == "length"

    asyncio.run(main())


def test_a_cancelled_request_hears_nothing_more_and_its_pages_are_free(
    model: Path, tamper: Callable[[str], None]
) -> None:
    tamper(SLOW)

    async def main() -> None:
        async with supervised(model, max_batch=2, kv_pages=140) as supervisor:
            number, account = submit(supervisor, **LONG)
            _, waits = submit(supervisor, **LONG)  # for pages
            await until(lambda: len(account.ids) > 2)
            assert (supervisor.stats.running, supervisor.stats.waiting) == (1, 1)
            supervisor.cancel(number)
            supervisor.cancel(number)
            drawn = len(account.ids)
            steps = supervisor.stats.steps
            await until(lambda: waits.ids)
            assert supervisor.stats.steps <= steps + 3
            assert (len(account.ids), account.finish, account.error) == (drawn, None, None)
            assert supervisor.in_flight == 1

    asyncio.run(main())


def test_requests_that_arrive_during_a_step_share_the_next(model: Path, tamper: Callable[[str], None]) -> None:
    tamper(SLOW_STEPS.format(seconds=0.1))

    async def main() -> None:
        async with supervised(model) as supervisor:
            _, blocker = submit(supervisor, max_tokens=2)
            await until(lambda: supervisor.stats.steps == 1)
            accounts = [submit(supervisor, max_tokens=1)[1] for _ in range(9)]
            for account in (blocker, *accounts):
                await account.wait()
            # The second plan may have been on its way by then, so that they are in that one or in the third.
            assert (supervisor.stats.prefill_plans, supervisor.stats.prefill_chunks) == (2, 10)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_an_engine_without_work_uses_no_processor(model: Path) -> None:
    async def main() -> None:
        async with supervised(model, ping_deadline=0.4) as supervisor:  # ten pings a second
            stat = Path(f"/proc/{supervisor.engine_pid}/stat")

            def ticks() -> int:
                fields = stat.read_text().rpartition(")")[2].split()
                return int(fields[11]) + int(fields[12])

            before = ticks()
            await asyncio.sleep(0.5)
            assert ticks() - before <= 2, "hundredths of a second"

    asyncio.run(main())


def test_a_receiver_that_fails_costs_the_others_nothing(model: Path) -> None:
    class BrokenAtTokens(Account):
        def tokens(self, ids: object, details: object) -> None:
            raise KeyError(ids)

    class BrokenAtEnd(Account):
        def end(self, finish: str) -> None:
            raise KeyError(finish)

        def lost(self, error: ApiError) -> None:
            raise error

    async def main() -> None:
        async with supervised(model) as supervisor:
            broken = BrokenAtTokens()
            _, before = submit(supervisor, max_tokens=5)
            supervisor.submit([1, 2], {"max_tokens": 5}, broken)
            supervisor.submit([1, 2], {"max_tokens": 5}, BrokenAtEnd())
            _, after = submit(supervisor, max_tokens=5)
            assert len((await before.wait()).ids) == len((await after.wait()).ids) == 5
            assert broken.error is not None
            assert broken.error.kind == "internal"
            assert supervisor.in_flight == 0
            supervisor.submit([1, 2], LONG, BrokenAtEnd())
            _, last = submit(supervisor, **LONG)
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.in_flight == 0)
            assert last.is_over.is_set()

    asyncio.run(main())


# ---- death and freeze ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "frozen", "failing"])
def test_an_engine_that_stops_loses_each_request_once_and_another_takes_over(
    model: Path, tamper: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    flag = tmp_path / "failing"
    tamper(SLOW.replace("time.sleep", f"assert not Path({str(flag)!r}).exists(), 'as a test wants it'; time.sleep"))
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.3)

    async def main() -> None:
        async with supervised(model, ping_deadline=0.5 if how == "frozen" else 30, max_batch=200) as supervisor:
            pid = supervisor.engine_pid
            assert pid is not None
            accounts = [submit(supervisor, **LONG)[1] for _ in range(300)]
            await until(lambda: sum(len(account.ids) > 1 for account in accounts) == 200)
            assert (supervisor.in_flight, supervisor.stats.running, supervisor.stats.waiting) == (300, 200, 100)
            began = time.monotonic()
            match how:
                case "killed":
                    os.kill(pid, signal.SIGKILL)
                case "frozen":
                    os.kill(pid, signal.SIGSTOP)
                case _:
                    flag.touch()
            for account in accounts:
                await account.wait()
            assert time.monotonic() - began < 5
            flag.unlink(missing_ok=True)
            words = {"killed": "was killed by SIGKILL", "frozen": "did not answer for 0.5 seconds"}
            for account in accounts:
                assert account.error is not None
                assert (account.error.kind, account.error.retry_after) == ("unavailable", 1)
                assert words.get(how, "ended with status 1") in str(account.error)
            assert supervisor.state == "restarting"
            assert (supervisor.in_flight, supervisor.stats) == (0, Stats())
            with pytest.raises(ApiError, match="the engine is being restarted") as raised:
                submit(supervisor)
            assert (raised.value.kind, raised.value.retry_after) == ("unavailable", 1)
            await until(lambda: is_gone(pid), 1)
            await until(lambda: supervisor.state == "ready")
            assert supervisor.restarts == 1
            _, account = submit(supervisor, max_tokens=3)
            assert (await account.wait()).finish == "length"
            assert supervisor.stats.tokens == 3

    asyncio.run(main())


def test_a_step_shorter_than_the_deadline_is_no_freeze(model: Path, tamper: Callable[[str], None]) -> None:
    tamper(SLOW_STEPS.format(seconds=0.4))

    async def main() -> None:
        async with supervised(model, ping_deadline=1) as supervisor:
            _, account = submit(supervisor, max_tokens=2)
            assert (await account.wait()).finish == "length"
            assert supervisor.restarts == 0

    asyncio.run(main())


def test_a_pause_of_this_process_is_not_held_against_the_engine(model: Path) -> None:
    async def main() -> None:
        async with supervised(model, ping_deadline=0.2) as supervisor:
            pid = supervisor.engine_pid
            for _ in range(3):
                time.sleep(0.3)
                await asyncio.sleep(0.06)
            assert (supervisor.state, supervisor.engine_pid) == ("ready", pid)

    asyncio.run(main())


def test_the_pause_before_a_restart_grows_until_an_engine_lives(
    model: Path, tamper: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.4)
    monkeypatch.setattr(module, "_HEALTHY_AFTER", 0.1)
    flag = tmp_path / "broken"
    tamper(AT_START.format(action=f"os.path.exists({str(flag)!r}) and os._exit(3)"))

    async def main() -> None:
        async with supervised(model) as supervisor:
            supervisor._pause = 0.1
            pauses = []

            async def die() -> None:
                assert supervisor.engine_pid is not None
                os.kill(supervisor.engine_pid, signal.SIGKILL)
                await until(lambda: supervisor.state == "restarting")

            monkeypatch.setattr(module._log, "error", lambda text, why, pause: pauses.append((why, pause)))
            flag.touch()
            await die()
            await until(lambda: supervisor.restarts == 4)
            flag.unlink()
            await until(lambda: supervisor.state == "ready")
            exits = "ended with status 3"
            assert pauses[:4] == [("was killed by SIGKILL", 0.1), (exits, 0.2), (exits, 0.4), (exits, 0.4)]
            monkeypatch.setattr(module, "_FIRST_PAUSE", 0.05)
            await asyncio.sleep(0.15)
            await die()
            await until(lambda: supervisor.state == "ready")
            assert pauses[-1] == ("was killed by SIGKILL", 0.05)

    asyncio.run(main())
