"""The command line: every command explains itself, works on a toy artifact, and answers bad input with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from toy_artifact import write_toy_artifact

from crucible import LLM, cli

APPS = [group.typer_instance for group in cli.app.registered_groups if group.typer_instance]
COMMANDS = [
    [command.name or command.callback.__name__]
    for app in APPS
    for command in app.registered_commands
    if command.callback
] + [["bench", name] for name in ("decode", "prefill", "compare", "serve", "compat", "stall", "soak")]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_toy_artifact(tmp_path_factory.mktemp("cli") / "toy"))


class Result:
    """Exit status and output of one command line."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["crucible", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        self.status = ended.value.code or 0
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def crucible(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: Result(capsys, monkeypatch, *arguments)


def test_help_shows_the_path(crucible) -> None:
    result = crucible("--help")
    assert result.status == 0
    order = [result.out.index(f" {name} ") for name in ("prepare", "train", "export", "generate")]
    assert order == sorted(order)
    for name, *_ in COMMANDS:
        assert f" {name} " in result.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(crucible, command: list[str]) -> None:
    result = crucible(*command, "--help")
    assert result.status == 0
    assert "Example" in result.out
    assert f"crucible {' '.join(command)}" in result.out.split("Example")[1]


def test_the_version_is_the_package_s(crucible) -> None:
    import crucible as package

    assert crucible("--version").out == f"crucible {package.__version__}\n"


# ---- what commands print ----------------------------------------------------------------------------------------


def test_tokenize_and_back(crucible) -> None:
    assert crucible("tokenize", "The World is a stage").out == "464 2159 318 257 3800\n"
    assert crucible("tokenize", "--decode", "464,2159, 318 257 3800").out == "The World is a stage\n"
    assert crucible("tokenize", "--pieces", "né").out == "     77  b'n'\n   2634  b'\\xc3\\xa9'\n"


def test_generate_prints_prompt_and_continuation_and_notes_to_stderr(crucible, artifact: str) -> None:
    arguments = ("generate", artifact, "-p", "the cat", "-n", "12", "--temperature", "1.1", "--seed", "3")
    result = crucible(*arguments)
    assert result.status == 0
    assert result.out.startswith("the cat")
    assert "12 tokens in" in result.err
    assert "seed 3; length" in result.err
    again = crucible(*arguments, "--no-cache", "--no-echo")
    assert "the cat" + again.out == result.out
    assert crucible(*arguments, "--seed", "4").out != result.out


def test_temperature_zero_is_greedy(crucible, artifact: str) -> None:
    greedy = crucible("generate", artifact, "-p", "the", "-n", "8", "--temperature", "0")
    assert "; greedy; " in greedy.err
    assert greedy.out == crucible("generate", artifact, "-p", "the", "-n", "8", "--seed", "99").out


def test_logits_lists_the_likeliest_tokens(crucible, artifact: str) -> None:
    llm = LLM(artifact)
    last_V = llm.logits("the dog")[-1]
    result = crucible("logits", artifact, "--prompt", "the dog", "--top", "3")
    listed = [line.split()[0] for line in result.out.splitlines()[-3:]]
    assert listed == [str(token_id) for token_id in (-last_V).argsort()[:3]]
    ids = ",".join(map(str, llm.encode("the dog")))
    assert crucible("logits", artifact, "--ids", ids, "--top", "3").out == result.out


def test_inspect_shows_the_model(crucible, artifact: str) -> None:
    result = crucible("inspect", artifact)
    assert result.status == 0
    assert "model.layers.1.mlp.down_proj.weight" in result.out


# ---- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "-p", "x"], "nowhere: no such file or folder"),
        (["generate", "{artifact}", "-p", ""], "the prompt is empty"),
        (["generate", "{artifact}", "-p", "x", "-n", "500"], "the context of 96"),
        (["generate", "{artifact}", "-p", "x", "--top-k", "5"], "top_k=5 needs a positive temperature"),
        (["generate", "{artifact}", "-p", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["logits", "{artifact}"], "give exactly one of --prompt and --ids"),
        (["logits", "{artifact}", "--ids", "1,two"], "token ids are integers separated by commas, not '1,two'"),
        (["logits", "{artifact}", "--ids", "1,320"], "token id 320; the model's are 0 to 319"),
        (["tokenize", "--decode", "99999999"], "token id 99999999 is outside the vocabulary of 50257"),
        (["tokenize", "-t", "nowhere", "x"], "nowhere"),
        (["inspect", "nowhere"], "nowhere: no such file or folder"),
        (["prepare", "nowhere.txt", "--out", "{tmp}/out"], "nowhere.txt"),
    ],
)
def test_bad_input_is_one_line_and_status_1(
    crucible, artifact: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = crucible(*(argument.format(artifact=artifact, tmp=tmp_path) for argument in arguments))
    assert result.status == 1
    assert result.out == ""
    assert message in result.err
    assert result.err.startswith("crucible: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["generate", "x"], ["train", "--lr", "much", "--run", "x"], ["fly"]])
def test_wrong_usage_is_status_2(crucible, arguments: list[str]) -> None:
    assert crucible(*arguments).status == 2


def test_a_missing_package_names_its_extra(crucible, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "app", without_torch)
    result = crucible()
    assert result.status == 1
    assert result.err == "crucible: torch is not installed; pip install --editable '.[train]' in the checkout\n"


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["crucible"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_ctrl_c_ends_generation_with_what_was_printed(artifact: str) -> None:
    command = [
        sys.executable,
        "-m",
        "crucible.cli",
        "generate",
        artifact,
        "-p",
        "the",
        "-n",
        "90",
        "--temperature",
        "1",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == "the"
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.returncode in (0, 130), "the last token may come before the signal"
        assert "Traceback" not in process.stderr.read()
