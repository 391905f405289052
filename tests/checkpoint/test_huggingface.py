"""Every array of the bundled checkpoint against the safetensors package's reading, on many meshes, byte for byte."""

import itertools
import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint import huggingface
from kimi_jax.checkpoint import plan as plans
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors import Files, open_checkpoint
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement
from kimi_jax.parameters import declarations

RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}
WIDTH_RULES = {**RULES, "expert": "ep", "expert_mlp": "tp"}
PREFIX = "language_model."


def leaf(parameters, path):
    for name in path:
        parameters = getattr(parameters, name) if name in ("packed", "scale") else parameters[name]
    return parameters


def expected(declaration, tensors, slot_experts):
    """One array of the parameters from the safetensors package's tensors."""
    if not declaration.stacked:
        return tensors[PREFIX + declaration.key()].astype(declaration.dtype)
    zero = np.zeros(declaration.shape[1:], declaration.dtype)
    return np.stack([zero if e == EMPTY else tensors[PREFIX + declaration.key(e)] for e in slot_experts])


def assert_loaded(parameters, module, tensors, dtype=jnp.bfloat16):
    for declaration in declarations(module, dtype):
        array = leaf(parameters, declaration.path)
        wanted = expected(declaration, tensors, module.placement.slot_experts)
        assert array.dtype == wanted.dtype == declaration.dtype, declaration.path
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), declaration.path


REDUNDANT = Placement((*range(16), 3, 3, 7, EMPTY, 0, 1, 2, EMPTY), 16)


@pytest.mark.parametrize(
    ("axes", "rules", "placement"),
    [
        ((1, 1, 1), RULES, even_placement(16, 1)),
        ((2, 2, 4), RULES, even_placement(16, 8)),
        ((1, 3, 4), RULES, even_placement(16, 12)),
        ((1, 2, 8), WIDTH_RULES, even_placement(16, 2)),
        ((1, 4, 2), RULES, REDUNDANT),
    ],
)
def test_every_shard_holds_the_files_bytes(tiny, make_mesh, axes, rules, placement):
    parameters = tiny.load(make_mesh(*axes), rules, placement)
    assert_loaded(parameters, tiny.module(placement), tiny.tensors())


def test_files_of_other_float_types_are_converted(tiny):
    q_a, o = (PREFIX + f"model.layers.1.self_attn.{name}_proj.weight" for name in ("q_a", "o"))
    tensors = tiny.tensors()
    tiny.rewrite({q_a: tensors[q_a].astype(np.float32) * np.float32(1.001), o: tensors[o].astype(np.float16)})
    parameters = tiny.load(dtype=jnp.bfloat16)
    assert_loaded(parameters, tiny.module(), tiny.tensors())


def test_float32_parameters_hold_the_bfloat16_values_and_fixed_types_stay(tiny, make_mesh):
    parameters = tiny.load(make_mesh(1, 2, 4), placement=even_placement(16, 8), dtype=jnp.float32)
    assert_loaded(parameters, tiny.module(even_placement(16, 8)), tiny.tensors(), jnp.float32)
    gate = parameters["model"]["layers"][1]["mlp"]
    assert gate["gate"]["e_score_correction_bias"].dtype == jnp.float32
    assert gate["experts"]["gate_proj"].scale.dtype == jnp.bfloat16


