"""log.csv, the watch over speed, the estimate of time left, and the device's rates."""

from __future__ import annotations

import errno

import pytest

from crucible import hardware
from crucible.train import metrics
from crucible.train.metrics import COLUMNS, DeviceMonitor, LogError, LogRow, LogWriter, Pace, SpeedWatch, read_log


def row(step: int, **changes) -> LogRow:
    values = {
        "step": step,
        "tokens": 160 * step,
        "loss": 4.1 / step,
        "val_loss": 1 / 3 if step % 2 == 0 else None,
        "lr": 1e-3 / 7,
        "grad_norm": 0.1 + step,
        "ms_per_step": 12.345678901234567,
        "tokens_per_second": 1e6 / 3,
        "mfu": None,
        "power_limit_w": None,
        "sm_clock_mhz": None,
    }
    return LogRow(**{**values, **changes})


def write(path, rows, after=0):
    log = LogWriter(path, after=after)
    for each in rows:
        log.write(each)
    log.sync()
    log.close()


# ---- log.csv --------------------------------------------------------------------------------------------------------


def test_rows_read_back_exactly(tmp_path):
    rows = [row(1), row(2, mfu=0.4321, power_limit_w=700.0, sm_clock_mhz=1980), row(3, loss=1e-30)]
    write(tmp_path / "log.csv", rows)
    assert read_log(tmp_path / "log.csv") == rows
    assert read_log(tmp_path / "log.csv", up_to=2) == rows[:2]


def test_what_was_not_measured_says_so(tmp_path):
    write(tmp_path / "log.csv", [row(1)])
    header, line = (tmp_path / "log.csv").read_text().splitlines()
    assert header.split(",") == list(COLUMNS)
    cells = dict(zip(COLUMNS, line.split(","), strict=True))
    assert cells["val_loss"] == ""
    assert [cells[name] for name in ("mfu", "power_limit_w", "sm_clock_mhz")] == ["n/a"] * 3


def test_a_resumed_log_has_each_step_once(tmp_path):
    path = tmp_path / "log.csv"
    write(path, [row(step) for step in range(1, 6)])
    with path.open("a") as file:
        file.write("6,960,0.5")  # the line that a power cut broke off
    assert len(read_log(path)) == 5
    again = [row(step, loss=9.0) for step in (4, 5)]
    write(path, again, after=3)
    assert read_log(path) == [row(1), row(2), row(3), *again]


def test_a_log_without_the_rows_before_a_checkpoint_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    with pytest.raises(LogError, match="cannot read"):
        LogWriter(path, after=2)
    write(path, [row(1)])
    with pytest.raises(LogError, match="steps 1 to 2"):
        LogWriter(path, after=2)
    write(path, [row(1), row(3)])
    with pytest.raises(LogError, match="steps 1 to 2"):
        LogWriter(path, after=2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "first line"),
        ("step,loss\n1,2\n", "first line"),
        (",".join(COLUMNS) + "\n1,2,3\n", "line 2"),
        (",".join(COLUMNS) + "\n" + ",".join(["x"] * len(COLUMNS)) + "\n", "line 2"),
    ],
)
def test_a_malformed_log_is_named_with_its_line(tmp_path, text, complaint):
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(LogError, match=complaint):
        read_log(tmp_path / "log.csv")


def test_a_full_disk_is_one_clear_error(tmp_path):
    log = LogWriter(tmp_path / "log.csv")

    class Full:
        def write(self, line):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            real.close()

    real, log._file = log._file, Full()
    with pytest.raises(LogError, match=r"log\.csv: No space left on device"):
        log.write(row(1))
    log.close()


# ---- speed ----------------------------------------------------------------------------------------------------------


def feed(watch: SpeedWatch, times_ms, first=1, **changes):
    rows = (row(first + index, ms_per_step=ms, **changes) for index, ms in enumerate(times_ms))
    return [change for change in map(watch.add, rows) if change is not None]


def test_a_lasting_change_is_announced_once_with_power_and_clock():
    watch = SpeedWatch()
    assert feed(watch, [2500.0] * 100, power_limit_w=55.0, sm_clock_mhz=900) == []
    changes = feed(watch, [930.0] * 300, first=101, power_limit_w=135.0, sm_clock_mhz=2100)
    assert len(changes) == 1
    change = changes[0]
    assert (change.before_ms, change.after_ms) == (2500.0, 930.0)
    assert change.step == 101
    assert "2500 -> 930 ms" in str(change)
    assert "55 W -> 135 W" in str(change)
    assert "900 MHz -> 2100 MHz" in str(change)
    back = feed(watch, [2500.0] * 100, first=401)
    assert len(back) == 1
    assert "power limit 135 W -> n/a" in str(back[0])


@pytest.mark.parametrize(
    "times_ms",
    [
        [1000.0, 1400.0] * 200,  # noise inside the ratio
        [1000.0] * 100 + [5000.0] * 9 + [1000.0] * 100,  # a disturbance shorter than half a window
        [1000.0] * 100 + [2000.0] * 18 + [1000.0] * 100,  # a longer one that the median leaves within 20 steps
        [100.0] * 100 + [200.0] * 50 + [100.0] * 100,  # off for 40 steps, which are only 8 s
        [1000.0 * 1.004**step for step in range(400)],  # drifting, never jumping
        [30_000.0] + [1000.0] * 300,  # a slow first step
    ],
)
def test_noise_and_short_disturbances_are_not_announced(times_ms):
    assert feed(SpeedWatch(), times_ms) == []


def test_time_left_comes_from_recent_steps_and_spread_out_evaluations():
    pace = Pace()
    assert pace.seconds_left(10) is None
    for _ in range(30):
        pace.add(5.0, 0.0)
    for step in range(30):
        pace.add(1.0, 6.0 if step % 10 == 0 else 0.0)
    assert pace.seconds_left(10) == pytest.approx(10 * (1.0 + 18 / 60))
    assert pace.seconds_left(0) == 0


# ---- the device -----------------------------------------------------------------------------------------------------


def test_rates_of_a_card_are_asked_for_once_a_second(monkeypatch):
    asked, now = [], [0.0]

    def reading(index):
        asked.append(index)
        return hardware.PowerReading(
            power_w=1.0, power_limit_w=700.0, sm_clock_mhz=1900 + len(asked), temperature_c=None
        )

    monkeypatch.setattr(hardware, "power_and_clock", reading)
    monkeypatch.setattr(hardware, "measured_peak_flops", lambda name, dtype: {("Card", "bfloat16"): 7e14}[name, dtype])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    monitor = DeviceMonitor(device_name="Card", cuda_index=1, dtype="bfloat16")
    assert monitor.peak_flops == 7e14
    assert monitor.power_and_clock() == (700.0, 1901)
    now[0] = 0.5
    assert monitor.power_and_clock() == (700.0, 1901)
    now[0] = 1.0
    assert monitor.power_and_clock() == (700.0, 1902)
    assert asked == [1, 1]


def test_the_processor_has_no_power_limit_and_an_unmeasured_device_no_peak(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monitor = DeviceMonitor(device_name="Some CPU", cuda_index=None, dtype="float32")
    assert monitor.peak_flops is None
    assert monitor.power_and_clock() == (None, None)


def test_a_card_that_says_nothing_is_not_available(monkeypatch):
    monkeypatch.setattr(hardware, "power_and_clock", lambda index: None)
    assert DeviceMonitor(device_name="Card", cuda_index=0, dtype="float32").power_and_clock() == (None, None)
