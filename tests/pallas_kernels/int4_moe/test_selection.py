import dataclasses
import re

import jax.numpy as jnp
import pytest

from pallas_kernels.int4_moe import OPERATION, Shape
from pallas_kernels.int4_moe.selection import SHARED_MEMORY_BYTES, workspace_bytes
from pallas_kernels.int4_moe.shapes import SHAPES, expert_parallel, tensor_parallel
from pallas_kernels.int4_moe.tile import UNIT, shared_memory_bytes
from pallas_kernels.operation import Device

H200, B200, GB300 = (
    Device("NVIDIA H200", "9.0", 132),
    Device("NVIDIA B200", "10.0", 148),
    Device("NVIDIA GB300", "10.3", 152),
)


def config_of(shape, device=H200, implementation="auto"):
    return OPERATION.choose(shape, jnp.bfloat16, device, implementation).config


@pytest.mark.parametrize("device", [H200, B200, GB300], ids=lambda device: device.kind)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_kernels_whose_tiles_fit(name, device):
    shape = SHAPES[name]
    chosen = OPERATION.choose(shape, jnp.bfloat16, device)
    assert chosen.implementation in ("warp", device.architecture)
    for kind, tile, out, k in (
        ("gate_up", chosen.config.gate_up, shape.width, shape.hidden),
        ("down", chosen.config.down, shape.hidden, shape.width),
    ):
        m_rows = UNIT * tile.warpgroups * (1 if kind == "gate_up" else 2)
        assert tile.engine == chosen.implementation
        assert out % m_rows == 0
        assert k % (tile.k_step * tile.split) == 0
        assert tile.k_step == k or tile.k_step == 256
        assert tile.stages >= 2
        assert shared_memory_bytes(tile, kind) <= SHARED_MEMORY_BYTES


def test_tile_rows_follow_the_rows_an_expert_meets():
    chosen = [OPERATION.choose(expert_parallel(n, 48), jnp.bfloat16, H200) for n in (1, 64, 512, 1024, 4096)]
    assert [(c.implementation, c.config.gate_up.rows) for c in chosen] == [
        ("warp", 8),
        ("warp", 8),
        ("hopper", 16),
        ("hopper", 32),
        ("hopper", 64),
    ]
    assert [config_of(expert_parallel(n, 48), H200, "hopper").gate_up.rows for n in (1, 4096)] == [16, 64]
    assert config_of(expert_parallel(4096, 48), H200, "warp").gate_up.rows == 8


def test_few_active_experts_share_k_among_ctas():
    # One row under TP-8: 8 experts x 2 blocks of 128 features are 16 items for 132 cores; 7 shares of k make 112,
    # 14 make 224.
    chosen = config_of(tensor_parallel(1, 8))
    assert (chosen.gate_up.split, chosen.down.split) == (14, 1)
    assert config_of(expert_parallel(64, 48)).gate_up.split == 1


def test_workspace_is_the_temporaries_of_the_worst_routing():
    # 64 rows x 8 over 48 experts: at most 48 + 512 / 8 tiles of 8 rows, each row hidden bf16, width bf16, hidden f32.
    shape = expert_parallel(64, 48)
    assert workspace_bytes(shape, config_of(shape)) == (48 + 64) * 8 * (2 * 7168 + 2 * 2048 + 4 * 7168)


def test_tiles_follow_the_rows_that_arrive():
    """An nvl72 step of 64 requests: buffers take 396 rows of 1,224 that chose, so that an expert meets 25 and not 8."""
    buffer = Shape(396, 8, 6, 7168, 2048, 384)
    rows = {
        routed: config_of(dataclasses.replace(buffer, routed_rows=routed), GB300).gate_up.rows
        for routed in (0, 96, 1224)
    }
    assert rows == {0: 16, 96: 8, 1224: 64}


@pytest.mark.parametrize(
    ("shape", "reason"), [(Shape(4, 2, 8, 7168, 192, 8), "width is 192"), (Shape(4, 2, 8, 96, 64, 8), "hidden is 96")]
)
def test_sizes_that_no_kernel_serves(shape, reason):
    chosen = OPERATION.choose(shape, jnp.bfloat16, H200)
    assert chosen.implementation == "reference"
    assert re.search(reason, chosen.reason)
    with pytest.raises(ValueError, match=reason):
        OPERATION.choose(shape, jnp.bfloat16, H200, "warp")
