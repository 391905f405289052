"""The drafter again, in numpy and float64 and without a cache: all taps of the text at once, every mask spelled out."""

import math

import numpy as np


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def frequencies(config):
    half = config.head_dim // 2
    plain = np.array([config.rope_theta ** (-i / half) for i in range(half)])
    if config.yarn is None:
        return plain
    yarn = config.yarn

    def pair(turns):
        return half * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns), config.rope_theta)

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), config.head_dim - 1)
    slow = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
    return plain / yarn.factor * slow + plain * (1 - slow)


def rotate(x, positions, config):
    """[rows, heads, dim] at [rows]."""
    angle = positions[:, None, None] * frequencies(config)
    turn = np.exp(1j * angle) * config.attention_factor
    half = config.head_dim // 2
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def convolve(x, base, dynamic):
    """x [rows, hidden], base [taps, hidden], dynamic [rows, taps, groups]."""
    out = np.zeros_like(x)
    group = x.shape[1] // dynamic.shape[2]
    for row in range(len(x)):
        for tap in range(min(len(base), row + 1)):
            out[row] += (base[tap] + np.repeat(dynamic[row, tap], group)) * x[row - tap]
    return out


def draft(config, weights, embed, taps, anchor, block=None):
    """Hidden states [block, hidden] of one request whose text so far has taps [length, K, hidden]."""
    w = {key: np.asarray(value, np.float64) for key, value in weights.items()}
    block = block or config.block_size
    start, eps, size = len(taps), config.rms_norm_eps, config.head_dim
    context = rms_norm(
        taps.reshape(start, taps.shape[1] * taps.shape[2]) @ w["fc.weight"].T, w["hidden_norm.weight"], eps
    )
    x = np.asarray(embed, np.float64)[[anchor] + [config.mask_token_id] * (block - 1)] * config.input_embedding_scale
    positions = np.arange(start + block)
    group = config.num_attention_heads // config.num_key_value_heads

    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."

        def sublayer(x, conv, function, p=p):
            if config.conv_kernel_size is None:
                return function(x)
            base = w[f"{p}{conv}.base_kernel"]
            dynamic = x @ w[f"{p}{conv}.kernel_projection.weight"].T
            dynamic = dynamic.reshape(len(x), 2, config.conv_kernel_size, -1)
            return convolve(function(convolve(x, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])

        def attention(x, p=p, i=i):
            both = np.concatenate([context, x])
            q, k, v = (
                (rows @ w[f"{p}self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, size)
                for name, rows in (("q", x), ("k", both), ("v", both))
            )
            q = rotate(rms_norm(q, w[p + "self_attn.q_norm.weight"], eps), positions[start:], config)
            k = rotate(rms_norm(k, w[p + "self_attn.k_norm.weight"], eps), positions, config)
            out = np.zeros_like(q)
            for a in range(block):
                at = start + a
                seen = []
                for key in positions:
                    sees = key >= start - config.draft_window
                    if config.window(i) is not None:
                        sees &= abs(at - key) < config.window(i)
                    if config.causal(i):
                        sees &= key <= at
                    seen.append(sees)
                for head in range(config.num_attention_heads):
                    s = np.where(seen, k[:, head // group] @ q[a, head] / math.sqrt(size), -np.inf)
                    e = np.exp(s - s.max())
                    out[a, head] = e / e.sum() @ v[:, head // group]
            return out.reshape(block, -1) @ w[p + "self_attn.o_proj.weight"].T

        def mlp(x, p=p):
            gate = x @ w[p + "mlp.gate_proj.weight"].T
            up = x @ w[p + "mlp.up_proj.weight"].T
            return (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T

        x = x + sublayer(rms_norm(x, w[p + "input_layernorm.weight"], eps), "attention_conv", attention)
        x = x + sublayer(rms_norm(x, w[p + "post_attention_layernorm.weight"], eps), "mlp_conv", mlp)
    return rms_norm(x, w["norm.weight"], eps)
