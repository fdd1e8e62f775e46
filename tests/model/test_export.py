"""From a checkpoint to an artifact and back: bits, logits by `transformers` and by the engine, the folder itself."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cells import all_cells, axis_cells, toy
from safetensors.torch import load_file, save_file
from toy_weights import toy_weights
from train_runs import toy_run

from crucible.config import ModelConfig
from crucible.data.shards import write_shard
from crucible.engine.artifact import ArtifactError, Generation, read_config, read_generation, read_json
from crucible.engine.weights import INDEX_NAME, WEIGHTS_NAME, load_weights
from crucible.export import artifact as exporter
from crucible.export import target as targets
from crucible.export.artifact import export_checkpoint, round_tensors, verify, verify_engine
from crucible.export.names import from_artifact, to_artifact
from crucible.model.transformer import Transformer
from crucible.tokenizer import Tokenizer
from crucible.train.checkpoint import CheckpointError, TrainingState, save
from crucible.train.loop import train

VOCAB = 300
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want."
DTYPES = ["f32", "f16", "bf16"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    torch.set_num_threads(1)
    return Tokenizer.train([TEXT] * 2, 280)


def write_checkpoint(run: Path, config: ModelConfig, tokenizer: Tokenizer, *, step: int = 3, seed: int = 0) -> Path:
    """A run with one more checkpoint, of dense random weights; the first is the best."""
    run.mkdir(exist_ok=True)
    tokenizer.save(run / "tokenizer.json")
    tensors = {from_artifact(name): torch.from_numpy(w) for name, w in toy_weights(config, seed).items()}
    state = TrainingState(step=step, tokens=40 * step, val_loss=2.5, best_step=3, best_val_loss=2.5, loader={}, rng={})
    return save(run, model_config=config, tensors=tensors, optimizer={}, state=state)


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    write_checkpoint(tmp_path / "run", toy(vocab_size=VOCAB), tokenizer)
    return tmp_path / "run"


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", all_cells())
def test_names_map_both_ways_over_every_cell(config: ModelConfig) -> None:
    names = list(Transformer(config).state_dict())
    assert {to_artifact(name) for name in names} == config.tensor_shapes().keys()
    assert [from_artifact(to_artifact(name)) for name in names] == names


@pytest.mark.parametrize("name", ["norm.weight", "model.lm_head.weight", "xmodel.norm.weight", ""])
def test_a_name_outside_the_map_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of an artifact's tensor"):
        from_artifact(name)


# ---- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_folder_holds_what_the_formats_document_says(dtype: Any, run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "deep" / "out", dtype=dtype)
    assert out == tmp_path / "deep" / "out"
    files = "config.json crucible.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in out.iterdir()) == files.split()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {path.stat().st_mode for path in out.iterdir()} == {(run / "tokenizer.json").stat().st_mode}
    tokenizer = Tokenizer.from_file(out)
    assert tokenizer.sha256 == Tokenizer.from_file(run).sha256
    assert read_config(out) == toy(vocab_size=VOCAB)
    assert read_generation(out) == Generation(tokenizer.eot_id, (tokenizer.eot_id,), tokenizer.eot_id)
    provenance = read_json(out / "crucible.json")
    assert provenance.pop("exported_with").keys() == {"crucible", "torch", "safetensors"}
    assert provenance == {"run": "run", "step": 3, "tokens": 120, "val_loss": 2.5, "dtype": dtype}


def test_a_trained_run_exports_with_its_provenance(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data, run = tmp_path / "data", tmp_path / "demo"
    data.mkdir()
    tokenizer.save(data / "tokenizer.json")
    (data / "meta.json").write_text(json.dumps({"sources": ["prose"]}))
    ids = np.array(tokenizer.encode(TEXT) * 20)
    for name in ("train_000000.bin", "val_000000.bin"):
        write_shard(data / name, ids, vocab_size=tokenizer.vocab_size, tokenizer_id=tokenizer.sha256[:8])
    config = toy_run(tmp_path, "demo", model=toy(vocab_size=VOCAB), steps=4, warmup_steps=1)
    assert config.data == data
    train(config)
    out = export_checkpoint(run, tmp_path / "out")
    assert verify(out, run).max_relative_error < 2e-5
    assert verify_engine(out, run).max_relative_error < 2e-5
    provenance = read_json(out / "crucible.json")
    assert (provenance["run"], provenance["step"], provenance["data"]) == ("demo", 4, {"sources": ["prose"]})
    assert provenance["tokenizer_sha256"] == tokenizer.sha256.hex()
    assert provenance["versions"]["torch"] == torch.__version__
    assert {"git", "device", "val_loss"} <= provenance.keys()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_to_nearest_even(dtype: Any, run: Path, tmp_path: Path) -> None:
    """Against rounding by hand in float64; the dense weights hit both directions, ties are set on purpose."""
    weights = toy_weights(toy(vocab_size=VOCAB))
    weights["model.norm.weight"][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    folder = run / "checkpoints" / "best"
    tensors = {from_artifact(name): torch.from_numpy(w) for name, w in weights.items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    out = export_checkpoint(run, tmp_path / "out", dtype=dtype)
    significant_bits = {"f32": 24, "f16": 11, "bf16": 8}[dtype]
    for name, found in load_weights(out, read_config(out)).items():
        exact = weights[name].astype(np.float64)
        _, exponent = np.frexp(exact)
        smallest = {"f32": -149, "f16": -24, "bf16": -133}[dtype]
        unit = np.exp2(np.maximum(exponent - significant_bits, smallest).astype(np.float64))
        np.testing.assert_array_equal(found, np.rint(exact / unit) * unit)  # rint rounds ties to even


def test_the_choice_of_checkpoint(run: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_checkpoint(run, toy(vocab_size=VOCAB), tokenizer, step=9, seed=1)
    steps = {
        which: read_json(export_checkpoint(run, tmp_path / which, which=which) / "crucible.json")["step"]
        for which in ("best", "last")
    }
    assert steps == {"best": 3, "last": 9}
    direct = export_checkpoint(run / "checkpoints" / "step-00000009", tmp_path / "direct")
    assert read_json(direct / "crucible.json")["step"] == 9
    assert read_json(direct / "crucible.json")["run"] == "run"


@pytest.mark.parametrize("limit", [1, 5000, 30_000, 10**9])
def test_large_artifacts_are_sharded(limit: int, run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "out", max_shard_bytes=limit)
    whole = export_checkpoint(run, tmp_path / "whole")
    files = sorted(out.glob("*.safetensors"))
    assert (out / INDEX_NAME).exists() == (len(files) > 1) == (limit < 10**9)
    for file in files:
        held = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(held) <= limit or len(held) == 1
    if len(files) > 1:
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert read_json(out / INDEX_NAME)["metadata"]["total_size"] == 4 * read_config(out).num_parameters()
    for name, weight in load_weights(out, read_config(out)).items():
        np.testing.assert_array_equal(weight, load_weights(whole, read_config(whole))[name])
    assert verify(out, run).max_relative_error < 5e-6


# ---- what is refused --------------------------------------------------------------------------------------------


def test_an_overflow_names_the_tensor() -> None:
    tensors = {"norm.weight": torch.ones(4), "layers.0.mlp.up_proj.weight": torch.full((2, 2), 65504.0)}
    assert round_tensors(tensors, "f16")["model.layers.0.mlp.up_proj.weight"].max() == 65504
    tensors["layers.0.mlp.up_proj.weight"][1, 0] = -65520.0  # the first that rounds to infinity
    with pytest.raises(ArtifactError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight': 65520 is out of range for f16"):
        round_tensors(tensors, "f16")
    assert round_tensors(tensors, "bf16").keys() == {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"}
    with pytest.raises(ArtifactError, match="out of range for bf16"):
        round_tensors({"norm.weight": torch.tensor([3.4e38])}, "bf16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_checkpoint_is_not_exported(value: float) -> None:
    with pytest.raises(ArtifactError, match=r"'model\.norm\.weight' holds a value that is not finite"):
        round_tensors({"norm.weight": torch.tensor([1.0, value])}, "f32")


def test_a_run_without_a_fitting_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    write_checkpoint(small, toy(vocab_size=270), Tokenizer.from_file(run))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: 280 tokens do not fit the model's vocab_size=270"):
        export_checkpoint(small, tmp_path / "out")
    (run / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: no such file"):
        export_checkpoint(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_bad_arguments(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="dtype must be one of f32, f16, bf16, not 'int8'"):
        export_checkpoint(run, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        export_checkpoint(tmp_path / "none", tmp_path / "out")


# ---- the target folder ------------------------------------------------------------------------------------------


def test_an_existing_target_needs_force_and_is_replaced_whole(run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "out", max_shard_bytes=5000)
    with pytest.raises(ArtifactError, match=r"out exists; .* force"):
        export_checkpoint(run, out, dtype="f16")
    assert read_json(out / "crucible.json")["dtype"] == "f32"
    export_checkpoint(run, out, dtype="f16", force=True)
    assert read_json(out / "crucible.json")["dtype"] == "f16"
    assert not (out / INDEX_NAME).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_force_replaces_nothing_but_an_artifact(run: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for target in ("home", "file", "run"):
        with pytest.raises(ArtifactError, match="is not an artifact of ours"):
            export_checkpoint(run, tmp_path / target, force=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_a_target_that_appears_meanwhile_is_not_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_lose_the_race(*arguments: Any) -> None:
        write(*arguments)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").touch()

    write = exporter._write_tensors
    monkeypatch.setattr(exporter, "_write_tensors", write_and_lose_the_race)
    with pytest.raises(ArtifactError, match="out exists"):
        export_checkpoint(run, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_target_that_cannot_be_made_says_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file/out cannot be written: .*Not a directory"):
        export_checkpoint(run, tmp_path / "file" / "out")


def test_a_link_to_an_artifact_stays_a_link(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    export_checkpoint(run, tmp_path / "link", dtype="bf16", force=True)
    assert (tmp_path / "link").is_symlink()
    assert read_json(tmp_path / "real" / "crucible.json")["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("module", "at"),
    [(exporter, "_write_texts"), (exporter, "_write_tensors"), (targets, "_put"), (targets, "sync_file")],
)
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_artifact_and_nothing_else(
    module: Any, at: str, error: BaseException, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export_checkpoint(run, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, at, fail)
    with pytest.raises(ArtifactError if isinstance(error, OSError) else KeyboardInterrupt):
        export_checkpoint(run, out, dtype="f16", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_failed_rename_puts_the_old_artifact_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = export_checkpoint(run, tmp_path / "out")
    rename = Path.rename

    def fail_into_place(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith("-old"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(ArtifactError, match="out cannot be written: no"):
        export_checkpoint(run, out, dtype="f16", force=True)
    assert read_json(out / "crucible.json")["dtype"] == "f32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


# ---- transformers -----------------------------------------------------------------------------------------------

LLAMAS = [
    toy(vocab_size=VOCAB),
    toy(vocab_size=VOCAB, attention="mha", rope_theta=500.0, norm_eps=0.03),
    toy(vocab_size=VOCAB, attention="mqa", tie_word_embeddings=False),
    toy(vocab_size=VOCAB, hidden_size=32),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", LLAMAS, ids=["gqa", "mha", "mqa-untied", "square"])
def test_transformers_computes_the_same(config: ModelConfig, dtype: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", config, tokenizer)
    found = verify(export_checkpoint(checkpoint, tmp_path / "out", dtype=dtype), checkpoint)
    assert found.against == f"transformers {transformers.__version__}"
    assert found.lengths == (1, 17, 48, 96)
    assert 0 < found.max_relative_error < 2e-5
    assert found.top1_agreement == 1.0
    assert found.notice is None
    assert "same likeliest token at 100.0% of 162 positions" in str(found)


def test_transformers_encodes_and_decodes_the_same(run: Path, tmp_path: Path) -> None:
    ours = Tokenizer.from_file(run)
    theirs = transformers.AutoTokenizer.from_pretrained(export_checkpoint(run, tmp_path / "out"))
    for text in (TEXT, "  two spaces , don ' t!", "naïve 🙂 漢字\n\n\ttab", "a .  b ?", "<s> x </s> [INST]", ""):
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs.convert_tokens_to_ids(theirs.eos_token) == theirs.bos_token_id == ours.eot_id
    assert len(theirs) == ours.vocab_size


def test_transformers_tokenizer_loads_beside_a_model_it_does_not_know(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_checkpoint(tmp_path / "run", toy(vocab_size=VOCAB, pos_encoding="alibi"), tokenizer)
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"] == tokenizer.encode(TEXT)


def test_transformers_generates_what_our_model_would(run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([[5, 60, 200]])
    found = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    ours = Transformer(toy(vocab_size=VOCAB))
    ours.load_state_dict(load_file(run / "checkpoints" / "best" / "model.safetensors"))
    eot_id = read_generation(out).eos_token_ids[0]
    wanted = ids[0].tolist()
    with torch.inference_mode():
        while len(wanted) < len(found) and wanted[-1] != eot_id:
            wanted.append(int(ours(torch.tensor([wanted]))[0, -1].argmax()))
    assert found == wanted


def test_a_config_that_transformers_wrote_reads_back(run: Path, tmp_path: Path) -> None:
    """Its save keeps theta in rope_parameters, adds keys of its own, and may shard."""
    config = toy(vocab_size=VOCAB, rope_theta=500.0)
    out = export_checkpoint(run, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert read_config(tmp_path / "theirs") == config
    assert (tmp_path / "theirs" / INDEX_NAME).exists()
    expected = load_weights(out, read_config(out))
    for name, weight in load_weights(tmp_path / "theirs", config).items():
        np.testing.assert_array_equal(weight, expected[name])


def test_without_transformers_the_notice_says_so(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = export_checkpoint(run, tmp_path / "out")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = verify(out, run)
    assert found.against == "our torch model"
    assert "transformers is not installed" in str(found.notice)
    assert str(found.notice) in str(found)


# ---- every cell, and what a difference looks like ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", axis_cells())
def test_verification_passes_for_every_axis_value(
    config: ModelConfig, dtype: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    run = tmp_path / "run"
    write_checkpoint(run, config.vary(vocab_size=VOCAB), tokenizer)
    out = export_checkpoint(run, tmp_path / "out", dtype=dtype)
    found = verify(out, run)
    assert found.against == (f"transformers {transformers.__version__}" if config.is_llama else "our torch model")
    assert found.max_relative_error < 2e-5
    engine = verify_engine(out, run)
    assert engine.against == "the engine's reference backend"
    assert engine.lengths == (1, 17, 96)
    assert 0 < engine.max_relative_error < 2e-5
    assert min(found.top1_agreement, engine.top1_agreement) == 1.0


def rewrite(out: Path, name: str, change: Any) -> None:
    tensors = load_file(out / WEIGHTS_NAME)
    tensors[name] = change(tensors[name]).contiguous()
    (out / WEIGHTS_NAME).unlink()
    save_file(tensors, out / WEIGHTS_NAME, metadata={"format": "pt"})


@pytest.mark.parametrize("check", [verify, verify_engine])
def test_one_changed_bit_is_found(check: Any, run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "out")

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int32)[5] ^= 1
        return tensor

    rewrite(out, "model.layers.1.input_layernorm.weight", flip)
    with pytest.raises(ArtifactError, match=r"tensor 'model\.layers\.1\.input_layernorm\.weight' differs from"):
        check(out, run)


@pytest.mark.parametrize("check", [verify, verify_engine])
def test_a_changed_config_is_found(check: Any, run: Path, tmp_path: Path) -> None:
    out = export_checkpoint(run, tmp_path / "out")
    values = read_json(out / "config.json")
    (out / "config.json").write_text(json.dumps({**values, "rope_theta": 10_001.0}))
    with pytest.raises(ArtifactError, match=r"rope_theta is 10001\.0, in the checkpoint 10000\.0"):
        check(out, run)


@pytest.mark.parametrize("check", [verify, verify_engine])
def test_the_checkpoint_of_another_step_is_found(check: Any, run: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_checkpoint(run, toy(vocab_size=VOCAB), tokenizer, step=9, seed=1)
    with pytest.raises(ArtifactError, match="differs from"):
        check(export_checkpoint(run, tmp_path / "out"), run, which="last")


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """The other RoPE pairing of a head's rows."""
    return tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


