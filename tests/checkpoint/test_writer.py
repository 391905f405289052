"""What is written is read back, by the safetensors package and by the loader, byte for byte."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kimi_jax import text_files
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors import open_checkpoint
from kimi_jax.checkpoint.writer import Writer, leaf, save
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement
from kimi_jax.parameters import declarations

RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}
WIDTH_RULES = {**RULES, "expert": "ep", "expert_mlp": "tp"}


def options(checkpoint, placement, dtype=jnp.bfloat16):
    config = checkpoint.config
    return dict(dtype=dtype, num_experts=config.n_routed_experts, slot_experts=placement.slot_experts)


def config_json(checkpoint):
    return json.loads((checkpoint.directory / "config.json").read_text())


@pytest.mark.parametrize(
    ("axes", "rules", "placement"),
    [
        ((1, 1, 1), RULES, even_placement(16, 1)),
        ((2, 1, 8), WIDTH_RULES, even_placement(16, 1)),
        ((1, 3, 4), RULES, even_placement(16, 12)),
        ((1, 4, 2), RULES, Placement((EMPTY, 3, *range(16), 3, 7, 0, 1, 2, EMPTY), 16)),
    ],
)
def test_written_tensors_are_the_bytes_that_were_read(tiny, make_mesh, tmp_path, axes, rules, placement):
    parameters = tiny.load(make_mesh(*axes), rules, placement)
    out, module = tmp_path / "out", tiny.module(placement)
    extra = [tiny.directory / "tiktoken.model"]
    arguments = options(tiny, placement)
    save(out, parameters, module, config_json(tiny), tiny.config.key_prefix, extra_files=extra, **arguments)
    expected = {k: v for k, v in tiny.tensors().items() if k.startswith(tiny.config.key_prefix)}
    written = type(tiny)(out).tensors()
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert written[key].dtype == value.dtype, key
        assert written[key].tobytes() == value.tobytes(), key
    assert {p.name for p in out.iterdir()} == {
        *(f"model-0000{n}-of-000005.safetensors" for n in range(1, 6)),
        "model.safetensors.index.json", "config.json", "tiktoken.model",
    }  # fmt: skip
    assert type(tiny)(out).config == tiny.config
    assert (out / "tiktoken.model").read_bytes() == extra[0].read_bytes()
    again = type(tiny)(out).load(make_mesh(*axes), rules, placement)
    for one, two in zip(jax.tree.leaves(parameters), jax.tree.leaves(again), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_layer_shards_are_the_published_files_to_the_byte(tiny, tmp_path):
    """Order of tensors, header and offsets are the safetensors package's, as in the real checkpoint."""
    save(
        tmp_path / "out", tiny.load(), tiny.module(), config_json(tiny), tiny.config.key_prefix,
        **options(tiny, even_placement(16, 1)),
    )  # fmt: skip
    for layer in range(4):
        ours = tmp_path / "out" / f"model-0000{layer + 1}-of-000005.safetensors"
        package = safetensors.numpy.save(safetensors.numpy.load_file(ours))
        assert ours.read_bytes() == package


def test_float32_weights_are_written_as_asked(tiny, tmp_path):
    key = tiny.config.key_prefix + "model.norm.weight"
    parameters = tiny.load(dtype=jnp.float32)
    parameters["model"]["norm"]["weight"] = parameters["model"]["norm"]["weight"] * (1 + 2**-12)
    for dtype in (jnp.float32, jnp.bfloat16):
        out = tmp_path / jnp.dtype(dtype).name
        save(
            out, parameters, tiny.module(), config_json(tiny), tiny.config.key_prefix,
            **options(tiny, even_placement(16, 1), dtype),
        )  # fmt: skip
        written = type(tiny)(out).tensors()[key]
        assert written.dtype == dtype
        assert written.tobytes() == np.asarray(parameters["model"]["norm"]["weight"]).astype(dtype).tobytes()


def writer(checkpoint, out):
    placement = even_placement(16, 1)
    return Writer(
        out,
        checkpoint.module(),
        config_json(checkpoint),
        checkpoint.config.key_prefix,
        **options(checkpoint, placement),
    )


def nothing_of_it_loads(tiny, partial):
    """Neither under its own name nor under another, by no reader of the project, nor by others, who need the index."""
    for folder in (partial, shutil.copytree(partial, partial.with_name("renamed"))):
        unfinished = re.escape(str(folder)) + ".* the folder was never finished; parts of it are blank"
        for read in (type(tiny)(folder).load, open_checkpoint, ModelConfig.from_json, DrafterConfig.from_json):
            with pytest.raises(CheckpointError, match=unfinished):
                read() if read.__name__ == "load" else read(folder)
        assert not {"config.json", "model.safetensors.index.json"} & {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_writer_killed_at_its_last_files_leaves_the_marker(tiny, tmp_path, monkeypatch, name):
    write_text = text_files.write_text

    def die(path, text):
        if path.name == name:
            raise KeyboardInterrupt
        write_text(path, text)

    monkeypatch.setattr(text_files, "write_text", die)
    with pytest.raises(KeyboardInterrupt):
        save(
            tmp_path / "out", tiny.load(), tiny.module(), config_json(tiny), tiny.config.key_prefix,
            **options(tiny, even_placement(16, 1)),
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="INCOMPLETE says that the folder was never finished"):
        open_checkpoint(tmp_path / "out.incomplete")


def test_a_writer_that_dies_leaves_nothing_that_looks_complete(tiny, tmp_path):
    parameters, out = tiny.load(), tmp_path / "out"
    several = list(declarations(tiny.module()))

    def die_half_way():
        with writer(tiny, out) as half:
            for declaration in several[:20]:
                half.add(declaration, leaf(parameters, declaration.path))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_half_way()
    assert not out.exists()
    nothing_of_it_loads(tiny, tmp_path / "out.incomplete")
    with writer(tiny, out) as whole:  # starts anew over what was left
        for declaration in several:
            whole.add(declaration, leaf(parameters, declaration.path))
    assert out.exists()
    assert not (tmp_path / "out.incomplete").exists()


def test_every_array_must_be_written(tiny, tmp_path):
    parameters = tiny.load()
    declaration = next(declarations(tiny.module()))
    with pytest.raises(CheckpointError, match="arrays were never written"), writer(tiny, tmp_path / "out") as some:
        some.add(declaration, leaf(parameters, declaration.path))
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(tiny):
    before = {path.name: path.read_bytes() for path in tiny.directory.iterdir()}
    with pytest.raises(CheckpointError, match="not an empty folder"), writer(tiny, tiny.directory):
        pass
    assert {path.name: path.read_bytes() for path in tiny.directory.iterdir()} == before


def test_wrong_types_are_refused(tiny, tmp_path):
    bias = next(d for d in declarations(tiny.module()) if d.path[-1] == "e_score_correction_bias")
    with pytest.raises(CheckpointError, match="bfloat16, expected float32"), writer(tiny, tmp_path / "out") as some:
        some.add(bias, jnp.zeros(bias.shape, jnp.bfloat16))
