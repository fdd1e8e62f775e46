"""The command `crucible serve`: what it does not start with, and for whom it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import BODIES, GENERATE
from serve_process import Server, free_port

from crucible.errors import CrucibleError
from crucible.serve.app import AppSettings
from crucible.serve.channel import EngineConfig
from crucible.serve.server import ServerSettings


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status and the last line of a server that does not start."""
    command = [sys.executable, "-m", "crucible.cli", "serve", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    assert "Traceback" not in result.stderr
    return result.returncode, " ".join(result.stderr.split())


def test_a_model_that_is_none_is_named(tmp_path: Path) -> None:
    status, words = run(str(tmp_path / "nowhere"), "--backend", "reference")
    assert status == 1
    assert "nowhere" in words


def test_what_the_engine_cannot_read_ends_the_start(toy_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(toy_model, tmp_path / "cut"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    status, words = run(str(model), "--backend", "reference", "--port", "0")
    assert status == 1
    assert "model.safetensors" in words


def test_an_address_in_use_is_told(toy_model: Path, server: Server) -> None:
    status, words = run(str(toy_model), "--backend", "null", "--port", str(server.port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1, port {server.port}: Address already in use" in words


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", "127.0.0.1.example.com", ""])
def test_others_are_not_served_without_a_key(host: str) -> None:
    engine = EngineConfig(model="toy")
    with pytest.raises(CrucibleError, match="set --api-key"):
        ServerSettings(engine=engine, app=AppSettings(), host=host)
    ServerSettings(engine=engine, app=AppSettings(api_key="key"), host=host)
    ServerSettings(engine=engine, app=AppSettings(), host=host, allow_unauthenticated=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_is(host: str) -> None:
    ServerSettings(engine=EngineConfig(model="toy"), app=AppSettings(), host=host)


def test_the_command_refuses_in_one_line(toy_model: Path) -> None:
    status, words = run(str(toy_model), "--host", "0.0.0.0", CRUCIBLE_API_KEY="")
    assert status == 1
    assert words.startswith("crucible: others can reach 0.0.0.0: set --api-key")


def test_others_are_served_with_a_key(make_server: Callable[..., Server]) -> None:
    port = free_port()
    server = make_server(
        "--host", "0.0.0.0", "--port", str(port), backend="null", CRUCIBLE_API_KEY="s3cret", wait=False
    )
    server.url = f"http://127.0.0.1:{port}"
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.post(GENERATE, json=BODIES[GENERATE]).status_code == 401
    assert server.post(GENERATE, json=BODIES[GENERATE], headers={"x-api-key": "s3cret"}).status_code == 200
