"""What the kernels are timed beside computes the same, and the figures are what they say; times need a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from meshes.hardware import gpu
from pallas_kernels import benchmark, int4_moe, tree_attention
from pallas_kernels.alternatives import ALTERNATIVES
from pallas_kernels.operation import differences
from pallas_kernels.registry import OPERATIONS

SMALL = {
    "int4_moe": int4_moe.Shape(9, 2, 3, 64, 32, 5),
    "tree_attention": tree_attention.Shape(2, 5, 4, 40, (40, 9), 32, 8),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_plain_jax_computes_the_same(name, oracles):
    arguments = OPERATIONS[name].problem(SMALL[name])
    want = jax.tree.leaves(oracles[name](*arguments))[0]
    (found,) = differences([jax.jit(ALTERNATIVES[name])(*arguments)], [want])
    assert 0 < found.frobenius < 8e-3  # bfloat16 here and there


def test_the_sets_rotate_and_every_call_depends_on_the_last():
    got = benchmark.chain(lambda x, factor: factor * x, 4)(jnp.ones(2), [(1,), (20,), (300,)])
    np.testing.assert_allclose(got, 1.001 * 1.02 * 1.3 * 1.001, rtol=1e-6)


def test_necessary_bytes_of_experts_are_of_the_distinct_ones_that_have_rows():
    operation, shape = OPERATIONS["int4_moe"], int4_moe.Shape(4, 2, 3, 64, 32, 100)
    arguments = operation.problem(shape, seed=2)
    here = [int(i) for i in np.asarray(arguments[1]).ravel() if i < 3]
    weights = 3 * 64 * 32
    assert operation.necessary(shape, arguments) == (len(set(here)) * weights * 4.5 / 8, 2 * weights * len(here))


def test_necessary_bytes_and_operations_of_attention():
    operation = OPERATIONS["tree_attention"]
    # 8 x 32,768 positions of 1,152 bytes; 264 query rows of 2,176 operations each.
    want = 8 * 32768 * 1152, 8 * 32768 * 264 * 2176
    assert operation.necessary(operation.shapes["tp8-tree33"], ()) == want


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_measurement_has_all_figures(name, monkeypatch):
    monkeypatch.setattr(benchmark, "SETS", 2)
    monkeypatch.setattr(benchmark, "CALLS", 3)
    operation = dataclasses.replace(OPERATIONS[name], shapes={"small": SMALL[name]})
    timing = benchmark.measure(operation.reference, operation, "small", gpu("h200"), 1e12, 1)
    assert timing.us > 0
    assert 0 < timing.of_floor < timing.of_copy


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What chooses a clock finds a GPU, and asks anew before and after."""
    benchmark.clock.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield monkeypatch
    benchmark.clock.cache_clear()


def test_a_gpu_is_timed_by_its_own_kernels_less_those_of_an_empty_chain(on_a_gpu):
    def kernels(program):
        """Stands in for CUPTI: a call's kernels take 3 ms, each addition between calls 0.25 ms."""

        def run(*operands):
            text = jax.jit(program).lower(*operands).as_text()
            calls, additions = text.count("call @cos("), text.count("stablehlo.add ")
            return program(*operands), 3.0 * calls + 0.25 * additions

        return run

    on_a_gpu.setattr(profiler, "measure", kernels)
    assert benchmark.clock() == "CUPTI"
    us = benchmark.microseconds(jnp.cos, jnp.ones(2), [()], repeats=2)
    assert us == pytest.approx(3000)


@pytest.mark.parametrize("reason", ["another profiler is attached", None])
def test_the_host_times_where_cupti_cannot(on_a_gpu, reason):
    def refuse(program):
        def run(*operands):
            if reason:
                raise RuntimeError(reason)
            return program(*operands), None

        return run

    on_a_gpu.setattr(profiler, "measure", refuse)
    assert benchmark.clock() == "host"
    assert 0 < benchmark.median_seconds(jax.jit(jnp.cos), jnp.ones(2), repeats=2) < 10


def test_a_cpu_is_timed_by_the_host():
    benchmark.clock.cache_clear()
    assert benchmark.clock() == "host"
