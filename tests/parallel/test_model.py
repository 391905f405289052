"""The whole model with every exchange, against transformers' logits in float32 (tolerance as in tests/model)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.engine import open_checkpoint
from kimi_jax.model.transformer import causal_rows
from meshes.devices import build_mesh
from meshes.presets import preset

TINY = Path(__file__).parents[1] / "data" / "tiny_random"
HGX = preset("hgx-ib-16")
NVL72 = preset("nvl72")


@pytest.mark.parametrize(
    ("machine", "exchange", "experts"),
    [
        pytest.param(HGX, "alltoall", "slots", id="hgx-ib-16 alltoall"),
        pytest.param(HGX, "tensor", "width", id="hgx-ib-16 tensor"),
        *(
            pytest.param(machine, exchange, "slots", id=name, marks=pytest.mark.slow)
            for name, machine, exchange in (
                ("hgx-ib-16 wide ep alltoall", HGX.with_axes(dp=1, ep=16, tp=1), "alltoall"),
                ("nvl36 alltoall", preset("nvl36"), "alltoall"),
                ("nvl72 alltoall", NVL72, "alltoall"),
                ("nvl72 auto", NVL72, "auto"),
                ("nvl72 ep 72 alltoall", NVL72.with_axes(dp=1, ep=72, tp=1), "alltoall"),
                ("nvl72 dp 9", NVL72.with_axes(dp=9, ep=1, tp=8), "alltoall"),
            )
        ),
    ],
)
def test_logits(machine, exchange, experts, forward, reference):
    layout = dataclasses.replace(machine.layout, exchange=exchange, experts=experts)
    machine = machine.with_layout(layout)
    engine = open_checkpoint(TINY, build_mesh(machine, jax.devices()), layout, jnp.float32)
    ids = reference["input_ids"]
    count, length = ids.shape
    rows = causal_rows(jnp.asarray(ids), jnp.zeros(count, jnp.int32), jnp.full(count, length, jnp.int32))
    np.testing.assert_allclose(forward(engine, rows).logits, reference["logits"], atol=1e-4)
