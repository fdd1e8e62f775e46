"""Weights in fewer bytes: int8 with a scale per output row and chunk of inputs, f16 with a power of two per row.

The int8 form is symmetric. A chunk is 128 consecutive inputs of one output row, fewer where a row ends. Its scale is
max|w| / 127, its values are w / scale to the nearest integer, ties to even; both quotients are rounded to f32. A weight
then stands for value * scale and is off by at most half a scale. This is group-wise quantisation (Shen et al. 2020,
"Q-BERT"), four bytes per chunk; docs/experiments.md has the price in cross-entropy of it and of one scale per row.
Before that, inputs of the attention's projections are balanced against the norm that they come from (`balance`).

Extra shape letters: N outputs of a linear layer, K its inputs, C its chunks ceil(K / chunk), M rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.errors import CrucibleError
from crucible.hardware import usable_cores

F32: TypeAlias = npt.NDArray[np.float32]

WeightFormat = Literal["f32", "f16", "int8"]
WEIGHT_FORMATS: Final[tuple[WeightFormat, ...]] = get_args(WeightFormat)

CHUNK: Final = 128
"""Inputs that share a scale, but in o_proj (`chunk_size`)."""

MAX_VALUE: Final = 127
"""Largest magnitude of a value; -128 is not used, so that negating a weight negates its value."""

MAX_SHIFT: Final = 6
"""Largest power of two by which `balance` moves an input up or down; f16 operands stay far from subnormal."""

_MAX_SCALE: Final = np.nextafter(np.finfo(np.float32).max / np.float32(MAX_VALUE), np.float32(0))
_MIN_SCALE: Final = np.finfo(np.float32).tiny
_BLOCK: Final = 1 << 16  # weights at a time: temporaries stay in the cache

_F16_TOP: Final = 15  # the largest weight of an f16 row is below 2^15, so that rounding it up stays finite
_F16_MIN_EXPONENT: Final = -126  # of a scale that is a normal number
_F16_LIMIT: Final = np.ldexp(np.float32(32760), 113)  # from here on the largest weight would round to 2^128


class QuantError(CrucibleError):
    """Weights that have no such form, or arrays that are no such weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix whose entry [n, k] is values[n, k] * scales[n, k // chunk].

    Attributes:
        values: int8 [N, K], from -127 to 127.
        scales: f32 [N, C]; zero where a whole chunk is.
        chunk: inputs per scale.

    Raises:
        QuantError: dtypes, shapes or chunk do not fit together. Values are not looked at: see `check`.
    """

    values: npt.NDArray[np.int8]
    scales: F32
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise QuantError(f"chunk must be positive, not {self.chunk}")
        if self.values.dtype != np.int8 or self.values.ndim != 2:
            raise QuantError(f"values must be int8 [N, K], not {self.values.dtype} {list(self.values.shape)}")
        expected = (len(self.values), num_chunks(self.values.shape[1], self.chunk))
        if self.scales.dtype != np.float32 or self.scales.shape != expected:
            raise QuantError(
                f"scales must be float32 {list(expected)}, not {self.scales.dtype} {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.nbytes + self.scales.nbytes

    def check(self) -> None:
        """Look at every value. Raises QuantError: a value is -128, or a scale is negative or not finite."""
        if self.values.size and self.values.min() < -MAX_VALUE:
            raise QuantError(f"values must be from -{MAX_VALUE} to {MAX_VALUE}, and one is -128")
        # A NaN anywhere makes both extremes NaN.
        if self.scales.size and not (self.scales.min() >= 0 and np.isfinite(self.scales.max())):
            raise QuantError("scales must be finite and not negative")

    def rows(self, ids_M: npt.NDArray[np.integer]) -> F32:
        """Chosen rows as f32 [M, K], each entry one product rounded to f32: how an embedding is looked up."""
        return _scaled(self.values[ids_M], self.scales[ids_M], self.chunk)

    def dequantise(self) -> F32:
        """The matrix as f32 [N, K], each entry one product rounded to f32."""
        return _scaled(self.values, self.scales, self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class F16Weight:
    """A matrix whose entry [n, k] is values[n, k] * scales[n].

    Attributes:
        values: f16 [N, K]; the largest of a row lies in [2^14, 2^15), wherever the row's own magnitude is.
        scales: f32 [N], powers of two.

    Raises:
        QuantError: dtypes or shapes do not fit together.
    """

    values: npt.NDArray[np.float16]
    scales: F32

    def __post_init__(self) -> None:
        if self.values.dtype != np.float16 or self.values.ndim != 2:
            raise QuantError(f"values must be float16 [N, K], not {self.values.dtype} {list(self.values.shape)}")
        if self.scales.dtype != np.float32 or self.scales.shape != (len(self.values),):
            raise QuantError(
                f"scales must be float32 [{len(self.values)}], not {self.scales.dtype} {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.nbytes + self.scales.nbytes

    def rows(self, ids_M: npt.NDArray[np.integer]) -> F32:
        """Chosen rows as f32 [M, K]."""
        rows: F32 = self.values[ids_M].astype(np.float32) * self.scales[ids_M, None]
        return rows

    def dequantise(self) -> F32:
        """The matrix as f32 [N, K]; exact but where an entry is below f32's normal numbers."""
        matrix: F32 = self.values.astype(np.float32) * self.scales[:, None]
        return matrix


Weight: TypeAlias = F32 | F16Weight | Int8Weight
"""One tensor of a model as a backend gets it. Norms, biases and position embeddings are always f32 arrays."""


def num_chunks(num_inputs: int, chunk: int) -> int:
    """Scales per output row."""
    return -(-num_inputs // chunk)


def chunk_size(config: ModelConfig, name: str) -> int:
    """Inputs per scale of a tensor: `CHUNK`, but in o_proj as many whole heads of one key/value group as fit it.

    That is the largest multiple of head_dim that is at most `CHUNK` and divides group_size * head_dim, so that no chunk
    spans two groups; a head wider than `CHUNK` is one chunk.
    """
    if not name.endswith("self_attn.o_proj.weight"):
        return CHUNK
    heads = (n for n in range(1, config.group_size + 1) if config.group_size % n == 0)
    return config.head_dim * max((n for n in heads if n * config.head_dim <= CHUNK), default=1)


def is_matrix(name: str) -> bool:
    """Whether a tensor of `ModelConfig.tensor_shapes()` takes a weight format.

    Linear layers and the token embedding do, which is the output projection too where they are tied. Norms, biases and
    position embeddings, a fraction of a percent of the bytes, stay f32.
    """
    return name.endswith("_proj.weight") or name in ("model.embed_tokens.weight", "lm_head.weight")


def quantise(weight_NK: F32, chunk: int = CHUNK) -> Int8Weight:
    """The int8 form of a matrix f32 [N, K]. |w - value * scale| <= scale / 2 * (1 + 2^-16) for each entry.

    A chunk whose scale would be subnormal (every |w| below 127 * 2^-126) becomes zero.

    Raises:
        QuantError: not a float32 matrix, or a weight is not finite.
    """
    _check_matrix(weight_NK)
    num_rows, num_inputs = weight_NK.shape
    values_NK = np.empty((num_rows, num_inputs), dtype=np.int8)
    scales_NC = np.empty((num_rows, num_chunks(num_inputs, chunk)), dtype=np.float32)
    whole = num_inputs // chunk * chunk
    step = max(1, _BLOCK // max(1, num_inputs))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        # Whole chunks, then the short one at the rows' end: each a stack of rows of equal length.
        for columns, length in ((slice(0, whole), chunk), (slice(whole, num_inputs), num_inputs - whole)):
            if columns.start == columns.stop:
                continue
            weight_RCL = weight_NK[rows, columns].reshape(-1, (columns.stop - columns.start) // length, length)
            scales_RC = _chunk_scales(weight_RCL)
            chunks = slice(columns.start // chunk, num_chunks(columns.stop, chunk))
            scales_NC[rows, chunks] = scales_RC
            values_NK[rows, columns] = _chunk_values(weight_RCL, scales_RC).reshape(len(weight_RCL), -1)
    return Int8Weight(values_NK, scales_NC, chunk)


def halve(weight_NK: F32) -> F16Weight:
    """The f16 form of a matrix f32 [N, K]: each row times a power of two, rounded to f16, ties to even.

    The power brings the row's largest weight into [2^14, 2^15), as far as the scale stays a normal f32 number; so no
    row overflows, and an entry loses bits to f16's range only below 2^-28 of its row's largest.

    Raises:
        QuantError: not a float32 matrix, or a weight is not finite, or would not stay so (2^128 - 2^116 and above).
    """
    _check_matrix(weight_NK)
    values_NK = np.empty(weight_NK.shape, dtype=np.float16)
    scales_N = np.empty(len(weight_NK), dtype=np.float32)
    step = max(1, _BLOCK // max(1, weight_NK.shape[1]))
    for first in range(0, len(weight_NK), step):
        rows = slice(first, first + step)
        largest_R = _largest(weight_NK[rows])
        if not (largest_R < _F16_LIMIT).all():
            raise QuantError(f"a weight of magnitude {largest_R.max()} is out of range for f16")
        exponents_R = np.maximum(np.frexp(largest_R)[1] - _F16_TOP, _F16_MIN_EXPONENT)
        # Exact: what a power of two could push below f32's normal numbers is far below f16's smallest.
        values_NK[rows] = weight_NK[rows] * np.ldexp(np.float32(1), -exponents_R)[:, None]
        scales_N[rows] = np.ldexp(np.float32(1), exponents_R)
    return F16Weight(values_NK, scales_N)


def convert(config: ModelConfig, weights: Mapping[str, Weight], weight_format: WeightFormat) -> dict[str, Weight]:
    """A model's tensors with every matrix (`is_matrix`) in a weight format, balanced first if that is int8; the others
    as they are.

    A matrix that is stored in int8 stays so under "int8" and "f32" stands for its values; f16 is made from those.

    Raises:
        QuantError: the format is unknown, or as `quantise`; the message names the tensor.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise QuantError(f"the weight format must be one of {', '.join(WEIGHT_FORMATS)}, not {weight_format!r}")
    balanced = balance(config, weights, weight_format)
    # In threads: numpy holds no lock while it computes, and a model is quantised before its first token.
    with ThreadPoolExecutor(usable_cores()) as pool:
        converted = pool.map(lambda name: convert_tensor(config, name, balanced[name], weight_format), balanced)
        return dict(zip(balanced, converted, strict=True))


def balance(config: ModelConfig, weights: Mapping[str, Weight], weight_format: WeightFormat) -> dict[str, Weight]:
    """A model's tensors, with the inputs of q, k and v scaled by powers of two if the format is int8.

    The norm before them is divided by what their columns are multiplied by, so that the model computes the same to
    the bit in f32 (this is the exact case of Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization",
    section 4.1). The columns of v come near to equal sizes: a column that is small because its input is large
    otherwise gets few of a chunk's 127 steps, which in v is a third of what int8 costs SmolLM2-135M.

    Nothing is done where no norm is in between (`post`), or where the matrices are stored in int8.
    """
    balanced = dict(weights)
    if weight_format != "int8" or config.norm_placement != "pre":
        return balanced
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        names = [f"{at}self_attn.{x}_proj.weight" for x in "qkv"]
        if any(isinstance(weights[name], Int8Weight) for name in names):
            continue
        factors_K = _factors(dense(weights[names[-1]]))
        balanced |= {name: dense(weights[name]) * factors_K for name in names}
        norm = [name for part in ("weight", "bias") if (name := f"{at}input_layernorm.{part}") in weights]
        balanced |= {name: dense(weights[name]) / factors_K for name in norm}
    return balanced


def _factors(weight_NK: F32) -> F32:
    """Powers of two that bring the columns' root mean squares near to their median."""
    rms_K = np.sqrt(np.square(weight_NK, dtype=np.float64).mean(axis=0))
    known_K = (rms_K > 0) & np.isfinite(rms_K)
    shifts_K = np.zeros(len(rms_K))
    if known_K.any():
        shifts_K[known_K] = np.rint(np.log2(np.median(rms_K[known_K]) / rms_K[known_K]))
    return np.exp2(np.clip(shifts_K, -MAX_SHIFT, MAX_SHIFT)).astype(np.float32)


def dense(weight: Weight) -> F32:
    """A tensor of any format as the f32 array that it stands for."""
    return weight.dequantise() if isinstance(weight, Int8Weight | F16Weight) else weight


def convert_tensor(config: ModelConfig, name: str, weight: Weight, weight_format: WeightFormat) -> Weight:
    """`convert` for one tensor, which is balanced already."""
    if not is_matrix(name) or (isinstance(weight, Int8Weight) and weight_format == "int8"):
        return weight
    try:
        if weight_format == "int8":
            return quantise(dense(weight), chunk_size(config, name))
        return halve(dense(weight)) if weight_format == "f16" else dense(weight)
    except QuantError as error:
        raise QuantError(f"tensor {name!r}: {error}") from None


def _check_matrix(weight_NK: F32) -> None:
    if weight_NK.dtype != np.float32 or weight_NK.ndim != 2:
        raise QuantError(f"a weight must be float32 [N, K], not {weight_NK.dtype} {list(weight_NK.shape)}")


def _largest(weight: F32) -> F32:
    """The largest magnitude along the last axis. Raises QuantError where one is not finite."""
    largest: F32 = np.maximum(weight.max(axis=-1, initial=0), -weight.min(axis=-1, initial=0))
    if not np.isfinite(largest).all():
        raise QuantError("a weight is not finite")
    return largest


def _chunk_scales(weight_RCL: F32) -> F32:
    """Scales [R, C] of chunks [R, C, L]."""
    scales_RC: F32 = np.minimum(_largest(weight_RCL) / np.float32(MAX_VALUE), _MAX_SCALE)
    scales_RC[scales_RC < _MIN_SCALE] = 0
    return scales_RC


def _chunk_values(weight_RCL: F32, scales_RC: F32) -> npt.NDArray[np.int8]:
    """Values [R, C, L]: the quotients rounded to f32, then to integers; zero where the scale is."""
    zero = scales_RC == 0
    quotients_RCL = weight_RCL / np.where(zero, np.float32(1), scales_RC)[..., None]
    quotients_RCL[zero] = 0
    return np.rint(quotients_RCL, out=quotients_RCL).astype(np.int8)


def _scaled(values_MK: npt.NDArray[np.int8], scales_MC: F32, chunk: int) -> F32:
    num_rows, num_inputs = values_MK.shape
    product_MK = np.empty((num_rows, num_inputs), dtype=np.float32)
    step = max(1, _BLOCK // max(1, num_inputs))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        for index in range(scales_MC.shape[1]):
            columns = slice(index * chunk, (index + 1) * chunk)
            np.multiply(values_MK[rows, columns], scales_MC[rows, index, None], out=product_MK[rows, columns])
    return product_MK
