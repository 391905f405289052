"""What a step holds, reads, computes and sends, against the public checkpoint, compiled shardings and hand counts."""

import dataclasses
import hashlib
from importlib import resources
from pathlib import Path

import jax.numpy as jnp
import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.ledger.part import PARTS, part_of
from kimi_jax.ledger.precision import Precision
from kimi_jax.ledger.step import Step, cache_bytes, ledger
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.compile import held_arrays
from kimi_jax.profiling.placed import weight_bytes
from meshes.presets import Layout, preset

DATA = Path(__file__).parents[1] / "data"
EXPERT = 24_772_608
"""Bytes of one expert: 3 · 7168 · 2048 weights of 4.5 bits."""


def step_on(layout: Layout, **changes) -> Step:
    return dataclasses.replace(Step(k26(), layout, 64, 17, 8192, kimi_drafter()), **changes)


def test_packaged_configuration_is_k26s():
    # SHA-256 of moonshotai/Kimi-K2.6 config.json at revision 7eb5002f.
    text = resources.files("kimi_jax").joinpath("assets", "k26_config.json").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "85825ca6e18cbe539eb83ee09eedfb3f4222265929f06e9f535a6d9364f55899"


def test_weights_are_those_of_the_real_checkpoints_tensor_list():
    """64 shards, equal to the byte to K2.6's."""
    needs = ledger(step_on(Layout(), requests=1, rows=1, context=1, drafter=None))
    assert tuple(needs) == PARTS
    total = {part: need.weights for part, need in needs.items() if need.weights}
    assert {part: round(size / 1e9, 3) for part, size in total.items()} == {
        "attention": 12.339,
        "router": 0.330,
        "experts": 570.761,
        "shared_expert": 5.285,
        "dense": 0.793,
        "head": 2.349,
        "embedding": 2.349,
    }
    assert total["experts"] == 60 * 384 * EXPERT
    assert sum(total.values()) == pytest.approx(594.206e9, abs=1e6)
    assert needs["experts"].total.hbm_bytes == pytest.approx(60 * 8 * EXPERT)
    read = sum(need.total.hbm_bytes for need in needs.values())
    assert read == pytest.approx(32.99e9, abs=5e6)


def test_cache_and_drafter():
    step = step_on(Layout())
    assert cache_bytes(dataclasses.replace(step, context=1)) == 70_272
    drafter = ledger(dataclasses.replace(step, requests=1))["drafter"]
    # The file of z-lab/Kimi-K2.5-DFlash has 6.48 GiB, 3.48 B parameters.
    assert drafter.weights / 2**30 == pytest.approx(6.48, abs=0.005)
    assert drafter.cache == 4096 * 24_576


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("hgx-ib-16", Layout(ep=2, tp=8)),
        ("hgx-ib-16", Layout(ep=2, tp=8, experts="width")),
        ("nvl36", Layout(ep=9, tp=4)),
        ("nvl72", Layout(ep=9, tp=8)),
        ("nvl72", Layout(dp=9, tp=8)),
        ("nvl72", Layout(tp=64)),
    ],
)
def test_weights_are_what_the_programs_shardings_hold(mesh, layout):
    machine = preset(mesh).with_layout(layout)
    case = Case(k26(), machine, machine.gpu_names[0], requests=64, context=8192, drafter=kimi_drafter())
    held = weight_bytes(held_arrays(case)[0])
    assert held == {part: need.weights for part, need in ledger(case.step).items() if need.weights}


@pytest.mark.parametrize("name", ["tiny_random", "variant_ct"])
def test_any_model_of_the_family(name):
    config = ModelConfig.from_json(DATA / name)
    machine = preset("local").with_axes(ep=2, tp=2)
    case = Case(config, machine, "h200", requests=3, context=40, budget=0, dtype=jnp.float32)
    held = weight_bytes(held_arrays(case)[0])
    assert held == {part: need.weights for part, need in ledger(case.step).items() if need.weights}


def test_needs_of_nvl72():
    step = step_on(preset("nvl72").layout)
    needs = ledger(step)
    assert (step.device_requests, step.device_rows, step.depth, step.num_slots) == (8, 136, 7, 432)
    # 72 requests × 17 rows choose 8 of 384: nearly all of the 432 slots' 384 experts, over 72 ranks.
    touched = 384 * (1 - (1 - 8 / 384) ** (72 * 17)) / 72
    assert step.experts.experts == pytest.approx(touched)
    assert needs["experts"].total.hbm_bytes == pytest.approx(60 * touched * EXPERT)
    assert needs["experts"].total.flops == pytest.approx(60 * 2 * 3 * 7168 * 2048 * 72 * 17 * 8 / 72)
    attention = needs["attention"]
    assert attention.cache == 8 * 8192 * 576 * 2 * 61
    assert attention.total.hbm_bytes == attention.weights + attention.cache
    assert attention.work["cache"].flops == 2 * 136 * 8 * (2 * 512 + 64) * 8192 * 61
    # The head is read by head and drafter; the ring of 4096 positions holds one of the 8 heads on each rank.
    head, drafter = needs["head"], needs["drafter"]
    assert head.total.hbm_bytes == head.weights
    assert drafter.cache == 8 * 4096 * 6 * 128 * 2 * 2
    assert drafter.total.hbm_bytes == drafter.weights + head.weights + drafter.cache
    assert needs["tree"].total.hbm_bytes == 8 * 7 * 163840 / 8 * 4
    assert needs["embedding"].total.hbm_bytes == 136 * 7168 * 2


