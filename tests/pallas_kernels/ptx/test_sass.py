"""Instruction counts of hot loops, from the machine code that ptxas makes of the kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest

from meshes.hardware import gpu
from pallas_kernels.operation import Device
from pallas_kernels.registry import OPERATIONS
from ptx import emulate, sass

LOOP = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry sums(.param .u64 values, .param .u32 count)
{
.reg .pred %p; .reg .b32 %r<4>; .reg .f32 %f<6>; .reg .b64 %d;
ld.param.u64 %d, [values];
ld.param.u32 %r0, [count];
mov.f32 %f0, 0f00000000;
again:
ld.global.f32 %f1, [%d];
sqrt.approx.f32 %f2, %f1;
fma.rn.f32 %f0, %f2, %f1, %f0;
st.global.f32 [%d], %f0;
add.u64 %d, %d, 4;
add.u32 %r0, %r0, -1;
setp.ne.u32 %p, %r0, 0;
@%p bra again;
ret;
}
"""


def test_a_loop_is_found_and_counted():
    loop = sass.hot_loop(sass.assemble(LOOP, "sm_90a"), "MUFU")
    # Unrolled or not, a trip loads, takes one root, multiplies and adds, and stores.
    assert loop["LDG"] == loop["STG"] == loop["MUFU"] > 0
    assert loop["FFMA"] >= loop["MUFU"]
    assert loop["BRA"] == 1
    with pytest.raises(ValueError, match="no loop has HMMA"):
        sass.hot_loop(sass.assemble(LOOP, "sm_90a"), "HMMA")
    with pytest.raises(RuntimeError, match="ptxas failed"):
        sass.assemble(LOOP.replace("fma.rn", "fma"), "sm_90a")


@pytest.mark.slow
def test_a_stage_of_the_experts_takes_the_instructions_that_its_page_says():
    facts, operation = gpu("h200"), OPERATIONS["int4_moe"]
    device = Device(facts.device_kind, "9.0", facts.core_count)
    shape = operation.shapes["ep-48-rows-64"]
    choice = operation.choose(shape, jnp.bfloat16, device, "warp")
    arguments = jax.eval_shape(functools.partial(operation.problem, shape))
    kernels = emulate.kernels_of("h200", lambda *a: operation.run(choice, *a), arguments)
    loop = sass.hot_loop(sass.assemble(kernels["int4_gate_up"].ptx, "sm_90a"), "HMMA")
    assert loop["HMMA"] == 48  # 2 units x 8 groups of 32 x 2 steps of 16, and 2 of the offset a group
    assert 400 <= loop.total() <= 500, loop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "architecture", "most", "reads"), [("h200", "sm_90a", 315, 2), ("gb300", "sm_103a", 130, 1)]
)
def test_a_tile_of_attention_is_copied_with_the_instructions_that_its_page_says(card, architecture, most, reads):
    facts, operation = gpu(card), OPERATIONS["tree_attention"]
    device = Device(facts.device_kind, "{}.{}".format(*facts.compute_capability), facts.core_count)
    shape = operation.shapes["tp8-tree9"]
    choice = operation.choose(shape, jnp.bfloat16, device)
    arguments = jax.eval_shape(functools.partial(operation.problem, shape))
    kernels = emulate.kernels_of(card, lambda *a: operation.run(choice, *a), arguments)
    kernel = kernels[f"tree_attention_{choice.implementation}"]
    loop = sass.hot_loop(sass.assemble(kernel.ptx, architecture), "UTMALDG")
    assert loop["UTMALDG"] == 4  # latent and rope key, of a page or of the request's own rows
    assert loop["LDG"] == reads  # the page's number, and on Hopper the request's tiles
    assert loop.total() <= most, loop
