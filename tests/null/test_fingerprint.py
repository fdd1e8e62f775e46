"""The name of everything that bits depend on: it changes with each of it, and with nothing else."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from cells import toy
from toy_weights import toy_weights

from crucible.engine.fingerprint import fingerprint
from crucible.engine.quant import convert

CONFIG = toy()
WEIGHTS = toy_weights(CONFIG)
NAME = "model.embed_tokens.weight"


def test_it_is_the_same_for_the_same_model() -> None:
    found = fingerprint(CONFIG, WEIGHTS, "cpu", "f32")
    assert re.fullmatch("fp_[0-9a-f]{12}", found)
    copies = {name: np.asfortranarray(WEIGHTS[name]) for name in reversed(WEIGHTS)}
    assert fingerprint(CONFIG, copies, "cpu", "f32") == found


def test_it_changes_with_whatever_bits_depend_on() -> None:
    nudged = {**WEIGHTS, NAME: WEIGHTS[NAME].copy()}
    nudged[NAME][-1, -1] = np.nextafter(nudged[NAME][-1, -1], np.float32(np.inf))
    int8 = convert(CONFIG, WEIGHTS, "int8")
    found = [
        fingerprint(CONFIG, WEIGHTS, "cpu", "f32"),
        fingerprint(CONFIG, WEIGHTS, "cpu", "int8"),
        fingerprint(CONFIG, WEIGHTS, "reference", "f32"),
        fingerprint(dataclasses.replace(CONFIG, norm_eps=CONFIG.norm_eps * 2), WEIGHTS, "cpu", "f32"),
        fingerprint(CONFIG, nudged, "cpu", "f32"),
        fingerprint(CONFIG, int8, "cpu", "f32"),
        fingerprint(CONFIG, convert(CONFIG, WEIGHTS, "f16"), "cpu", "f32"),
        fingerprint(CONFIG, {}, "null", "f32"),
    ]
    assert len(set(found)) == len(found)
