"""MLA tree attention on Blackwell (sm_100a, sm_103a): tcgen05 on 64 query rows, scores and values in tensor memory.

One warp copies tiles, one warp issues the matrix products, and a warpgroup does the softmax; scores of tile j + 1 are
computed while the softmax of tile j runs. The values stay in tensor memory and are rescaled only when a row's maximum
rises by more than `lazy` (in base 2): until then the old maximum is as good, since probabilities of up to 2^lazy are
exact enough in bfloat16. A key tile is the value tile: the latents are read once for both products.

docs/kernels_tree_attention.md has the budget and the ordering argument of each barrier.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.tree_attention import registers, schedule
from pallas_kernels.tree_attention.registers import spread
from pallas_kernels.tree_attention.tile import BLOCK, STAGES, TILE_ROWS, Config

TILE = plgpu.Layout.WGMMA  # tensor memory of 64-row tiles is read in Hopper's register layout
ROW = plgpu.Layout.WGMMA.reduce(1)


def attend(
    q_latent: BFloat16[Array, "requests query_rows rank"],
    q_rope: BFloat16[Array, "requests query_rows rope"],
    cache_latent: BFloat16[Array, "number_of_pages page rank"],
    cache_rope: BFloat16[Array, "number_of_pages page rope"],
    own_latent: BFloat16[Array, "requests rows rank"],
    own_rope: BFloat16[Array, "requests rows rope"],
    pages: Int32[Array, "requests entries"],
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
    half = rank // 2
    row_tiles = (words - 1) * schedule.WORD // BLOCK
    page = cache_latent.shape[1]
    page_numbers = functools.partial(schedule.page_numbers, per_tile=BLOCK // page)
    scale2 = registers.base2(scale)

    def body(
        ql_ref, qr_ref, cl_ref, cr_ref, ol_ref, or_ref,
        pages_ref, length_ref, mask_ref, pieces_ref, requests_ref, *results,
        ql, qr, latent, key_rope, p_smem, s_tmem, left_tmem, right_tmem,
        q_full, q_free, kv_full, kv_free, s_full, s_free, p_ready, pv_done,
    ):  # fmt: skip
        result = registers.Result(results)
        piece, tile_index, warpgroup = (lax.axis_index(name) for name in ("piece", "tile", "warpgroup"))
        rows = pl.ds(tile_index * TILE_ROWS, TILE_ROWS)
        low, high, first_request, end_request = (pieces_ref[piece, i] for i in range(4))

        def slot_of(tile):
            return lax.rem(tile - low, jnp.int32(STAGES))

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

                plgpu.copy_gmem_to_smem(ql_ref.at[request, rows], ql, q_full)
                plgpu.copy_gmem_to_smem(qr_ref.at[request, rows], qr, q_full)
                start, lo, hi = extent(request)
                context_tiles = requests_ref[request, 1] - row_tiles

                def one_tile(j, _):
                    """The only place that reads the cache."""
                    tile = start + j
                    slot = slot_of(tile)
                    numbers = page_numbers(pages_ref, request, j)  # before the wait, because they are far away

                    @pl.when(tile - low >= STAGES)
                    def _():
                        plgpu.barrier_wait(kv_free.at[slot])

                    def copy(latent_ref, rope_ref, source):
                        for i, first in enumerate(range(0, BLOCK, page)):
                            for ref, smem in ((latent_ref, latent), (rope_ref, key_rope)):
                                destination = smem.at[slot, pl.ds(first, page)]
                                plgpu.copy_gmem_to_smem(ref.at[source(i, first)], destination, kv_full.at[slot])

                    def own(i, first):
                        return request, pl.ds((j - context_tiles) * BLOCK + first, page)

                    pl.when(j < context_tiles)(lambda: copy(cl_ref, cr_ref, lambda i, first: numbers[i]))
                    pl.when(j >= context_tiles)(lambda: copy(ol_ref, or_ref, own))

                lax.fori_loop(lo, hi, one_tile, None)

            every_request(one_request)

            # Nothing may still arrive at a barrier when the block of threads ends.
            @pl.when(end_request > first_request)
            def _():
                plgpu.barrier_wait(q_free)

            def drain(tile, _):
                plgpu.barrier_wait(kv_free.at[slot_of(tile)])

            lax.fori_loop(jnp.maximum(low, high - STAGES), high, drain, None)

        def products():
            def scores(tile, last):
                slot = slot_of(tile)
                plgpu.barrier_wait(kv_full.at[slot])
                plgpu.tcgen05_mma(s_tmem, ql, latent.at[slot].transpose((1, 0)), accumulate=False)
                plgpu.tcgen05_mma(s_tmem, qr, key_rope.at[slot].transpose((1, 0)), s_full, accumulate=True)

                @pl.when(last)
                def _():
                    plgpu.tcgen05_commit_arrive(q_free)

            def one_request(request):
                start, lo, hi = extent(request)
                plgpu.barrier_wait(q_full)
                scores(start + lo, lo + 1 >= hi)

                def one_tile(j, _):
                    slot = slot_of(start + j)
                    plgpu.barrier_wait(s_free)
                    pl.when(j + 1 < hi)(lambda: scores(start + j + 1, j + 2 >= hi))
                    plgpu.barrier_wait(p_ready)  # also says that the previous request's values have been read
                    for tmem, column in ((left_tmem, 0), (right_tmem, half)):
                        values = latent.at[slot, :, pl.ds(column, half)]
                        plgpu.tcgen05_mma(tmem, p_smem, values, accumulate=j > lo)
                    plgpu.tcgen05_commit_arrive(kv_free.at[slot])
                    plgpu.tcgen05_commit_arrive(pv_done)

                lax.fori_loop(lo, hi, one_tile, None)

            every_request(one_request)

        def softmax():
            def filled(value):
                return plgpu.layout_cast(jnp.full((TILE_ROWS,), value, jnp.float32), ROW)

            def read(tmem):
                value = plgpu.async_load_tmem(tmem, layout=TILE)
                plgpu.wait_load_tmem()
                return value

            def one_request(request):
                def load_word(w):
                    return plgpu.load(mask_ref.at[request, w, rows], layout=ROW, optimized=False)

                _, lo, hi = extent(request)
                length = length_ref[request]
                context_tiles = requests_ref[request, 1] - row_tiles

                def step(j, carry, masked):
                    maximum, total = carry
                    plgpu.barrier_wait(s_full)
                    s = read(s_tmem)
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
                            value = read(tmem)
                            plgpu.async_store_tmem(tmem, value * spread(shrink, value.shape))
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
                    value = read(tmem)
                    result.write_values(value * spread(inverse, value.shape), *destination, pl.ds(column, half))

            every_request(one_request)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(copies)
                pl.when(warp == 1)(products)

        pl.when(warpgroup == 1)(softmax)

    def barrier(count=1):
        return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)

    operands = (q_latent, q_rope, cache_latent, cache_rope, own_latent, own_rope, pages, lengths, mask)
    return schedule.run(
        body,
        operands,
        tables,
        config=config,
        interpret=interpret,
        kernel_name="tree_attention_blackwell",
        scratch={
            "ql": registers.tiles(64, TILE_ROWS, rank),
            "qr": registers.tiles(64, TILE_ROWS, rope),
            # A 64-row product whose result is 64 wide takes its right operand in 32-column atoms at most.
            "latent": registers.tiles(32, STAGES, BLOCK, rank),
            "key_rope": registers.tiles(32, STAGES, BLOCK, rope),
            "p_smem": registers.tiles(64, TILE_ROWS, BLOCK),
            "s_tmem": plgpu.TMEM((TILE_ROWS, BLOCK), jnp.float32),
            "left_tmem": plgpu.TMEM((TILE_ROWS, half), jnp.float32),
            "right_tmem": plgpu.TMEM((TILE_ROWS, half), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_free": barrier(),
            "kv_full": plgpu.Barrier(num_arrivals=2 * BLOCK // page, num_barriers=STAGES),
            "kv_free": barrier(STAGES),
            "s_full": barrier(),
            "s_free": barrier(),
            "p_ready": barrier(),
            "pv_done": barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
    )
