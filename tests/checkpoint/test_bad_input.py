"""Damaged and hostile checkpoints: every one refused with the file, the tensor and the cause."""

import json
import os
import re
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint import huggingface
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.plan import SKIPPED_FAMILIES
from kimi_jax.checkpoint.safetensors import INDEX_NAME, open_checkpoint
from kimi_jax.parallel.placement import EMPTY

LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "mlp.experts.3.down_proj."
NORM = LAYER + "input_layernorm.weight"


def refuses(checkpoint, *words):
    """The load fails before any tensor is read (or by its bytes), with all these words in the message."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load()
    message = str(caught.value)
    assert all(word in message for word in words), message


def edit_header(file, change):
    """Applies `change` to the parsed header and writes it back over the same body."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def edit_index(checkpoint, change):
    path = checkpoint.directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (NORM, np.ones(64, jnp.bfloat16), ["[64]", "[128]"]),
        (NORM, np.ones(128, np.int32), ["I32", "BF16 or F16 or F32"]),
        (NORM, np.ones(128, np.float64), ["F64"]),
        (NORM, np.full(128, np.nan, jnp.bfloat16), ["NaN"]),
        (NORM, np.full(128, np.inf, np.float16), ["infinity"]),
        (LAYER + "mlp.gate.e_score_correction_bias", np.ones(16, jnp.bfloat16), ["BF16", "expected F32"]),
        (EXPERT + "weight_packed", np.ones((128, 32), np.int64), ["I64", "expected I32"]),
        (EXPERT + "weight_scale", np.ones((128, 4), jnp.bfloat16), ["[128, 4]", "[128, 8]"]),  # groups of 64
        (EXPERT + "weight_scale", np.ones((128, 8), np.float32), ["F32", "expected BF16"]),
        (EXPERT + "weight_scale", np.full((128, 8), np.nan, jnp.bfloat16), ["NaN"]),
        (EXPERT + "weight_scale", np.full((128, 8), -np.inf, jnp.bfloat16), ["infinity"]),
        (EXPERT + "weight_shape", np.array([256, 128], np.int32), ["[256, 128]", "[128, 256]"]),
        (EXPERT + "weight_shape", np.array([128, 256, 1], np.int32), ["[3]", "[2]"]),
        (EXPERT + "weight_shape", np.array([128, 256], np.float32), ["F32", "I32 or I64"]),
        (EXPERT + "weight_packed", None, ["missing"]),
        (EXPERT + "weight_shape", None, ["missing"]),
        ("language_model.lm_head.weight", None, ["missing"]),
    ],
)
def test_wrong_tensor(tiny, key, value, words):
    name = tiny.file_of(key).name if value is not None else str(tiny.directory)
    tiny.rewrite({key: value})
    refuses(tiny, key, name, *words)


@pytest.mark.parametrize("key", [LAYER + "mlp.gate.bias", "language_model.model.layers.4.input_layernorm.weight", "x"])
def test_extra_tensor(tiny, key):
    tiny.rewrite({key: np.ones(128, jnp.bfloat16)}, tiny.file_of(NORM))
    refuses(tiny, key, tiny.file_of(NORM).name, "not part of the model")


def test_skipped_families_are_named_by_the_caller(tiny):
    with pytest.raises(CheckpointError, match=r"mm_projector\.\S+: not part of the model"):
        tiny.load(skip=("vision_tower.",))


def test_many_problems_are_counted(tiny):
    tiny.rewrite({key: None for key in tiny.weight_map if ".mlp.experts.5." in key})
    refuses(tiny, "mlp.experts.5.", "(and 22 more)")  # 3 layers x 3 projections x 3 tensors


