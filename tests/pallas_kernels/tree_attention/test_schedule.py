import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.schedule import pack_mask, plan
from pallas_kernels.tree_attention.shapes import ancestors_of


def test_every_tile_belongs_to_one_piece_and_cut_requests_are_joined():
    rng = np.random.default_rng(0)
    cut = jax.jit(plan, static_argnums=(1, 2, 3, 4))
    pieces_that_span_requests = requests_that_are_cut = empty_pieces = 0
    sizes = [
        (1, 1, 1, 1),
        (1, 7, 1, 1),
        (1, 5, 3, 2),
        (5, 1, 1, 1),
        (5, 3, 1, 1),
        (4, 4, 2, 1),
        (3, 7, 1, 2),
        (2, 3, 4, 1),
    ]
    for requests, splits, min_tiles, row_tiles in 15 * sizes:
        lengths = rng.integers(0, 600, requests) * rng.integers(0, 2, requests)
        pieces, spans, joins = map(np.asarray, cut(jnp.asarray(lengths, jnp.int32), row_tiles, 64, splits, min_tiles))
        tiles = -(-lengths // 64) + row_tiles
        np.testing.assert_array_equal(spans[:, 1], tiles)
        parts = [[] for _ in range(requests)]
        for piece, (low, high, first, end) in enumerate(pieces):
            covered = 0
            for request in range(first, end):
                start, count = spans[request]
                lo, hi = max(low - start, 0), min(high - start, count)
                assert lo < hi
                covered += hi - lo
                parts[request].append((piece, lo, hi))
            assert covered == high - low
            pieces_that_span_requests += end - first > 1
            empty_pieces += high == low
        busy = [high - low for low, high, *_ in pieces if high > low]
        assert len(set(busy[:-1])) <= 1
        assert min(busy[:-1], default=min_tiles) >= min_tiles
        joined = {request: (first, end) for request, first, end in joins if request >= 0}
        assert len(joined) == (joins[:, 0] >= 0).sum()
        for request, own in enumerate(parts):
            assert [lo for _, lo, _ in own] == [0] + [hi for _, _, hi in own[:-1]]
            assert own[-1][2] == tiles[request]
            requests_that_are_cut += len(own) > 1
            assert joined.get(request) == ((own[0][0], own[-1][0] + 1) if len(own) > 1 else None)
    assert min(pieces_that_span_requests, requests_that_are_cut, empty_pieces) > 20


def test_mask_bits():
    ancestors = ancestors_of([list(range(-1, 39))], 40)  # a chain: row i sees 0..i
    valid = np.arange(40)[None] < 39
    mask = np.asarray(pack_mask(jnp.asarray(ancestors), jnp.asarray(valid), heads=2, block=64, padded=128))
    assert mask.shape == (1, 3, 128)
    words = mask.astype(np.uint32)
    for row in range(40):
        for query_row in (2 * row, 2 * row + 1):
            bits = (2 ** (row + 1) - 1) * (row < 39)
            low, high, is_valid = words[0, :, query_row]
            assert (int(low) | int(high) << 32, is_valid) == (bits, row < 39)
    assert (words[0, :, 80:] == 0).all()
