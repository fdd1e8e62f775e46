"""SIGKILL at every system call that a run makes to its folder, and what the file system itself refuses.

Run as a script this file is the process that does it: it imports torch once and forks a child per experiment, because
a forked child may run autograd only if its parent never did. One line of JSON per experiment goes to standard output.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CALLS = ("fsync", "rename", "replace", "symlink", "rmdir")
MAX_POINTS = 200


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_kill_at_any_call_leaves_a_run_that_ends_with_the_same_bits(experiments):
    kills = [e for e in experiments if e["kind"] == "kill"]
    assert [e["point"] for e in kills] == list(range(1, len(kills) + 1))
    assert 30 < len(kills) < MAX_POINTS
    for experiment in kills:
        assert experiment["killed"], experiment
        assert experiment["same"], experiment
    # The kills fell before, between and after the saves of steps 2 and 4, and no state but these was ever found.
    found = [e["last_step"] for e in kills]
    assert found == sorted(found, key=lambda step: step or 0)
    assert set(found) == {None, 2, 4}


def test_a_file_that_may_not_grow_is_an_error_and_the_run_resumes(experiments):
    (experiment,) = [e for e in experiments if e["kind"] == "limit"]
    assert experiment["error"].startswith("CheckpointError: cannot save ")
    assert "File too large" in experiment["error"]
    assert experiment["same"], experiment


# ---- the other process ----------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    from train_runs import outcome, toy_run

    from crucible.train import checkpoint
    from crucible.train import folder as folder_module
    from crucible.train.loop import train
    from crucible.train.step import Learner

    def config(name: str):
        return toy_run(folder, name, steps=4, save_every=2, warmup_steps=1, batch_size=4, grad_accumulation=1)

    def finish(name: str) -> None:
        train(config(name), resume=(folder / name / "config.json").exists())

    def killed_at(point: int) -> None:
        arm(point, checkpoint)
        train(config(f"killed-{point}"))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            train(config("limited"))
        except ValueError as error:
            (folder / "error").write_text(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("60 kB were enough for the optimizer")

    def last_step(name: str) -> int | None:
        try:
            return checkpoint.load(checkpoint.resolve(folder / name, "last")).state.step
        except checkpoint.CheckpointError:
            return None

    # What a first step loads, done here once instead of in every child, and without autograd.
    folder_module.git_state()
    optimizer = Learner(config("whole")).optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    optimizer.step()

    assert in_child(finish, "whole") == 0
    expected = outcome(folder / "whole")
    for point in range(1, MAX_POINTS):
        name = f"killed-{point}"
        status = in_child(killed_at, point)
        if status == 0:
            break
        found = last_step(name)
        same = in_child(finish, name) == 0 and outcome(folder / name) == expected
        report(kind="kill", point=point, killed=status == -signal.SIGKILL, last_step=found, same=same)
        shutil.rmtree(folder / name)
    assert in_child(limited) == 0
    same = in_child(finish, "limited") == 0 and outcome(folder / "limited") == expected
    report(kind="limit", error=(folder / "error").read_text(), same=same)


def arm(point: int, checkpoint) -> None:
    """Has this process killed just before call number `point`; half-written tensor files are points of their own."""
    seen = 0

    def reach() -> None:
        nonlocal seen
        seen += 1
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Callable) -> Callable:
        def call(*arguments, **keywords):
            reach()
            return real(*arguments, **keywords)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save_file = checkpoint.save_file

    def save_in_halves(tensors, path) -> None:
        save_file(tensors, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        reach()
        path.write_bytes(content)

    checkpoint.save_file = save_in_halves


def in_child(function: Callable, *arguments) -> int:
    """Runs a function in a forked child and returns its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(**experiment) -> None:
    print(json.dumps(experiment), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]))
