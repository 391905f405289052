"""The kernels at full size, assembled by the real ptxas for cards that are not here."""

import jax
import pytest

from meshes.targets import TARGETS
from pallas_kernels.int4_moe.assembly import assemble
from pallas_kernels.int4_moe.shapes import expert_parallel, tensor_parallel

# Few rows (mma.sync), the tensor-core engines at 16, 32 and 64 rows a tile, the narrowest width, k shared by CTAs.
SHAPES = {
    "few rows": expert_parallel(64, 48),
    "16 rows": expert_parallel(512, 48),
    "32 rows": expert_parallel(1024, 48),
    "64 rows": expert_parallel(4096, 48),
    "tp 32": tensor_parallel(64, 32),
    "one row, tp 8": tensor_parallel(1, 8),
}


# jax 0.11.2 makes more of the same kernel: gate and up at 64 rows of wgmma do not quite fit the registers there.
OLD_JAX = jax.__version_info__ < (0, 12)


def check(gpu, names):
    tensor_core = "wgmma.mma_async" if gpu in ("h100", "h200") else "tcgen05.mma"
    for name, assembly in zip(names, assemble(gpu, [SHAPES[n] for n in names]), strict=True):
        gather, gate_up, down, combine = assembly.kernels
        assert assembly.copied_bytes == 0, name
        warp = "rows" not in name or name == "few rows"
        spills = 144 if OLD_JAX and name == "64 rows" and tensor_core.startswith("wgmma") else 0
        for kernel in (gather, combine):
            assert kernel.stack_bytes == kernel.spill_bytes == 0, name
            assert kernel.registers <= (255 if name == "one row, tp 8" else 128), name  # four CTAs share a core
            assert kernel.opcodes["ld.global.v"] > 0, name
            assert kernel.opcodes["st.global.v"] > 0, name
        for kernel in (gate_up, down):
            assert kernel.stack_bytes <= spills // 2, name
            assert kernel.spill_bytes <= spills, name
            # Two computing warpgroups and a loading one share 65,536 registers.
            assert kernel.registers <= 168, name
            instruction, other = ("mma.sync.aligned.m16n8k16", tensor_core)[:: 1 if warp else -1]
            assert kernel.opcodes[instruction] > 0, name
            assert kernel.opcodes[other] == 0, name
            assert kernel.opcodes["cp.async.bulk.tensor"] >= 6, name  # five loads of a stage and the store
            assert kernel.opcodes["lop3.b32"] >= 32, name


@pytest.mark.parametrize("gpu", TARGETS)
def test_assembles_without_spills(gpu):
    check(gpu, ["few rows", "64 rows"])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", TARGETS)
def test_every_card_and_shape_assembles(gpu):
    check(gpu, list(SHAPES))
