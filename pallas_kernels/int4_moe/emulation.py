"""Run per-thread register code in jnp, so that Pallas's interpreter executes what a GPU thread executes.

The interpreter never runs inline GPU instructions. Here a warpgroup's registers become arrays with one leading axis of
128 threads; which element a register holds comes from Mosaic's own layout objects, so a wrong layout, nibble order or
scale is wrong here too.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.extend.core import Primitive
from jax.interpreters import mlir

THREADS = 128


def _tile(array: np.ndarray, tiles: Sequence[Sequence[int]]) -> np.ndarray:
    for tile in tiles:
        rank = len(tile)
        lead, dims = array.shape[: array.ndim - rank], array.shape[array.ndim - rank :]
        array = array.reshape(*lead, *[z for d, s in zip(dims, tile, strict=True) for z in (d // s, s)])
        n = len(lead)
        array = array.transpose(*range(n), *[n + 2 * i for i in range(rank)], *[n + 2 * i + 1 for i in range(rank)])
    return array


@functools.cache
def element_index(layout: fa.FragmentedLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Flat logical index of every register element: `[thread, register, element]`, registers in Mosaic's order."""
    iota = np.arange(math.prod(shape)).reshape(shape)
    if not isinstance(layout, fa.TiledLayout):
        raise TypeError(f"only tiled register layouts are emulated, not {layout}")
    tiled = _tile(iota, layout.tiling.tiles)

    def axes(dims) -> list[tuple[int | None, int]]:
        return [
            (None, d.times) if isinstance(d, fa.Replicated) else (d + tiled.ndim, tiled.shape[d + tiled.ndim])
            for d in dims
        ]

    vector = layout.vector_dim + tiled.ndim
    warp, lane = axes(layout.warp_dims), axes(layout.lane_dims)
    threaded = {axis for axis, _ in warp + lane if axis is not None}
    kept = [axis for axis in range(tiled.ndim) if axis not in threaded]
    threads = []
    for thread in range(THREADS):
        index: list[int | slice] = [slice(None)] * tiled.ndim
        for dims, value in ((warp, thread // 32), (lane, thread % 32)):
            for axis, size in reversed(dims):
                if axis is not None:
                    index[axis] = value % size
                value //= size
        registers = np.moveaxis(tiled[tuple(index)], kept.index(vector), -1)
        threads.append(registers.reshape(-1, tiled.shape[vector]))
    return np.stack(threads)


@functools.cache
def _home(layout: fa.FragmentedLayout, shape: tuple[int, ...]) -> np.ndarray:
    """For each logical element, one position of it in the flattened `[thread, register, element]` array."""
    index = element_index(layout, shape).reshape(-1)
    elements, position = np.unique(index, return_index=True)
    assert elements.size == math.prod(shape), "a register layout must cover its array"
    return position


def to_registers(array: jax.Array, layout: fa.FragmentedLayout) -> list[list[jax.Array]]:
    """Items of each register, a `[128]` array each: float32 elements, or 32-bit words of anything narrower."""
    index = element_index(layout, array.shape)
    values = array.reshape(-1)[index]
    if array.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
        bits = bits.reshape(*bits.shape[:-1], -1, 2)
        values = lax.bitcast_convert_type(bits[..., 0] | (bits[..., 1] << 16), jnp.int32)
    return [[values[:, r, i] for i in range(values.shape[2])] for r in range(values.shape[1])]


def from_registers(registers: Sequence[Sequence[jax.Array]], layout, shape: tuple[int, ...], dtype) -> jax.Array:
    """Inverse of `to_registers`."""
    values = jnp.stack([jnp.stack(list(items), -1) for items in registers], 1)
    if dtype == jnp.bfloat16:
        values = _halves(values).reshape(*values.shape[:-1], -1)
    return values.reshape(-1)[_home(layout, shape)].reshape(shape)


def _halves(word: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(word, jnp.uint32)
    return lax.bitcast_convert_type(jnp.stack([bits & 0xFFFF, bits >> 16], -1).astype(jnp.uint16), jnp.bfloat16)


def _word(low: jax.Array, high: jax.Array) -> jax.Array:
    bits = [lax.bitcast_convert_type(v, jnp.uint16).astype(jnp.uint32) for v in (low, high)]
    return lax.bitcast_convert_type(bits[0] | (bits[1] << 16), jnp.int32)


class EmulatedOps:
    """The instructions of `registers.DeviceOps` on `[128]` arrays."""

    @staticmethod
    def constant_word(value: int) -> jax.Array:
        return jnp.full((THREADS,), np.uint32(value).astype(np.int32))

    @staticmethod
    def zero() -> jax.Array:
        return jnp.zeros((THREADS,), jnp.float32)

    @staticmethod
    def shift_right(word: jax.Array, bits: int) -> jax.Array:
        return lax.shift_right_logical(word, jnp.int32(bits)) if bits else word

    @staticmethod
    def and_or(word: jax.Array, mask: int, bits: int) -> jax.Array:
        return (word & jnp.int32(mask)) | jnp.int32(bits)

    @staticmethod
    def low_float(word: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(word << 16, jnp.float32)

    @staticmethod
    def high_float(word: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(word & jnp.int32(-65536), jnp.float32)

    @staticmethod
    def fma(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return a * b + c

    @staticmethod
    def duplicate(word: jax.Array, high: bool) -> jax.Array:
        half = _halves(word)[:, int(high)]
        return _word(half, half)

    @staticmethod
    def subtract_multiply(word: jax.Array, offset: jax.Array, factor: jax.Array) -> jax.Array:
        difference = (_halves(word).astype(jnp.float32) - _halves(offset).astype(jnp.float32)).astype(jnp.bfloat16)
        product = difference.astype(jnp.float32) * _halves(factor).astype(jnp.float32)
        product = product.astype(jnp.bfloat16)
        return _word(product[:, 0], product[:, 1])

    @staticmethod
    def mma(c: Sequence[jax.Array], a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        """Four warps' m16n8k16; B may differ between warps, as on the device."""
        layouts = mgpu.MMALayouts(jnp.bfloat16, m_warps=4)
        left = from_registers([[r] for r in a], layouts.lhs, (64, 16), jnp.bfloat16).reshape(4, 16, 16)
        values = jnp.stack([_halves(r) for r in b], 1).reshape(4, -1)
        warp_home = np.unique(element_index(layouts.rhs, (16, 8))[:32].reshape(-1), return_index=True)[1]
        right = values[:, warp_home].reshape(4, 16, 8)
        product = jnp.einsum(
            "wmk,wkn->wmn", left.astype(jnp.float32), right.astype(jnp.float32), precision="highest"
        ).reshape(64, 8)
        products = [item for register in to_registers(product, layouts.acc) for item in register]
        return [x + y for x, y in zip(c, products, strict=True)]


# A kernel body may not capture array constants, so the emulation hides behind a primitive: its CPU lowering is an
# ordinary jnp function whose constants come into being outside the kernel.
_emulate_p = Primitive("int4_moe_emulated_registers")
_emulate_p.multiple_results = True
_emulate_p.def_abstract_eval(lambda *avals, function: [o.update() for o in _out_avals(function, avals)])
mlir.register_lowering(
    _emulate_p, mlir.lower_fun(lambda *args, function: function(*args), multiple_results=True), platform="cpu"
)


def _out_avals(function: Callable, avals) -> list:
    shapes = jax.eval_shape(function, *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])
    return [ShapedArray(s.shape, s.dtype) for s in shapes]


def emulate(function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Make an array function callable from a kernel body that the interpreter runs."""
    return lambda *args: _emulate_p.bind(*args, function=function)
