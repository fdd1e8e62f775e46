"""What this machine can do and what stands in its way: the checks behind `crucible doctor`.

Every check stands alone: one that breaks becomes a warning that carries the reason, and the others go on. Nothing is
changed on the machine, and nothing is asked of the network.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crucible import __version__, hardware
from crucible.errors import install
from crucible.hardware import Gpu

Status = Literal["ok", "info", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_FREE_DISK = 5 * 10**9
"""Bytes below which a run with its checkpoints and shards is likely to end early."""
MIN_CUDA_OF_GENERATION = {10: (12, 8), 12: (12, 8)}
"""First CUDA release that compiles natively for a compute capability's major number, where that is recent."""

EXTRAS = {
    "train": "crucible train, export and demo",
    "data": "crucible prepare from the Hugging Face hub, .parquet and .zst",
    "cpu": "the fast CPU backend",
    "cuda": "the CUDA backend",
    "serve": "crucible serve",
    "tui": "crucible chat",
    "gguf": "quantised .gguf files, smollm2 among them",
    "peers": "crucible bench compare",
    "dev": "make test and make check",
}
"""What each extra of pyproject.toml is for."""

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "info": ("--", "dim"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` is one line, empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


class Probe:
    """What several checks look at, each read once and only when first asked for."""

    @cached_property
    def machine(self) -> hardware.Machine:
        return hardware.machine()

    @cached_property
    def torch(self) -> Any:
        """The torch module, or None where it is not installed."""
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            return None
        return torch


def run_checks() -> list[Check]:
    """All findings, in the order a reader needs them. Never raises."""
    probe = Probe()
    checks: list[Check] = []
    for name, check in CHECKS:
        try:
            checks += check(probe)
        except Exception as error:  # whatever broke is itself the finding
            reason = " ".join(str(error).split()) or "no message"
            checks.append(Check(name, "warn", f"could not be checked: {type(error).__name__}: {reason}"))
    return checks


def exit_code(checks: Iterable[Check]) -> int:
    """1 where something required fails, else 0."""
    return int(any(check.status == "fail" for check in checks))


def render(checks: Sequence[Check], console: Console | None = None) -> None:
    """Print findings as a table, each remedy under its finding, and one line that sums up."""
    console = console or Console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        table.add_row(f"[{style}]{mark}[/]", check.name, escape(check.detail))
        if check.remedy:
            table.add_row("", "", f"[{style}]->[/] {escape(check.remedy)}")
    console.print(table)
    count = {status: sum(check.status == status for check in checks) for status in _MARKS}
    verdict = "something required is missing" if count["fail"] else "everything required is there"
    console.print(f"{verdict}; {count['warn']} warning{'s' * (count['warn'] != 1)}")


# ---- software ---------------------------------------------------------------------------------------------------


def check_python(probe: Probe) -> list[Check]:
    version = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        return [Check("Python", "fail", version, f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer")]
    return [Check("Python", "ok", version)]


def check_packages(probe: Probe) -> list[Check]:
    """What crucible requires, then each extra: installed versions against the ranges of its metadata."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("crucible") or []]
    except importlib.metadata.PackageNotFoundError:
        detail = f"{__version__} from sources that are not installed, so no version is checked"
        return [Check("crucible", "warn", detail, "pip install --editable . in the checkout")]
    found, problems = _installed(requirements, extra="")
    checks = [
        Check("crucible", "fail", "; ".join(problems), "pip install --editable . in the checkout")
        if problems
        else Check("crucible", "ok", f"{__version__} with {', '.join(found)}")
    ]
    for extra, purpose in EXTRAS.items():
        found, problems = _installed(requirements, extra)
        if not problems:
            # Neither found nor missing: the installed metadata is older than the extra.
            checks += [Check(f"extra {extra}", "ok", ", ".join(found))] if found else []
            continue
        # A version out of its range is a mistake; a package not installed is a choice.
        status: Status = "warn" if any("is out of range" in problem for problem in problems) else "info"
        checks.append(Check(f"extra {extra}", status, "; ".join(problems), f"{install(extra)}, for {purpose}"))
    return checks


def _installed(requirements: Sequence[Requirement], extra: str) -> tuple[list[str], list[str]]:
    """Packages of one extra ("" for the base) that are there, and what is wrong with those that are not."""
    found, problems = [], []
    for requirement in requirements:
        marker = requirement.marker
        if (marker is None) != (extra == "") or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        if requirement.name == "crucible":  # an extra that takes in others, which have their own line
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}")
        else:
            problems.append(f"{requirement.name} {version} is out of range {requirement.specifier}")
    return found, problems


# ---- processor, memory, disk ------------------------------------------------------------------------------------


def check_cpu(probe: Probe) -> list[Check]:
    cpu = probe.machine.cpu
    detail = f"{cpu.model}, {cpu.usable_cores} of {cpu.logical_cores} cores usable"
    if cpu.quota_cores is not None:
        detail += f" (control group allows {cpu.quota_cores:g})"
    checks = [Check("CPU", "ok", detail)]
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(asked) if asked.isdigit() else cpu.affinity_cores
    if threads > cpu.usable_cores:
        said = f"OMP_NUM_THREADS={asked}" if asked.isdigit() else f"by default {threads} threads start"
        detail = f"{said}, but only {cpu.usable_cores} can run at once: they would wait for each other"
        checks.append(Check("CPU threads", "warn", detail, f"export OMP_NUM_THREADS={cpu.usable_cores}"))
    return checks


def check_memory(probe: Probe) -> list[Check]:
    total, available = probe.machine.memory_bytes, probe.machine.memory_available_bytes
    if total is None:
        return [Check("memory", "info", "size not known")]
    free = "" if available is None else f", {_gb(available)} available"
    if available is not None and available < 2 * 10**9:
        remedy = "close other programs, or train a smaller preset with a smaller batch"
        return [Check("memory", "warn", f"{_gb(total)}{free}", remedy)]
    return [Check("memory", "ok", f"{_gb(total)}{free}")]


def check_disk(probe: Probe) -> list[Check]:
    usage = shutil.disk_usage(Path.cwd())
    detail = f"{_gb(usage.free)} free at {Path.cwd()}"
    if usage.free < MIN_FREE_DISK:
        return [Check("disk", "warn", detail, "free some space: runs keep checkpoints, corpora become shards")]
    return [Check("disk", "ok", detail)]


def check_wsl(probe: Probe) -> list[Check]:
    """WSL2: where the driver lives, and the memory trap that no error announces."""
    if not probe.machine.is_wsl:
        return []
    checks = [
        Check(
            "WSL2",
            "info",
            "a GPU allocation past the card's memory spills to host memory instead of failing, and is far slower there",
            "when raising the batch size watch the step time, not for an out-of-memory error",
        )
    ]
    inside = sorted(str(path) for path in Path("/usr/lib/x86_64-linux-gnu").glob("libcuda.so.*.*"))
    if inside:
        remedy = "remove the NVIDIA driver packages from Linux: the Windows driver serves WSL2, one inside breaks it"
        checks.append(Check("WSL2 driver", "fail", f"a driver is installed inside: {', '.join(inside)}", remedy))
    elif not Path("/dev/dxg").exists():
        remedy = "update the Windows NVIDIA driver, then: wsl --update; install no driver inside Linux"
        checks.append(Check("WSL2 driver", "warn", "/dev/dxg is missing, Windows passes no card through", remedy))
    return checks


# ---- graphics card ----------------------------------------------------------------------------------------------


def check_gpus(probe: Probe) -> list[Check]:
    machine = probe.machine
    if not machine.gpus:
        if not hardware.nvidia_gpu_present():
            return [Check("GPU", "info", f"none ({machine.gpu_reason}); training and the engine run on the CPU")]
        remedy = "pip install nvidia-ml-py, or see that nvidia-smi runs"
        return [Check("GPU", "warn", f"a card is present but cannot be asked: {machine.gpu_reason}", remedy)]
    cuda = "" if machine.cuda_driver is None else f", runs CUDA up to {_dotted(machine.cuda_driver)}"
    checks = [Check("NVIDIA driver", "ok", f"{machine.driver}{cuda}")]
    for gpu in machine.gpus:
        checks += [_describe(gpu), *_driver_covers(gpu, machine.cuda_driver), *_power(gpu)]
    return checks


def _describe(gpu: Gpu) -> Check:
    parts = [gpu.name]
    if gpu.compute_capability is not None:
        parts.append(f"compute capability {_dotted(gpu.compute_capability)} (sm_{_digits(gpu.compute_capability)})")
    if gpu.memory_bytes is not None:
        free = "" if gpu.memory_free_bytes is None else f", {_gb(gpu.memory_free_bytes)} free"
        parts.append(f"{_gb(gpu.memory_bytes)}{free}")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} C")
    return Check(f"GPU {gpu.index}", "ok", ", ".join(parts))


def _driver_covers(gpu: Gpu, cuda_driver: tuple[int, int] | None) -> list[Check]:
    if gpu.compute_capability is None or cuda_driver is None:
        return []
    needed = MIN_CUDA_OF_GENERATION.get(gpu.compute_capability[0])
    if needed is None or cuda_driver >= needed:
        return []
    detail = (
        f"sm_{_digits(gpu.compute_capability)} needs CUDA {_dotted(needed)}, the driver ends at {_dotted(cuda_driver)}"
    )
    return [Check(f"GPU {gpu.index} driver", "warn", detail, "update the NVIDIA driver (under WSL2: the Windows one)")]


def _power(gpu: Gpu) -> list[Check]:
    name = f"GPU {gpu.index} power"
    if gpu.power_limit_w is None:
        return [Check(name, "info", "the driver reports no power limit: quote measurements without it with care")]
    clock = "" if gpu.max_sm_clock_mhz is None else f", SM clock up to {gpu.max_sm_clock_mhz} MHz"
    detail = f"limit {gpu.power_limit_w:.0f} W{clock}"
    default = gpu.default_power_limit_w
    if default is not None and gpu.power_limit_w < 0.95 * default:
        remedy = (
            "raise it (laptop: the vendor's performance profile; else nvidia-smi -pl), or quote it with each number"
        )
        return [Check(name, "warn", f"{detail}, below the card's default of {default:.0f} W", remedy)]
    return [Check(name, "ok", detail)]


def check_torch_gpu(probe: Probe) -> list[Check]:
    """Whether the installed torch runs natively on each card it sees."""
    torch = probe.torch
    if torch is None:
        return []
    if torch.version.cuda is None or not torch.cuda.is_available():
        if not (probe.machine.gpus or hardware.nvidia_gpu_present()):
            return []
        if torch.version.cuda is None:
            remedy = "pip uninstall torch, then pip install torch from PyPI: its Linux build has CUDA"
            return [Check("torch on GPU", "warn", f"torch {torch.__version__} is a CPU build", remedy)]
        detail = f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the card"
        return [Check("torch on GPU", "warn", detail, "update the driver, or install a torch for an older CUDA")]
    checks = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        checks.append(
            _coverage_check("torch on GPU", f"torch {torch.__version__}", capability, torch.cuda.get_arch_list())
        )
    return checks


Coverage = Literal["native", "compatible", "ptx", "none"]


def arch_coverage(capability: tuple[int, int], arch_list: Iterable[str]) -> Coverage:
    """How code built for `arch_list` ("sm_90", "sm_90a", "compute_120", ...) runs on a compute capability.

    native: built for exactly this one. compatible: machine code of the same major and a lower minor number, which
    runs as it is. ptx: compiled by the driver at the first run. none: not at all. Architecture- and family-specific
    code (suffix a or f) runs on its own architecture alone, so it counts as native or not at all.
    """
    binaries: set[tuple[int, int]] = set()
    portable: set[tuple[int, int]] = set()
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        specific = digits[-1:] in ("a", "f")
        digits = digits.rstrip("af")
        if not digits.isdigit() or len(digits) < 2:
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built == capability and kind == "sm":
            return "native"
        if not specific:
            (binaries if kind == "sm" else portable).add(built)
    if any(built[0] == capability[0] and built[1] <= capability[1] for built in binaries):
        return "compatible"
    return "ptx" if any(built <= capability for built in portable) else "none"


def _coverage_check(name: str, what: str, capability: tuple[int, int], arch_list: Sequence[str]) -> Check:
    coverage = arch_coverage(capability, arch_list)
    sm = f"sm_{_digits(capability)}"
    if coverage in ("native", "compatible"):
        return Check(name, "ok", f"{what} has {'native' if coverage == 'native' else 'compatible'} code for {sm}")
    needed = MIN_CUDA_OF_GENERATION.get(capability[0])
    remedy = f"install a build for {sm}" + (f" (CUDA {_dotted(needed)} or newer)" if needed else "")
    built = f"built for {' '.join(arch_list) or 'nothing'}"
    if coverage == "ptx":
        return Check(
            name, "warn", f"{what} has only PTX for {sm}, compiled at the first run and slower; {built}", remedy
        )
    return Check(name, "warn", f"{what} has no code for {sm}; {built}", remedy)


def check_nvrtc(probe: Probe) -> list[Check]:
    """The run-time compiler that the CUDA backend builds its kernels with, and whether it knows each card."""
    path = find_nvrtc()
    gpus = [gpu for gpu in probe.machine.gpus if gpu.compute_capability is not None]
    if path is None:
        return [Check("NVRTC", "info", "not installed", f"{install('cuda')}, for {EXTRAS['cuda']}")] if gpus else []
    version, archs = query_nvrtc(path)
    checks = [Check("NVRTC", "ok", f"CUDA {_dotted(version)}, sm_{archs[0]} to sm_{archs[-1]}, {path}")]
    for gpu in gpus:
        assert gpu.compute_capability is not None
        if int(_digits(gpu.compute_capability)) not in archs:
            detail = f"CUDA {_dotted(version)} does not compile for sm_{_digits(gpu.compute_capability)}"
            checks.append(Check("NVRTC", "warn", detail, "pip install --upgrade nvidia-cuda-nvrtc"))
    return checks


def find_nvrtc() -> Path | None:
    """The NVRTC library of the newest nvidia-cuda-nvrtc package on sys.path, or None."""
    found = [
        library
        for folder in map(Path, sys.path)
        for pattern in ("nvidia/cu[0-9]*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
        for library in folder.glob(pattern)
        if library.suffix[1:].isdigit()
    ]
    return max(found, key=lambda library: int(library.suffix[1:]), default=None)


def query_nvrtc(path: Path) -> tuple[tuple[int, int], list[int]]:
    """Version of an NVRTC library and the architectures it compiles for, ascending (90 for sm_90).

    Raises:
        OSError: it cannot be loaded.
        RuntimeError: it answers with an error.
    """
    nvrtc = ctypes.CDLL(str(path))
    major, minor, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    status = nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    status = status or nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(number))
    archs = (ctypes.c_int * number.value)()
    status = status or nvrtc.nvrtcGetSupportedArchs(archs)
    if status or not number.value:
        raise RuntimeError(f"{path} answers with error {status}")
    return (major.value, minor.value), sorted(archs)


def check_fp8(probe: Probe) -> list[Check]:
    """FP8 by multiplying e4m3 matrices: a data sheet or a dtype's existence proves nothing."""
    torch = probe.torch
    if torch is None or torch.version.cuda is None or not torch.cuda.is_available():
        return []
    # Small integers are exact in e4m3 and their products in f32, so the right answer is known to the bit.
    rows = (torch.arange(16 * 32, device="cuda").reshape(16, 32) % 7 - 3).float()
    columns = (torch.arange(32 * 16, device="cuda").reshape(16, 32) % 5 - 2).float().T
    one = torch.ones((), device="cuda")
    try:
        product = torch._scaled_mm(
            rows.to(torch.float8_e4m3fn),
            columns.to(torch.float8_e4m3fn),  # column-major, as the call demands
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
        )
    except RuntimeError as error:
        return [Check("FP8", "info", f"not on this card: {str(error).splitlines()[0]}")]
    if not torch.equal(product, rows @ columns):
        return [Check("FP8", "warn", "e4m3 matrices multiply, but wrongly", "update the driver and torch")]
    return [Check("FP8", "ok", "e4m3 matrix product runs and is right")]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _digits(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


def _gb(number: int) -> str:
    return f"{number / 1e9:.1f} GB"


CHECKS: Sequence[tuple[str, Callable[[Probe], list[Check]]]] = (
    ("Python", check_python),
    ("packages", check_packages),
    ("CPU", check_cpu),
    ("memory", check_memory),
    ("disk", check_disk),
    ("WSL2", check_wsl),
    ("GPU", check_gpus),
    ("torch on GPU", check_torch_gpu),
    ("NVRTC", check_nvrtc),
    ("FP8", check_fp8),
)
