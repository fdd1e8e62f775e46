"""Linear layers, norms and activations in float64, each a function of one row at a time.

Rows are stacked only where numpy treats every row exactly as it would treat it alone (docs/arithmetic.md, section 4):
then a batch, a chunk of a prompt and a single token get the same bits. Arrays are float64 and C-contiguous.
Extra shape letters: M rows, N outputs of a linear layer; K in this file is its inputs.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
F32: TypeAlias = npt.NDArray[np.float32]

_GELU_SCALE: Final = math.sqrt(2 / math.pi)
_GELU_CUBIC: Final = 0.044715


def transposed(weight_NK: npt.NDArray[np.floating]) -> F64:
    """A weight as stored, [outputs, inputs], in the layout that `linear` takes: float64 [K, N], C-contiguous."""
    return np.ascontiguousarray(weight_NK.T, dtype=np.float64)


def linear(x_MK: F64, weight_KN: F64) -> F64:
    """[M, N]: every row times the weight, as M products of shape [1, K] x [K, N].

    One product [M, K] x [K, N] would be faster and wrong here: BLAS picks its order of summation by shape, so a row's
    bits would change with the number of its neighbours.
    """
    y_M1N: F64 = x_MK[:, None, :] @ weight_KN
    return y_M1N[:, 0, :]


def rms_norm(x_MD: F64, weight_D: F64, eps: float) -> F64:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4, with eps inside the root)."""
    mean_square_M1 = np.mean(x_MD * x_MD, axis=-1, keepdims=True)
    normed: F64 = x_MD / np.sqrt(mean_square_M1 + eps) * weight_D
    return normed


def layer_norm(x_MD: F64, weight_D: F64, bias_D: F64, eps: float) -> F64:
    """(x - mean) / sqrt(var + eps) * weight + bias with the biased variance (Ba, Kiros and Hinton 2016, section 3)."""
    centred_MD = x_MD - np.mean(x_MD, axis=-1, keepdims=True)
    variance_M1 = np.mean(centred_MD * centred_MD, axis=-1, keepdims=True)
    normed: F64 = centred_MD / np.sqrt(variance_M1 + eps) * weight_D + bias_D
    return normed


def silu(x: F64) -> F64:
    """x / (1 + exp(-x)) (Hendrycks and Gimpel 2016). Far below zero exp overflows to inf, and the result is -0."""
    with np.errstate(over="ignore"):
        y: F64 = x / (1 + np.exp(-x))
    return y


def gelu(x: F64) -> F64:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form (Hendrycks and Gimpel 2016, section 2)."""
    y: F64 = 0.5 * x * (1 + np.tanh(_GELU_SCALE * (x + _GELU_CUBIC * (x * x * x))))
    return y
