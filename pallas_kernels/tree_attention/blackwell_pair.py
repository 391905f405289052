"""MLA tree attention on Blackwell with two blocks a tensor-core instruction (tcgen05, cta_group::2).

A pair of blocks holds 128 query rows, 64 each, and every instruction runs at the full rate that a lone block's 64 rows
do not reach. The right operand is split over the pair: of the keys each block holds half the positions, of the values
half the columns, so a tile is copied twice into shared memory but read twice from the second-level cache only. A tile
has 128 positions and one stage: keys and values have barriers of their own, and each copy hides behind the other's use.

The interpreter has no pair instruction; tests run this kernel through a shim, without race detection. It is therefore
taken only by name (`implementation="blackwell_pair"`) until it has passed `self_check` on a card.

docs/kernels_tree_attention.md has the budget and the ordering argument of each barrier.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.tree_attention import registers, schedule
from pallas_kernels.tree_attention.registers import spread
from pallas_kernels.tree_attention.selection import TILE_ROWS

BLOCK = 128

TILE = plgpu.Layout.TCGEN05_M64_COLLECTIVE(BLOCK)
ROW = TILE.reduce(1)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a launch is cut, and when values are rescaled.

    `splits` pieces along the context, each of at least `min_tiles` tiles; `lazy` is the rise of a row's maximum, in
    base 2, that forces a rescale.
    """

    splits: int = 1
    min_tiles: int = 1
    lazy: float = 8.0

    @property
    def block(self) -> int:
        """Positions a tile."""
        return BLOCK

    @property
    def row_multiple(self) -> int:
        """Query rows are padded to a multiple of this."""
        return 2 * TILE_ROWS


