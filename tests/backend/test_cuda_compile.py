"""Every CUDA kernel compiles for every supported architecture, without a GPU; the cache and its switch work."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cells import toy

pytest.importorskip("cuda.bindings")

from crucible.engine.cuda import compile as cuda_compile
from crucible.engine.cuda.backend import check_architecture
from crucible.engine.cuda.compile import NO_COMPILE, CompileError, Definitions, cache_folder, compile_source, sources
from crucible.errors import CrucibleError

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")

UNITS: list[tuple[str, Definitions]] = [
    ("rows.cu", {"WEIGHTS": "Int8"}),
    ("attention.cu", {"HEAD_DIM": 64}),
    ("f32.cu", {}),
    ("probe.cu", {}),
    ("linear.cu", {"NARROW_WARPS": 16, "WEIGHTS": "Int8", "KIND": "QKV", "HEAD_DIM": 64, "CHUNK_STEPS": 8}),
    ("linear.cu", {"NARROW_WARPS": 16, "WEIGHTS": "Int8", "KIND": "SWIGLU", "CHUNK_STEPS": 8}),
    ("linear.cu", {"NARROW_WARPS": 16, "WEIGHTS": "Int8", "KIND": "RESIDUAL", "CHUNK_STEPS": 8}),
    ("linear.cu", {"NARROW_WARPS": 8, "WEIGHTS": "Int8", "KIND": "LOGITS", "CHUNK_STEPS": 8}),
]
"""What the backend compiles for int8 weights, and the other sources."""

OTHERS: list[tuple[str, Definitions]] = [
    ("rows.cu", {"WEIGHTS": "F16"}),
    *(("attention.cu", {"HEAD_DIM": dim}) for dim in (80, 96, 128)),
    ("linear.cu", {"NARROW_WARPS": 16, "WEIGHTS": "F16", "KIND": "QKV", "HEAD_DIM": 128, "CHUNK_STEPS": 8}),
    ("linear.cu", {"NARROW_WARPS": 16, "WEIGHTS": "F16", "KIND": "RESIDUAL", "CHUNK_STEPS": 5}),
]
"""Other definitions of the same kernels, compiled for one architecture."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_kernel_compiles_for_every_architecture_without_spills(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where test_cuda_launches.py finds them.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cubins"))
    units = [(*unit, arch) for unit, arch in itertools.product(UNITS, ARCHITECTURES)]
    units += [(*unit, "sm_90a") for unit in OTHERS]
    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda unit: compile_source(unit[0], unit[2], unit[1]).log, units))
    for unit, log in zip(units, logs, strict=True):
        spills = dict(re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL))
        assert spills, f"{unit}: the compiler reports nothing: {log}"
        for kernel, spilled in spills.items():
            # More than 8 wide heads on one key/value head take all registers that a thread can have.
            allowed = 8 if kernel == "attend_rows_16" and unit[1].get("HEAD_DIM") in (96, 128) else 0
            assert int(spilled) <= allowed, f"{unit}: {log}"
        assert "warning" not in log, f"{unit}: {log}"


def test_kernels_include_nothing_but_their_own_files() -> None:
    for name, text in sources().items():
        for included in re.findall(rb"#include\s+(\S+)", text):
            assert included.strip(b'"').decode() in sources(), f"{name} includes {included}"


def test_a_second_compilation_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_source("rows.cu", "sm_90a", {"WEIGHTS": "Int8"})
    monkeypatch.setenv(NO_COMPILE, "1")
    assert compile_source("rows.cu", "sm_90a", {"WEIGHTS": "Int8"}) == first
    for arch, definitions in (("sm_89", {"WEIGHTS": "Int8"}), ("sm_90a", {"WEIGHTS": "F16"})):
        with pytest.raises(CompileError, match=f"rows.cu for {arch} is not in .*{NO_COMPILE}=1 forbids"):
            compile_source("rows.cu", arch, definitions)


@pytest.mark.parametrize("changed", ["functions.cuh", "rows.cu", "an option", "the compiler"])
def test_the_cache_forgets_what_has_changed(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_source("rows.cu", "sm_90a", {"WEIGHTS": "Int8"})
    if changed == "an option":
        monkeypatch.setattr(cuda_compile, "OPTIONS", (*cuda_compile.OPTIONS, "--extra-device-vectorization"))
    elif changed == "the compiler":
        monkeypatch.setattr(cuda_compile, "_version", lambda: (13, 99))
    else:
        shutil.copytree(cuda_compile.KERNELS, tmp_path / "kernels")
        with (tmp_path / "kernels" / changed).open("a") as file:
            file.write("// another\n")
        monkeypatch.setattr(cuda_compile, "KERNELS", tmp_path / "kernels")
    sources.cache_clear()
    monkeypatch.setenv(NO_COMPILE, "1")
    try:
        with pytest.raises(CompileError, match="is not in"):
            compile_source("rows.cu", "sm_90a", {"WEIGHTS": "Int8"})
    finally:
        sources.cache_clear()


def test_an_error_carries_the_compilers_log() -> None:
    with pytest.raises(CompileError, match=r"(?s)rows.cu does not compile with .*--fmad=false.*\n.*Nonsense"):
        compile_source("rows.cu", "sm_90a", {"WEIGHTS": "Nonsense"})
    assert not list(cache_folder().glob("*.cubin"))


def test_a_machine_without_a_driver_gets_one_line() -> None:
    """In a process that no driver's library can be found in, wherever this runs."""
    code = """
import sys, types
import cuda.core
class NoDriver:
    def __init__(self, index): raise RuntimeError("libcuda is\\nnot there")
cuda.core.Device = NoDriver
from crucible.engine.cuda.driver import CudaError, Gpu
try:
    Gpu.open()
except CudaError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "backend 'cuda' finds no usable NVIDIA driver and device 0: libcuda is not there\n", (
        done.stderr
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_encoding": "alibi"}, "computes pos_encoding=rope, not alibi"),
        ({"norm": "layernorm"}, "computes norm=rmsnorm, not layernorm"),
        ({"activation": "gelu"}, "computes activation=swiglu, not gelu"),
        ({"norm_placement": "post"}, "computes norm_placement=pre, not post"),
        ({"qk_norm": True}, "computes qk_norm=False, not True"),
        ({"head_dim": 32}, "takes a head_dim of 64, 80, 96, 128, not 32"),
        ({"head_dim": 64, "hidden_size": 24}, "takes only a hidden_size that is a multiple of 16, not 24"),
        ({"head_dim": 64, "hidden_size": 32, "intermediate_size": 40}, "takes only a intermediate_size"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CrucibleError, match=message):
        check_architecture(toy(**changes))