SLIPS: dict[str, tuple[str, Any]] = {
    "the other RoPE pairing": ("layers.0.self_attn.q_proj.weight", swap_halves),
    "heads in another order": ("layers.1.self_attn.k_proj.weight", lambda t: t.roll(8, 0)),
    "a norm off by 1e-3": ("norm.weight", lambda t: t * 1.001),
    "embedding rows moved": ("embed_tokens.weight", lambda t: t.roll(1, 0)),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_the_comparison_of_logits_would_find_a_slip(
    slip: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the comparison of bits out of the way and the checkpoint's model computing from other weights."""
    from crucible.export import verify as module

    name, change = SLIPS[slip]
    out = export_checkpoint(run, tmp_path / "out")
    torch_logits = module._torch_logits

    def slipped(config: ModelConfig, tensors: dict[str, torch.Tensor], **rest: Any) -> Any:
        return torch_logits(config, {**tensors, name: change(tensors[name])}, **rest)

    monkeypatch.setattr(module, "_torch_logits", slipped)
    for check in (verify, verify_engine):
        with pytest.raises(ArtifactError, match="logits differ from the checkpoint's: relative error"):
            check(out, run)


def test_a_model_that_transformers_refuses_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = toy(vocab_size=VOCAB, hidden_size=26, num_attention_heads=4)  # it wants a multiple of the heads
    write_checkpoint(tmp_path / "run", config, tokenizer)
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"transformers .* cannot load it"):
        verify(out, tmp_path / "run")
    assert verify_engine(out, tmp_path / "run").max_relative_error < 2e-5


def test_a_checkpoint_out_of_its_run_needs_its_tokenizer_beside(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "best", tmp_path / "a" / "b" / "copy")
    with pytest.raises(ArtifactError, match="needs the tokenizer"):
        export_checkpoint(tmp_path / "a" / "b" / "copy", tmp_path / "out")
    shutil.copy(run / "tokenizer.json", tmp_path / "a" / "tokenizer.json")
    assert export_checkpoint(tmp_path / "a" / "b" / "copy", tmp_path / "out").is_dir()
