"""The code a GPU thread runs, run here on emulated registers and without the pipeline around it."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.emulation import EmulatedOps, element_index, from_registers, to_registers

pack = runpy.run_path(str(Path(__file__).with_name("problems.py")))["pack"]
WARP, LANE = np.divmod(np.arange(128), 32)
ROW, COLUMN = LANE // 4, LANE % 4


def natural_order(x):
    """Inverse of `registers.pair_order`."""
    grouped = x.reshape(*x.shape[:-1], -1, 4, 4, 2)  # group, b, c, t
    return grouped.transpose(*range(x.ndim - 1), x.ndim - 1, x.ndim + 1, x.ndim + 2, x.ndim).reshape(x.shape)


def test_pair_order_is_a_permutation_with_an_inverse():
    x = np.arange(96).reshape(1, 96)
    ordered = np.asarray(registers.pair_order(jnp.asarray(x)))
    for b in range(4):
        for c in range(4):
            for t in range(2):
                assert ordered[0, 32 + 8 * b + 2 * c + t] == 32 + 8 * c + 4 * t + b
    np.testing.assert_array_equal(natural_order(jnp.asarray(ordered)), x)


def test_layouts_are_the_fragments_of_the_ptx_manual():
    """m16n8k16: lane l holds rows l/4 and l/4 + 8 and columns 2 (l%4) and the next of A and C, column l/4 of B."""

    def rows_columns(layout, shape):
        return np.divmod(element_index(layout.to_mgpu(), shape), shape[1])

    row, column = rows_columns(registers.WORDS, (64, 32))
    for group in range(8):
        for half in range(2):
            np.testing.assert_array_equal(row[:, 2 * group + half, 0], 16 * WARP + 8 * half + ROW)
            np.testing.assert_array_equal(column[:, 2 * group + half, 0], 4 * group + COLUMN)
    row, column = rows_columns(registers.ROWS, (16, 64))
    for block in range(2):
        for k in range(8):
            np.testing.assert_array_equal(row[:, 8 * block + k, 0], 8 * block + ROW)
            np.testing.assert_array_equal(column[:, 8 * block + k, 1], 8 * k + 2 * COLUMN + 1)
    row, _ = rows_columns(registers.OUT, (64, 8))
    pair_row, pair_column = rows_columns(registers.PAIR_OUT, (64, 8))
    order = np.asarray(registers.pair_order(jnp.arange(64)[None]))[0]
    np.testing.assert_array_equal(order[pair_row], row)  # the lane of feature f writes f's place in pair order
    np.testing.assert_array_equal(pair_column[:, :2, 0], np.stack([2 * COLUMN, 2 * COLUMN + 1], 1))
    for groups in (2, 4, 8, 16):
        flat = element_index(registers.scale_layout(groups).to_mgpu(), registers.scale_shape(64, groups))
        for half in range(2):
            np.testing.assert_array_equal(flat[:, half, 0] // groups, 16 * WARP + 8 * half + ROW)


class Case:
    """Two units of 64 rows over `groups` groups."""

    def __init__(self, groups=2, seed=0):
        rng = np.random.default_rng(seed)
        self.groups = groups
        self.codes = rng.integers(0, 16, (2, 64, 32 * groups)).astype(np.uint8)
        self.codes[0, :, :32] = 0
        self.scales = rng.uniform(0.01, 1.0, (2, 64, groups)).astype(ml_dtypes.bfloat16)
        self.x = rng.normal(size=(8, 32 * groups)).astype(ml_dtypes.bfloat16)

    def weights(self):
        return (self.codes.astype(np.float32) - 8) * np.repeat(self.scales.astype(np.float32), 32, -1)

    def registers(self):
        words = [to_registers(jnp.asarray(pack(c)), registers.WORDS.to_mgpu()) for c in self.codes]
        layout = registers.scale_layout(self.groups).to_mgpu()
        shape = registers.scale_shape(64, self.groups)
        return words + [to_registers(jnp.asarray(s).reshape(shape), layout) for s in self.scales]

    def dequantized(self, interleave=False):
        """Both units' left operands, columns back in natural order."""

        def run():
            code = registers.dequantize_units(range(self.groups), interleave=interleave)
            out = code(EmulatedOps, *self.registers())
            k = 32 * self.groups
            if interleave:
                layout = plgpu.Layout.TCGEN05.to_mgpu()
                both = from_registers(out[0], layout, (128, k), jnp.bfloat16).reshape(4, 2, 16, k)
                units = [both[:, u].reshape(64, k) for u in range(2)]
            else:
                units = [from_registers(o, plgpu.Layout.WGMMA.to_mgpu(), (64, k), jnp.bfloat16) for o in out]
            return natural_order(jnp.stack(units))

        return np.asarray(jax.jit(run)().astype(jnp.float32))

    def multiplied(self):
        def run():
            zero = to_registers(jnp.zeros((64, 8)), registers.ACC.to_mgpu())
            x = to_registers(registers.pair_order(jnp.asarray(self.x)), registers.ROWS.to_mgpu())
            code = registers.mma_units(8, range(self.groups))
            out = code(EmulatedOps, zero, zero, *self.registers(), x)
            return jnp.stack([from_registers(o, registers.ACC.to_mgpu(), (64, 8), jnp.float32) for o in out])

        return np.asarray(jax.jit(run)())


@pytest.mark.parametrize(("interleave", "groups"), [(False, 2), (True, 4), (True, 8)])
def test_dequantized_operand_is_the_rounded_product(interleave, groups):
    case = Case(groups)
    expected = case.weights().astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(case.dequantized(interleave), expected)


def test_warp_product_is_exact_up_to_float32():
    case = Case()
    expected = np.einsum("umk,nk->umn", case.weights().astype(np.float64), case.x.astype(np.float64))
    # Sums of 136 x are removed again: rounding is that of numbers some 17 times larger than the result.
    np.testing.assert_allclose(case.multiplied(), expected, atol=1e-5 * np.abs(expected).max())


def test_split_units_undoes_the_interleaving():
    acc = np.arange(128 * 8, dtype=np.float32).reshape(128, 8)
    parts = registers.split_units(None, to_registers(jnp.asarray(acc), plgpu.Layout.TCGEN05.to_mgpu()))
    for unit, part in enumerate(parts):
        got = from_registers(part, registers.ACC.to_mgpu(), (64, 8), jnp.float32)
        np.testing.assert_array_equal(got, acc.reshape(4, 2, 16, 8)[:, unit].reshape(64, 8))


def _swapped_nibbles(monkeypatch):
    right = registers._codes
    monkeypatch.setattr(registers, "_codes", lambda ops, word, b: right(ops, word, 3 - b))


def _swapped_row_halves(monkeypatch):
    right = registers._scale_word
    monkeypatch.setattr(registers, "_scale_word", lambda scale, group, half: right(scale, group, 1 - half))


def _swapped_group_scales(monkeypatch):
    right = registers._scale_word
    monkeypatch.setattr(registers, "_scale_word", lambda scale, group, half: right(scale, group ^ 1, half))


def _offset_of_seven(monkeypatch):
    monkeypatch.setattr(registers, "OFFSET", 0x4307_4307)


@pytest.mark.parametrize("fault", [_swapped_nibbles, _swapped_row_halves, _swapped_group_scales, _offset_of_seven])
def test_seeded_faults_are_seen(fault, monkeypatch):
    case = Case()
    expected = case.weights()
    fault(monkeypatch)
    assert np.linalg.norm(case.dequantized() - expected) > 0.05 * np.linalg.norm(expected)
