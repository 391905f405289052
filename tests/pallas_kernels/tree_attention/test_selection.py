import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.operation import Device
from pallas_kernels.tree_attention import OPERATION, Shape, expanded_pays
from pallas_kernels.tree_attention.shapes import SHAPES

SHAPE = Shape(8, 33, 64, 8192)
H200 = Device("NVIDIA H200", "9.0", 132)
GB300 = Device("NVIDIA GB300", "10.3", 152)


def config_of(shape, device):
    return OPERATION.choose(shape, jnp.bfloat16, device).config


@pytest.mark.parametrize("device", [H200, GB300])
@pytest.mark.parametrize("name", SHAPES)
def test_whole_waves_fill_the_card(name, device):
    shape = SHAPES[name]
    choice = OPERATION.choose(shape, jnp.bfloat16, device)
    config = choice.config
    query_tiles = -(-shape.rows * shape.heads // config.row_multiple) * config.row_multiple // 64
    blocks = query_tiles * config.splits
    waves = -(-blocks // device.cores)
    assert waves <= 2
    assert blocks >= 0.85 * waves * device.cores
    assert f"{query_tiles} query tiles x {config.splits} pieces" in choice.reason


def test_query_tiles_share_copies_on_hopper_where_there_are_two():
    def cluster(rows):
        return config_of(Shape(8, rows, 8, 8192), H200).cluster

    assert [cluster(rows) for rows in (1, 8, 9, 33)] == [1, 1, 2, 2]


def test_short_contexts_are_not_ground_to_dust():
    splits = config_of(Shape(1, 1, 8, 512), H200).splits
    assert splits == 2  # 9 tiles, at least 4 a piece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 96}, "kv_lora_rank is 96"),
        ({"kv_lora_rank": 640}, "kv_lora_rank is 640"),
        ({"rope": 32}, "rope width is 32"),
        ({"page": 8}, "a page holds 8 positions"),
        ({"page": 128}, "a page holds 128 positions"),
    ],
)
def test_what_a_kernel_cannot_serve_goes_to_the_reference_or_is_an_error_by_name(change, message):
    shape = dataclasses.replace(SHAPE, **change)
    choice = OPERATION.choose(shape, jnp.bfloat16, GB300)
    assert choice.implementation == "reference"
    assert message in choice.reason
    with pytest.raises(ValueError, match=message):
        OPERATION.choose(shape, jnp.bfloat16, GB300, "blackwell")


def test_heads_are_expanded_from_one_and_a_half_times_the_rows_at_which_operations_are_equal():
    # 2,176 operations a row absorbed, 640 and once 262,144 expanded: equal at 170.7 rows.
    k26 = {"kv_lora_rank": 512, "nope": 128, "v": 128}
    assert [expanded_pays(rows, **k26) for rows in (1, 65, 255, 256, 4096)] == [False, False, False, True, True]
    # A latent no wider than half a head's key and value saves nothing by being expanded.
    assert not expanded_pays(10**6, kv_lora_rank=16, nope=16, v=16)
