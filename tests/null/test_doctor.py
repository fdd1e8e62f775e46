"""doctor.py on made-up machines: each trap it knows is found, named, and given a remedy; nothing makes it crash."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from crucible import doctor, hardware
from crucible.doctor import Check, Probe

GIB = 2**30

GPU = hardware.Gpu(
    index=0,
    name="RTX PRO 4000",
    uuid="GPU-aa",
    pci_bus_id="00000000:01:00.0",
    compute_capability=(12, 0),
    memory_bytes=16 * GIB,
    memory_free_bytes=15 * GIB,
    power_limit_w=134.0,
    default_power_limit_w=134.0,
    sm_clock_mhz=700,
    max_sm_clock_mhz=2600,
    temperature_c=49,
)

MACHINE = hardware.Machine(
    system="Linux",
    python="3.11.7",
    is_wsl=False,
    cpu=hardware.Cpu(model="Some CPU", logical_cores=8, affinity_cores=8, quota_cores=None),
    memory_bytes=16 * GIB,
    memory_available_bytes=9 * GIB,
    gpus=(GPU,),
    driver="596.86",
    cuda_driver=(13, 2),
    gpu_reason=None,
)

NO_GPU = dataclasses.replace(MACHINE, gpus=(), driver=None, cuda_driver=None, gpu_reason="no NVIDIA driver")


def probe(machine: hardware.Machine = MACHINE, torch: Any = None) -> Probe:
    """A probe that has already seen this machine and this torch."""
    made = Probe()
    made.__dict__.update(machine=machine, torch=torch)
    return made


def with_gpu(**changes: Any) -> hardware.Machine:
    return dataclasses.replace(MACHINE, gpus=(dataclasses.replace(GPU, **changes),))


@pytest.fixture(autouse=True)
def no_card_in_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nvidia_gpu_present", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


# ---- the whole --------------------------------------------------------------------------------------------------


def test_a_real_run_passes_here_and_each_warning_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without torch: its checks belong to machines with a card, and loading it would take this test's time.
    monkeypatch.setitem(sys.modules, "torch", None)
    checks = doctor.run_checks()
    assert {"Python", "crucible", "CPU", "memory", "disk", "GPU"} <= {check.name for check in checks}
    assert doctor.exit_code(checks) == 0
    assert not [check for check in checks if check.status in ("warn", "fail") and not check.remedy]


def test_a_check_that_breaks_is_a_warning_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Probe) -> list[Check]:
        raise OSError("libcublas.so.13: cannot\nopen shared object")

    def fine(_: Probe) -> list[Check]:
        return [Check("after", "ok", "reached")]

    monkeypatch.setattr(doctor, "CHECKS", (("torch on GPU", broken), ("after", fine)))
    first, second = doctor.run_checks()
    assert (first.name, first.status) == ("torch on GPU", "warn")
    assert first.detail == "could not be checked: OSError: libcublas.so.13: cannot open shared object"
    assert second.name == "after"


@pytest.mark.parametrize(("statuses", "code"), [([], 0), (["ok", "info", "warn"], 0), (["ok", "fail"], 1)])
def test_only_a_failure_sets_the_exit_code(statuses: list[doctor.Status], code: int) -> None:
    assert doctor.exit_code(Check("x", status, "") for status in statuses) == code


def test_rendering_keeps_brackets_and_says_the_verdict() -> None:
    out = io.StringIO()
    checks = [Check("a", "ok", "fine"), Check("b", "warn", "no [x]", "pip install '.[cuda]'")]
    doctor.render(checks, Console(file=out, width=100))
    text = out.getvalue()
    assert "pip install '.[cuda]'" in text
    assert "no [x]" in text
    assert "everything required is there; 1 warning\n" in text
    doctor.render([Check("c", "fail", "gone", "mend it")], Console(file=out, width=100))
    assert "something required is missing; 0 warnings\n" in out.getvalue()


# ---- software ---------------------------------------------------------------------------------------------------


def test_the_extras_are_those_of_pyproject() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        assert set(doctor.EXTRAS) == set(tomllib.load(file)["project"]["optional-dependencies"])


def packages(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], requires: list[str]) -> dict[str, Check]:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: requires)
    monkeypatch.setattr(importlib.metadata, "version", version)
    return {check.name: check for check in doctor.check_packages(probe())}


def test_packages_against_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = [
        "numpy>=1.26",
        "torch>=2.11; extra == 'train'",
        "datasets>=3.0; extra == 'data'",
        "numba>=0.60; extra == 'cpu'",
        "cuda-core<2,>=1.2; extra == 'cuda'",
    ]
    installed = {"numpy": "2.4.6", "torch": "2.13.0+cpu", "datasets": "2.21.0", "cuda-core": "2.0.0"}
    checks = packages(monkeypatch, installed, requires)
    assert (checks["crucible"].status, checks["extra train"].status) == ("ok", "ok")
    assert "numpy 2.4.6" in checks["crucible"].detail
    assert checks["extra train"].detail == "torch 2.13.0+cpu"
    assert (checks["extra data"].status, checks["extra data"].detail) == (
        "warn",
        "datasets 2.21.0 is out of range >=3.0",
    )
    assert (checks["extra cpu"].status, checks["extra cpu"].detail) == ("info", "numba is not installed")
    assert checks["extra cpu"].remedy.startswith("pip install --editable '.[cpu]'")
    assert checks["extra cuda"].status == "warn"
    assert "extra demo" not in checks  # metadata that does not know the extra says nothing about it


@pytest.mark.parametrize("installed", [{}, {"numpy": "1.25.0"}])
def test_a_missing_or_old_required_package_fails(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    assert packages(monkeypatch, installed, ["numpy>=1.26"])["crucible"].status == "fail"


def test_sources_that_are_not_installed_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (check,) = doctor.check_packages(probe())
    assert (check.status, bool(check.remedy)) == ("warn", True)


def test_an_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python(probe())[0].status == "ok"
    monkeypatch.setattr(doctor, "MIN_PYTHON", (99, 0))
    assert doctor.check_python(probe())[0].status == "fail"


# ---- processor, memory, disk, WSL2 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "omp", "warns"),
    [(None, "", False), (None, "16", True), (2.0, "", True), (2.0, "2", False), (2.5, "3,2", True), (8.0, "x", False)],
)
def test_more_threads_than_can_run(monkeypatch: pytest.MonkeyPatch, quota: float | None, omp: str, warns: bool) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    cpu = dataclasses.replace(MACHINE.cpu, quota_cores=quota)
    checks = doctor.check_cpu(probe(dataclasses.replace(MACHINE, cpu=cpu)))
    assert ("CPU threads" in [check.name for check in checks]) is warns


def test_low_memory_and_disk_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_memory(probe())[0].status == "ok"
    assert doctor.check_memory(probe(dataclasses.replace(MACHINE, memory_available_bytes=GIB)))[0].status == "warn"
    assert doctor.check_memory(probe(dataclasses.replace(MACHINE, memory_bytes=None)))[0].status == "info"
    monkeypatch.setattr(doctor, "MIN_FREE_DISK", 2**62)
    assert doctor.check_disk(probe())[0].status == "warn"


def test_wsl_notes_only_under_wsl() -> None:
    assert doctor.check_wsl(probe()) == []
    notes = " ".join(
        check.detail + check.remedy for check in doctor.check_wsl(probe(dataclasses.replace(MACHINE, is_wsl=True)))
    )
    assert "spills to host memory instead of failing" in notes
    assert "no driver inside" in notes


# ---- graphics card ----------------------------------------------------------------------------------------------


def test_a_card_is_described() -> None:
    found = {check.name: check for check in doctor.check_gpus(probe())}
    assert found["NVIDIA driver"].detail == "596.86, runs CUDA up to 13.2"
    assert found["GPU 0"].detail == "RTX PRO 4000, compute capability 12.0 (sm_120), 17.2 GB, 16.1 GB free, 49 C"
    assert found["GPU 0 power"].detail == "limit 134 W, SM clock up to 2600 MHz"
    assert {check.status for check in found.values()} == {"ok"}


def test_a_card_that_reports_little_is_described_too() -> None:
    fields = [field.name for field in dataclasses.fields(GPU) if field.name not in ("index", "name", "uuid")]
    found = {check.name: check for check in doctor.check_gpus(probe(with_gpu(**dict.fromkeys(fields))))}
    assert found["GPU 0"].detail == "RTX PRO 4000"
    assert found["GPU 0 power"].status == "info"


def test_no_card_is_no_warning_but_a_mute_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = doctor.check_gpus(probe(NO_GPU))
    assert (check.status, "no NVIDIA driver" in check.detail) == ("info", True)
    monkeypatch.setattr(hardware, "nvidia_gpu_present", lambda: True)
    (check,) = doctor.check_gpus(probe(NO_GPU))
    assert (check.status, bool(check.remedy)) == ("warn", True)


@pytest.mark.parametrize(
    ("capability", "cuda_driver", "warns"),
    [((12, 0), (12, 7), True), ((12, 0), (12, 8), False), ((10, 0), (12, 4), True), ((9, 0), (12, 0), False)],
)
def test_a_driver_too_old_for_the_card(capability: tuple[int, int], cuda_driver: tuple[int, int], warns: bool) -> None:
    machine = dataclasses.replace(with_gpu(compute_capability=capability), cuda_driver=cuda_driver)
    warned = [check for check in doctor.check_gpus(probe(machine)) if check.status == "warn"]
    assert [check.name for check in warned] == (["GPU 0 driver"] if warns else [])


def test_a_lowered_power_limit_warns() -> None:
    checks = doctor.check_gpus(probe(with_gpu(power_limit_w=55.0)))
    (check,) = [check for check in checks if check.status == "warn"]
    assert "limit 55 W" in check.detail
    assert "default of 134 W" in check.detail


@pytest.mark.parametrize(
    ("capability", "archs", "coverage"),
    [
        ((12, 0), "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "native"),
        ((9, 0), "sm_80 sm_90a", "native"),
        ((8, 9), "sm_80 sm_86 sm_90", "compatible"),
        ((8, 0), "sm_86 sm_90", "none"),
        ((12, 0), "sm_90 compute_90", "ptx"),
        ((12, 1), "sm_120 compute_120", "compatible"),
        ((12, 0), "sm_90a compute_90a", "none"),
        ((10, 3), "sm_100f", "none"),
        ((7, 0), "sm_75 compute_75", "none"),
        ((9, 0), "", "none"),
        ((9, 0), "gfx942", "none"),
    ],
)
def test_arch_coverage(capability: tuple[int, int], archs: str, coverage: str) -> None:
    assert doctor.arch_coverage(capability, archs.split()) == coverage


def fake_torch(cuda: str | None, *, available: bool = True, archs: str = "") -> Any:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 1,
            get_device_capability=lambda index: (12, 0),
            get_arch_list=archs.split,
        ),
    )


@pytest.mark.parametrize(
    ("torch", "status", "said"),
    [
        (fake_torch("13.0", archs="sm_90 sm_120"), "ok", "native code for sm_120"),
        (fake_torch("12.6", archs="sm_90 compute_90"), "warn", "only PTX for sm_120"),
        (fake_torch("12.6", archs="sm_90"), "warn", "no code for sm_120"),
        (fake_torch(None, available=False), "warn", "CPU build"),
        (fake_torch("13.0", available=False), "warn", "cannot use the card"),
    ],
)
def test_torch_on_the_card(torch: Any, status: str, said: str) -> None:
    (check,) = doctor.check_torch_gpu(probe(torch=torch))
    assert check.status == status
    assert said in check.detail
    assert bool(check.remedy) is (status != "ok")


def test_torch_checks_are_silent_without_torch_or_card() -> None:
    assert doctor.check_torch_gpu(probe()) == []
    assert doctor.check_torch_gpu(probe(NO_GPU, fake_torch(None, available=False))) == []
    assert doctor.check_fp8(probe()) == []
    assert doctor.check_fp8(probe(NO_GPU, fake_torch(None, available=False))) == []


def test_nvrtc_must_know_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nvrtc", lambda: None)
    assert doctor.check_nvrtc(probe(NO_GPU)) == []
    assert [check.status for check in doctor.check_nvrtc(probe())] == ["info"]
    monkeypatch.setattr(doctor, "find_nvrtc", lambda: Path("libnvrtc.so.13"))
    monkeypatch.setattr(doctor, "query_nvrtc", lambda path: ((13, 0), [75, 90, 120]))
    assert [check.status for check in doctor.check_nvrtc(probe())] == ["ok"]
    monkeypatch.setattr(doctor, "query_nvrtc", lambda path: ((12, 6), [75, 90]))
    first, second = doctor.check_nvrtc(probe())
    assert (first.status, second.status) == ("ok", "warn")
    assert "does not compile for sm_120" in second.detail


def test_the_newest_nvrtc_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert doctor.find_nvrtc() is None
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc.alt.so.13"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / name).touch()
    assert doctor.find_nvrtc() == tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    with pytest.raises(OSError, match=r"libnvrtc\.so\.13"):
        doctor.query_nvrtc(tmp_path / "nvidia/cu13/lib/libnvrtc.so.13")
