"""MLA tree attention on Hopper (sm_90a): wgmma on 64 query rows, the values' columns split over two warpgroups.

Warpgroup "scores" computes a tile of scores and its softmax, hands the probabilities over through shared memory, and
accumulates the left half of the values; warpgroup "values" accumulates the right half and issues the copies. Neither
half of a 64 x 512 accumulator exceeds 128 registers a thread, and two warpgroups have 255 registers each without
`setmaxnreg`. A key tile is the value tile: the latents are read once for both products and for all rows and heads.

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

TILE = plgpu.Layout.WGMMA
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
    requests, _, rank = q_latent.shape
    rope = q_rope.shape[-1]
    words = mask.shape[1]
    half, cluster = rank // 2, config.cluster
    row_tiles = (words - 1) * schedule.WORD // BLOCK
    page = cache_latent.shape[1]
    page_numbers = functools.partial(schedule.page_numbers, per_tile=BLOCK // page)
    scale2 = registers.base2(scale)
    multicast = "cluster" if cluster > 1 else None

    def body(
        ql_ref, qr_ref, cl_ref, cr_ref, ol_ref, or_ref,
        pages_ref, length_ref, mask_ref, pieces_ref, requests_ref, *results,
        ql, qr, latent, key_rope, p_smem, row_smem, q_full, kv_full, kv_free, p_ready, p_free,
    ):  # fmt: skip
        result = registers.Result(results)
        piece, tile_index, warpgroup = (lax.axis_index(name) for name in ("piece", "tile", "warpgroup"))
        if cluster > 1:
            tile_index = tile_index * cluster + lax.axis_index("cluster")
        rows = pl.ds(tile_index * TILE_ROWS, TILE_ROWS)
        low, high, first_request, end_request = (pieces_ref[piece, i] for i in range(4))

        def slot_of(tile):
            return lax.rem(tile - low, jnp.int32(STAGES))

        def extent(request):
            """First tile of the request on the line, and the part of its tiles that is this piece's."""
            start, count = requests_ref[request, 0], requests_ref[request, 1]
            return start, jnp.maximum(low - start, 0), jnp.minimum(high - start, count)

        def look_up(request, j):
            """What a copy of tile j of a request needs from the tables: read early, because each read is far away."""
            return request, j, requests_ref[request, 1], page_numbers(pages_ref, request, j)

        def load_tile(tile, request, j, count, numbers):
            """Copy tile j of a request's `count`: the only place that reads the cache."""
            slot = slot_of(tile)
            context_tiles = count - row_tiles

            def copy(latent_ref, rope_ref, source):
                for i, first in enumerate(range(0, BLOCK, page)):
                    for ref, smem in ((latent_ref, latent), (rope_ref, key_rope)):
                        destination = smem.at[slot, pl.ds(first, page)]
                        plgpu.copy_gmem_to_smem(
                            ref.at[source(i, first)], destination, kv_full.at[slot], collective_axes=multicast
                        )

            def own(i, first):
                return request, pl.ds((j - context_tiles) * BLOCK + first, page)

            pl.when(j < context_tiles)(lambda: copy(cl_ref, cr_ref, lambda i, first: numbers[i]))
            pl.when(j >= context_tiles)(lambda: copy(ol_ref, or_ref, own))

        def multiply_add(acc, issue):
            """acc plus the product that `issue` starts; the interpreter knows only accumulators that start at zero."""
            if interpret is None:
                return pl.run_state(issue)(registers.ACC.init(acc))

            def product(ref):
                issue(ref)
                return ref[...]

            return acc + pl.run_scoped(product, registers.ACC(acc.shape, jnp.float32))

        def zeros():
            return plgpu.layout_cast(jnp.full((TILE_ROWS, half), 0, jnp.float32), TILE)

        def destination(request, lo, hi):
            whole = (lo == 0) & (hi == requests_ref[request, 1])
            return request, registers.segment(piece, request, first_request), whole, rows

        @pl.when(warpgroup == 0)
        def _scores():
            def filled(value):
                return plgpu.layout_cast(jnp.full((TILE_ROWS,), value, jnp.float32), ROW)

            def one_request(request, _):
                def load_word(w):
                    return plgpu.load(mask_ref.at[request, w, rows], layout=ROW, optimized=False)

                plgpu.copy_gmem_to_smem(ql_ref.at[request, rows], ql, q_full)
                plgpu.copy_gmem_to_smem(qr_ref.at[request, rows], qr, q_full)
                start, lo, hi = extent(request)
                length = length_ref[request]
                context_tiles = requests_ref[request, 1] - row_tiles
                plgpu.barrier_wait(q_full)

                def step(j, carry, masked):
                    acc, maximum, total = carry
                    slot = slot_of(start + j)
                    plgpu.barrier_wait(kv_full.at[slot])

                    def dot(ref):
                        plgpu.wgmma(ref, ql, latent.at[slot].transpose((1, 0)))
                        plgpu.wgmma(ref, qr, key_rope.at[slot].transpose((1, 0)))
                        return ref[...]

                    s = pl.run_scoped(dot, registers.ACC((TILE_ROWS, BLOCK), jnp.float32)) * scale2
                    if masked:
                        s = registers.hide(s, j, context_tiles, length, load_word, TILE)
                    new_maximum = jnp.maximum(maximum, s.max(axis=1))
                    shrink = jnp.exp2(maximum - new_maximum)
                    p = jnp.exp2(s - spread(new_maximum, s.shape))
                    total = total * shrink + p.sum(axis=1)
                    p = p.astype(jnp.bfloat16)

                    # The very first probabilities of this block of threads find the buffers free.
                    @pl.when(start + j > low)
                    def _():
                        plgpu.barrier_wait(p_free)

                    p_smem[...] = p
                    row_smem[...] = shrink
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready)

                    def weigh(ref):
                        left = latent.at[slot, :, pl.ds(0, half)]
                        plgpu.wgmma(ref, p_smem if interpret is not None else p, left)

                    acc = multiply_add(acc * spread(shrink, acc.shape), weigh)
                    plgpu.barrier_arrive(kv_free.at[slot])
                    return acc, new_maximum, total

                full = jnp.clip(lax.div(length, jnp.int32(BLOCK)), lo, hi)  # tiles up to here need no mask
                carry = (zeros(), filled(registers.FLOOR), filled(0.0))
                carry = lax.fori_loop(lo, full, functools.partial(step, masked=False), carry)
                acc, maximum, total = lax.fori_loop(full, hi, functools.partial(step, masked=True), carry)
                inverse, lse = registers.normaliser(maximum, total, load_word(words - 1))
                plgpu.barrier_wait(p_free)
                row_smem[...] = inverse
                plgpu.barrier_arrive(p_ready)
                result.write_lse(lse, *destination(request, lo, hi))
                left = acc * spread(inverse, acc.shape)
                result.write_values(left, *destination(request, lo, hi), pl.ds(0, half))

            lax.fori_loop(first_request, end_request, one_request, None)

            @pl.when(end_request > first_request)
            def _():
                plgpu.barrier_wait(p_free)

        @pl.when(warpgroup == 1)
        def _values():
            def following(request, j, count, numbers):
                last = j + 1 >= count
                return jnp.where(last, jnp.minimum(request + 1, requests - 1), request), jnp.where(last, 0, j + 1)

            cursor = first_request, low - requests_ref[first_request, 0]
            for i in range(STAGES):
                ahead = look_up(*cursor)
                pl.when(low + i < high)(functools.partial(load_tile, low + i, *ahead))
                cursor = following(*ahead)

            def one_request(request, cursor):
                start, lo, hi = extent(request)

                def step(j, carry):
                    acc, *cursor = carry
                    tile = start + j
                    slot = slot_of(tile)
                    ahead = look_up(*cursor)
                    plgpu.barrier_wait(p_ready)
                    shrink = plgpu.load(row_smem, layout=ROW, optimized=False)

                    def weigh(ref):
                        plgpu.wgmma(ref, p_smem, latent.at[slot, :, pl.ds(half, half)])

                    acc = multiply_add(acc * spread(shrink, acc.shape), weigh)
                    plgpu.barrier_arrive(p_free)
                    if cluster > 1:
                        plgpu.barrier_arrive(kv_free.at[slot])
                    plgpu.barrier_wait(kv_free.at[slot])
                    pl.when(tile + STAGES < high)(lambda: load_tile(tile + STAGES, *ahead))
                    return acc, *following(*ahead)

                acc, *cursor = lax.fori_loop(lo, hi, step, (zeros(), *cursor))
                plgpu.barrier_wait(p_ready)
                inverse = plgpu.load(row_smem, layout=ROW, optimized=False)
                plgpu.barrier_arrive(p_free)
                right = acc * spread(inverse, acc.shape)
                result.write_values(right, *destination(request, lo, hi), pl.ds(half, half))
                return tuple(cursor)

            lax.fori_loop(first_request, end_request, one_request, cursor)

    if cluster > 1:
        # Both warpgroups of every block of the cluster: a multicast copy overwrites the tile of all of them.
        kv_free = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=STAGES)
        launch = {"cluster": (cluster,), "cluster_names": ("cluster",)}
    else:
        kv_free = plgpu.Barrier(num_barriers=STAGES)
        launch = {}
    operands = (q_latent, q_rope, cache_latent, cache_rope, own_latent, own_rope, pages, lengths, mask)
    return schedule.run(
        body,
        operands,
        tables,
        config=config,
        interpret=interpret,
        kernel_name="tree_attention_hopper",
        scratch={
            "ql": registers.tiles(64, TILE_ROWS, rank),
            "qr": registers.tiles(64, TILE_ROWS, rope),
            "latent": registers.tiles(64, STAGES, BLOCK, rank),
            "key_rope": registers.tiles(64, STAGES, BLOCK, rope),
            "p_smem": registers.tiles(64, TILE_ROWS, BLOCK),
            "row_smem": plgpu.SMEM((TILE_ROWS,), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "kv_full": plgpu.Barrier(num_arrivals=2 * BLOCK // page, num_barriers=STAGES),
            "kv_free": kv_free,
            "p_ready": plgpu.Barrier(),
            "p_free": plgpu.Barrier(),
        },
        # The default scratch for reductions would overflow shared memory by 56 bytes; these reductions need none.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        **launch,
    )
