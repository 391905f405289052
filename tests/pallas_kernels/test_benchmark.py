"""What the kernels are timed beside computes the same, and the figures are what they say; times need a GPU."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from meshes.hardware import gpu
from pallas_kernels import benchmark, timing
from pallas_kernels.int4_moe import Shape, Target
from pallas_kernels.int4_moe import benchmark as experts
from pallas_kernels.tree_attention import benchmark as attention
from pallas_kernels.tree_attention.selection import current_device
from pallas_kernels.tree_attention.shapes import SHAPES
from pallas_kernels.tree_attention.shapes import Shape as AttentionShape

CPU = Target("cpu", "", 1)


def small_cases():
    yield experts.case("small", Shape(9, 2, 3, 64, 32, 5), CPU, sets=2)
    yield attention.case("small", AttentionShape(2, 5, 4, 40, (40, 9), 32, 8), current_device(), sets=2)


@pytest.mark.parametrize("case", list(small_cases()), ids=lambda case: case.operation)
def test_everything_timed_computes_the_same(case):
    errors = {name: timing.compare(case, name).relative_error for name, call in case.calls.items() if callable(call)}
    assert len(errors) >= 3
    # Rounding to bfloat16 here and there; the reference of the experts is the specification itself.
    assert all(error is not None and error < 8e-3 for error in errors.values()), errors
    wrong = dataclasses.replace(case, calls={"wrong": lambda x, *rest: 1.05 * case.exact(x, *rest)})
    assert timing.compare(wrong, "wrong").relative_error == pytest.approx(0.05, rel=1e-3)


def test_the_sets_rotate_and_every_call_depends_on_the_last():
    got = timing.chain(lambda x, factor: factor * x, 4)(jnp.ones(2), [(1,), (20,), (300,)])
    np.testing.assert_allclose(got, 1.001 * 1.02 * 1.3 * 1.001, rtol=1e-6)


def test_floor_is_the_larger_of_memory_and_tensor_cores():
    case = next(small_cases())
    shape = SHAPES["tp8-tree33"]
    # 8 x 32,768 positions of 1,152 bytes at 4.8 TB/s; 264 query rows of 2,176 operations each at 989 TFLOP/s.
    memory, tensor = 8 * 32768 * 1152 / 4.8e6, 8 * 32768 * 264 * 2176 / 989e6
    assert tensor > memory
    case = dataclasses.replace(case, least_bytes=shape.cache_bytes, operations=shape.operations)
    assert case.floor_us(gpu("h200")) == pytest.approx(tensor)
    assert dataclasses.replace(case, operations=1.0).floor_us(gpu("h200")) == pytest.approx(memory)


def test_least_bytes_of_experts_count_the_distinct_ones_that_have_rows():
    case = experts.case("small", Shape(4, 2, 3, 64, 32, 100), CPU, sets=3)
    distinct = [len({int(i) for i in np.asarray(ids).ravel() if i < 3}) for ids, *_ in case.sets]
    assert case.least_bytes == pytest.approx(np.mean(distinct) * 3 * 64 * 32 * 4.5 / 8)


def test_a_shape_that_does_not_exist_lists_those_that_do():
    with pytest.raises(ValueError, match=re.escape("no shape matches 'nothing'; there are a, b")):
        next(benchmark._cases({"a": small_cases, "b": small_cases}, "nothing"))


def test_a_card_without_kernels_cannot_be_interpreted():
    with pytest.raises(ValueError, match="there are no kernels for NVIDIA RTX PRO 6000"):
        benchmark.interpret("rtx-pro-6000", benchmark.OPERATIONS, print)
