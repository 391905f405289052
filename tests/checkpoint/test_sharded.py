"""Sharded checkpoints: bit-exact onto any mesh and placement, refused when anything is missing or damaged."""

import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kimi_jax.checkpoint import convert as conversion
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors import open_checkpoint as open_safetensors
from kimi_jax.checkpoint.sharded import reader
from kimi_jax.checkpoint.sharded.manifest import parts, read_manifest
from kimi_jax.checkpoint.sharded.writer import save
from kimi_jax.checkpoint.writer import leaf
from kimi_jax.commands import convert
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.eplb import save_placements
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement
from kimi_jax.parameters import declarations

RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}
WIDTH_RULES = {**RULES, "expert": "ep", "expert_mlp": "tp"}
REDUNDANT = Placement((EMPTY, 3, *range(16), 3, 7, 0, 1, 2, EMPTY), 16)
BODY = "parts/layer-00001"


def to_orbax(checkpoint, target, **options):
    config = checkpoint.config
    conversion.to_orbax(
        checkpoint.directory, target, checkpoint.module(), config.key_prefix,
        num_experts=config.n_routed_experts, dtype=jnp.bfloat16, **options,
    )  # fmt: skip


def restore(directory, checkpoint, mesh, rules=RULES, placement=None, dtype=jnp.bfloat16, **options):
    placement = placement or even_placement(16, 1)
    module = checkpoint.module(placement)
    return reader.restore(
        directory, module, mesh, rules, dtype=dtype, slot_experts=placement.slot_experts, **options
    )  # fmt: skip


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The bundled checkpoint as a sharded one, converted once; tests that damage it copy it."""
    source = Path(__file__).parents[1] / "data" / "tiny_random"
    target = tmp_path_factory.mktemp("orbax") / "tiny"
    config = ModelConfig.from_json(source)
    conversion.to_orbax(
        source, target, CausalLM(config), config.key_prefix, num_experts=config.n_routed_experts, dtype=jnp.bfloat16
    )
    return target


@pytest.mark.parametrize(
    ("axes", "rules", "placement"),
    [
        ((1, 1, 1), RULES, even_placement(16, 1)),
        ((2, 2, 4), RULES, even_placement(16, 8)),
        ((1, 2, 8), WIDTH_RULES, even_placement(16, 2)),
        ((1, 4, 2), RULES, REDUNDANT),
    ],
)
def test_restores_what_the_safetensors_loader_reads(tiny, converted, make_mesh, axes, rules, placement):
    mesh = make_mesh(*axes)
    assert_same(restore(converted, tiny, mesh, rules, placement), tiny.load(mesh, rules, placement))


def test_restores_into_float32(tiny, converted, make_mesh):
    mesh = make_mesh(1, 1, 2)
    assert_same(restore(converted, tiny, mesh, dtype=jnp.float32, placement=even_placement(16, 2)),
                tiny.load(mesh, placement=even_placement(16, 2), dtype=jnp.float32))  # fmt: skip


@pytest.mark.parametrize(("axes", "rules", "placement"), [((2, 2, 2), RULES, REDUNDANT)])
def test_saved_from_one_mesh_and_placement_restored_onto_another(tiny, make_mesh, tmp_path, axes, rules, placement):
    """As training or a rebalancing leaves them; the placement can be read back."""
    mesh = make_mesh(*axes)
    parameters, module = tiny.load(mesh, rules, placement), tiny.module(placement)
    save(tmp_path / "out", parameters, module, dtype=jnp.bfloat16, slot_experts=placement.slot_experts)
    assert read_manifest(tmp_path / "out").slot_experts == placement.slot_experts
    assert_same(restore(tmp_path / "out", tiny, mesh, rules, placement), parameters)
    other, spread = make_mesh(1, 3, 4), even_placement(16, 12)
    assert_same(restore(tmp_path / "out", tiny, other, RULES, spread), tiny.load(other, RULES, spread))


def test_parts_are_ordinary_orbax_checkpoints(tiny, converted):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore((converted / BODY).absolute())
    parameters = tiny.load()
    inside = [d for d in declarations(tiny.module()) if d.path[:3] == ("model", "layers", 1)]
    assert len(tree) == len(inside)
    for declaration in inside:
        value = tree[".".join(map(str, declaration.path))]
        assert value.dtype == declaration.dtype
        assert np.asarray(value).tobytes() == np.asarray(leaf(parameters, declaration.path)).tobytes()


def test_chunks_are_experts(converted):
    """A process reads the experts it holds and no others."""
    stored = read_manifest(converted).arrays["model.layers.1.mlp.experts.down_proj.packed"]
    assert stored.shape == (16, 128, 32)
    assert stored.chunk == (1, 128, 32)


def test_back_to_the_hf_layout_byte_for_byte(tiny, converted, tmp_path):
    config = tiny.config
    conversion.to_huggingface(
        converted, tmp_path / "hf", tiny.module(), config.key_prefix, num_experts=config.n_routed_experts
    )
    back = type(tiny)(tmp_path / "hf")
    expected, written = tiny.tensors(), back.tensors()
    assert written.keys() == expected.keys()
    assert all(written[k].dtype == v.dtype and written[k].tobytes() == v.tobytes() for k, v in expected.items())
    assert back.config == config
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        assert (back.directory / name).read_bytes() == (tiny.directory / name).read_bytes()


def test_conversion_holds_one_layer_at_a_time(tiny, tmp_path):
    to_orbax(tiny, tmp_path / "warm")
    config_part = {
        part: sum(np.prod(d.shape) * d.dtype.itemsize for d in held)
        for part, held in parts(tiny.module(), jnp.bfloat16).items()
    }
    tracemalloc.start()
    try:
        to_orbax(tiny, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest, objects = max(config_part.values()), 1_500_000
    assert largest * 3 < sum(config_part.values()) + largest  # the bound below says something
    assert peak < 2 * largest + objects


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


def test_a_conversion_that_dies_leaves_nothing_that_looks_complete(tiny, tmp_path, make_mesh, monkeypatch):
    target = tmp_path / "out"

    def die(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_orbax(tiny, target, progress=die)
    assert not target.exists()
    partial = tmp_path / "out.incomplete"
    assert (partial / "parts").exists()
    assert not {"config.json", "manifest.json"} & {path.name for path in partial.iterdir()}
    for folder in (partial, shutil.copytree(partial, tmp_path / "renamed")):
        for read in (read_manifest, open_safetensors, ModelConfig.from_json):
            with pytest.raises(
                CheckpointError, match=rf"{folder.name}/INCOMPLETE says that the folder was never finis"
            ):
                read(folder)
    to_orbax(tiny, target)
    assert not partial.exists()


def largest_file(directory):
    return max(
        (p for p in (directory / "parts" / "layer-00001").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: largest_file(d).unlink(), ["missing, expected"]),
        (lambda d: largest_file(d).write_bytes(largest_file(d).read_bytes()[:-7]), ["bytes, expected"]),
        (lambda d: (d / "manifest.json").unlink(), ["manifest.json", "missing", "half-written"]),
        (lambda d: (d / "manifest.json").write_text("{"), ["manifest.json", "cannot be read"]),
        (lambda d: (d / "manifest.json").write_text("[]"), ["manifest.json", "not a JSON object"]),
        (lambda d: edit(d, lambda m: m.update(version=0)), ["format version 0", "convert the original"]),
        (lambda d: edit(d, lambda m: m.update(version=2)), ["format version 2", "reads 1"]),
        (lambda d: edit(d, lambda m: m.update(format="zarr")), ["format is not"]),
        (lambda d: edit(d, lambda m: m.pop("arrays")), ["broken manifest", "arrays"]),
        (lambda d: edit(d, lambda m: m["arrays"].pop("lm_head.weight")), ["lm_head.weight: missing"]),
        (
            lambda d: edit(d, lambda m: m["arrays"].update(x=m["arrays"]["lm_head.weight"])),
            ["x: not part of the model"],
        ),
        (
            lambda d: edit(d, lambda m: m["arrays"]["lm_head.weight"].update(shape=[576, 64])),
            ["lm_head.weight", "[576, 64]", "[576, 128]"],
        ),
        (
            lambda d: edit(
                d, lambda m: m["arrays"]["model.layers.1.mlp.gate.e_score_correction_bias"].update(dtype="bfloat16")
            ),
            ["e_score_correction_bias", "is bfloat16, expected float32"],
        ),
        (lambda d: edit(d, lambda m: m.update(slot_experts=[*range(15), EMPTY])), ["no stored slot holds expert 15"]),
        (lambda d: (d / "checksums-0.json").unlink(), ["CRC-32 differs"]),
    ],
)
def test_incomplete_or_foreign_checkpoints_are_refused(tiny, copy, make_mesh, damage, words):
    damage(copy)
    with pytest.raises(CheckpointError) as caught:
        restore(copy, tiny, make_mesh())
    assert all(word in str(caught.value) for word in words), caught.value


def edit(directory, change):
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_every_flipped_byte_is_refused_or_harmless(tiny, copy, make_mesh):
    """Damage anywhere in the stored files: an error that names the part and the array, or the right weights."""
    rng, expected = np.random.default_rng(3), tiny.load()
    files = [path for path in sorted((copy / "parts").rglob("*")) if path.is_file()]
    weights = np.array([path.stat().st_size for path in files], float)
    refused = 0
    for _ in range(20):
        file = files[rng.choice(len(files), p=weights / weights.sum())]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
        file.write_bytes(changed)
        error, loaded = outcome(copy, tiny, make_mesh())
        if error:
            refused += 1
            assert "parts/" in error
            assert "model." in error or "lm_head" in error, error
        else:
            assert_same(loaded, expected)
        file.write_bytes(content)
    assert refused > 10


def outcome(directory, checkpoint, mesh):
    try:
        return None, restore(directory, checkpoint, mesh)
    except CheckpointError as error:
        return str(error), None


def test_progress_counts_every_byte(tiny, converted, make_mesh):
    seen = []
    restore(converted, tiny, make_mesh(1, 2, 2), placement=even_placement(16, 4), progress=lambda *s: seen.append(s))
    total = sum(np.prod(d.shape) * d.dtype.itemsize for d in declarations(tiny.module()))
    assert seen[-1] == (total, total)


def test_convert_commands(tiny, tmp_path, capsys):
    """There and back through 24 slots, of which 8 are replicas, in another order in every layer."""
    slots = [*range(16), *range(8)]
    placements = [Placement(tuple(np.roll(slots, layer).tolist()), 16) for layer in range(tiny.config.num_moe_layers)]
    save_placements(tmp_path / "placement.json", placements)
    convert.run_to_orbax(
        convert.ToOrbaxOptions(
            checkpoint=tiny.directory, output=tmp_path / "sharded", placement=tmp_path / "placement.json"
        )
    )
    held = read_manifest(tmp_path / "sharded").slot_experts
    assert list(held.values()) == [placement.slot_experts for placement in placements]
    convert.run_to_hf(convert.ConvertOptions(checkpoint=tmp_path / "sharded", output=tmp_path / "hf"))
    written = type(tiny)(tmp_path / "hf").tensors()
    for key, value in tiny.tensors().items():
        if key.startswith("language_model."):
            assert written[key].tobytes() == value.tobytes(), key
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        convert.run_to_orbax(convert.ToOrbaxOptions(checkpoint=tiny.directory, output=tmp_path / "sharded"))
