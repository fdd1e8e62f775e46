"""hardware.py against made-up /proc trees and a made-up NVML, so that every machine is the same to these tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from crucible import hardware
from crucible.hardware import Cpu

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---- processor and memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(8, None, 8), (8, 16.0, 8), (8, 2.5, 2), (8, 0.4, 1), (1, 4.0, 1)],
)
def test_usable_cores_is_the_smaller_of_affinity_and_quota(affinity: int, quota: float | None, usable: int) -> None:
    cpu = Cpu(model="x", logical_cores=64, affinity_cores=affinity, quota_cores=quota)
    assert cpu.usable_cores == usable


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # The group above is tighter than the process's own.
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/outer/inner/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        # A container that sees only the mount's top, version 1.
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_cpu_quota_of_both_control_group_versions(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert hardware.cpu(tree(tmp_path, files)).quota_cores == quota


def test_memory_is_cut_to_the_control_group(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {9 * GIB // 1024} kB\n"}
    assert hardware.memory(tree(tmp_path, meminfo)) == (16 * GIB, 9 * GIB)
    limit = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n"}
    assert hardware.memory(tree(tmp_path, limit)) == (4 * GIB, 4 * GIB)
    assert hardware.memory(tree(tmp_path, {"sys/fs/cgroup/job/memory.max": "max\n"})) == (16 * GIB, 9 * GIB)


def test_cpu_model_and_wsl(tmp_path: Path) -> None:
    assert not hardware.is_wsl(tmp_path)
    tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU 9000\n",
            "proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n",
        },
    )
    assert hardware.cpu(tmp_path).model == "Some CPU 9000"
    assert hardware.is_wsl(tmp_path)


# ---- graphics cards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "present"),
    [
        ({}, False),
        ({"dev/nvidia0": ""}, True),
        ({"dev/nvidia-uvm": ""}, False),
        ({"dev/dxg": ""}, False),
        ({"dev/dxg": "", "usr/lib/wsl/lib/nvidia-smi": ""}, True),
    ],
)
def test_gpu_presence_by_device_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], present: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.nvidia_gpu_present(tree(tmp_path, files)) is present


class FakeNvml(ModuleType):
    """As much of `pynvml` as hardware.py asks, for cards given as (name, uuid); power of card i is 100 + i watts."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        __module__ = "pynvml"

    def __init__(self, cards: list[tuple[str, str]], *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.cards, self.driver = cards, driver

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": lambda: b"580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetName": lambda i: self.cards[i][0],
            "nvmlDeviceGetUUID": lambda i: self.cards[i][1].encode(),
            "nvmlDeviceGetPciInfo": lambda i: SimpleNamespace(busId=f"00000000:{i:02X}:00.0"),
            "nvmlDeviceGetCudaComputeCapability": lambda i: (12, 0),
            "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(total=16 * GIB, free=15 * GIB),
            "nvmlDeviceGetEnforcedPowerLimit": lambda i: 55_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": self._not_supported,
            "nvmlDeviceGetPowerUsage": lambda i: (100 + i) * 1000,
            "nvmlDeviceGetClockInfo": lambda i, kind: 1700,
            "nvmlDeviceGetMaxClockInfo": lambda i, kind: 2600,
            "nvmlDeviceGetTemperature": self._not_supported,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def _not_supported(self, *_: Any) -> None:
        raise self.NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a FakeNvml with the cards it is called with."""

    def install(cards: list[tuple[str, str]] | None, *, driver: bool = True) -> None:
        hardware._nvml.cache_clear()
        module = None if cards is None else FakeNvml(cards, driver=driver)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    yield install
    hardware._nvml.cache_clear()


def test_machine_reads_cards_and_leaves_unknowns_none(nvml: Any) -> None:
    nvml([("RTX PRO 4000", "GPU-aa")])
    found = hardware.machine()
    assert (found.driver, found.cuda_driver, found.gpu_reason) == ("580.95.05", (13, 1), None)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.uuid, gpu.pci_bus_id) == ("RTX PRO 4000", "GPU-aa", "00000000:00:00.0")
    assert (gpu.compute_capability, gpu.memory_bytes, gpu.memory_free_bytes) == ((12, 0), 16 * GIB, 15 * GIB)
    assert (gpu.power_limit_w, gpu.sm_clock_mhz, gpu.max_sm_clock_mhz) == (55.0, 1700, 2600)
    assert gpu.default_power_limit_w is None
    assert gpu.temperature_c is None


@pytest.mark.parametrize(
    ("cards", "driver", "reason"),
    [
        (None, False, "nvidia-ml-py is not installed"),
        ([], False, "no NVIDIA driver: Driver Not Loaded"),
        ([], True, "finds no card"),
    ],
)
def test_no_card_comes_with_its_reason(nvml: Any, cards: Any, driver: bool, reason: str) -> None:
    nvml(cards, driver=driver)
    found = hardware.machine()
    assert found.gpus == ()
    assert reason in str(found.gpu_reason)
    assert hardware.power_and_clock(0) is None


def test_power_follows_cuda_visible_devices(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def power(index: int) -> float | None:
        reading = hardware.power_and_clock(index)
        return None if reading is None else reading.power_w

    nvml([("A", "GPU-aa11"), ("A", "GPU-bb22"), ("A", "GPU-bb33")])
    assert [power(i) for i in (0, 1, 2, 3, -1)] == [100.0, 101.0, 102.0, None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-aa")
    assert [power(i) for i in (0, 1, 2)] == [102.0, 100.0, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,7")
    assert [power(i) for i in (0, 1)] == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert power(0) is None


def test_power_is_not_guessed_among_different_cards(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml([("Small", "GPU-aa"), ("Big", "GPU-bb")])
    assert hardware.power_and_clock(0) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    reading = hardware.power_and_clock(1)
    assert reading is not None
    assert (reading.power_w, reading.power_limit_w, reading.temperature_c) == (101.0, 55.0, None)


# ---- measured rates ---------------------------------------------------------------------------------------------


def test_measured_peak_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hardware.measured_peak_flops("NVIDIA H200", "bfloat16") is None
    path = hardware.save_measured_peak_flops("NVIDIA H200", "bfloat16", 743e12, power_limit_w=700.0, sm_clock_mhz=1980)
    hardware.save_measured_peak_flops("NVIDIA H200", "float32", 50.25e12)
    assert hardware.measured_peak_flops("NVIDIA H200", "bfloat16") == 743e12
    assert hardware.measured_peak_flops("NVIDIA H200", "float32") == 50.25e12
    assert hardware.measured_peak_flops("NVIDIA H200", "float16") is None
    assert hardware.measured_peak_flops("NVIDIA H100", "bfloat16") is None
    stored = json.loads(path.read_text())
    assert stored["device"] == "NVIDIA H200"
    assert stored["flops"]["bfloat16"]["power_limit_w"] == 700.0
    assert list(path.parent.iterdir()) == [path]  # nothing temporary is left


@pytest.mark.parametrize("text", ["", "{", "[]", '{"flops": 3}', '{"flops": {"bfloat16": {}}}'])
def test_a_spoilt_measurement_is_none_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = hardware.save_measured_peak_flops("card", "bfloat16", 1e12)
    path.write_text(text)
    with pytest.warns(UserWarning, match="card.json"):
        assert hardware.measured_peak_flops("card", "bfloat16") is None
    hardware.save_measured_peak_flops("card", "bfloat16", 2e12)
    assert hardware.measured_peak_flops("card", "bfloat16") == 2e12


def test_a_rate_that_is_not_positive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="flops_per_s"):
            hardware.save_measured_peak_flops("card", "bfloat16", rate)
