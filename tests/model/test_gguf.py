"""Writing .gguf files: read back bit for bit, and run by llama.cpp where that is installed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cells import LINEAR, LLAMA3
from toy_artifact import write_toy_artifact
from toy_tokenizers import TRAINING_TEXT, toy_document

from crucible.config import RopeScaling
from crucible.engine import runner
from crucible.engine.artifact import ArtifactError, Generation
from crucible.engine.quant import chunk_size, is_matrix, quantise
from crucible.engine.reference import ReferenceBackend
from crucible.engine.request import SamplingParams
from crucible.export.gguf import export_gguf
from crucible.gguf.file import GgufFile
from crucible.gguf.tokenizer import PRE_TOKENIZERS
from crucible.models import LoadedModel, resolve
from crucible.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")

LLAMA32 = RopeScaling(
    kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
# Widths of 64 and 96: multiples of Q8_0's 32, but for one of 40.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 320}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied mha": {"attention": "mha", "tie_word_embeddings": False},
    "biases": {"qkv_bias": True, "o_bias": True},
    "linear": {"rope_scaling": LINEAR, "rope_theta": 500.0},
    "llama 3": {"rope_scaling": LLAMA32, "rope_theta": 500_000.0, "head_dim": 64},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1_000_000.0},
    "qwen3": {"qk_norm": True, "intermediate_size": 40},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("toys") / "toy"
    changes = {**SIZES, **MODELS[request.param]}
    return resolve(write_toy_artifact(folder, chat_template="{{ messages }}", control=["<|im_end|>"], **changes))


def bits(weight: Any) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(weight).view(np.uint32)


def test_f32_reads_back_bit_for_bit(model: LoadedModel, tmp_path: Path) -> None:
    found = resolve(export_gguf(model, tmp_path / "x.gguf"))
    assert found.name == "x"
    assert found.config == model.config
    assert list(found.weights) == list(model.weights)
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(bits(found.weights[name]), bits(weight))
    assert found.generation == model.generation
    assert (found.chat_template, found.prefix_ids) == (model.chat_template, model.prefix_ids)
    assert found.tokenizer.encode(TRAINING_TEXT) == model.tokenizer.encode(TRAINING_TEXT)
    assert found.tokenizer.control_tokens == model.tokenizer.control_tokens


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_fewer_bits_are_those_of_the_type(model: LoadedModel, tmp_path: Path, dtype: Any) -> None:
    path = export_gguf(model, tmp_path / "x.gguf", dtype=dtype)
    found, stored = resolve(path), {info.type.name for info in GgufFile(path).tensors.values()}
    # Rows of 40 take no whole blocks of Q8_0.
    assert stored == {"F32", dtype.upper(), *(["F16"] if 40 in model.config.tensor_shapes()[DOWN] else [])}
    for name, weight in model.weights.items():
        if weight.ndim == 1:
            np.testing.assert_array_equal(bits(found.weights[name]), bits(weight))
        elif dtype == "f16" or weight.shape[1] % 32:
            np.testing.assert_array_equal(found.weights[name], weight.astype(np.float16).astype(np.float32))
        else:
            # A block's scale is its largest weight / 127, rounded to f16; a weight is off by half a scale at most.
            scale = np.abs(weight.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
            error = np.abs(found.weights[name] - weight).reshape(-1, 32)
            assert (error <= scale * (0.5 + 127 * 2.0**-11)).all()
            assert error.max() > 0


DOWN = "model.layers.0.mlp.down_proj.weight"


def test_an_int8_artifact_is_written_as_its_numbers(tmp_path: Path) -> None:
    model = resolve(write_toy_artifact(tmp_path / "toy"))
    held = {
        name: quantise(weight, chunk_size(model.config, name)) if is_matrix(name) else weight
        for name, weight in model.weights.items()
    }
    found = resolve(export_gguf(dataclasses.replace(model, weights=held), tmp_path / "x.gguf"))
    for name, weight in held.items():
        expected = weight if isinstance(weight, np.ndarray) else weight.dequantise()
        np.testing.assert_array_equal(bits(found.weights[name]), bits(expected))


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pos_encoding": "alibi"},
            "only rope, swiglu, rmsnorm and pre can be written as GGUF, not attention gqa, pos_",
        ),
        ({"norm": "layernorm"}, "norm layernorm"),
        ({"qk_norm": True, "qkv_bias": True}, "llama.cpp has no architecture with both qk_norm and biases"),
        ({"rope_scaling": LLAMA3}, "rope_scaling llama3 can be written with (1.0, 4.0, 8192) only, not (1.0, 4.0, 32)"),
    ],
    ids=str,
)
def test_models_that_llama_cpp_lacks_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = resolve(write_toy_artifact(tmp_path / "toy", **changes))
    with pytest.raises(ArtifactError, match=re.escape(message)):
        export_gguf(model, tmp_path / "x.gguf")
    assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (toy_document("metaspace_bpe"), "GGUF can be written with those called gpt-2, smollm, llama-bpe, qwen2 there"),
        (toy_document("metaspace_unigram"), "the tokenizer cuts text in a way that has no name here"),
        (toy_document("byte_level"), "the tokenizer cuts text in a way"),
        (toy_document("byte_level", pre_tokenizer=None), "the tokenizer cuts text in a way"),
    ],
    ids=["metaspace", "unigram", "no words", "no pre-tokenizer"],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path: Path, tokenizer: bytes, message: str) -> None:
    model = resolve(write_toy_artifact(tmp_path / "toy", vocab_size=512))
    with pytest.raises(ArtifactError, match=message):
        export_gguf(dataclasses.replace(model, tokenizer=Tokenizer.from_bytes(tokenizer)), tmp_path / "x.gguf")


def test_what_gguf_has_no_room_for_is_refused(tmp_path: Path) -> None:
    model = resolve(write_toy_artifact(tmp_path / "toy"))

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ArtifactError, match=re.escape(message)):
            export_gguf(dataclasses.replace(model, **changes), tmp_path / "x.gguf")

    refused("GGUF has room for 3 ids that end a reply", generation=Generation(None, (1, 2, 3, 4), None))
    refused("GGUF can put its one beginning-of-text id before a text, not [5]", prefix_ids=(5,))
    document = json.loads(model.tokenizer.to_json())
    document["added_tokens"][0]["lstrip"] = True
    stripping = Tokenizer.from_bytes(json.dumps(document).encode())
    refused("added token '<|endoftext|>' takes white space", tokenizer=stripping)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_a_weight_out_of_range_is_named(tmp_path: Path, dtype: Any) -> None:
    model = resolve(write_toy_artifact(tmp_path / "toy", **SIZES))
    weights = {**model.weights, DOWN: np.full_like(model.weights[DOWN], 7e4)}
    model = dataclasses.replace(model, weights=weights)
    with pytest.raises(ArtifactError, match=r"tensor blk\.0\.ffn_down\.weight: 70000 is out of range for .*choose f32"):
        export_gguf(model, tmp_path / "x.gguf", dtype=dtype)
    assert not list(tmp_path.glob("*gguf*"))
    export_gguf(model, tmp_path / "x.gguf")


def test_the_target_is_replaced_by_force_alone(tmp_path: Path) -> None:
    model, out = resolve(write_toy_artifact(tmp_path / "toy")), tmp_path / "deep" / "x.gguf"
    export_gguf(model, out)
    whole = out.read_bytes()
    with pytest.raises(ArtifactError, match=r"x\.gguf exists; choose another .* replace it with force \(--force\)"):
        export_gguf(model, out)
    out.write_bytes(b"x")
    assert export_gguf(model, out, force=True).read_bytes() == whole
    assert [path.name for path in out.parent.iterdir()] == ["x.gguf"]
    with pytest.raises(ArtifactError, match=r"a GGUF file's name must end in \.gguf"):
        export_gguf(model, tmp_path / "x.bin")
    with pytest.raises(ArtifactError, match=r"dtype must be one of f32, f16, q8_0, not 'q4_0'"):
        export_gguf(model, out, dtype="q4_0")  # type: ignore[arg-type]
    (tmp_path / "y.gguf").mkdir()
    with pytest.raises(ArtifactError, match=r"y\.gguf exists"):
        export_gguf(model, tmp_path / "y.gguf", force=True)


# ---- llama.cpp ----------------------------------------------------------------------------------------------------


def llama_cpp(path: Path) -> Any:
    library = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, to run our files in llama.cpp")
    return library.Llama(
        str(path), n_ctx=96, n_threads=1, n_batch=96, logits_all=True, type_k=0, type_v=0, verbose=False
    )


def test_llama_cpp_computes_the_same(model: LoadedModel, tmp_path: Path) -> None:
    """With its cache in f32 too. Observed: 3.7e-6 of a row's root mean square at most; rows of queries and keys left in
    our order give 4.8, those of biases alone 1.9, Llama 3's divisors left out 0.07."""
    theirs = llama_cpp(export_gguf(model, tmp_path / "x.gguf"))
    config, ids = model.config, model.tokenizer.encode(TRAINING_TEXT)[:32]
    backend = ReferenceBackend(config, model.weights)
    theirs.eval(ids)
    found, ours = np.array(theirs.scores[: len(ids)], dtype=np.float64), runner.logits(backend, ids)
    rms = np.sqrt(np.mean(ours.astype(np.float64) ** 2, axis=-1, keepdims=True))
    assert np.max(np.abs(found - ours) / rms) < 512 * 2.0**-24
    tokens = [t.token_id for t in runner.generate(backend, ids, SamplingParams(max_tokens=24), eos_ids=())]
    greedy = []
    for token in theirs.generate(ids, temp=0.0, reset=True):
        greedy.append(token)
        if len(greedy) == len(tokens):
            break
    assert greedy == tokens


