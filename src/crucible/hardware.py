"""What this machine is: processor, memory, graphics cards, and the rates measured on them.

Standard library only at import. NVML is asked through the `nvidia-ml-py` package where that is installed; without it,
or without a driver, there are no cards and a reason why. A rate that was not measured is None, never a guess.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crucible.files import write_json

ROOT = Path("/")
"""Where /proc, /sys and /dev are looked for; tests pass a folder of their own."""


class HardwareError(RuntimeError):
    """NVML cannot be used here: the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor as this process may use it."""

    model: str
    logical_cores: int
    affinity_cores: int
    quota_cores: float | None
    """CPU time per second of wall time that the control group allows, or None without a limit."""

    @property
    def usable_cores(self) -> int:
        """Threads that can run at once: the smaller of affinity and quota, a fraction of a core cut off, at least 1."""
        if self.quota_cores is None:
            return self.affinity_cores
        return max(1, min(self.affinity_cores, int(self.quota_cores)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One NVIDIA card; a field that the driver does not report (usual under WSL2) is None."""

    index: int
    """Position in NVML's order, which is that of the PCI bus."""
    name: str
    uuid: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    memory_free_bytes: int | None
    power_limit_w: float | None
    """The limit in force, which the user or the laptop's power profile may change at any time."""
    default_power_limit_w: float | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    temperature_c: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that a measurement has to name about where it was made."""

    system: str
    python: str
    is_wsl: bool
    cpu: Cpu
    memory_bytes: int | None
    """Host memory this process may use: the machine's, or its control group's limit where that is smaller."""
    memory_available_bytes: int | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    """NVIDIA driver version."""
    cuda_driver: tuple[int, int] | None
    """Newest CUDA version the driver runs."""
    gpu_reason: str | None
    """Why `gpus` is empty; None where it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerReading:
    """Power and clock of a card at one moment; None where the driver does not say."""

    power_w: float | None
    power_limit_w: float | None
    sm_clock_mhz: int | None
    temperature_c: int | None


def machine() -> Machine:
    """This machine, read anew at each call. Never raises: what cannot be read is None."""
    gpus: tuple[Gpu, ...] = ()
    driver = cuda_driver = reason = None
    try:
        nvml = _nvml()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda_driver = (version // 1000, version % 1000 // 10)
        gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        if not gpus:
            reason = "the NVIDIA driver finds no card"
    except HardwareError as error:
        reason = str(error)
    except Exception as error:  # NVML's own error classes exist only where the package does
        reason = f"NVML: {error}"
    total, available = memory()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        is_wsl=is_wsl(),
        cpu=cpu(),
        memory_bytes=total,
        memory_available_bytes=available,
        gpus=gpus,
        driver=driver,
        cuda_driver=cuda_driver,
        gpu_reason=reason,
    )


# ---- processor and memory ---------------------------------------------------------------------------------------


def cpu(root: Path = ROOT) -> Cpu:
    """The processor and how much of it this process may use."""
    logical = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Cpu(
        model=_cpu_model(root), logical_cores=logical, affinity_cores=affinity, quota_cores=_cgroup_cpu_quota(root)
    )


def usable_cores() -> int:
    """Threads worth starting here, see `Cpu.usable_cores`."""
    return cpu().usable_cores


def memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Total and available host memory in bytes, after the control group's limit."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE))
    total = int(found["MemTotal"]) * 1024 if "MemTotal" in found else _physical_memory()
    available = int(found["MemAvailable"]) * 1024 if "MemAvailable" in found else None
    for path in _cgroup_files(root, "memory", "memory.max", "memory.limit_in_bytes"):
        limit = _read(path)
        # "max" is cgroup v2's absence of a limit; v1 writes a huge number, which the minimum ignores.
        if limit is not None and limit.strip().isdigit() and total is not None:
            total = min(total, int(limit))
    if available is not None and total is not None:
        available = min(available, total)
    return total, available


def is_wsl(root: Path = ROOT) -> bool:
    """Whether this is Linux inside Windows (WSL2), where the driver lives outside."""
    return "microsoft" in (_read(root / "proc/sys/kernel/osrelease") or "").lower()


