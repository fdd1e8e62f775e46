"""Write the test vectors of docs/arithmetic.md from 60-digit arithmetic: `python make_vectors.py`.

Needs mpmath, and nothing of this project. Inputs are exact f32 numbers; every result is rounded once, to f32 in the
tables that a backend must hold exactly and to float64 elsewhere. All numbers are written as hexadecimal floats.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from mpmath import cos, exp, mp, mpf, pi, sin, sqrt, tanh

mp.dps = 60


def f64(x: mpf) -> str:
    return float(x).hex()


def f32(x: mpf) -> str:
    with mp.workprec(24):  # straight to 24 bits: by way of float64 it would be rounded twice
        return float(+x).hex()


def draw(rng: random.Random, count: int, std: float = 1.0, mean: float = 0.0) -> list[mpf]:
    """Normal numbers that are exactly f32."""
    return [mpf(struct.unpack("f", struct.pack("f", rng.gauss(mean, std)))[0]) for _ in range(count)]


def rope() -> list[dict[str, Any]]:
    positions = [0, 1, 2, 15, 16, 63, 64, 95, 255, 1023, 2047, 8191]
    cases = []
    for theta, head_dim, pairs in ((10_000, 8, range(4)), (10_000, 64, (0, 1, 7, 16, 31)), (100_000, 64, (1, 9, 30))):
        angles = [[p * mpf(theta) ** (-mpf(2 * i) / head_dim) for i in pairs] for p in positions]
        cases.append(
            {
                "theta": theta,
                "head_dim": head_dim,
                "pairs": list(pairs),
                "positions": positions,
                "cos_f32": [[f32(cos(a)) for a in row] for row in angles],
                "sin_f32": [[f32(sin(a)) for a in row] for row in angles],
            }
        )
    return cases


def alibi_slopes(num_heads: int) -> list[mpf]:
    """The recursion of the published code: a power of two directly, else two powers of two."""
    if num_heads & (num_heads - 1) == 0:
        return [mpf(2) ** (-mpf(8) * (h + 1) / num_heads) for h in range(num_heads)]
    below = 1 << (num_heads.bit_length() - 1)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: num_heads - below]


def norms() -> list[dict[str, Any]]:
    rng = random.Random(1)
    cases = []
    for size, std, mean, eps in (
        (24, 1.0, 0.0, 1e-5),
        (40, 1e-4, 3e-4, 1e-5),
        (40, 1e4, -2e4, 1e-6),
        (1, 1.0, 0.0, 1e-5),
    ):
        x, weight, bias = draw(rng, size, std, mean), draw(rng, size, 0.5, 1.0), draw(rng, size)
        rms = sqrt(sum(v * v for v in x) / size + mpf(eps))
        centre = sum(x) / size
        deviation = sqrt(sum((v - centre) ** 2 for v in x) / size + mpf(eps))
        cases.append(
            {
                "eps": f64(mpf(eps)),
                "x": [f64(v) for v in x],
                "weight": [f64(v) for v in weight],
                "bias": [f64(v) for v in bias],
                "rmsnorm": [f64(v / rms * w) for v, w in zip(x, weight, strict=True)],
                "layernorm": [f64((v - centre) / deviation * w + b) for v, w, b in zip(x, weight, bias, strict=True)],
            }
        )
    return cases


def activations() -> dict[str, list[str]]:
    rng = random.Random(2)
    x = sorted({mpf(0), mpf(40), mpf(-40), mpf(2) ** -60, -(mpf(2) ** -60), *draw(rng, 40), *draw(rng, 40, 10.0)})
    inner = [sqrt(2 / pi) * (v + mpf("0.044715") * v**3) for v in x]
    return {
        "x": [f64(v) for v in x],
        "silu": [f64(v / (1 + exp(-v))) for v in x],
        "gelu_tanh": [f64(v / 2 * (1 + tanh(u))) for v, u in zip(x, inner, strict=True)],
    }


def attention() -> dict[str, Any]:
    """One query at position 69: chunk 0 is full, chunk 1 holds 6 positions."""
    rng = random.Random(3)
    head_dim, num_positions, chunk = 4, 70, 64
    q = draw(rng, head_dim, 2.0)
    k = [draw(rng, head_dim, 2.0) for _ in range(num_positions)]
    v = [draw(rng, head_dim) for _ in range(num_positions)]

    def partial(scores: list[mpf], values: list[list[mpf]]) -> tuple[mpf, mpf, list[mpf]]:
        top = max(scores)
        weights = [exp(s - top) for s in scores]
        return (
            top,
            sum(weights),
            [sum(w * row[i] for w, row in zip(weights, values, strict=True)) for i in range(head_dim)],
        )

    cases = []
    for slope in (mpf(0), mpf(2) ** -3):
        scores = [
            sum(a * b for a, b in zip(q, key, strict=True)) / sqrt(head_dim) - slope * (num_positions - 1 - j)
            for j, key in enumerate(k)
        ]
        chunks = [partial(scores[c : c + chunk], v[c : c + chunk]) for c in range(0, num_positions, chunk)]
        _, total, weighted = partial(scores, v)
        cases.append(
            {
                "slope": f64(slope),
                "chunks": [{"max": f64(m), "sum": f64(s), "value": [f64(e) for e in o]} for m, s, o in chunks],
                "output": [f64(e / total) for e in weighted],
            }
        )
    return {
        "q": [f64(e) for e in q],
        "k": [[f64(e) for e in row] for row in k],
        "v": [[f64(e) for e in row] for row in v],
        "cases": cases,
    }


def vectors() -> dict[str, Any]:
    """The content of every file, by name."""
    return {
        "rope.json": rope(),
        "alibi.json": {str(n): [f32(slope) for slope in alibi_slopes(n)] for n in range(1, 17)},
        "norms.json": norms(),
        "activations.json": activations(),
        "attention.json": attention(),
    }


if __name__ == "__main__":
    for name, content in vectors().items():
        (Path(__file__).parent / name).write_text(json.dumps(content, indent=1) + "\n")
