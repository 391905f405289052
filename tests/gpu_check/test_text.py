"""Text of a model that fits the kernels is the references', and a fault in either operation is seen in it."""

import jax.numpy as jnp
import pytest

from kimi_jax.gpu_check.text import fitting_texts
from kimi_jax.gpu_check.work import MOST_BELOW
from kimi_jax.model import attention, moe


def gate_for_up(right, x, slots, weights, gate, up, down, **options):
    return right(x, slots, weights, up, gate, down, **options)


def heads_reversed(right, latent, rope, *rest, **options):
    return right(latent[:, :, ::-1], rope[:, :, ::-1], *rest, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "fault"), [(moe, "int4_moe", gate_for_up), (attention, "tree_attention", heads_reversed)]
)
def test_a_fault_in_the_bfloat16_model_is_seen_in_its_text(module, name, fault, monkeypatch):
    right = getattr(module, name)

    def faulty(first, *rest, **options):
        return fault(right, first, *rest, **options) if first.dtype == jnp.bfloat16 else right(first, *rest, **options)

    monkeypatch.setattr(module, name, faulty)
    _, picks, below = next(fitting_texts())
    assert [pick.operation for pick in picks[:2]] == ["experts", "attention"]
    assert below.mean() > 2 * MOST_BELOW


@pytest.mark.slow
def test_text_in_bfloat16_is_nearly_that_of_float32():
    for _, _, below in fitting_texts():
        assert len(below) == 32
        assert below.min() == 0
        assert below.mean() < MOST_BELOW / 2
