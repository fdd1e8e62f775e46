"""How the engine's process starts, or does not, and that nothing of it is left in whatever way it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from supervised import AT_START, SLOW, is_gone, submit, supervised, tampering, until
from toy_artifact import write_toy_artifact

from crucible.errors import CrucibleError
from crucible.serve import supervisor as module
from crucible.serve.channel import EngineConfig
from crucible.serve.protocol import ApiError
from crucible.serve.supervisor import Supervisor

LONG = {"max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("model") / "toy", max_position_embeddings=2048)


@pytest.fixture
def tamper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return tampering(tmp_path, monkeypatch)


# ---- starting ------------------------------------------------------------------------------------------------------


def failed_start(model: str | Path, **options: float) -> tuple[str, Supervisor]:
    """The error of a start, after the check that no process is left of it."""

    async def main() -> tuple[str, Supervisor]:
        supervisor = Supervisor(EngineConfig(model=str(model), backend="null"), **options)
        with pytest.raises(CrucibleError) as raised:
            await supervisor.start()
        assert (supervisor.state, supervisor.engine_pid, supervisor.restarts) == ("failed", None, 0)
        assert supervisor.failure == str(raised.value)
        with pytest.raises(ApiError, match="the engine cannot be started") as refused:
            submit(supervisor)
        assert refused.value.retry_after is None
        await supervisor.stop()
        return str(raised.value), supervisor

    return asyncio.run(main())


def test_a_model_that_cannot_be_had_is_told_in_the_engines_words(tmp_path: Path) -> None:
    error, _ = failed_start(tmp_path / "nowhere")
    assert error.startswith(f"{tmp_path / 'nowhere'}: no such file or folder; a model is")


def test_a_process_that_ends_while_it_starts_is_not_started_again(model: Path, tamper: Callable[[str], None]) -> None:
    tamper(AT_START.format(action="os._exit(3)"))
    assert failed_start(model)[0] == "the engine ended with status 3"
    tamper("import os, sys\nif 'crucible.serve.worker' in sys.orig_argv: os._exit(4)")
    assert failed_start(model)[0] == "the engine ended with status 4"


def test_a_start_has_a_deadline(model: Path, tamper: Callable[[str], None]) -> None:
    tamper(AT_START.format(action="time.sleep(60)"))
    began = time.monotonic()
    error, _ = failed_start(model, startup_deadline=0.5)
    assert error == "the engine was not ready within 0.5 seconds"
    assert time.monotonic() - began < 2


def test_a_start_that_nobody_waits_for_any_longer_is_undone(model: Path, tamper: Callable[[str], None]) -> None:
    tamper(AT_START.format(action="time.sleep(60)"))

    async def main() -> None:
        supervisor = Supervisor(EngineConfig(model=str(model), backend="null"))
        start = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.engine_pid is not None)
        pid = supervisor.engine_pid
        assert pid is not None
        await asyncio.sleep(0.1)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert supervisor.state == "stopped"
        assert is_gone(pid)

    asyncio.run(main())


def test_a_model_that_is_gone_at_the_restart_ends_the_attempts(tmp_path: Path) -> None:
    model = write_toy_artifact(tmp_path / "toy")

    async def main() -> None:
        async with supervised(model) as supervisor:
            supervisor._pause = 0.05
            (model / "config.json").unlink()
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            await until(lambda: supervisor.state == "failed")
            assert supervisor.failure is not None
            assert "config.json: no such file" in supervisor.failure
            await until(lambda: supervisor.engine_pid is None)
            assert supervisor.restarts == 1

    asyncio.run(main())


def test_what_does_not_fit_memory_is_told(model: Path) -> None:
    async def main() -> None:
        with pytest.raises(CrucibleError, match=r"^out of memory; fewer kv_pages or a smaller max_batch takes less: "):
            async with supervised(model, backend="reference", kv_pages=2**36):
                pass

    asyncio.run(main())


def test_a_temporary_folder_whose_name_is_too_long_for_a_socket_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    error, _ = failed_start(model)
    assert error == f"the engine has no process: {folder} is too long a path for a socket; set TMPDIR to a shorter one"
    assert list(folder.iterdir()) == []


def test_progress_is_told_while_it_starts(model: Path) -> None:
    stages: list[str] = []

    async def main() -> None:
        async with supervised(model, on_progress=lambda stage, done: stages.append(stage)):
            assert stages == ["starting the engine", f"reading {model}", "preparing the null backend"]

    asyncio.run(main())


# ---- stopping ------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_supervisor(
    model: Path,
    tamper: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process, no file, no descriptor; requests in flight are lost."""
    tamper(SLOW)
    tmp_path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def main() -> None:
        await once()
        before = descriptors()
        await once()
        assert descriptors() == before

    async def once() -> None:
        async with supervised(model) as supervisor:
            assert list(tmp_path.iterdir()) == [], "the address is removed once both ends are there"
            _, account = submit(supervisor, **LONG)
            await until(lambda: account.ids)
        assert account.error is not None
        assert str(account.error) == "the server is stopping"
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ApiError, match="the server is stopping"):
            submit(supervisor)
        await supervisor.stop()

    asyncio.run(main())


def test_signals_of_a_terminal_or_a_service_manager_are_the_parents(model: Path) -> None:
    async def main() -> None:
        async with supervised(model) as supervisor:
            assert supervisor.engine_pid is not None
            assert os.getsid(supervisor.engine_pid) == supervisor.engine_pid
            os.kill(supervisor.engine_pid, signal.SIGINT)
            os.kill(supervisor.engine_pid, signal.SIGTERM)
            _, account = submit(supervisor, max_tokens=3)
            assert (await account.wait()).finish == "length"
            assert supervisor.restarts == 0

    asyncio.run(main())


def test_a_frozen_engine_is_stopped_all_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.2)

    async def main() -> None:
        async with supervised(model) as supervisor:
            assert supervisor.engine_pid is not None
            os.kill(supervisor.engine_pid, signal.SIGSTOP)

    asyncio.run(main())


PARENT = """
import asyncio, sys
from crucible.serve.channel import EngineConfig
from crucible.serve.supervisor import Supervisor

async def main():
    supervisor = Supervisor(EngineConfig(model=sys.argv[1], backend="null"))
    start = asyncio.create_task(supervisor.start())
    await asyncio.sleep(0)
    if sys.argv[2] == "ready":
        await start
    print(supervisor.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process outlives its parent")
@pytest.mark.parametrize("state", ["starting", "ready", "stopped"])
def test_no_engine_outlives_a_parent_that_is_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    when = "starting" if state == "starting" else "ready"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), when], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        assert not is_gone(pid)
        parent.kill()
    end = time.monotonic() + 5
    while not is_gone(pid):
        assert time.monotonic() < end, "an orphan is left"
        time.sleep(0.01)
    assert state == "starting" or list(tmp_path.iterdir()) == []