def _cpu_model(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cgroup_cpu_quota(root: Path) -> float | None:
    quotas = []
    for path in _cgroup_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = (_read(path) or "").split()
        if path.name == "cpu.cfs_quota_us":
            words += (_read(path.with_name("cpu.cfs_period_us")) or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _cgroup_files(root: Path, controller: str, v2_name: str, v1_name: str) -> list[Path]:
    """The limit files of this process's control group and of all above it, for either hierarchy version."""
    files = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", v2_name
        elif controller in controllers.split(","):
            top, name = root / "sys/fs/cgroup" / controller, v1_name
        else:
            continue
        # Inside a container the named group may not be visible; the mount's top is then the group itself.
        folder = top / group.lstrip("/")
        while folder.is_relative_to(top):
            files.append(folder / name)
            folder = folder.parent
    return files


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


# ---- graphics cards ---------------------------------------------------------------------------------------------


def nvidia_gpu_present(root: Path = ROOT) -> bool:
    """Whether the system shows an NVIDIA card, told without any package: device nodes, or WSL2's with its tool."""
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    tool = (root / "usr/lib/wsl/lib/nvidia-smi").exists() or shutil.which("nvidia-smi") is not None
    return (root / "dev/dxg").exists() and tool


def power_and_clock(index: int = 0) -> PowerReading | None:
    """Power, limit, clock and temperature now of the card that CUDA calls `index` in this process.

    None without NVML, and where the card cannot be told: with cards of different kinds CUDA numbers the fastest
    first and NVML the first on the bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID or CUDA_VISIBLE_DEVICES holds UUIDs.
    Takes 0.01 ms once NVML is loaded (measured on an H200), so that it can be called at every logged step.
    """
    try:
        nvml = _nvml()
        handle = _cuda_device(nvml, index)
    except HardwareError:
        return None
    return PowerReading(
        power_w=_watts(_ask(nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_w=_watts(_ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        sm_clock_mhz=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )


@cache
def _nvml() -> Any:
    """The initialised `pynvml` module. Raises HardwareError with the reason why there is none."""
    try:
        import pynvml
    except ImportError:
        raise HardwareError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise HardwareError(f"no NVIDIA driver: {error}") from None
    return pynvml


def _cuda_device(nvml: Any, index: int) -> Any:
    """NVML's handle of a CUDA ordinal. Raises HardwareError where they cannot be matched."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(handles))] if visible is None else [e.strip() for e in visible.split(",")]
    if not 0 <= index < len(entries):
        raise HardwareError(f"CUDA sees no device {index}")
    entry = entries[index]
    if entry.isdigit() and int(entry) < len(handles):
        names = {_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
        if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise HardwareError("cards of different kinds: set CUDA_DEVICE_ORDER=PCI_BUS_ID to tell them apart")
        return handles[int(entry)]
    # CUDA accepts any unambiguous beginning of a UUID.
    matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if entry and uuid.startswith(entry)]
    if len(matches) != 1:
        raise HardwareError(f"CUDA_VISIBLE_DEVICES entry {entry!r} names no card")
    return matches[0]


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    size = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=None if pci is None else _text(pci.busId),
        compute_capability=None if capability is None else (capability[0], capability[1]),
        memory_bytes=None if size is None else size.total,
        memory_free_bytes=None if size is None else size.free,
        power_limit_w=_watts(_ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        default_power_limit_w=_watts(_ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        sm_clock_mhz=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=_ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _ask(query: Callable[..., Any], *arguments: Any) -> Any:
    """An NVML query's answer, or None where this card or driver has none (NotSupported, GpuIsLost ...)."""
    try:
        return query(*arguments)
    except Exception as error:
        if type(error).__module__.split(".")[0] != "pynvml":
            raise
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---- measured rates ---------------------------------------------------------------------------------------------


def measured_peak_flops(device_name: str, dtype: str) -> float | None:
    """Matrix-product rate in FLOP/s that was measured on a device of this name, or None.

    Args:
        device_name: as torch and NVML give it, for example "NVIDIA H200".
        dtype: "float32", "bfloat16", "float16" ...

    A file that cannot be understood counts as no measurement, with a warning that names it.
    """
    path = _peak_file(device_name)
    text = _read(path)
    if text is None:
        return None
    try:
        entry = json.loads(text)["flops"].get(dtype)
        return None if entry is None else float(entry["flops_per_s"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} is not a measurement of peak rates ({error!r}); delete it", stacklevel=2)
        return None


def save_measured_peak_flops(
    device_name: str,
    dtype: str,
    flops_per_s: float,
    *,
    power_limit_w: float | None = None,
    sm_clock_mhz: int | None = None,
) -> Path:
    """Keep a measured rate for `measured_peak_flops`, beside those of other dtypes, and return its file.

    The power limit and the clock under load go with it: the same card at another limit has another peak.

    Raises:
        ValueError: the rate is not positive.
    """
    if not flops_per_s > 0:
        raise ValueError(f"flops_per_s must be positive, not {flops_per_s!r}")
    path = _peak_file(device_name)
    try:
        flops = dict(json.loads(_read(path) or "{}").get("flops", {}))
    except (ValueError, TypeError, AttributeError):
        flops = {}
    flops[dtype] = {"flops_per_s": flops_per_s, "power_limit_w": power_limit_w, "sm_clock_mhz": sm_clock_mhz}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"device": device_name, "flops": flops})
    return path


def cache_dir() -> Path:
    """Folder for what can be made again: $XDG_CACHE_HOME/crucible, else ~/.cache/crucible. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "crucible"


def _peak_file(device_name: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") or "device"
    return cache_dir() / "peaks" / f"{slug}.json"
