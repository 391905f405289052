"""MoonViT and its projector: the patches of one medium to rows that stand in for its placeholders.

Attribute names are the checkpoint's, so a weight's path in this tree is its key in the file. The weights are no
experts' and not quantised; each device has all of them, and media are spread over devices (`vision.encoder`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from kimi_jax.parameters import weight
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.positions import MERGE, merged, places, resized, rotate, rotation, temporal

EPS = 1e-5
"""Of the tower's norms; the projector's is a field of the configuration."""
QUERIES = 256
"""Patches whose scores are in memory at the same time."""
CHANNELS = 3


class Affine(nnx.Module):
    """y = x Wᵀ + b."""

    def __init__(self, inputs: int, outputs: int):
        self.weight = weight((outputs, inputs), (None, None))
        self.bias = weight((outputs,), (None,))

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        return jnp.einsum("...i,oi->...o", x, self.weight[...]) + self.bias[...]


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) in float32, scaled and shifted."""

    def __init__(self, size: int, eps: float):
        self.weight = weight((size,), (None,))
        self.bias = weight((size,), (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normalised = centred * jax.lax.rsqrt(variance + self.eps)
        return (normalised * self.weight[...] + self.bias[...]).astype(x.dtype)


class Convolution(nnx.Module):
    """The projection of a patch, stored as a convolution whose stride is its side."""

    def __init__(self, config: VisionConfig):
        side = config.patch_size
        self.weight = weight((config.hidden_size, CHANNELS, side, side), (None,) * 4)
        self.bias = weight((config.hidden_size,), (None,))

    def __call__(self, x: Float[Array, "patches pixels"]) -> Float[Array, "patches hidden"]:
        matrix = self.weight[...]
        return x @ matrix.reshape(matrix.shape[0], -1).T + self.bias[...]


class LearnedPositions(nnx.Module):
    """One vector for each place of a grid."""

    def __init__(self, config: VisionConfig):
        shape = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.weight = weight(shape, (None,) * 3)


class PatchEmbedding(nnx.Module):
    """Projection and positions."""

    def __init__(self, config: VisionConfig):
        self.proj = Convolution(config)
        self.pos_emb = LearnedPositions(config)


class MLP(nnx.Module):
    """fc1(gelu(fc0 x)), its GELU approximated by tanh."""

    def __init__(self, config: VisionConfig):
        self.fc0 = Affine(config.hidden_size, config.intermediate_size)
        self.fc1 = Affine(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "patches hidden"]:
        return self.fc1(jax.nn.gelu(self.fc0(x), approximate=True))


class Block(nnx.Module):
    """x + attention(norm x), then + mlp(norm ·)."""

    def __init__(self, config: VisionConfig):
        self.norm0 = LayerNorm(config.hidden_size, EPS)
        self.norm1 = LayerNorm(config.hidden_size, EPS)
        self.wqkv = Affine(config.hidden_size, 3 * config.hidden_size)
        self.wo = Affine(config.hidden_size, config.hidden_size)
        self.mlp = MLP(config)
        self.heads = config.num_attention_heads

    def __call__(
        self, x: Float[Array, "patches hidden"], turn: tuple[Array, Array], count: Int[Array, ""]
    ) -> Float[Array, "patches hidden"]:
        split = self.wqkv(self.norm0(x)).reshape(len(x), 3, self.heads, -1)
        q, k = (rotate(split[:, part], *turn) for part in range(2))
        x = x + self.wo(attention(q, k, split[:, 2], count).reshape(x.shape))
        return x + self.mlp(self.norm1(x))


def attention(
    q: Float[Array, "patches heads width"],
    k: Float[Array, "patches heads width"],
    v: Float[Array, "patches heads width"],
    count: Int[Array, ""],
) -> Float[Array, "patches heads width"]:
    """Every patch sees the first `count`. Scores are float32, and `QUERIES` rows of them exist at a time."""
    patches, _, width = q.shape
    seen = jnp.arange(patches) < jnp.maximum(count, 1)

    def block(q: Array) -> Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * width**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)

    if patches <= QUERIES:
        return block(q)
    return jax.lax.map(block, q.reshape(-1, QUERIES, *q.shape[1:])).reshape(q.shape)


class Encoder(nnx.Module):
    """All blocks, and a last norm."""

    def __init__(self, config: VisionConfig):
        self.blocks = nnx.List([Block(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = LayerNorm(config.hidden_size, EPS)


class VisionTower(nnx.Module):
    """MoonViT."""

    def __init__(self, config: VisionConfig):
        self.patch_embed = PatchEmbedding(config)
        self.encoder = Encoder(config)
        self.config = config

    def __call__(
        self, pixels: Float[Array, "patches pixels"], grid: Int[Array, "3"]
    ) -> Float[Array, "tokens 4 hidden"]:
        """The four merged patches of every token of one medium, averaged over its frames."""
        where = places(grid, len(pixels))
        with jax.named_scope("patches"):
            x = self.patch_embed.proj(pixels)
            x = x + resized(self.patch_embed.pos_emb.weight[...], grid, where).astype(x.dtype)
            x = x + temporal(where.frames, grid, x.shape[1]).astype(x.dtype)
        turn = rotation(where, self.config.head_dim)
        for index, block in enumerate(self.encoder.blocks):
            with jax.named_scope(f"block{index}"):
                x = block(x, turn, grid.prod())
        return merged(self.encoder.final_layernorm(x), grid)


class Gelu(nnx.Module):
    """The exact GELU, which has no weights but a place in the projector's list."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.nn.gelu(x, approximate=False)


class Projector(nnx.Module):
    """Four patches of the tower to one row of the language model."""

    def __init__(self, config: VisionConfig):
        merged_size = MERGE**2 * config.hidden_size
        self.pre_norm = LayerNorm(config.hidden_size, config.projector_ln_eps)
        self.proj = nnx.List([Affine(merged_size, merged_size), Gelu(), Affine(merged_size, config.text_hidden_size)])

    def __call__(self, x: Float[Array, "tokens 4 hidden"]) -> Float[Array, "tokens text_hidden"]:
        x = self.pre_norm(x).reshape(len(x), -1)
        for layer in self.proj:
            x = layer(x)
        return x


class VisionModel(nnx.Module):
    """Tower and projector. Building it allocates nothing: see `parameters`."""

    def __init__(self, config: VisionConfig):
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)
        self.config = config

    def __call__(
        self, patches: UInt8[Array, "patches pixels"], grid: Int[Array, "3"]
    ) -> Float[Array, "tokens text_hidden"]:
        """Rows of the language model for one medium of `grid` (frames, rows, columns), with padding behind both.

        The pixels of a patch are its three colours one after the other, each row by row, of 0 to 255. There are a
        quarter as many tokens as patches; a grid's own are rows · columns / 4 whatever its frames.
        """
        with jax.named_scope("vision"):
            dtype = self.mm_projector.pre_norm.weight[...].dtype
            pixels = ((patches.astype(jnp.float32) / 255 - 0.5) / 0.5).astype(dtype)
            return self.mm_projector(self.vision_tower(pixels, grid))