def truncate(file, size):
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.unlink(), ["missing shard", "is the download complete?"]),
        (lambda f: truncate(f, 0), ["0 bytes", "too short"]),
        (lambda f: truncate(f, 5), ["5 bytes", "too short"]),
        (lambda f: truncate(f, 1000), ["truncated?"]),
        (lambda f: truncate(f, -1), ["truncated"]),
        (lambda f: f.write_bytes(f.read_bytes() + b"\0" * 8), ["8 bytes after the last tensor"]),
        (lambda f: f.write_bytes(struct.pack("<Q", 2**63) + f.read_bytes()[8:]), ["header length", "exceeds"]),
        (lambda f: f.write_bytes(struct.pack("<Q", 3) + f.read_bytes()[8:]), ["broken JSON header"]),
        (lambda f: f.write_bytes(struct.pack("<Q", 8) + b"[[1,2]] "), ["not an object"]),
        (lambda f: f.write_bytes(struct.pack("<Q", 99_999) + b"[" * 99_999), ["broken JSON header"]),
        (lambda f: f.write_bytes(struct.pack("<Q", 4) + b'"\xff" '), ["broken JSON header"]),
        (lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), ["exceeds", "not safetensors?"]),
        (lambda f: (f.unlink(), f.mkdir()), ["not a regular file"]),
        (lambda f: (f.unlink(), os.mkfifo(f)), ["not a regular file"]),
        (lambda f: (f.unlink(), f.symlink_to(f.name)), ["loop of symbolic links"]),
        (lambda f: (f.unlink(), f.symlink_to("blobs/gone")), ["link to a missing file"]),
    ],
)
def test_damaged_shard(tiny, damage, words):
    file = tiny.file_of(NORM)
    damage(file)
    refuses(tiny, file.name, *words)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "BF17"}, ["unknown dtype 'BF17'"]),
        ({"dtype": ["BF16"]}, ["unknown dtype"]),
        ({"dtype": "F32"}, ["F32[128] takes 512 bytes", "span 256"]),
        ({"shape": [-128]}, ["not counts"]),
        ({"shape": [True]}, ["not counts"]),
        ({"shape": [128, 10**30]}, ["takes"]),
        ({"shape": 128}, ["header entry without"]),
        ({"data_offsets": [0, 256, 512]}, ["header entry without"]),
        ({"data_offsets": [-256, 0]}, ["not counts"]),
        ({"data_offsets": [0.0, 256.0]}, ["not counts"]),
        ({"data_offsets": [8, 264]}, ["overlaps"]),
        ({"data_offsets": [10**15, 10**15 + 256]}, ["hole"]),
    ],
)
def test_broken_header_entry(tiny, entry, words):
    def change(header):
        header[NORM] |= entry

    edit_header(tiny.file_of(NORM), change)
    # An entry that moved leaves a hole where it was; which of the two is met first depends on the order of bytes.
    with pytest.raises(CheckpointError) as caught:
        tiny.load()
    message = str(caught.value)
    assert tiny.file_of(NORM).name in message
    assert any(word in message for word in [*words, "hole"]), message
    if "hole" not in message:
        assert NORM in message


def test_tensors_out_of_range_of_their_file(tiny):
    file = tiny.file_of("language_model.model.norm.weight")
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [10**9, 10**9 + 8]}
    edit_header(file, lambda header: header.update(extra=entry))
    refuses(tiny, file.name, "extra", "follows a hole")


def test_a_name_that_stands_twice_in_a_header(tiny):
    file = tiny.file_of(NORM)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    again = b', "%s": {"dtype": "BF16", "shape": [128], "data_offsets": [0, 256]}}' % NORM.encode()
    text = content[8 : 8 + length].rstrip()[:-1] + again
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    refuses(tiny, file.name)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "a\\b", "\0"]
)
def test_index_names_files_outside_the_folder(tiny, name):
    shutil.copy(tiny.file_of(NORM), tiny.directory.parent / "outside.safetensors")
    edit_index(tiny, lambda weight_map: weight_map.update({NORM: name}))
    refuses(tiny, INDEX_NAME, repr(name))


def test_index_and_headers_must_agree(tiny):
    elsewhere = tiny.file_of("language_model.lm_head.weight")
    edit_index(tiny, lambda weight_map: weight_map.update({NORM: elsewhere.name}))
    refuses(tiny, NORM, f"the index places it in {elsewhere.name}")


def test_index_lacks_a_tensor_of_a_shard(tiny):
    file = tiny.file_of(NORM)
    edit_index(tiny, lambda weight_map: weight_map.pop(NORM))
    refuses(tiny, file.name, NORM, "the index does not have it")


def test_shard_lacks_a_tensor_of_the_index(tiny):
    file = tiny.file_of(NORM)
    edit_index(tiny, lambda weight_map: weight_map.update({"ghost.weight": file.name}))
    refuses(tiny, file.name, "ghost.weight", "does not have it")


def test_a_shard_listed_under_two_names(tiny):
    file = tiny.file_of(NORM)
    shutil.copy(file, file.with_name("copy.safetensors"))
    edit_index(tiny, lambda weight_map: weight_map.update({NORM: "copy.safetensors"}))
    refuses(tiny, "copy.safetensors: language_model.", f"the index places it in {file.name}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["broken JSON index"]),
        ("[]", ["not an object"]),
        ("{}", ["no weight_map"]),
        ('{"weight_map": []}', ["no weight_map"]),
        ('{"weight_map": {"a": 3}}', ["a: file name 3"]),
        ('{"weight_map": {"a": "x.safetensors"}}', ["x.safetensors", "missing shard"]),
        ("{" * 100_000, ["broken JSON index"]),
    ],
)
def test_broken_index(tiny, text, words):
    (tiny.directory / INDEX_NAME).write_text(text)
    refuses(tiny, *words)


