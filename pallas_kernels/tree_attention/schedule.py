"""What the GPU kernels share around the attention itself: who works on what, the packed mask, joining split requests.

A request is a row of tiles: its context in tiles of `block` positions, then its own rows in tiles of `block`. The
tiles of all requests lie on one line, which is cut into `splits` equal pieces, one for each block of threads along
the context (FlashMLA's tile scheduler). Lengths may differ at will: every piece costs the same, one long request is
spread over many pieces, and a piece walks over many short requests. A piece that holds a whole request writes the
result; only requests cut by a boundary pass through float32 partial results, at most two for each piece.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import registers
from pallas_kernels.tree_attention.tile import BLOCK, Config

WORD = 32
"""Mask bits a word."""

UNROLL = 8
"""Partial results that the join kernel reads at a time."""


class Schedule(NamedTuple):
    """Where every piece and every request begins: small int32 tables that the kernels read."""

    pieces: Int[Array, "splits 4"]
    """First tile, end tile, first request, end request."""
    requests: Int[Array, "requests 2"]
    """First tile, tile count."""
    joins: Int[Array, "cuts 3"]
    """Of each request that may be cut: the request or −1 if it is whole, its first piece, its end piece."""


def plan(lengths: Int[Array, " requests"], row_tiles: int, block: int, splits: int, min_tiles: int = 1) -> Schedule:
    """Cut the tiles of all requests into `splits` equal pieces; `row_tiles` of each request are its own rows.

    A piece has at least `min_tiles`, so that short contexts are not ground into parts that cost more to join than
    to compute; the last pieces are then empty.
    """
    tiles = lax.div(lengths.astype(jnp.int32) + block - 1, block) + row_tiles
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    start, total = end - tiles, end[-1]
    size = jnp.maximum(lax.div(total + splits - 1, splits), min_tiles)
    cut = jnp.minimum(jnp.arange(splits + 1, dtype=jnp.int32) * size, total)
    low, high = cut[:-1], cut[1:]
    # Every request has at least one tile, so starts increase strictly and counting them finds the request of a tile.
    first = (start <= low[:, None]).sum(axis=1, dtype=jnp.int32) - 1
    after = (start < high[:, None]).sum(axis=1, dtype=jnp.int32)
    pieces = jnp.stack([low, high, first, after], axis=1)
    pieces = jnp.where((low < high)[:, None], pieces, 0)  # a piece past the end holds nothing

    first_piece = lax.div(start, size)
    end_piece = lax.div(end + size - 1, size)
    request = jnp.arange(len(tiles), dtype=jnp.int32)
    if len(tiles) >= splits:  # fewer boundaries than requests: list the request that each boundary is the first to cut
        boundary = cut[1:-1]
        request = (start <= boundary[:, None]).sum(axis=1, dtype=jnp.int32) - 1
        first_piece, end_piece = first_piece[request], end_piece[request]
        cut_here = (
            (start[request] < boundary) & (boundary < total) & (first_piece == jnp.arange(splits - 1, dtype=jnp.int32))
        )
    else:
        cut_here = end_piece - first_piece > 1
    joins = jnp.stack([jnp.where(cut_here, request, -1), first_piece, end_piece], axis=1)
    return Schedule(pieces, jnp.stack([start, tiles], axis=1), joins)


def whole_tiles(
    pages: Int[Array, "requests tiles"], lengths: Int[Array, " requests"], page: int
) -> Int[Array, "requests entries"]:
    """The tables with entries for whole kernel tiles, at least one of them.

    A tile is copied whole. Where it is several pages, the last that a length reaches stands again for those behind it.
    """
    per_tile = BLOCK // page
    missing = -pages.shape[1] % per_tile if pages.shape[1] else per_tile
    pages = jnp.pad(pages.astype(jnp.int32), ((0, 0), (0, missing)))
    if per_tile == 1:
        return pages
    last = lax.div(jnp.maximum(lengths, 1) - 1, page)[:, None]
    return jnp.take_along_axis(pages, jnp.minimum(jnp.arange(pages.shape[1]), last), axis=1)


def page_numbers(pages: jax.Ref, request, tile, per_tile: int) -> list[Array]:
    """Where a tile of a request's context lies; anything where the tile is one of its own rows."""
    last = pages.shape[1] - 1
    return [pages[request, jnp.minimum(tile * per_tile + i, last)] for i in range(per_tile)]