TEXTS = [
    TRAINING_TEXT,
    "it's 12345 naïve\n\n  é x   \t\ty\r\n\r\n3.14159 ١٢٣ ⅷ ½",
    "    def f(x):\n        return x ** 2  # don't WE'LL I'VE\n\n\n",
    "你好，世界。 Привет 👍🏽 \u0085 \u00a0 \u200b\ufeff end",
    "  leading, and trailing   ",
]


@pytest.mark.parametrize("rule", PRE_TOKENIZERS, ids=lambda rule: rule.names[0])
def test_llama_cpp_makes_the_same_ids_of_text(tmp_path: Path, rule: Any) -> None:
    """llama.cpp does not normalise, so texts are given in normal form, as nearly all text is."""
    document = json.loads(Tokenizer.train([TRAINING_TEXT, *TEXTS] * 3, 400).to_json())
    document |= {"pre_tokenizer": rule.pre_tokenizer, "normalizer": rule.normalizer}
    document["model"]["ignore_merges"] = rule.ignore_merges
    tokenizer = Tokenizer.from_bytes(json.dumps(document).encode())
    model = resolve(write_toy_artifact(tmp_path / "toy", **{**SIZES, "vocab_size": 400}))
    path = export_gguf(dataclasses.replace(model, tokenizer=tokenizer), tmp_path / "x.gguf")
    theirs = llama_cpp(path)
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text), text
    assert resolve(path).tokenizer.encode(TRAINING_TEXT) == tokenizer.encode(TRAINING_TEXT)