def test_key_value_heads_that_are_copied_are_read_for_one_head():
    """Of 8 heads on tp 64 every rank holds all, and reads the one of its query."""
    whole = 2 * 6 * 7168 * 8 * 128 * 2
    drafter = ledger(step_on(Layout(tp=64)))["drafter"]
    assert drafter.weights - drafter.work["weights"].hbm_bytes == pytest.approx(whole * 7 / 8)


def test_a_mixed_step_is_a_round_with_a_chunk_beside_it():
    layout, chunk = preset("nvl72").layout, 512
    alone, mixed = ledger(step_on(layout)), ledger(step_on(layout, program="mixed", chunk=chunk))
    rows, requests = 8 * 17, 8  # of a device
    near = step_on(layout, program="mixed", chunk=chunk, chunk_context=4096)  # half of the requests' 8,192
    for part in ("router", "shared_expert", "dense"):
        flops = mixed[part].total.flops / alone[part].total.flops
        assert flops == pytest.approx((rows + chunk) / rows)
        assert mixed[part].total.hbm_bytes == alone[part].total.hbm_bytes
    assert mixed["head"].total.flops / alone["head"].total.flops == pytest.approx((rows + 1) / rows)
    read = mixed["attention"].work
    assert read["cache"] == alone["attention"].work["cache"]
    assert read["prompt"].hbm_bytes == pytest.approx(read["cache"].hbm_bytes / requests)
    assert read["prompt"].flops == pytest.approx(read["cache"].flops / rows * chunk)
    assert read["prompt"].flops == pytest.approx(2 * ledger(near)["attention"].work["prompt"].flops)
    assert mixed["attention"].cache == alone["attention"].cache
    prefill = ledger(step_on(layout, program="prefill", requests=9, rows=chunk))
    apart = alone["experts"].total.hbm_bytes + prefill["experts"].total.hbm_bytes
    assert mixed["experts"].total.hbm_bytes < 0.7 * apart, "the experts' weights are read once for both"
    assert mixed["drafter"].total.hbm_bytes == alone["drafter"].total.hbm_bytes


def test_a_prefill_needs_the_drafters_context_only():
    needs = ledger(step_on(preset("nvl72").layout, program="prefill", rows=512))
    # Keys and values of one head in six layers, an eighth of the fusion of six taps, norms of 128 and 7168.
    projections = 6 * (2 * 128 * 7168 + 128) + 6 * 7168 * 7168 // 8 + 7168
    assert needs["drafter"].total.hbm_bytes == 2 * projections
    assert needs["tree"].total.hbm_bytes == 0
    assert needs["head"].total.flops == needs["head"].weights * 8  # one row a request


def test_a_split_cache_is_held_and_read_in_parts():
    copied = step_on(preset("nvl72").layout, context=8190)
    split = dataclasses.replace(copied, layout=dataclasses.replace(copied.layout, cache="split"))
    for step, positions in ((copied, 8190), (split, 1024)):
        attention = ledger(step)["attention"]
        assert attention.cache == attention.work["cache"].hbm_bytes == 8 * positions * 576 * 2 * 61


def test_plain_decoding_needs_no_drafter():
    needs = ledger(step_on(preset("nvl72").layout, rows=1))
    assert all(not needs[part].weights and not needs[part].messages for part in ("drafter", "tree"))


def test_another_precision():
    step = step_on(preset("nvl72").layout)
    narrow = Precision(expert_bits=8, attention_bits=8, cache_bytes=1, dispatch_bytes=1)
    stored, other = ledger(step), ledger(dataclasses.replace(step, precision=narrow))
    assert other["experts"].weights == pytest.approx(stored["experts"].weights * 8 / 4.5)
    assert other["attention"].weights == stored["attention"].weights / 2
    assert other["attention"].cache == stored["attention"].cache / 2
    assert other["dense"] == stored["dense"]
    assert other["experts"].total.flops == stored["experts"].total.flops


def test_a_weight_of_no_part_is_refused():
    with pytest.raises(ValueError, match="belongs to no known part"):
        part_of(("target", "model", "unknown", "weight"))


def test_a_drafter_of_candidates_of_its_own():
    """DFlash 2's codebooks and convolutions are held, and its selector's candidates are sent."""
    drafter = DrafterConfig.from_json(DATA / "tiny_random_drafter")
    config = ModelConfig.from_json(DATA / "tiny_random")
    two = dataclasses.replace(
        drafter, conv_kernel_size=3, conv_group_size=16, selector_rank=4, selector_top_k=5
    )  # fmt: skip
    one_step = Step(config, Layout(tp=2), 1, 8, 40, drafter, dtype=jnp.float32)
    one, other = ledger(one_step), ledger(dataclasses.replace(one_step, drafter=two))
    assert other["drafter"].weights - one["drafter"].weights >= 2 * config.vocab_size * 4 * 4
    assert other["tree"].messages[0].bytes == one["tree"].messages[0].bytes * 5 / 7
