"""The kernels at full size, assembled by the real ptxas for cards that are not here."""

import re

import jax
import jax.numpy as jnp
import pytest

from meshes.hardware import gpu
from meshes.targets import TARGETS
from pallas_kernels.assembly import assemble
from pallas_kernels.operation import Device
from pallas_kernels.registry import OPERATIONS

# Few rows (mma.sync), the tensor-core engines at 16, 32 and 64 rows a tile, the narrowest width, k shared by CTAs.
EXPERTS = {
    "ep-48-rows-64": 8,
    "ep-48-rows-4096": 64,
    "ep-48-rows-512": 16,
    "ep-48-rows-1024": 32,
    "tp-32-rows-64": 8,
    "tp-8-rows-1": 8,
}
# jax 0.11.2 makes more of the same kernel: gate and up at 64 rows of wgmma do not quite fit the registers there.
OLD_JAX = jax.__version_info__ < (0, 12)
# docs/kernels_tree_attention.md: 128 registers of accumulator, 32 of scores, 16 of probabilities and the softmax's
# vectors meet at the 255-register ceiling in the masked tile; what does not fit is addresses and tables.
ATTENTION_SPILLS = 128
TENSOR_CORE = {"hopper": "wgmma.mma_async", "blackwell": "tcgen05.mma"}


def device(card: str) -> Device:
    facts = gpu(card)
    return Device(facts.device_kind, "{}.{}".format(*facts.compute_capability), facts.core_count)


def experts(card, names):
    tensor_core = TENSOR_CORE[device(card).architecture]
    for name, assembly in zip(names, assemble(card, "int4_moe", names), strict=True):
        assert assembly.copied_elements == 0, name
        kernels = {kernel.removesuffix("_mosaic_gpu_kernel"): found for kernel, found in assembly.kernels.items()}
        ptx = {kernel.removesuffix("_mosaic_gpu_kernel"): text for kernel, text in assembly.ptx.items()}
        assert set(kernels) == {"int4_gather", "int4_gate_up", "int4_down", "int4_combine"}
        spills = 144 if OLD_JAX and EXPERTS[name] == 64 and tensor_core.startswith("wgmma") else 0
        for kernel in ("int4_gather", "int4_combine"):
            assert kernels[kernel].stack_bytes == kernels[kernel].spill_store_bytes == 0, name
            assert kernels[kernel].registers <= (255 if name == "tp-8-rows-1" else 128), name  # four CTAs share a core
            assert "ld.global.v" in ptx[kernel]
            assert "st.global.v" in ptx[kernel]
        for kernel in ("int4_gate_up", "int4_down"):
            assert kernels[kernel].stack_bytes <= spills // 2, name
            assert kernels[kernel].spill_store_bytes + kernels[kernel].spill_load_bytes <= spills, name
            # Two computing warpgroups and a loading one share 65,536 registers.
            assert kernels[kernel].registers <= 168, name
            instruction, other = ("mma.sync.aligned.m16n8k16", tensor_core)[:: 1 if EXPERTS[name] == 8 else -1]
            assert instruction in ptx[kernel], name
            assert other not in ptx[kernel], name
            assert ptx[kernel].count("cp.async.bulk.tensor") >= 6, name  # five loads of a stage and the store
            assert ptx[kernel].count("lop3.b32") >= 32, name


def attention(card, names):
    operation, seen = OPERATIONS["tree_attention"], set()
    kernel = device(card).architecture
    for name, assembly in zip(names, assemble(card, "tree_attention", names), strict=True):
        shape = operation.shapes[name]
        config = operation.choose(shape, jnp.bfloat16, device(card)).config
        kernels = {kernel.removesuffix("_mosaic_gpu_kernel"): found for kernel, found in assembly.kernels.items()}
        # A kernel that the process has assembled before, at another shape, is not assembled again.
        seen |= set(kernels)
        assert {f"tree_attention_{kernel}", *(["tree_attention_join"] if config.splits > 1 else [])} <= seen
        for found in kernels.values():
            assert found.registers <= 255
            assert found.spill_store_bytes <= (0 if "join" in found.name else ATTENTION_SPILLS)
        for entry, ptx in assembly.ptx.items():
            if kernel in entry:
                assert TENSOR_CORE[kernel] in ptx
                assert "cp.async.bulk.tensor" in ptx
                assert ("multicast::cluster" in ptx) == (config.cluster > 1)
                if kernel == "hopper":
                    wgmma_order(ptx)
        # No copy of the cache: XLA copies nothing, and what it allocates is partial results, padding and tables.
        assert assembly.copied_elements == 0
        padded = (-(-shape.rows * shape.heads // 64) + 1) * 64
        results = shape.requests * padded * (2 * shape.kv_lora_rank + 4)
        partials = 2 * config.splits * padded * (4 * shape.kv_lora_rank + 4) * (config.splits > 1)
        queries = 2 * shape.requests * padded * (shape.kv_lora_rank + shape.rope)
        assert assembly.temporary_bytes < results + partials + queries + 2**20
        if shape.cache_bytes > 2**28:
            assert assembly.temporary_bytes < shape.cache_bytes


def wgmma_order(ptx):
    """The interpreter's wgmma is synchronous: see in the PTX that each is waited for before the barrier that follows,

    and that stores to shared memory which the tensor core reads are fenced before their barrier.
    """
    started = waited = False
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            started = True
        elif "wgmma.wait_group.sync.aligned 0" in line:
            waited |= started
            started = False
        elif "mbarrier.arrive" in line:
            assert not started, "a barrier is arrived at while a product that reads its tile is in flight"
    assert waited
    # One hand-over of probabilities in the unmasked and one in the masked loop.
    handovers = re.findall(r"fence\.proxy\.async\S*;\s.*?bar\.sync.*?mbarrier\.arrive", ptx, re.S)
    assert len(handovers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("card", TARGETS)
def test_few_and_many_rows_and_a_tree_assemble(card):
    experts(card, ["ep-48-rows-64", "ep-48-rows-4096"])
    attention(card, ["dp-tree33"])


@pytest.mark.slow
@pytest.mark.parametrize("card", TARGETS)
def test_every_tile_size_of_the_experts_assembles(card):
    experts(card, list(EXPERTS))


@pytest.mark.slow
@pytest.mark.parametrize("card", ["h200", "gb300"])
def test_every_shape_of_attention_assembles(card):
    attention(card, list(OPERATIONS["tree_attention"].shapes))


def test_a_shape_that_does_not_exist_lists_those_that_do():
    with pytest.raises(RuntimeError, match="has no shape 'nothing': choose from tp8-decode, "):
        assemble("h200", "tree_attention", ["nothing"])
