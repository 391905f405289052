import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import Device, blackwell, choose, expanded_pays, tree_attention
from pallas_kernels.tree_attention.selection import current_device
from pallas_kernels.tree_attention.shapes import SCALE, SHAPES, Shape, problem

SIZES = {"requests": 8, "rows": 33, "heads": 64, "positions": 8192}
H200 = Device("gpu", "NVIDIA H200", 132)
GB300 = Device("gpu", "NVIDIA GB300", 152)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA H200", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA B200", "blackwell"),
        ("NVIDIA GB200", "blackwell"),
        ("NVIDIA B300", "blackwell"),
        ("NVIDIA GB300", "blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_cards_and_their_kernels(kind, kernel):
    device = Device("gpu", kind, 100)
    assert device.kernel == kernel
    choice = choose(**SIZES, device=device)
    assert choice.implementation == (kernel or "reference")
    assert kind in choice.reason


def test_the_cpu_takes_the_reference_and_says_so():
    choice = choose(**SIZES)
    assert (choice.implementation, choice.config) == ("reference", None)
    assert "cpu" in choice.reason


@pytest.mark.parametrize("device", [H200, GB300])
@pytest.mark.parametrize("name", SHAPES)
def test_whole_waves_fill_the_card(name, device):
    shape = SHAPES[name]
    choice = choose(
        requests=shape.requests, rows=shape.rows, heads=shape.heads, positions=shape.positions, device=device
    )
    config = choice.config
    query_tiles = -(-shape.rows * shape.heads // config.row_multiple) * config.row_multiple // 64
    blocks = query_tiles * config.splits
    waves = -(-blocks // device.cores)
    assert waves <= 2
    assert blocks >= 0.85 * waves * device.cores
    assert f"{query_tiles} query tiles x {config.splits} pieces" in choice.reason


def test_query_tiles_share_copies_on_hopper_where_there_are_two():
    def cluster(rows):
        return choose(requests=8, rows=rows, heads=8, positions=8192, device=H200).config.cluster

    assert [cluster(rows) for rows in (1, 8, 9, 33)] == [1, 1, 2, 2]


def test_short_contexts_are_not_ground_to_dust():
    splits = choose(requests=1, rows=1, heads=8, positions=512, device=H200).config.splits
    assert splits == 2  # 9 tiles, at least 4 a piece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 96}, "kv_lora_rank is 96"),
        ({"kv_lora_rank": 640}, "kv_lora_rank is 640"),
        ({"rope": 32}, "rope width is 32"),
        ({"dtype": jnp.float32}, "arrays are float32"),
        ({"positions": 0}, "holds 0 positions"),
        ({"positions": 1001}, "holds 1001 positions"),
    ],
)
def test_what_a_kernel_cannot_serve_goes_to_the_reference_or_is_an_error_by_name(change, message):
    choice = choose(**{**SIZES, **change}, device=GB300)
    assert choice.implementation == "reference"
    assert message in choice.reason
    with pytest.raises(ValueError, match=message):
        choose(**{**SIZES, **change}, device=GB300, implementation="blackwell")


def test_heads_are_expanded_from_one_and_a_half_times_the_rows_at_which_operations_are_equal():
    # 2,176 operations a row absorbed, 640 and once 262,144 expanded: equal at 170.7 rows.
    k26 = {"kv_lora_rank": 512, "nope": 128, "v": 128}
    assert [expanded_pays(rows, **k26) for rows in (1, 65, 255, 256, 4096)] == [False, False, False, True, True]
    # A latent no wider than half a head's key and value saves nothing by being expanded.
    assert not expanded_pays(10**6, kv_lora_rank=16, nope=16, v=16)


def test_an_unknown_name_is_refused():
    arguments = problem(Shape(1, 2, 1, 8, kv_lora_rank=16, rope=4))
    with pytest.raises(ValueError, match="unknown implementation 'flash'"):
        tree_attention(*arguments, scale=SCALE, implementation="flash")


def test_launch_parameters_of_another_kernel_are_refused():
    arguments = problem(Shape(1, 2, 8, 64, kv_lora_rank=128))
    with pytest.raises(ValueError, match=r"blackwell\.Config, but hopper was picked"):
        tree_attention(*arguments, scale=SCALE, implementation="hopper", config=blackwell.Config())


def test_arrays_tracked_over_mesh_axes_are_refused_with_the_remedy():
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    arguments = problem(Shape(1, 2, 8, 64, kv_lora_rank=128))
    spec = jax.sharding.PartitionSpec("dp")
    call = jax.shard_map(
        lambda *a: tree_attention(*a, scale=SCALE, implementation="hopper"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match="give shard_map check_vma=False"):
        jax.eval_shape(call, *arguments)


def test_the_pair_form_is_taken_by_name_alone():
    assert choose(**SIZES, device=GB300).implementation == "blackwell"
    choice = choose(**SIZES, device=GB300, implementation="blackwell_pair")
    assert (choice.config.row_multiple, choice.config.splits) == (128, 4)
    with pytest.raises(ValueError, match="a pair of blocks halves 256 or 512"):
        choose(**SIZES, kv_lora_rank=128, device=GB300, implementation="blackwell_pair")


def test_the_device_is_the_meshs():
    abstract = jax.sharding.AbstractDevice(device_kind="NVIDIA GB300", num_cores=152, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), abstract_device=abstract)
    assert current_device().platform == "cpu"
    with jax.sharding.use_abstract_mesh(mesh):
        assert current_device() == GB300
