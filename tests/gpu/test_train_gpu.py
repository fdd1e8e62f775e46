"""Training on a CUDA device: what the CPU tests cannot show. Skipped where torch sees none."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from cells import axis_cells, toy
from toy_tokenizers import TRAINING_TEXT
from train_runs import toy_run

from crucible.config import ModelConfig
from crucible.data.prepare import prepare
from crucible.export.artifact import export_checkpoint, verify_engine
from crucible.model.transformer import Transformer
from crucible.train.events import Started, Stepped
from crucible.train.loop import train
from crucible.train.metrics import read_log

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize("config", axis_cells())
@pytest.mark.parametrize("path", ["fused", "materialised"])
def test_f32_logits_are_the_cpu_s(config: ModelConfig, path: str) -> None:
    model = Transformer(config, attention_path=path)  # type: ignore[arg-type]
    tokens_BT = torch.randint(config.vocab_size, (2, 80), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_BTV = model(tokens_BT)
        found_BTV = model.cuda()(tokens_BT.cuda()).cpu()
    assert (found_BTV - expected_BTV).abs().max() <= 2e-6 * expected_BTV.abs().max() + 1e-7


@pytest.mark.parametrize("compile", [False, True])
def test_bf16_is_the_default_and_learns_what_f32_learns(tmp_path: Path, compile: bool) -> None:
    started: list[Started] = []
    losses = {}
    for dtype in ("auto", "f32"):
        config = toy_run(tmp_path, f"{dtype}-{compile}", device="cuda", dtype=dtype, steps=60, compile=compile)
        result = train(config, on_event=lambda event: started.append(event) if isinstance(event, Started) else None)
        losses[dtype] = result.val_loss
        log = read_log(config.run / "log.csv")
        assert log[-1].loss < 0.8 * log[0].loss
        assert all(row.power_limit_w and row.sm_clock_mhz for row in log), "NVML gives both on this device"
    assert [event.dtype for event in started] == ["bf16", "f32"]
    # bf16 operands have 8 bits; over 60 steps of this size both runs end within a few percent of each other.
    assert losses["auto"] == pytest.approx(losses["f32"], rel=0.05)


def test_resuming_on_the_gpu_goes_on_from_the_same_state(tmp_path: Path) -> None:
    whole = toy_run(tmp_path, "whole", device="cuda", dtype="f32")
    part = dataclasses.replace(whole, run=tmp_path / "part")

    def interrupt(event: object) -> None:
        if isinstance(event, Stepped) and event.row.step == 7:
            signal.raise_signal(signal.SIGINT)

    train(whole)
    assert train(part, on_event=interrupt).interrupted == "SIGINT"
    assert train(part, resume=True).interrupted is None
    rows = [read_log(config.run / "log.csv")[-1] for config in (whole, part)]
    assert rows[1].step == rows[0].step == 12
    # GPU sums may take another order from run to run, so the losses agree to rounding, not in bits.
    assert rows[1].loss == pytest.approx(rows[0].loss, rel=1e-3)


def test_a_model_trained_here_runs_in_the_engine(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\f".join([TRAINING_TEXT] * 12))
    prepare([str(text)], tmp_path / "data", tokenizer="train:300", val_fraction=0.3)
    config = toy_run(tmp_path, model=toy(vocab_size=320), device="cuda", steps=8)
    train(config)
    artifact = export_checkpoint(config.run, tmp_path / "artifact")
    assert verify_engine(artifact, config.run).top1_agreement == 1.0
