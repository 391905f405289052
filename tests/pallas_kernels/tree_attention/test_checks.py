import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import checks, self_check, tree_attention
from pallas_kernels.tree_attention.shapes import Shape

SMALL = ((Shape(2, 5, 4, 64, (64, 9), kv_lora_rank=32, rope=8), 0.5),)


def test_a_right_implementation_passes_and_is_named(monkeypatch):
    monkeypatch.setattr(checks, "CHECKS", SMALL)
    (result,) = self_check()
    assert result.choice.implementation == "reference"
    # The bfloat16 output is rounded, the float32 one it is compared with is not.
    assert 0 < result.out_error < 2**-8
    assert result.lse_error < 1e-5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, lse: (out * 1.02, lse),
        lambda out, lse: (out, lse + 0.01),
        lambda out, lse: (out.at[0, 0, 0, 0].set(jnp.nan), lse),
        lambda out, lse: (out, lse.at[0, 0, 0].set(-jnp.inf)),
    ],
)
def test_a_wrong_one_is_an_error_with_figures(spoil, monkeypatch):
    def wrong(*arguments, scale):
        return spoil(*tree_attention(*arguments, scale=scale))

    monkeypatch.setattr(checks, "CHECKS", SMALL)
    monkeypatch.setattr(checks, "tree_attention", functools.wraps(tree_attention)(wrong))
    with pytest.raises(RuntimeError, match="tree attention is wrong on this device: reference"):
        self_check()