def pack_mask(
    ancestors: Bool[Array, "requests rows rows"],
    valid: Bool[Array, "requests rows"],
    heads: int,
    block: int,
    padded: int,
) -> Int[Array, "requests words padded"]:
    """The mask as bits, one column of words for each query row (row x heads + head), zero past the last.

    The last word says whether the row is valid; an invalid row sees nothing.
    """
    requests, rows, _ = ancestors.shape
    columns = -(-rows // block) * block
    bits = jnp.pad(ancestors & valid[:, :, None], ((0, 0), (0, 0), (0, columns - rows)))
    bits = bits.reshape(requests, rows, columns // WORD, WORD).astype(jnp.uint32)
    words = (bits << jnp.arange(WORD, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    words = jnp.concatenate([words, valid[:, :, None].astype(jnp.uint32)], axis=-1)
    words = jnp.repeat(lax.bitcast_convert_type(words, jnp.int32).swapaxes(1, 2), heads, axis=2)
    return jnp.pad(words, ((0, 0), (0, 0), (0, padded - rows * heads)))


def partials(splits: int, padded: int, rank: int) -> list[jax.ShapeDtypeStruct]:
    """Float32 partial results: outputs and base-2 log-sum-exp of the first and the last request of each piece."""
    if splits == 1:
        return []
    return [
        jax.ShapeDtypeStruct((2 * splits, padded, rank), jnp.float32),
        jax.ShapeDtypeStruct((2 * splits, padded), jnp.float32),
    ]


def results(requests: int, padded: int, rank: int) -> tuple[jax.Ref, jax.Ref]:
    """References to uninitialised outputs and log-sum-exps, which the attention and the join kernel both write."""
    shapes = ((requests, padded, rank), jnp.bfloat16), ((requests, padded), jnp.float32)
    out, lse = (jax.new_ref(lax.empty(shape, dtype)) for shape, dtype in shapes)
    return out, lse


def join(parts, tables: Schedule, out: jax.Ref, lse: jax.Ref, *, interpret=None) -> None:
    """Join the partial results of every cut request into `out` and `lse`, in place: one block for each query row.

    A long request may be cut into as many parts as the card has cores. `UNROLL` of them are in flight at a time,
    because each is a memory access away.
    """
    part, part_lse = parts
    _, padded, rank = part.shape
    layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // 128)

    def body(part_ref, part_lse_ref, pieces_ref, joins_ref, out_ref, lse_ref):
        cut, row = lax.axis_index("cut"), lax.axis_index("row")
        request, first, after = (joins_ref[cut, i] for i in range(3))

        def add(i, carry):
            maximum, total, acc = carry
            lses, values = [], []
            for j in range(UNROLL):
                piece = first + i * UNROLL + j
                near = jnp.minimum(piece, after - 1)
                segment = registers.segment(near, request, pieces_ref[near, 2])
                lses.append(jnp.where(piece < after, part_lse_ref[segment, row], -jnp.inf))
                values.append(plgpu.load(part_ref.at[segment, row], layout=layout, optimized=False))
            new_maximum = functools.reduce(jnp.maximum, lses, maximum)
            shrink = jnp.exp2(maximum - new_maximum)
            total, acc = total * shrink, acc * shrink
            for value, value_lse in zip(values, lses, strict=True):
                weight = jnp.exp2(value_lse - new_maximum)
                total, acc = total + weight, acc + value * weight
            return new_maximum, total, acc

        @pl.when(request >= 0)
        def _():
            zero = plgpu.layout_cast(jnp.full((rank,), 0, jnp.float32), layout)
            trips = lax.div(after - first + UNROLL - 1, jnp.int32(UNROLL))
            carry = (jnp.float32(registers.FLOOR), jnp.float32(0), zero)
            maximum, total, acc = lax.fori_loop(0, trips, add, carry)
            seen = total > 0
            total = jnp.where(seen, total, jnp.float32(1))
            registers.store(out_ref.at[request, row], (acc * jnp.where(seen, 1 / total, 0.0)).astype(out_ref.dtype))
            lse_ref[request, row] = jnp.where(seen, (maximum + jnp.log2(total)) * registers.LN2, -jnp.inf)

    plgpu.kernel(
        body,
        out_type=[],
        grid=(tables.joins.shape[0], padded),
        grid_names=("cut", "row"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="tree_attention_join",
    )(part, part_lse, tables.pieces, tables.joins, out, lse)


def run(
    body: Callable,
    operands: tuple[Array, ...],
    tables: Schedule,
    *,
    config: Config,
    scratch: Mapping[str, Any],
    interpret=None,
    **kernel_options,
) -> tuple[Array, Array]:
    """Launch an attention kernel over pieces and query tiles, two warpgroups a block, and join what was cut.

    `operands` are the queries, the cache, the rows, the page tables, the lengths and the mask, as `attend` takes them.
    The body gets references to them, to the tables of pieces and requests, to the results and, where requests may be
    cut, to the partial results, and its scratch by name. Returns outputs and natural log-sum-exp, padded to whole query
    tiles.
    """

    def named(*refs):  # Mosaic would lay out a mapping in the order of its names
        rest = len(refs) - len(scratch)
        body(*refs[:rest], **dict(zip(scratch, refs[rest:], strict=True)))

    requests, _, rank = operands[0].shape
    padded = operands[-1].shape[-1]
    out, lse = results(requests, padded, rank)
    parts = plgpu.kernel(
        named,
        out_type=partials(config.splits, padded, rank),
        grid=(config.splits, padded // config.row_multiple),
        grid_names=("piece", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        scratch_types=tuple(scratch.values()),
        **kernel_options,
    )(*operands, tables.pieces, tables.requests, out, lse)
    if config.splits > 1:
        join(parts, tables, out, lse, interpret=interpret)
    return jax.freeze(out), jax.freeze(lse)


def launch(
    attend: Callable,
    config: Config,
    q_latent: Float[Array, "requests rows heads rank"],
    q_rope: Float[Array, "requests rows heads rope"],
    latent: Float[Array, "number_of_pages page rank"],
    rope: Float[Array, "number_of_pages page rope"],
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    own_latent: Float[Array, "requests rows rank"],
    own_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"],
    *,
    scale: float,
    valid: Bool[Array, "requests rows"] | None = None,
    interpret=None,
) -> tuple[Float[Array, "requests rows heads rank"], Float[Array, "requests rows heads"]]:
    """Bring the public operation's arguments into a kernel's form, run it and bring the results back.

    Queries become one axis of query rows (row x heads + head). Nothing of the cache is touched here. The mask and
    the schedule depend on lengths and ancestors alone: one compiled step computes them once for all its layers.
    """
    requests, rows, heads, rank = q_latent.shape
    query_rows = rows * heads
    padded = -(-query_rows // config.row_multiple) * config.row_multiple

    def align(array):  # the copy engine's tiles are 8 rows high; it fills what lies past the end with zeros
        return jnp.pad(array, ((0, 0), (0, -array.shape[1] % 8), (0, 0)))

    valid = ancestors.any(axis=-1) if valid is None else valid
    # A request without a valid row sees nothing, however long its context is.
    lengths = jnp.where(valid.any(axis=1), jnp.minimum(lengths, pages.shape[1] * latent.shape[1]), 0).astype(jnp.int32)
    if not latent.shape[0]:  # nothing is cached, but the copy that never runs needs a page to name
        latent, rope = (jnp.zeros((1, *pool.shape[1:]), pool.dtype) for pool in (latent, rope))
    out, lse = attend(
        align(q_latent.reshape(requests, query_rows, rank)),
        align(q_rope.reshape(requests, query_rows, -1)),
        latent,
        rope,
        align(own_latent),
        align(own_rope),
        whole_tiles(pages, lengths, latent.shape[1]),
        lengths,
        pack_mask(ancestors, valid, heads, BLOCK, padded),
        plan(lengths, -(-rows // BLOCK), BLOCK, config.splits, config.min_tiles),
        scale=scale,
        config=config,
        interpret=interpret,
    )
    return (out[:, :query_rows].reshape(q_latent.shape), lse[:, :query_rows].reshape(requests, rows, heads))
