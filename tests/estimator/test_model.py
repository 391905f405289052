"""Bytes and counts against those of the real checkpoint's tensor list (64 shards, equal to the byte to K2.6's)."""

import hashlib
from importlib import resources

import pytest

from kimi_jax.estimator.model import Drafter, Weights, cache_bytes_per_token, k26, weight_bytes


def test_packaged_configuration_is_k26s():
    # SHA-256 of moonshotai/Kimi-K2.6 config.json at revision 7eb5002f.
    text = resources.files("kimi_jax").joinpath("assets", "k26_config.json").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "85825ca6e18cbe539eb83ee09eedfb3f4222265929f06e9f535a6d9364f55899"


def test_weight_bytes_are_the_checkpoints():
    assert Weights(k26()).expert * 4.5 / 8 == 24_772_608
    total = weight_bytes(k26())
    in_gb = {name: round(value / 1e9, 3) for name, value in total.items()}
    assert in_gb == {
        "attention": 12.339,
        "router": 0.330,
        "experts": 570.761,
        "shared_expert": 5.285,
        "dense": 0.793,
        "head": 2.349,
        "embedding": 2.349,
    }
    assert sum(total.values()) == pytest.approx(594.206e9, abs=1e6)
    assert sum(total.values()) - total["experts"] == pytest.approx(23.444e9, abs=1e6)


def test_active_bytes_of_one_row():
    total = weight_bytes(k26())
    experts = total["experts"] * 8 / 384
    assert experts == pytest.approx(11.891e9, abs=1e6)
    assert experts + sum(total.values()) - total["experts"] - total["embedding"] == pytest.approx(32.99e9, abs=5e6)


def test_cache_and_drafter():
    assert cache_bytes_per_token(k26()) == 70_272
    drafter = Drafter()
    # The file of z-lab/Kimi-K2.5-DFlash has 6.48 GiB, 3.48 B parameters.
    assert drafter.weights * drafter.bytes_per_weight / 2**30 == pytest.approx(6.48, abs=0.005)
    assert drafter.cache_bytes_per_token == 24_576