def test_index_through_a_loop_of_links(tiny):
    index = tiny.directory / INDEX_NAME
    index.unlink()
    index.symlink_to(index.name)
    refuses(tiny, INDEX_NAME, "loop of symbolic links")


def test_shards_may_be_links_to_files_elsewhere_as_in_the_hubs_cache(tiny):
    file = tiny.file_of(NORM)
    blob = tiny.directory.parent / "blob"
    shutil.move(file, blob)
    file.symlink_to(blob)
    assert tiny.load()["model"]["layers"][1]["input_layernorm"]["weight"].shape == (128,)


def test_not_a_checkpoint_folder(tmp_path):
    with pytest.raises(CheckpointError, match="is this a checkpoint folder"):
        huggingface.open_checkpoint(tmp_path)


def test_mesh_that_does_not_divide(tiny, make_mesh):
    with pytest.raises(
        CheckpointError, match=r"layers.0.mlp.down_proj.weight: cannot lie on this mesh: .*partitioned 3 times"
    ):
        tiny.load(make_mesh(1, 1, 3))


class Slots:
    """A placement that `parallel.placement` would not let through."""

    def __init__(self, slots):
        self.slot_experts, self.num_slots = slots, 16


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([*range(15), EMPTY], r"leave out \[15\]"),
        ([*range(15), 16], r"unknown experts \[16\] and leave out \[15\]"),
        (list(range(17)), "16 slots, but experts were given for 17"),
    ],
)
def test_slots_must_hold_every_expert(tiny, slots, words):
    with pytest.raises(CheckpointError, match=words):
        tiny.load(placement=Slots(slots))


def test_every_mutation_is_refused_by_name_or_reads_what_the_file_says(tiny):
    """Random damage to headers and index, and cuts: refused, naming a file, or every array is the original's."""
    rng = np.random.default_rng(5)
    original = {file: file.read_bytes() for file in tiny.directory.iterdir()}
    reference = tiny.load()
    shards = sorted(file for file in original if file.suffix == ".safetensors")
    refused = 0
    for _ in range(150):
        file = [*shards, tiny.directory / INDEX_NAME][rng.integers(len(shards) + 1)]
        content = bytearray(original[file])
        head = len(content) if file.suffix == ".json" else 8 + struct.unpack("<Q", content[:8])[0]
        for at in rng.integers(0, head, rng.integers(1, 4)):
            content[at] = rng.integers(256)
        if not rng.integers(5):
            del content[rng.integers(len(content)) :]
        file.write_bytes(content)
        loaded, error = outcome(tiny)
        refused += bool(error)
        if error:
            assert re.search(r"model\S*\.(safetensors|json)|language_model|vision_tower|mm_projector", error)
        else:
            assert same(loaded, reference)
        file.write_bytes(original[file])
    assert refused > 100


def test_a_flipped_bit_of_a_tensor_changes_its_array_alone_or_is_refused_by_name(tiny):
    """The format has no checksums (sharded checkpoints do): only NaN, infinity and a wrong weight_shape are found."""
    rng = np.random.default_rng(6)
    reference = jax.tree.leaves(tiny.load())
    tensors = list(open_checkpoint(tiny.directory).values())
    refused = changed = 0
    for _ in range(40):
        tensor = tensors[rng.integers(len(tensors))]
        at = tensor.start + int(rng.integers(tensor.nbytes))
        original = tensor.file.read_bytes()
        content = bytearray(original)
        content[at] ^= 1 << int(rng.integers(8))
        tensor.file.write_bytes(content)
        loaded, error = outcome(tiny)
        if error:
            refused += 1
            assert tensor.file.name in error
            assert tensor.name in error
        else:
            leaves = jax.tree.leaves(loaded)
            pairs = zip(reference, leaves, strict=True)
            differ = [a for a, b in pairs if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
            changed += len(differ)
            assert len(differ) == (not tensor.name.startswith(SKIPPED_FAMILIES))
        tensor.file.write_bytes(original)
    assert refused
    assert changed


def outcome(checkpoint):
    try:
        return checkpoint.load(), None
    except CheckpointError as error:
        return None, str(error)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
