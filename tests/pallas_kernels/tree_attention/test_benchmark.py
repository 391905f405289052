import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import benchmark
from pallas_kernels.tree_attention.shapes import SCALE, SHAPES, Shape, problem


def test_what_it_compares_with_computes_the_same(oracle):
    shape = Shape(2, 5, 4, 40, (40, 9), kv_lora_rank=32, rope=8)
    arguments = problem(shape, dtype=jnp.float32)
    out, _ = benchmark.jax_attention(*arguments, scale=SCALE)
    np.testing.assert_allclose(out, oracle(*arguments, scale=SCALE)[0], rtol=0, atol=1e-5)  # float32


def test_bounds_of_a_shape():
    bounds = benchmark.bounds(SHAPES["tp8-tree33"], "h200")
    # 8 x 32,768 positions of 1,152 bytes at 4.8 TB/s; 264 query rows of 2,176 operations each at 989 TFLOP/s.
    assert bounds["memory_us"] == pytest.approx(8 * 32768 * 1152 / 4.8e6)
    assert bounds["tensor_us"] == pytest.approx(8 * 32768 * 264 * 2176 / 989e6)


def test_without_a_gpu_it_times_nothing_and_says_so(capsys, tmp_path):
    table = tmp_path / "table.json"
    benchmark.main(benchmark.Arguments(shapes=("dp-tree33",), json=table))
    printed = capsys.readouterr().out
    assert "nothing is timed" in printed
    assert "34 query tiles x 7 pieces" in printed
    assert '"memory_us"' in table.read_text()


def test_an_unknown_shape_lists_the_known():
    with pytest.raises(SystemExit, match="unknown shapes nothing: choose from tp8-decode"):
        benchmark.main(benchmark.Arguments(shapes=("nothing",)))
