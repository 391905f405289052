import numpy as np
import pytest


def experts_in_float64(x, expert_ids, expert_weights, *stacks):
    """The INT4 mixture pair by pair, unpacked from the published format (compressed-tensors 0.20.1, pack_quantized)."""

    def unpack(stack):
        packed, scale = np.asarray(stack.packed).view(np.uint32), np.asarray(stack.scale, np.float64)
        codes = np.stack([(packed >> np.uint32(4 * j)) & 15 for j in range(8)], -1).reshape(*packed.shape[:-1], -1)
        return (codes.astype(np.float64) - 8) * np.repeat(scale, 32, -1)

    gate, up, down = map(unpack, stacks)
    x, router = np.asarray(x, np.float64), np.asarray(expert_weights)
    out = np.zeros(x.shape)
    for row, experts in enumerate(np.asarray(expert_ids)):
        for k, e in enumerate(experts):
            if 0 <= e < len(gate):
                g = gate[e] @ x[row]
                out[row] += router[row, k] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[row])))
    return out


def softmax_over_paths(
    q_latent, q_rope, latent, rope, pages, lengths, own_latent, own_rope, ancestors, *, scale=0.14467962580268923
):
    """Each row as the last token of its own path, in float64: keys gathered, then an ordinary softmax."""
    queries = np.concatenate([np.asarray(q_latent, np.float64), np.asarray(q_rope, np.float64)], -1)
    pool = np.concatenate([np.asarray(latent, np.float64), np.asarray(rope, np.float64)], -1)
    own = np.concatenate([np.asarray(own_latent, np.float64), np.asarray(own_rope, np.float64)], -1)
    rank = q_latent.shape[-1]
    out = np.zeros(q_latent.shape)
    lse = np.full(q_latent.shape[:3], -np.inf)
    for b, length in enumerate(np.asarray(lengths)):
        filled = np.asarray(pages)[b, : -(-length // pool.shape[1])]
        cached = pool[filled].reshape(-1, pool.shape[-1])[:length]
        for i, sees in enumerate(np.asarray(ancestors[b])):
            if not sees.any():
                continue
            keys = np.concatenate([cached, own[b, sees]])
            scores = queries[b, i] @ keys.T * scale
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out[b, i] = weights / total @ keys[:, :rank]
            lse[b, i] = (top + np.log(total))[:, 0]
    return out, lse


ORACLES = {"int4_moe": experts_in_float64, "tree_attention": softmax_over_paths}


@pytest.fixture(scope="session")
def oracles():
    """By operation, what it computes, in float64 NumPy."""
    return ORACLES
