import re

import jax.numpy as jnp
import pytest

from pallas_kernels.int4_moe import Shape, Target, plan
from pallas_kernels.int4_moe.plan import SHARED_MEMORY_BYTES
from pallas_kernels.int4_moe.shapes import SHAPES, expert_parallel, tensor_parallel
from pallas_kernels.int4_moe.tile import UNIT, shared_memory_bytes

H200, B200, GB300 = (
    Target("NVIDIA H200", "9.0", 132),
    Target("NVIDIA B200", "10.0", 148),
    Target("NVIDIA GB300", "10.3", 152),
)
CPU, RTX, A100 = Target("cpu", "", 1), Target("NVIDIA RTX PRO 6000", "12.0", 188), Target("NVIDIA A100", "8.0", 108)


@pytest.mark.parametrize("target", [H200, B200, GB300], ids=lambda t: t.device_kind)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_kernels_whose_tiles_fit(name, target):
    shape = SHAPES[name]
    chosen = plan(shape, jnp.bfloat16, target)
    assert chosen.gate_up
    assert chosen.down
    assert chosen.implementation in ("warp", target.architecture)
    for kind, tile, out, k in (
        ("gate_up", chosen.gate_up, shape.width, shape.hidden),
        ("down", chosen.down, shape.hidden, shape.width),
    ):
        m_rows = UNIT * tile.warpgroups * (1 if kind == "gate_up" else 2)
        assert out % m_rows == 0
        assert k % (tile.k_step * tile.split) == 0
        assert tile.k_step == k or tile.k_step == 256
        assert tile.stages >= 2
        assert shared_memory_bytes(tile, kind) <= SHARED_MEMORY_BYTES


def test_tile_rows_follow_the_rows_an_expert_meets():
    chosen = [plan(expert_parallel(rows, 48), jnp.bfloat16, H200) for rows in (1, 64, 512, 1024, 4096)]
    assert [(c.implementation, c.gate_up.rows) for c in chosen] == [
        ("warp", 8),
        ("warp", 8),
        ("hopper", 16),
        ("hopper", 32),
        ("hopper", 64),
    ]


def test_few_active_experts_share_k_among_ctas():
    # One row under TP-8: 8 experts x 2 blocks of 128 features are 16 items for 132 cores; 7 shares of k make 112,
    # 14 make 224.
    chosen = plan(tensor_parallel(1, 8), jnp.bfloat16, H200)
    assert chosen.gate_up.split == 14
    assert chosen.down.split == 1
    assert plan(expert_parallel(64, 48), jnp.bfloat16, H200).gate_up.split == 1


def test_workspace_is_the_temporaries_of_the_worst_routing():
    # 64 rows x 8 over 48 experts: at most 48 + 512 / 8 tiles of 8 rows, each row hidden bf16, width bf16, hidden f32.
    chosen = plan(expert_parallel(64, 48), jnp.bfloat16, H200)
    assert chosen.workspace_bytes == (48 + 64) * 8 * (2 * 7168 + 2 * 2048 + 4 * 7168)


@pytest.mark.parametrize(
    ("target", "dtype", "shape", "reason"),
    [
        (CPU, jnp.bfloat16, expert_parallel(4, 48), "cpu has no kernel here"),
        (RTX, jnp.bfloat16, expert_parallel(4, 48), r"capability 12\.0"),
        (A100, jnp.bfloat16, expert_parallel(4, 48), r"capability 8\.0"),
        (H200, jnp.float32, expert_parallel(4, 48), "activations are float32"),
        (H200, jnp.bfloat16, Shape(4, 2, 8, 7168, 192, 8), "width is 192"),
        (H200, jnp.bfloat16, Shape(4, 2, 8, 96, 64, 8), "hidden is 96"),
    ],
)
def test_falls_back_aloud_and_refuses_by_name(target, dtype, shape, reason):
    chosen = plan(shape, dtype, target)
    assert chosen.implementation == "reference"
    assert re.search(reason, chosen.reason)
    with pytest.raises(ValueError, match=reason):
        plan(shape, dtype, target, "warp")


def test_engines_belong_to_their_architecture():
    with pytest.raises(ValueError, match="NVIDIA H200 is not Blackwell"):
        plan(expert_parallel(4, 48), jnp.bfloat16, H200, "blackwell")
    assert plan(expert_parallel(4, 48), jnp.bfloat16, GB300, "blackwell").gate_up.engine == "tcgen05"
