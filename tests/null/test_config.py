"""ModelConfig: counts against hand calculation, derived sizes, round trip, and every refusal."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
from cells import LINEAR, LLAMA3, all_cells, toy
from hypothesis import given
from hypothesis import strategies as st

from crucible.config import (
    AXES,
    MAX_VOCAB_SIZE,
    PRESETS,
    UNTRAINED_FIELDS,
    ConfigError,
    ModelConfig,
    attention_kind,
    default_intermediate_size,
    default_kv_heads,
    preset,
)

FOREIGN = [{"qkv_bias": True}, {"o_bias": True}, {"qk_norm": True}, {"rope_scaling": LINEAR}, {"rope_scaling": LLAMA3}]
"""Each of the fields that only models of others have."""

# ---- counts, by hand from the toy sizes: V 67, T 96, D 24, F 40, 2 layers, H 4, K 8 ---------------------------------

QO = 2 * 32 * 24
KV_PER_HEAD = 2 * 8 * 24
SWIGLU, GELU = 3 * 24 * 40, 2 * 24 * 40
EMBED, POSITIONS, NORM = 67 * 24, 96 * 24, 24


@pytest.mark.parametrize(
    ("changes", "per_layer", "final_norm", "embedding"),
    [
        ({"attention": "mha"}, QO + 4 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
        ({"attention": "gqa"}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
        ({"attention": "mqa"}, QO + 1 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
        ({"pos_encoding": "alibi"}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
        ({"pos_encoding": "none"}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
        ({"pos_encoding": "learned"}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED + POSITIONS),
        ({"activation": "gelu"}, QO + 2 * KV_PER_HEAD + GELU + 2 * NORM, NORM, EMBED),
        ({"norm": "layernorm"}, QO + 2 * KV_PER_HEAD + SWIGLU + 4 * NORM, 2 * NORM, EMBED),
        ({"norm_placement": "post"}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, 0, EMBED),
        ({"norm": "layernorm", "norm_placement": "post"}, QO + 2 * KV_PER_HEAD + SWIGLU + 4 * NORM, 0, EMBED),
        ({"tie_word_embeddings": False}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, 2 * EMBED),
        ({"qkv_bias": True}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM + 32 + 2 * 16, NORM, EMBED),
        ({"o_bias": True}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM + 24, NORM, EMBED),
        ({"qk_norm": True}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM + 2 * 8, NORM, EMBED),
        ({"rope_scaling": LINEAR}, QO + 2 * KV_PER_HEAD + SWIGLU + 2 * NORM, NORM, EMBED),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_parameters_by_hand(changes: dict[str, Any], per_layer: int, final_norm: int, embedding: int) -> None:
    config = toy(**changes)
    assert config.num_non_embedding_parameters() == 2 * per_layer + final_norm
    assert config.num_parameters() == 2 * per_layer + final_norm + embedding


@pytest.mark.parametrize(("attention", "total"), [("mha", 13_632), ("gqa", 12_096), ("mqa", 11_328)])
def test_parameters_as_one_number(attention: str, total: int) -> None:
    assert toy(attention=attention).num_parameters() == total


@pytest.mark.parametrize("config", all_cells())
def test_both_ways_of_counting_agree(config: ModelConfig) -> None:
    """num_parameters() asserts that the tensor table and the structure give one sum."""
    for tied in (True, False):
        assert dataclasses.replace(config, tie_word_embeddings=tied).num_parameters() > 0


@pytest.mark.parametrize(
    ("name", "non_embedding", "total"),
    [
        ("nano", 2_213_632, 2_737_920),
        ("30m", 9_442_176, 28_758_912),
        ("120m", 74_337_024, 112_970_496),
        ("350m", 265_864_192, 317_375_488),
    ],
)
def test_presets_count(name: str, non_embedding: int, total: int) -> None:
    assert preset(name).num_non_embedding_parameters() == non_embedding
    assert preset(name).num_parameters() == total


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "kv_heads", "intermediate"),
    [("30m", 6, 384, 6, 2, 1024), ("120m", 12, 768, 12, 3, 2048), ("350m", 24, 1024, 16, 4, 2752)],
)
def test_presets_have_their_sizes(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int
) -> None:
    config = preset(name)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, intermediate)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, kv_heads, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (50304, 1024, True)
    assert config.is_llama


def test_a_preset_is_there_or_named() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"no preset '1t'; there are {', '.join(PRESETS)}")):
        preset("1t")


@pytest.mark.parametrize(
    ("attention", "multiply_adds"),
    [
        # 2 layers of matrices, the output projection, and q.k and p.v over 10 positions of 2 layers.
        ("mha", 2 * (3072 + 2880) + 1608 + 2 * 2 * 32 * 10),
        ("gqa", 2 * (2304 + 2880) + 1608 + 2 * 2 * 32 * 10),
        ("mqa", 2 * (1920 + 2880) + 1608 + 2 * 2 * 32 * 10),
    ],
)
def test_flops_by_hand(attention: str, multiply_adds: int) -> None:
    config = toy(attention=attention)
    assert config.flops_per_token(10, backward=False) == 2 * multiply_adds
    assert config.flops_per_token(10) == 6 * multiply_adds


def test_flops_count_products_and_not_parameters() -> None:
    base = toy().flops_per_token(50)
    for same in ({"tie_word_embeddings": False}, {"pos_encoding": "learned"}, {"norm": "layernorm"}):
        assert toy(**same).flops_per_token(50) == base
    assert toy(activation="gelu").flops_per_token(50) == base - 6 * 2 * 24 * 40
    assert preset("120m").flops_per_token(1024) == 790_953_984


@pytest.mark.parametrize(("attention", "num_bytes"), [("mha", 256), ("gqa", 128), ("mqa", 64)])
def test_kv_bytes_by_hand(attention: str, num_bytes: int) -> None:
    """K and V of 2 layers, 8 elements a head, two bytes each."""
    assert toy(attention=attention).kv_bytes_per_token() == num_bytes
    assert toy(attention=attention).kv_bytes_per_token(4) == 2 * num_bytes


def test_kv_bytes_of_a_preset() -> None:
    assert preset("120m").kv_bytes_per_token() == 2 * 12 * 3 * 64 * 2


# ---- the tensor table -----------------------------------------------------------------------------------------------


def test_tensors_of_a_plain_llama() -> None:
    assert toy(num_hidden_layers=1).tensor_shapes() == {
        "model.embed_tokens.weight": (67, 24),
        "model.layers.0.input_layernorm.weight": (24,),
        "model.layers.0.self_attn.q_proj.weight": (32, 24),
        "model.layers.0.self_attn.k_proj.weight": (16, 24),
        "model.layers.0.self_attn.v_proj.weight": (16, 24),
        "model.layers.0.self_attn.o_proj.weight": (24, 32),
        "model.layers.0.post_attention_layernorm.weight": (24,),
        "model.layers.0.mlp.gate_proj.weight": (40, 24),
        "model.layers.0.mlp.up_proj.weight": (40, 24),
        "model.layers.0.mlp.down_proj.weight": (24, 40),
        "model.norm.weight": (24,),
    }


def test_tensors_of_the_cell_that_differs_most() -> None:
    config = toy(
        num_hidden_layers=1,
        attention="mqa",
        pos_encoding="learned",
        activation="gelu",
        norm="layernorm",
        norm_placement="post",
        tie_word_embeddings=False,
    )
    assert config.tensor_shapes() == {
        "model.embed_tokens.weight": (67, 24),
        "model.embed_positions.weight": (96, 24),
        "model.layers.0.post_attention_layernorm.weight": (24,),
        "model.layers.0.post_attention_layernorm.bias": (24,),
        "model.layers.0.self_attn.q_proj.weight": (32, 24),
        "model.layers.0.self_attn.k_proj.weight": (8, 24),
        "model.layers.0.self_attn.v_proj.weight": (8, 24),
        "model.layers.0.self_attn.o_proj.weight": (24, 32),
        "model.layers.0.post_feedforward_layernorm.weight": (24,),
        "model.layers.0.post_feedforward_layernorm.bias": (24,),
        "model.layers.0.mlp.up_proj.weight": (40, 24),
        "model.layers.0.mlp.down_proj.weight": (24, 40),
        "lm_head.weight": (67, 24),
    }


@pytest.mark.parametrize("config", all_cells())
def test_llama_is_exactly_rope_swiglu_rmsnorm_pre(config: ModelConfig) -> None:
    axes = tuple(getattr(config, axis) for axis in AXES)
    assert config.is_llama == (axes[1:] == ("rope", "swiglu", "rmsnorm", "pre"))


# ---- derived sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden_size", "swiglu"), [(1, 64), (24, 64), (25, 128), (256, 704), (384, 1024), (768, 2048), (1024, 2752)]
)
def test_intermediate_size(hidden_size: int, swiglu: int) -> None:
    assert default_intermediate_size(hidden_size, "swiglu") == swiglu
    assert default_intermediate_size(hidden_size, "gelu") == 4 * hidden_size


@given(st.integers(1, 2**16))
def test_swiglu_size_is_two_thirds_of_4d_rounded_up_to_64(hidden_size: int) -> None:
    size = default_intermediate_size(hidden_size, "swiglu")
    assert size % 64 == 0
    assert 3 * (size - 64) < 8 * hidden_size <= 3 * size


@pytest.mark.parametrize("name", PRESETS)
def test_activations_compare_at_equal_parameter_count(name: str) -> None:
    control = preset(name)
    other = control.vary(activation="gelu")
    assert other.intermediate_size == 4 * control.hidden_size
    assert other.num_non_embedding_parameters() == pytest.approx(control.num_non_embedding_parameters(), rel=0.03)


@pytest.mark.parametrize(
    ("num_heads", "kv_heads"), [(4, 2), (6, 2), (8, 2), (9, 3), (10, 5), (12, 3), (14, 7), (16, 4), (32, 8)]
)
def test_gqa_takes_the_largest_group_of_at_most_four(num_heads: int, kv_heads: int) -> None:
    assert default_kv_heads(num_heads, "gqa") == kv_heads
    assert default_kv_heads(num_heads, "mha") == num_heads
    assert default_kv_heads(num_heads, "mqa") == 1


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 7, 11, 25])
def test_gqa_that_would_collapse_is_an_error_that_says_so(num_heads: int) -> None:
    message = rf"attention='gqa' with num_attention_heads={num_heads} would collapse: .* is mqa, {num_heads} are mha"
    with pytest.raises(ConfigError, match=message):
        default_kv_heads(num_heads, "gqa")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.build(hidden_size=num_heads * 16, num_hidden_layers=1, num_attention_heads=num_heads)


@given(st.integers(1, 256), st.sampled_from(AXES["attention"]))
def test_a_derived_grouping_is_never_another_kind(num_heads: int, attention: Any) -> None:
    try:
        kv_heads = default_kv_heads(num_heads, attention)
    except ConfigError:
        assert attention == "gqa"
        return
    assert num_heads % kv_heads == 0
    assert attention_kind(num_heads, kv_heads) == attention or num_heads == 1


@pytest.mark.parametrize("attention", ["mha", "mqa"])
def test_one_head_may_carry_either_name(attention: str) -> None:
    assert toy(num_attention_heads=1, attention=attention).group_size == 1


@pytest.mark.parametrize("attention", AXES["attention"])
def test_group_size(attention: str) -> None:
    assert toy(attention=attention).group_size == {"mha": 1, "gqa": 2, "mqa": 4}[attention]


def test_build_derives_what_is_not_given() -> None:
    config = ModelConfig.build(hidden_size=96, num_hidden_layers=2, num_attention_heads=12)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (8, 3, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (50304, 1024)
    given = ModelConfig.build(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=12,
        head_dim=10,
        num_key_value_heads=2,
        intermediate_size=100,
        rope_theta=500_000.0,
    )
    assert (given.head_dim, given.num_key_value_heads, given.intermediate_size) == (10, 2, 100)
    assert given.rope_theta == 500_000.0


# ---- varying --------------------------------------------------------------------------------------------------------


def test_vary_changes_only_what_depends_on_the_axis() -> None:
    control = preset("nano")
    for changes, derived in (
        ({"attention": "mha"}, {"num_key_value_heads": 4}),
        ({"attention": "mqa"}, {"num_key_value_heads": 1}),
        ({"activation": "gelu"}, {"intermediate_size": 1024}),
        ({"hidden_size": 384}, {"intermediate_size": 1024}),
        ({"hidden_size": 384, "activation": "gelu"}, {"intermediate_size": 1536}),
        ({"num_attention_heads": 12, "attention": "mqa"}, {"num_key_value_heads": 1}),
        ({"pos_encoding": "alibi"}, {}),
        ({"norm": "layernorm"}, {}),
        ({"norm_placement": "post"}, {}),
        ({"num_hidden_layers": 5}, {}),
    ):
        assert control.vary(**changes).to_dict() == {**control.to_dict(), **changes, **derived}


def test_vary_keeps_sizes_that_are_given_or_whose_axis_stays() -> None:
    config = toy(intermediate_size=40, num_attention_heads=12, num_key_value_heads=2)
    assert config.vary(attention="gqa", activation="swiglu", hidden_size=24) == config
    assert config.vary(attention="mha", num_key_value_heads=12).num_key_value_heads == 12
    assert config.vary(activation="gelu", intermediate_size=48).intermediate_size == 48
    assert config.vary() == config


def test_vary_comes_back() -> None:
    control = preset("30m")
    for axis, values in AXES.items():
        for value in values:
            assert control.vary(**{axis: value}).vary(**{axis: getattr(control, axis)}) == control


def test_vary_refuses_like_the_class() -> None:
    with pytest.raises(ConfigError, match=r"unknown key heads; allowed: vocab_size, "):
        toy().vary(heads=3)
    with pytest.raises(ConfigError, match="would collapse"):
        toy(num_attention_heads=5, attention="mha").vary(attention="gqa")


# ---- round trip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*all_cells(), *(pytest.param(config, id=name) for name, config in PRESETS.items())])
def test_round_trip_through_json(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("changes", FOREIGN, ids=str)
def test_round_trip_of_what_models_of_others_have(changes: dict[str, Any]) -> None:
    config = toy(**changes)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config != toy()
    assert len({config, toy(**changes)}) == 1


def test_files_from_before_the_fields_of_others_read_as_having_none() -> None:
    values = {name: value for name, value in toy().to_dict().items() if name not in UNTRAINED_FIELDS}
    assert ModelConfig.from_dict(values) == toy()
    assert {f.name for f in dataclasses.fields(ModelConfig)} - values.keys() == set(UNTRAINED_FIELDS)


def test_from_dict_names_every_missing_and_unknown_key() -> None:
    values = toy().to_dict()
    for name in values.keys() - set(UNTRAINED_FIELDS):
        with pytest.raises(ConfigError, match=f"^missing key: {name}$"):
            ModelConfig.from_dict({key: value for key, value in values.items() if key != name})
    with pytest.raises(ConfigError, match=r"^missing keys: vocab_size, norm_eps$"):
        ModelConfig.from_dict({k: v for k, v in values.items() if k not in ("vocab_size", "norm_eps")})
    with pytest.raises(ConfigError, match=r"^unknown key dropout; allowed: vocab_size, .*, rope_scaling$"):
        ModelConfig.from_dict({**values, "dropout": 0.1})
    with pytest.raises(ConfigError, match=r"^unknown keys dropout, bias; allowed: "):
        ModelConfig.from_dict({**values, "dropout": 0.1, "bias": True})


def test_config_is_frozen_and_hashable() -> None:
    config = toy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore[misc]
    assert len({config, toy(), config.vary(norm="layernorm")}) == 2


# ---- refusals -------------------------------------------------------------------------------------------------------

FIELDS = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
SIZES = [name for name, kind in FIELDS.items() if kind == "int"]
NUMBERS = [name for name, kind in FIELDS.items() if kind == "float"]
FLAGS = [name for name, kind in FIELDS.items() if kind == "bool"]
NOT_SIZES = [0, -1, 2.0, "4", None, True, [4]]
NOT_NUMBERS = [0, 0.0, -1.0, float("nan"), float("inf"), 10**400, "1", None, True]


def test_every_field_is_of_a_kind_that_is_checked() -> None:
    assert FLAGS == ["tie_word_embeddings", "qkv_bias", "o_bias", "qk_norm"]
    assert {*SIZES, *NUMBERS, *AXES, *FLAGS, "rope_scaling"} == set(FIELDS)


def refuses(message: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(toy(), **changes)


@pytest.mark.parametrize(("name", "value"), list(itertools.product(SIZES, NOT_SIZES)), ids=str)
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    message = re.escape(f"{name} must be a positive integer, not {value!r}")
    refuses(message, **{name: value})
    # build() computes with some of them before the class sees any.
    if value is not None:
        with pytest.raises(ConfigError, match=message):
            ModelConfig.build(**{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, name: value})


@pytest.mark.parametrize(
    ("name", "value"), list(itertools.product(NUMBERS, NOT_NUMBERS)), ids=lambda value: str(value)[:8]
)
def test_numbers_are_positive_and_finite(name: str, value: Any) -> None:
    refuses(f"{name} must be a positive finite number, not {value!r}", **{name: value})


@pytest.mark.parametrize(("name", "value"), list(itertools.product(FLAGS, [0, 1, "true", None])), ids=str)
def test_flags_are_bools(name: str, value: Any) -> None:
    refuses(re.escape(f"{name} must be true or false, not {value!r}"), **{name: value})


LLAMA3_FIELDS = dataclasses.asdict(LLAMA3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, "rope_scaling.kind must be one of linear, llama3, not 'yarn'"),
        ({"kind": "linear", "factor": 0.0}, "rope_scaling.factor must be a positive finite number, not 0.0"),
        ({"kind": "linear", "factor": "2"}, "rope_scaling.factor must be a positive finite number, not '2'"),
        ({"kind": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "rope_scaling of kind linear has a factor alone"),
        ({"kind": "linear"}, "rope_scaling must have the keys kind and factor"),
        ({"kind": "linear", "factor": 2.0, "beta": 1}, "unknown key beta; allowed: kind, factor, low_freq_factor"),
        (LLAMA3_FIELDS | {"high_freq_factor": None}, "rope_scaling.high_freq_factor must be a positive finite number"),
        (
            LLAMA3_FIELDS | {"low_freq_factor": float("nan")},
            "rope_scaling.low_freq_factor must be a positive finite number",
        ),
        (
            LLAMA3_FIELDS | {"low_freq_factor": 4.0},
            "rope_scaling.low_freq_factor=4.0 must be below high_freq_factor=4.0",
        ),
        (
            LLAMA3_FIELDS | {"original_max_position_embeddings": 32.0},
            "original_max_position_embeddings must be a positive int",
        ),
        (2.0, "rope_scaling must be a RopeScaling or None, not 2.0"),
    ],
    ids=str,
)
def test_a_scaling_we_cannot_compute_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelConfig.from_dict({**toy().to_dict(), "rope_scaling": values})


@pytest.mark.parametrize("pos_encoding", ["alibi", "learned", "none"])
def test_scaling_needs_rope(pos_encoding: str) -> None:
    refuses(
        f"rope_scaling needs pos_encoding='rope', not '{pos_encoding}'",
        rope_scaling=LINEAR,
        pos_encoding=pos_encoding,
    )


@pytest.mark.parametrize(("axis", "value"), list(itertools.product(AXES, ["relu", "", None, 1, ["mha"]])), ids=str)
def test_axes_take_their_literals_only(axis: str, value: Any) -> None:
    message = re.escape(f"{axis} must be one of {', '.join(AXES[axis])}, not {value!r}")
    refuses(message, **{axis: value})
    for make in (toy, toy().vary, lambda **axes: toy(num_attention_heads=5, **{"attention": "mha", **axes})):
        with pytest.raises(ConfigError, match=message):
            make(**{axis: value})


def test_vocabulary_is_bounded_by_the_samplers_exact_sums() -> None:
    assert MAX_VOCAB_SIZE == 2**18
    assert toy(vocab_size=2**18).vocab_size == 2**18
    refuses(f"vocab_size must be at most {2**18}, not {2**18 + 1}", vocab_size=2**18 + 1)


def test_rope_pairs_need_an_even_head() -> None:
    refuses("head_dim must be even for rope, not 7", head_dim=7)
    for other in ("alibi", "learned", "none"):
        assert toy(head_dim=7, pos_encoding=other).head_dim == 7


@pytest.mark.parametrize("kv_heads", [3, 5, 8])
def test_kv_heads_divide_heads(kv_heads: int) -> None:
    refuses(f"num_key_value_heads must divide num_attention_heads=4, not {kv_heads}", num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("attention", "kv_heads", "found"),
    [("gqa", 1, "mqa"), ("gqa", 4, "mha"), ("mha", 2, "gqa"), ("mha", 1, "mqa"), ("mqa", 2, "gqa"), ("mqa", 4, "mha")],
)
def test_the_name_of_a_grouping_is_true(attention: str, kv_heads: int, found: str) -> None:
    refuses(
        f"attention='{attention}' contradicts num_attention_heads=4 with num_key_value_heads={kv_heads}, "
        f"which is {found}",
        attention=attention,
        num_key_value_heads=kv_heads,
    )


def test_one_head_is_not_gqa() -> None:
    refuses("attention='gqa' needs at least 4 heads; one head is mha", num_attention_heads=1, num_key_value_heads=1)


def test_build_names_a_hidden_size_that_heads_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="hidden_size=100 is not a multiple of 12 heads"):
        ModelConfig.build(hidden_size=100, num_hidden_layers=1, num_attention_heads=12)


def test_build_refuses_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"unknown key dropout; allowed: vocab_size, "):
        toy(dropout=0.1)
