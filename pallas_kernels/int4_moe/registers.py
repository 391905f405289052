"""What one GPU thread does to the weights: layouts, the pair order of the activations, and per-thread code.

The kernels read the checkpoint's layout as it is: word c of a group of 32 weights holds values 8c..8c+7 of its row, low
nibble first. Shifting a word right by 4b and keeping the lowest nibble of each half leaves values 8c+b and 8c+b+4 in
the two 16-bit halves. Lane c of a tensor-core fragment holds columns 2c, 2c+1 (and 2c+8, 2c+9), so those two values sit
where the instruction expects columns 8b+2c and 8b+2c+1 of the group. Multiplying needs the same order of the
activations, `pair_order`: one pass over a call's rows before they are gathered; the gate and up product is written
in it by renaming lanes (`PAIR_OUT`), which costs nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.int4_moe.tile import GROUP

MAGIC = 0x4300_4300  # bfloat16 128.0 twice: or-ing a code u into its low bits gives exactly 128 + u
OFFSET = 0x4308_4308  # 136.0 twice: 128 and the code's own offset of 8
NEGATIVE_OFFSET = 0xC308_C308
NIBBLES = 0x000F_000F


def pair_order(x: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
    """Order of activations the kernels multiply in: column 8b+2c+t of each group of 32 is value 8c+4t+b."""
    *batch, k = x.shape
    n = len(batch)
    grouped = x.reshape(*batch, k // GROUP, 4, 2, 4)  # group, c, t, b
    return grouped.transpose(*range(n), n, n + 3, n + 1, n + 2).reshape(x.shape)


def _tiled(tiles, warp_dims, lane_dims):
    layout = mgpu.TiledLayout(plgpu.Tiling(tiles), warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )


# Rows of 64-row units: 16 to a warp, lane 4 rl + c holds rows rl and rl + 8. Registers in (nested) row-major order.
ACC = plgpu.Layout.WGMMA  # (64, n) float32: registers (column block of 8, row half), two columns in each
# The same with one column in each register, as a transposed store needs.
OUT = _tiled(((64, 8), (16, 8), (8, 8), (1, 2), (1, 1)), (-10,), (-6, -5))
# OUT under the row numbers of pair order: row 32 w1 + 8 b + 4 w0 + 2 half + t is held by warp 2 w1 + w0, lane
# 4 (4t + b) + c, which in OUT is row 32 w1 + 16 w0 + 8 half + 4t + b: value 8c' + 4t + b of
# its group, with c' = 2 w0 + half.
PAIR_OUT = _tiled(((64, 8), (32, 8), (8, 8), (4, 8), (2, 8), (1, 2), (1, 1)), (-14, -10), (-6, -12, -5))
WORDS = _tiled(((64, 4), (16, 4), (8, 4), (1, 1)), (-8,), (-4, -3))  # (64, words): registers (group, row half)
# (n, k) activations, the same in every warp: registers (row block of 8, column block of 8), two columns in each.
ROWS = _tiled(((8, 8), (1, 2)), (plgpu.Replicated(4),), (-4, -3))


def scale_layout(groups: int):
    """Layout of a unit's scales: `(64, groups)`, or lines of 8 that hold several rows where a row has fewer.

    Registers are (block of 8 groups, row half); the four lanes of a row read the same scales.
    """
    if groups >= 8:
        return _tiled(((64, 8), (16, 8), (8, 8), (1, 8)), (-8,), (-4, plgpu.Replicated(4)))
    lines = groups  # eight rows of `groups` scales fill `groups` lines
    tiles = ((8 * lines, 8), (2 * lines, 8), (lines, 8), (1, groups))
    return _tiled(tiles, (-8,), (-4, -3, plgpu.Replicated(4)))


def scale_shape(rows: int, groups: int) -> tuple[int, int]:
    """Shape in which `rows` rows of scales lie in shared memory: contiguous either way."""
    return (rows, groups) if groups >= 8 else (rows * groups // 8, 8)


class DeviceOps:
    """The instructions the per-thread code uses, as MLIR and PTX."""

    def __init__(self) -> None:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, math, vector

        self._ir, self._arith, self._llvm, self._math, self._vector = ir, arith, llvm, math, vector
        self._i32, self._f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

    def _asm(self, text: str, constraints: str, *operands: Any) -> Any:
        return self._llvm.inline_asm(self._i32, list(operands), text, constraints, has_side_effects=False)

    def constant_word(self, value: int) -> Any:
        signed = int(np.uint32(value).astype(np.int32))
        return self._arith.constant(self._i32, self._ir.IntegerAttr.get(self._i32, signed))

    def zero(self) -> Any:
        return self._arith.constant(self._f32, self._ir.FloatAttr.get(self._f32, 0.0))

    def shift_right(self, word: Any, bits: int) -> Any:
        return self._arith.shrui(word, self.constant_word(bits)) if bits else word

    def and_or(self, word: Any, mask: int, bits: int) -> Any:
        # One lop3. Written as `and` and `or`, ptxas makes two of them, because each has an immediate operand.
        return self._asm(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;", "=r,r,r", word, self.constant_word(bits))

    def low_float(self, word: Any) -> Any:
        return self._arith.bitcast(self._f32, self._arith.shli(word, self.constant_word(16)))

    def high_float(self, word: Any) -> Any:
        return self._arith.bitcast(self._f32, self._arith.andi(word, self.constant_word(0xFFFF_0000)))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._math.fma(a, b, c)

    def duplicate(self, word: Any, high: bool) -> Any:
        return self._asm(f"prmt.b32 $0, $1, $1, {'0x3232' if high else '0x1010'};", "=r,r", word)

    def subtract_multiply(self, word: Any, offset: Any, factor: Any) -> Any:
        difference = self._asm("sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", word, offset)
        return self._asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", difference, factor)

    def mma(self, c: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        result = self._llvm.inline_asm(
            self._llvm.StructType.get_literal([self._f32] * 4),
            [*a, *b, *c],
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            has_side_effects=False,
        )
        return [self._llvm.extractvalue(self._f32, result, [i]) for i in range(4)]

    def unpack_register(self, register: Any) -> list[Any]:
        """Items of a register: float32 elements, or 32-bit words of anything narrower."""
        from jax.experimental.mosaic.gpu import utils

        vector_type = self._ir.VectorType(register.type)
        if vector_type.element_type != self._f32:
            bits = utils.bitwidth(vector_type.element_type) * vector_type.shape[0]
            register = utils.bitcast(register, self._ir.VectorType.get((bits // 32,), self._i32))
        count = self._ir.VectorType(register.type).shape[0]
        positions = [self._ir.DenseI64ArrayAttr.get([i]) for i in range(count)]
        return [self._vector.extract(register, dynamic_position=[], static_position=p) for p in positions]

    def pack_register(self, items: Sequence[Any], dtype: Any) -> Any:
        """Inverse of `unpack_register` for float32 and bfloat16."""
        from jax.experimental.mosaic.gpu import utils

        if dtype == jnp.float32:
            return self._vector.from_elements(self._ir.VectorType.get((len(items),), self._f32), list(items))
        words = self._vector.from_elements(self._ir.VectorType.get((len(items),), self._i32), list(items))
        return utils.bitcast(words, self._ir.VectorType.get((2 * len(items),), self._ir.BF16Type.get()))


def register_function(
    code: Callable[..., list[list[list[Any]]]],
    arguments: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any, Any]],
    *,
    interpret: bool,
) -> Callable[..., Sequence[jax.Array]]:
    """Make per-thread code callable from a kernel body, on the device or in the interpreter.

    `code(ops, *registers)` takes and returns, for every array, a list of registers, each a list of 32-bit items.
    `arguments` are the layouts of the arrays it takes, `results` the (shape, dtype, layout) of those it returns.
    """
    if interpret:
        from pallas_kernels.int4_moe.emulation import EmulatedOps, emulate, from_registers, to_registers

        def emulated(*arrays: jax.Array) -> list[jax.Array]:
            registers = [to_registers(a, lay.to_mgpu()) for a, lay in zip(arrays, arguments, strict=True)]
            out = code(EmulatedOps, *registers)
            return [from_registers(r, lay.to_mgpu(), s, d) for r, (s, d, lay) in zip(out, results, strict=True)]

        return emulate(emulated)

    def inline(_, *arrays: Any) -> list[Any]:
        from jax.experimental.mosaic.gpu import fragmented_array as fa

        ops = DeviceOps()
        out = code(ops, *[[ops.unpack_register(r) for r in a.registers.flat] for a in arrays])
        fragments = []
        for registers, (shape, dtype, layout) in zip(out, results, strict=True):
            layout = layout.to_mgpu()
            array = np.empty(layout.registers_shape(shape), dtype=object)
            assert array.size == len(registers)
            for i, items in enumerate(registers):
                array.flat[i] = ops.pack_register(items, dtype)
            fragments.append(fa.FragmentedArray(_registers=array, _layout=layout, _is_signed=None))
        return fragments

    return_type = [plgpu.ShapeDtypeStruct(s, d, layout=lay) for s, d, lay in results]
    return plgpu.inline_mgpu(arg_types=tuple(arguments), return_type=return_type)(inline)


def _scale_word(registers: list[list[Any]], group: int, half: int) -> tuple[Any, bool]:
    """The word that holds the scale of (group, row half) in a unit's scale registers, and whether in its high part."""
    block, within = divmod(group, 8)
    return registers[2 * block + half][within // 2], within % 2 == 1


def mma_units(rows: int, groups: range) -> Callable[..., Any]:
    """Per-thread code of the warp-level engine over some groups of a k step: both units' sums plus weights times `x`.

    `x` holds the activations of these groups alone.

    A product over a group starts from -136 Σx, got by multiplying with a constant; adding (128 + u) x then leaves
    Σ (u - 8) x, and the group's scale multiplies the float32 sum, so q·scale is never rounded to bfloat16.
    """

    def code(ops: Any, acc0: Any, acc1: Any, words0: Any, words1: Any, scale0: Any, scale1: Any, x: Any) -> Any:
        units = ((acc0, words0, scale0), (acc1, words1, scale1))
        out = [[list(r) for r in acc0], [list(r) for r in acc1]]
        offset = [ops.constant_word(NEGATIVE_OFFSET)] * 4
        zero = [ops.zero()] * 4
        for i, g in enumerate(groups):
            right = [
                [[x[4 * (block * len(groups) + i) + 2 * j + h][0] for h in range(2)] for j in range(2)]
                for block in range(rows // 8)
            ]
            starts = [ops.mma(ops.mma(zero, offset, first), offset, second) for first, second in right]
            for unit, (_, words, scale) in enumerate(units):
                left = [
                    [_codes(ops, words[2 * g + half][0], 2 * j + h) for h in range(2) for half in range(2)]
                    for j in range(2)
                ]
                factor = [_scale_float(ops, scale, g, half) for half in range(2)]
                for block, (first, second) in enumerate(right):
                    product = ops.mma(ops.mma(starts[block], left[0], first), left[1], second)
                    for half in range(2):
                        register = out[unit][2 * block + half]
                        for t in range(2):
                            register[t] = ops.fma(product[2 * half + t], factor[half], register[t])
        return out

    return code


def _codes(ops: Any, word: Any, b: int) -> Any:
    """Values 8c+b and 8c+b+4 of a word as two bfloat16, each 128 more than its code."""
    return ops.and_or(ops.shift_right(word, 4 * b), NIBBLES, MAGIC)


def _scale_float(ops: Any, scale: Any, group: int, half: int) -> Any:
    word, high = _scale_word(scale, group, half)
    return ops.high_float(word) if high else ops.low_float(word)


def dequantize_units(groups: range, *, interleave: bool) -> Callable[..., Any]:
    """Per-thread code that makes bfloat16(q·scale) of both units' weights over some groups of a k step.

    Not interleaved: two (64, k) arrays in the WGMMA layout. Interleaved: one (128, k) array in the TCGEN05 layout,
    where each warp's 32 rows are 16 of unit 0, then 16 of unit 1, so that both units' sums for a row end in one thread.
    """

    def code(ops: Any, words0: Any, words1: Any, scale0: Any, scale1: Any) -> Any:
        offset = ops.constant_word(OFFSET)
        columns = [[], []]  # per unit: blocks of 8 columns, each two words (row halves)
        for g in groups:
            for unit, (words, scale) in enumerate(((words0, scale0), (words1, scale1))):
                factor = [ops.duplicate(*_scale_word(scale, g, half)) for half in range(2)]
                for b in range(4):
                    codes = [_codes(ops, words[2 * g + half][0], b) for half in range(2)]
                    columns[unit].append([ops.subtract_multiply(codes[h], offset, factor[h]) for h in range(2)])
        if interleave:
            return [[[word] for pair in zip(*columns, strict=True) for unit in pair for word in unit]]
        return [[[word] for block in unit for word in block] for unit in columns]

    return code


def split_units(ops: Any, acc: Any) -> Any:
    """Per-thread code: a (128, n) TCGEN05 accumulator of interleaved units as the two units' (64, n) accumulators."""
    return [
        [acc[4 * block + 2 * unit + half] for block in range(len(acc) // 4) for half in range(2)] for unit in range(2)
    ]


def single_columns(ops: Any, acc: Any) -> Any:
    """Per-thread code that moves nothing: ACC as OUT, or as PAIR_OUT."""
    return [[[item] for register in acc for item in register]]