def attend(
    q_latent: BFloat16[Array, "requests query_rows rank"],
    q_rope: BFloat16[Array, "requests query_rows rope"],
    cache_latent: BFloat16[Array, "requests positions rank"],
    cache_rope: BFloat16[Array, "requests positions rope"],
    row_latent: BFloat16[Array, "requests rows rank"],
    row_rope: BFloat16[Array, "requests rows rope"],
    lengths: Int32[Array, " requests"],
    mask: Int32[Array, "requests words padded"],
    tables: schedule.Schedule,
    *,
    scale: float,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[BFloat16[Array, "requests padded rank"], Float32[Array, "requests padded"]]:
    """Run the kernel and join cut requests: outputs and natural log-sum-exp, padded to whole query tiles."""
    rank = q_latent.shape[-1]
    rope = q_rope.shape[-1]
    words = mask.shape[1]
    half, splits = rank // 2, config.splits
    row_tiles = (words - 1) * schedule.WORD // BLOCK
    scale2 = registers.base2(scale)

    halves = plgpu.Layout.TCGEN05_M64_COLLECTIVE(half)
    pair: dict[str, Any] = {"collective_axis": "block"}

    def split(axis: int) -> dict[str, Any]:
        """A copy whose two halves along `axis` go to the two blocks, tracked by the first one's barrier."""
        return {"collective_axes": "block", "leader_tracked": plgpu.CopyPartition.PARTITIONED(axis)}

    def body(*refs):
        (ql_ref, qr_ref, cl_ref, cr_ref, rl_ref, rr_ref, length_ref, mask_ref, pieces_ref, requests_ref) = refs[:10]
        result = registers.Result(refs[10 : 12 + 2 * (splits > 1)])
        ql, qr, key_latent, key_rope, value, p_smem, s_tmem, left_tmem, right_tmem = refs[-19:-10]
        q_full, q_free, k_full, k_free, v_full, v_free, s_full, s_free, p_ready, pv_done = refs[-10:]

        piece, tile_index, block, warpgroup = (lax.axis_index(n) for n in ("piece", "tile", "block", "warpgroup"))
        pair_rows = pl.ds(tile_index * 2 * TILE_ROWS, 2 * TILE_ROWS)
        rows = pl.ds((tile_index * 2 + block) * TILE_ROWS, TILE_ROWS)
        low, high, first_request, end_request = (pieces_ref[piece, i] for i in range(4))

        def extent(request):
            """First tile of the request on the line, and the part of its tiles that is this piece's."""
            start, count = requests_ref[request, 0], requests_ref[request, 1]
            return start, jnp.maximum(low - start, 0), jnp.minimum(high - start, count)

        def every_request(work):
            lax.fori_loop(first_request, end_request, lambda request, _: work(request), None)

        def copies():
            def one_request(request):
                @pl.when(request > first_request)
                def _():
                    plgpu.barrier_wait(q_free)  # the previous request's last scores are computed

                plgpu.copy_gmem_to_smem(ql_ref.at[request, pair_rows], ql, q_full, **split(0))
                plgpu.copy_gmem_to_smem(qr_ref.at[request, pair_rows], qr, q_full, **split(0))
                start, lo, hi = extent(request)
                context_tiles = requests_ref[request, 1] - row_tiles

                def one_tile(j, _):
                    """The only place that reads the cache."""
                    context = (request, pl.ds(j * BLOCK, BLOCK))
                    own = (request, pl.ds((j - context_tiles) * BLOCK, BLOCK))

                    def copy_keys(latent_ref, rope_ref, source):
                        plgpu.copy_gmem_to_smem(latent_ref.at[source], key_latent, k_full, **split(0))
                        plgpu.copy_gmem_to_smem(rope_ref.at[source], key_rope, k_full, **split(0))

                    def copy_values(latent_ref, source):
                        for i in range(2):
                            columns = (*source, pl.ds(i * half, half))
                            plgpu.copy_gmem_to_smem(latent_ref.at[columns], value.at[i], v_full, **split(1))

                    @pl.when(start + j > low)
                    def _():
                        plgpu.barrier_wait(k_free)

                    pl.when(j < context_tiles)(lambda: copy_keys(cl_ref, cr_ref, context))
                    pl.when(j >= context_tiles)(lambda: copy_keys(rl_ref, rr_ref, own))

                    @pl.when(start + j > low)
                    def _():
                        plgpu.barrier_wait(v_free)

                    pl.when(j < context_tiles)(lambda: copy_values(cl_ref, context))
                    pl.when(j >= context_tiles)(lambda: copy_values(rl_ref, own))

                lax.fori_loop(lo, hi, one_tile, None)

            every_request(one_request)

            # Nothing may still arrive at a barrier when the pair ends.
            @pl.when(end_request > first_request)
            def _():
                plgpu.barrier_wait(q_free)
                plgpu.barrier_wait(k_free)
                plgpu.barrier_wait(v_free)

        def products():
            """Issued by the first block for both."""

            def scores(last):
                plgpu.barrier_wait(k_full)
                plgpu.tcgen05_mma(s_tmem, ql, key_latent.transpose((1, 0)), accumulate=False, **pair)
                plgpu.tcgen05_mma(s_tmem, qr, key_rope.transpose((1, 0)), accumulate=True, **pair)
                plgpu.tcgen05_commit_arrive(k_free, **pair)
                plgpu.tcgen05_commit_arrive(s_full, **pair)

                @pl.when(last)
                def _():
                    plgpu.tcgen05_commit_arrive(q_free, **pair)

            def one_request(request):
                _, lo, hi = extent(request)
                plgpu.barrier_wait(q_full)
                scores(lo + 1 >= hi)

                def one_tile(j, _):
                    plgpu.barrier_wait(s_free)
                    pl.when(j + 1 < hi)(lambda: scores(j + 2 >= hi))
                    plgpu.barrier_wait(v_full)
                    plgpu.barrier_wait(p_ready)  # also says that the previous request's values have been read
                    for i, tmem in enumerate((left_tmem, right_tmem)):
                        plgpu.tcgen05_mma(tmem, p_smem, value.at[i], accumulate=j > lo, **pair)
                    plgpu.tcgen05_commit_arrive(v_free, **pair)
                    plgpu.tcgen05_commit_arrive(pv_done, **pair)

                lax.fori_loop(lo, hi, one_tile, None)

            every_request(one_request)

        def observe():
            """The second block's copies of the pair's barriers: the interpreter wants every phase seen by someone."""

            def one_request(request):
                _, lo, hi = extent(request)

                def one_tile(j, _):
                    plgpu.barrier_wait(s_free)
                    plgpu.barrier_wait(p_ready)

                lax.fori_loop(lo, hi, one_tile, None)

            every_request(one_request)

        def softmax():
            def filled(value):
                return plgpu.layout_cast(jnp.full((TILE_ROWS,), value, jnp.float32), ROW)

            def read(tmem, layout):
                loaded = plgpu.async_load_tmem(tmem, layout=layout)
                plgpu.wait_load_tmem()
                return loaded

            def spread_over_values(vector):
                return spread(plgpu.layout_cast(vector, halves.reduce(1)), (TILE_ROWS, half))

            def one_request(request):
                def load_word(w):
                    return plgpu.load(mask_ref.at[request, w, rows], layout=ROW, optimized=False)

                _, lo, hi = extent(request)
                length = length_ref[request]
                context_tiles = requests_ref[request, 1] - row_tiles

                def step(j, carry, masked):
                    maximum, total = carry
                    plgpu.barrier_wait(s_full)
                    s = read(s_tmem, TILE)
                    plgpu.barrier_arrive(s_free)
                    s = s * scale2
                    if masked:
                        s = registers.hide(s, j, context_tiles, length, load_word, TILE)
                    new_maximum = jnp.maximum(maximum, s.max(axis=1))
                    # One decision for the warpgroup: below the threshold every row keeps its old maximum.
                    rescale = jnp.max(new_maximum - maximum) > config.lazy
                    ceiling = jnp.where(rescale, jnp.float32(3e38), jnp.float32(-3e38))
                    new_maximum = jnp.maximum(maximum, jnp.minimum(new_maximum, ceiling))
                    shrink = jnp.exp2(maximum - new_maximum)
                    p = jnp.exp2(s - spread(new_maximum, s.shape))
                    total = total * shrink + p.sum(axis=1)

                    @pl.when(j > lo)
                    def _():
                        plgpu.barrier_wait(pv_done)  # the previous probabilities are used and the values at rest

                    p_smem[...] = p.astype(jnp.bfloat16)
                    plgpu.commit_smem()

                    @pl.when(jnp.logical_and(rescale, j > lo))
                    def _():
                        for tmem in (left_tmem, right_tmem):
                            plgpu.async_store_tmem(tmem, read(tmem, halves) * spread_over_values(shrink))
                        plgpu.commit_tmem()

                    plgpu.barrier_arrive(p_ready)
                    return new_maximum, total

                full = jnp.clip(lax.div(length, jnp.int32(BLOCK)), lo, hi)  # tiles up to here need no mask
                carry = (filled(registers.FLOOR), filled(0.0))
                carry = lax.fori_loop(lo, full, functools.partial(step, masked=False), carry)
                maximum, total = lax.fori_loop(full, hi, functools.partial(step, masked=True), carry)
                inverse, lse = registers.normaliser(maximum, total, load_word(words - 1))
                whole = (lo == 0) & (hi == requests_ref[request, 1])
                destination = (request, registers.segment(piece, request, first_request), whole, rows)
                result.write_lse(lse, *destination)
                plgpu.barrier_wait(pv_done)
                for tmem, column in ((left_tmem, 0), (right_tmem, half)):
                    normalised = read(tmem, halves) * spread_over_values(inverse)
                    result.write_values(normalised, *destination, pl.ds(column, half))

            every_request(one_request)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(copies)
                pl.when(jnp.logical_and(warp == 1, block == 0))(products)
                pl.when(jnp.logical_and(warp == 1, block != 0))(observe)

        pl.when(warpgroup == 1)(softmax)

    def tensor_memory(columns):
        return plgpu.TMEM((TILE_ROWS, columns), jnp.float32, collective=True)

    arrived = plgpu.Barrier(num_arrivals=2)  # two copies each
    computed = plgpu.Barrier(orders_tensor_core=True)
    both_blocks = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=1, orders_tensor_core=True)
    operands = (q_latent, q_rope, cache_latent, cache_rope, row_latent, row_rope, lengths, mask)
    return schedule.run(
        body,
        operands,
        tables,
        config=config,
        interpret=interpret,
        kernel_name="tree_attention_blackwell_pair",
        scratch_types=[
            registers.swizzled(128, TILE_ROWS, rank),
            registers.swizzled(128, TILE_ROWS, rope),
            registers.swizzled(128, BLOCK // 2, rank),
            registers.swizzled(128, BLOCK // 2, rope),
            registers.swizzled(128, 2, BLOCK, half // 2),
            registers.swizzled(128, TILE_ROWS, BLOCK),
            tensor_memory(BLOCK),
            tensor_memory(half),
            tensor_memory(half),
            arrived,  # q_full
            computed,  # q_free
            arrived,  # k_full
            computed,  # k_free
            arrived,  # v_full
            computed,  # v_free
            computed,  # s_full
            both_blocks,  # s_free
            both_blocks,  # p_ready
            computed,  # pv_done
        ],
        # Rows of scores lie over two warps: their reductions go through the default scratch of 2 KiB.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cluster=(2,),
        cluster_names=("block",),
    )
