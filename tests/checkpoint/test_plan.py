"""The plan at full scale: all 208,550 tensors of K2.6, headers from formulas over sparse files."""

import collections
import json
import math
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import pytest

from kimi_jax.checkpoint.plan import plan, split_processes
from kimi_jax.checkpoint.safetensors import open_checkpoint
from kimi_jax.commands import convert
from kimi_jax.commands.options import LayoutOptions
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.placement import even_placement

slow = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "data" / "configs" / "kimi_k26.json"
HIDDEN, EXPERTS, WIDTH, DENSE, VOCAB, LAYERS = 7168, 384, 2048, 18432, 163840, 61
Q_LORA, KV_LORA, HEADS, NOPE, ROPE, VALUE = 1536, 512, 64, 128, 64, 128
BYTES = {"BF16": 2, "F32": 4, "I32": 4}
FILE_BYTES = 595_177_988_208
"""Of the published weight files, headers included."""
ONE_EXPERT = 24_772_608
"""Packed words and scales of one expert's three matrices."""


def tensors():
    """(Shard, name, dtype, shape) of every tensor; the list is that of a public inventory of K2.5's files."""

    def mlp(at, width):
        yield at + "gate_proj", (width, HIDDEN)
        yield at + "up_proj", (width, HIDDEN)
        yield at + "down_proj", (HIDDEN, width)

    for layer in range(LAYERS):
        at, shard = f"language_model.model.layers.{layer}.", layer + 1
        attention = {
            "q_a_proj": (Q_LORA, HIDDEN),
            "q_a_layernorm": (Q_LORA,),
            "q_b_proj": (HEADS * (NOPE + ROPE), Q_LORA),
            "kv_a_proj_with_mqa": (KV_LORA + ROPE, HIDDEN),
            "kv_a_layernorm": (KV_LORA,),
            "kv_b_proj": (HEADS * (NOPE + VALUE), KV_LORA),
            "o_proj": (HIDDEN, HEADS * VALUE),
        }
        floats = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        floats |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if layer == 0:
            floats |= dict(mlp("mlp.", DENSE))
        else:
            floats |= {"mlp.gate": (EXPERTS, HIDDEN), **dict(mlp("mlp.shared_experts.", WIDTH))}
            yield shard, at + "mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
            for expert in range(EXPERTS):
                for name, (out, inputs) in mlp(f"{at}mlp.experts.{expert}.", WIDTH):
                    yield shard, name + ".weight_packed", "I32", (out, inputs // 8)
                    yield shard, name + ".weight_scale", "BF16", (out, inputs // 32)
                    yield shard, name + ".weight_shape", "I32", (2,)
        for name, shape in floats.items():
            yield shard, at + name + ".weight", "BF16", shape
    yield 62, "language_model.model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    yield 62, "language_model.model.norm.weight", "BF16", (HIDDEN,)
    yield 62, "language_model.lm_head.weight", "BF16", (VOCAB, HIDDEN)
    for name, shape in {"pre_norm": (1152,), "proj.0": (4608, 4608), "proj.2": (HIDDEN, 4608)}.items():
        yield 63, f"mm_projector.{name}.weight", "BF16", shape
        yield 63, f"mm_projector.{name}.bias", "BF16", shape[:1]
    block = {
        "mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304), "norm0": (1152,), "norm1": (1152,), "wo": (1152, 1152),
        "wqkv": (3456, 1152),
    }  # fmt: skip
    vision = {f"encoder.blocks.{n}.{name}": shape for n in range(27) for name, shape in block.items()}
    vision |= {"encoder.final_layernorm": (1152,), "patch_embed.proj": (1152, 3, 14, 14)}
    for name, shape in vision.items():
        yield 64, f"vision_tower.{name}.weight", "BF16", shape
        yield 64, f"vision_tower.{name}.bias", "BF16", shape[:1]
    yield 64, "vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, 1152)


@pytest.fixture(scope="module")
def k26(tmp_path_factory):
    """A folder with K2.6's config and index, and 64 shards with true headers over holes (30 MB on disk)."""
    directory = tmp_path_factory.mktemp("k26")
    shutil.copy(CONFIG, directory / "config.json")
    shards = collections.defaultdict(list)
    for shard, *tensor in tensors():
        shards[shard].append(tensor)
    weight_map, size = {}, 0
    for shard, held in shards.items():
        header, offset = {}, 0
        for name, dtype, shape in sorted(held, key=lambda t: (["F32", "I32", "BF16"].index(t[1]), t[0])):
            end = offset + BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = directory / f"model-{shard:05d}-of-{len(shards):06d}.safetensors"
        with open(file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
        weight_map |= dict.fromkeys(header, file.name)
        size += 8 + len(text) + offset
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert (len(weight_map), len(shards), size) == (208_550, 64, FILE_BYTES)
    yield directory
    shutil.rmtree(directory)


RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}


def dense_bytes(tp):
    """Everything but routed experts on one device, from the shapes above: what tp splits and what it does not."""
    split = sum(
        HEADS * (NOPE + ROPE) * Q_LORA + HEADS * (NOPE + VALUE) * KV_LORA + HIDDEN * HEADS * VALUE
        + 3 * HIDDEN * (WIDTH if layer else DENSE)
        for layer in range(LAYERS)
    ) + 2 * VOCAB * HIDDEN  # fmt: skip
    whole = LAYERS * (2 * HIDDEN + Q_LORA * HIDDEN + Q_LORA + (KV_LORA + ROPE) * HIDDEN + KV_LORA) + HIDDEN
    router = (LAYERS - 1) * EXPERTS * HIDDEN
    return 2 * (split // tp + whole + router) + 4 * (LAYERS - 1) * EXPERTS


SHAPES_PER_EXPERT = 24
"""Bytes of an expert's three weight_shape tensors, which are read and not kept."""


def short_rows(tp_ranks):
    """Bytes read beyond need: rows of the shared experts' down_proj have 4 kB, a page, and are read whole."""
    return 60 * 2 * HIDDEN * WIDTH * (8 - tp_ranks) // 8


@pytest.mark.parametrize("processes", [pytest.param(1, marks=slow), 2, pytest.param(16, marks=slow)])
def test_hgx_ib_reads_every_byte_once_and_puts_it_where_the_layout_says(k26, make_mesh, processes):
    config = ModelConfig.from_json(k26)
    mesh = make_mesh(1, 2, 8)
    module = CausalLM(config, even_placement(EXPERTS, 16))
    checkpoint = open_checkpoint(k26)
    planned = plan(
        checkpoint, module, config.key_prefix, mesh, RULES, dtype=jnp.bfloat16, num_experts=EXPERTS,
        slot_experts=module.placement.slot_experts, process_of=split_processes(mesh, processes),
    )  # fmt: skip
    assert len(planned.skipped) == 335
    assert set(planned.device_bytes().values()) == {24 * 60 * ONE_EXPERT + dense_bytes(8)}
    experts_read = []
    for process in planned.processes:
        ranges = collections.defaultdict(list)
        for array in planned.local(process):
            for read in array.reads():
                ranges[read.tensor.name].append(read.region)
            for tensor in array.shape_tensors():
                ranges[tensor.name].append(None)
        for name, regions in ranges.items():
            # Rectangles of one tensor are disjoint, so that no byte is read twice.
            bounds = [r for r in regions if r is not None]
            for i, a in enumerate(bounds):
                for b in bounds[i + 1 :]:
                    rows = min(a.row_end, b.row_end) > max(a.row, b.row)
                    assert not (rows and min(a.column_end, b.column_end) > max(a.column, b.column)), name
        if processes <= 2:  # a process holds all of tp, so it reads whole tensors
            for name, regions in ranges.items():
                read = sum(BYTES[checkpoint[name].dtype] * r.size for r in regions if r is not None)
                assert read == (0 if name.endswith("weight_shape") else checkpoint[name].nbytes), name
        experts = {name.split(".experts.")[1].split(".")[0] for name in ranges if ".experts." in name}
        experts_read.append(experts)
        assert len(experts) == EXPERTS // processes
        dense = dense_bytes(8) + short_rows(1) if processes == 16 else dense_bytes(1)
        assert planned.read_bytes(process) == len(experts) * 60 * (ONE_EXPERT + SHAPES_PER_EXPERT) + dense
    assert len(set().union(*experts_read)) == sum(map(len, experts_read)) == EXPERTS
    if processes == 1:
        assert len(ranges) == 208_215


def run_plan(capsys, directory, mesh, **options):
    convert.run_plan(convert.PlanOptions(checkpoint=directory, layout=LayoutOptions(mesh), **options))
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 18])
def test_plan_command_on_nvl72(k26, capsys, processes):
    shown = json.loads(run_plan(capsys, k26, mesh="nvl72", processes=processes, json=True))
    assert shown["tensors"] == 208_550
    assert shown["files"] == 64
    assert shown["tensor_bytes"] == 595_148_192_736
    assert shown["skipped_tensors"] == 335
    assert shown["device_bytes"] == [6 * 60 * ONE_EXPERT + dense_bytes(8)] * 72  # 432 slots, six each
    # Four or 36 or 72 devices hold tp ranks; 384 experts over 72 ranks leave every third rank full.
    held = [rank * EXPERTS // 72 for rank in range(73)]
    per_process = 72 // processes
    for process, read in enumerate(shown["read_bytes"]):
        experts = held[(process + 1) * per_process] - held[process * per_process]
        tp_ranks = min(per_process, 8)
        dense = dense_bytes(1) - (8 - tp_ranks) * (dense_bytes(1) - dense_bytes(8)) // 7
        assert read == experts * 60 * (ONE_EXPERT + SHAPES_PER_EXPERT) + dense + short_rows(tp_ranks)


def test_plan_command_shows_a_table(tiny, capsys):
    shown = run_plan(capsys, tiny.directory, mesh="hgx-ib", processes=2)
    assert "524 tensors in 7 files" in shown
    assert "hgx-ib-16: dp 1 × ep 2 × tp 8" in shown


def test_unequal_processes_are_refused(make_mesh):
    with pytest.raises(ValueError, match="16 devices cannot be shared equally by 3 processes"):
        split_processes(make_mesh(1, 2, 8), 3)