def test_router_bias_keeps_bits_that_bfloat16_would_lose(tiny):
    key = PREFIX + "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = np.full(16, 0.5, np.float32)
    bias[1] += 2**-12
    tiny.rewrite({key: bias})
    loaded = tiny.load()["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
    assert np.asarray(loaded).tobytes() == bias.tobytes()


def test_weight_shape_of_either_width_and_keys_without_prefix_in_one_file(tiny, tmp_path):
    """As compressed-tensors writes (I64) and as K2-Thinking names its keys; a small model has no index."""
    import safetensors.numpy

    tensors = {k.removeprefix(PREFIX): v for k, v in tiny.tensors().items() if k.startswith(PREFIX)}
    wide = {k: v.astype(np.int64) if k.endswith("weight_shape") else v for k, v in tensors.items()}
    safetensors.numpy.save_file(wide, tmp_path / "model.safetensors")
    module = tiny.module()
    loaded = huggingface.load(tmp_path, module, "", tiny_mesh(), RULES, dtype=jnp.bfloat16, num_experts=16)
    assert_loaded(loaded, module, tiny.tensors())


def test_cpu_devices_use_the_bytes_that_were_read(tiny, make_mesh):
    """Replicas on CPU devices share one buffer: 72 simulated devices need no 72 copies."""
    parameters = tiny.load(make_mesh(16, 1, 1))
    for leaf_ in jax.tree.leaves(parameters):
        assert len({shard.data.unsafe_buffer_pointer() for shard in leaf_.addressable_shards}) == 1


def test_host_memory_is_local_bytes_and_two_arrays(tiny, make_mesh):
    tiny.load(make_mesh(2, 4, 2), placement=even_placement(16, 8))  # modules and caches
    module = tiny.module(even_placement(16, 8))
    planned = plan_of(tiny, module, make_mesh(2, 4, 2))
    distinct = sum(array.nbytes for array in planned.local(0))
    tracemalloc.start()
    try:
        parameters = tiny.load(make_mesh(2, 4, 2), placement=even_placement(16, 8))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    headers = 1_500_000  # Python objects of the tensors' names and offsets
    assert peak < distinct + 2 * planned.largest(0) + headers
    del parameters


def test_progress_counts_every_byte(tiny, make_mesh):
    seen = []
    tiny.load(make_mesh(1, 2, 2), placement=even_placement(16, 4), progress=lambda *done: seen.append(done))
    module = tiny.module(even_placement(16, 4))
    total = plan_of(tiny, module, make_mesh(1, 2, 2)).read_bytes(0)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    body = sum(t.nbytes for k, t in open_checkpoint(tiny.directory).items() if k.startswith(PREFIX))
    assert total == body


class RecordingFiles(Files):
    def __init__(self):
        super().__init__()
        self.ranges = []

    def read_into(self, tensor, offset, target):
        self.ranges.append((tensor.name, offset, offset + target.nbytes))
        super().read_into(tensor, offset, target)


def tiny_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "ep", "tp"))


def plan_of(checkpoint, module, mesh, rules=RULES, processes=1):
    return plans.plan(
        open_checkpoint(checkpoint.directory), module, PREFIX, mesh, rules, dtype=jnp.bfloat16,
        num_experts=checkpoint.config.n_routed_experts, slot_experts=module.placement.slot_experts,
        process_of={d: i * processes // mesh.size for i, d in enumerate(mesh.devices.flat)},
    )  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("axes", "rules", "placement", "gap"),
    [
        ((2, 2, 4), RULES, even_placement(16, 8), 4096),
        ((2, 1, 8), WIDTH_RULES, even_placement(16, 1), 1),
        ((1, 2, 8), WIDTH_RULES, Placement((*range(16), 5, 5, 0, EMPTY), 16), 24),
    ],
)
def test_each_process_reads_its_own_bytes_once(tiny, make_mesh, monkeypatch, axes, rules, placement, gap, processes):
    """Simulated processes; a small gap makes the tiny rows be read in strides, as 16 kB rows are."""
    if processes > np.prod(axes):
        pytest.skip("more processes than devices")
    monkeypatch.setattr(plans, "SMALLEST_GAP", gap)
    plans._merge.cache_clear()
    plans._schedule.cache_clear()
    module, tensors = tiny.module(placement), tiny.tensors()
    planned = plan_of(tiny, module, make_mesh(*axes), rules, processes)
    for process in planned.processes:
        needed = 0
        with RecordingFiles() as files, huggingface.reading_pool(4) as pool:
            for array in planned.local(process):
                reading = huggingface.Reading.start(array, files, pool, huggingface.Counter(None, 0))
                for task in reading.tasks:
                    task.result()
                whole = expected(array.declaration, tensors, placement.slot_experts)
                index = array.sharding.devices_indices_map(whole.shape)
                for block, host in zip(array.blocks, reading.blocks, strict=True):
                    assert {planned.process_of[device] for device in block.devices} == {process}
                    assert host.tobytes() == whole[index[block.devices[0]]].tobytes()
                needed += array.read_bytes() - sum(t.nbytes for t in array.shape_tensors())
        assert sum(end - start for _, start, end in files.ranges) == needed
        ranges = sorted(files.ranges)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ranges)), "read twice"
        if gap == 1:
            assert needed == sum(array.nbytes for array in planned.local(process)), "reads what it does not need"


def test_a_file_cut_between_check_and_read_is_named(tiny):
    key = PREFIX + "lm_head.weight"
    module = tiny.module()
    planned = plan_of(tiny, module, tiny_mesh())
    os.truncate(tiny.file_of(key), tiny.file_of(key).stat().st_size - 100)
    with pytest.raises(CheckpointError, match=rf"{tiny.file_of(key).name}: .*weight: the file ends at byte"):
        huggingface.read(planned, module)
