"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over cached prefixes and trees of rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import Linear, Matrix, RMSNorm
from kimi_jax.model.pages import Latents
from kimi_jax.model.rope import Rotation, inverse_frequencies, rotate, rotation
from kimi_jax.model.rows import Rows, join, split
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.context import Queries, attend_in_parts
from pallas_kernels.tree_attention import expanded_pays, prefill_attention, tree_attention


class LatentAttention(nnx.Module):
    """MLA with heads sharded on tp.

    The latent is computed whole on every tp rank, and cached so, or in parts by position (`Latents.axis`).
    """

    def __init__(self, config: ModelConfig):
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim, ("heads", None))
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = Matrix(config.kv_lora_rank, heads * per_head, ("heads", None))
        self.o_proj = Linear(heads * config.v_head_dim, hidden, (None, "heads"))
        self.config = config

    def __call__(
        self, x: Float[Array, "all_rows hidden"], groups: Sequence[Rows], cached: Latents, expanded: bool | None = None
    ) -> tuple[Float[Array, "all_rows hidden"], list[Latents]]:
        """This tp rank's part of the output (to be summed over tp), and each group's own latents for the cache.

        `expanded` picks the form; None lets each group's rows decide (`expanded_pays`). Both give the same values.
        """
        q = split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), groups)
        compressed = split(self.kv_a_proj_with_mqa(x), groups)
        # Rows are turned after the split: a kernel that takes slices of turned ones would leave its graph.
        turns = [self.turn(rows.positions) for rows in groups]
        latents = [self.latents(own, turn) for own, turn in zip(compressed, turns, strict=True)]
        outs = [
            self.attend(rows, q, turn, own, cached, expanded)
            for rows, q, turn, own in zip(groups, q, turns, latents, strict=True)
        ]
        with jax.named_scope("output"):
            return self.o_proj(join(outs)), latents

    def attend(
        self,
        rows: Rows,
        q: Float[Array, "requests rows heads_and_dims"],
        turn: Rotation,
        own: Latents,
        cached: Latents,
        expanded: bool | None,
    ) -> Float[Array, "requests rows heads_and_values"]:
        """One group's attention, before o_proj; `q` are its queries as q_b_proj gives them."""
        config, (cos, sin) = self.config, turn
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        q = q.reshape(*q.shape[:-1], -1, config.qk_head_dim)
        q_nope, q_rope = q[..., :nope], self.rotate(q[..., nope:], cos[..., None, :], sin[..., None, :])
        w = self.kv_b_proj.weight[...].reshape(-1, nope + config.v_head_dim, rank)
        if expanded is None:
            expanded = expanded_pays(q.shape[1], kv_lora_rank=rank, nope=nope, v=config.v_head_dim)

        def over(queries: Queries, lengths: Array, ancestors: Array, valid: Array | None = None):
            keys = (cached.latent, cached.rope, rows.pages, lengths, own.latent, own.rope, ancestors)
            if not expanded:
                return tree_attention(*queries, *keys, scale=config.attention_scale, valid=valid)
            heads = w if cached.axis is None else all_gather(w, cached.axis)
            halves = (heads[:, :nope], heads[:, nope:])
            return prefill_attention(*queries, *keys, *halves, scale=config.attention_scale, valid=valid)

        if expanded:
            queries = (q_nope, q_rope)
        else:
            # Both products take all of kv_b_proj: XLA would write its key and value halves anew to multiply by them.
            padded = jnp.pad(q_nope, [(0, 0)] * 3 + [(0, config.v_head_dim)])
            queries = (jnp.einsum("brhp,hpc->brhc", padded, w), q_rope)
        if cached.axis is None:
            out, _ = over(queries, rows.lengths, rows.ancestors)
        else:
            out = attend_in_parts(over, queries, rows.lengths, rows.ancestors, cached.axis)
        if not expanded:
            out = jnp.einsum("brhc,hpc->brhp", out, w)[..., nope:]
        return out.reshape(*out.shape[:-2], -1)

    def turn(self, positions: Int[Array, "requests rows"]) -> Rotation:
        """Rotation of the rows' rope parts."""
        config = self.config
        amplitude = config.yarn.amplitude if config.yarn else 1.0
        frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        return rotation(positions, frequencies, amplitude)

    def latents(self, compressed: Float[Array, "requests rows rank_and_rope"], turn: Rotation) -> Latents:
        """The rows' own latents and rotated rope keys, as the cache takes them, from what kv_a_proj gives."""
        rank = self.config.kv_lora_rank
        return Latents(self.kv_a_layernorm(compressed[..., :rank]), self.rotate(compressed[..., rank:], *turn))

    def rotate(self, x: Float[Array, "... rope"], cos: Array, sin: Array) -> Float[Array, "... rope"]:
        """Rope parts turned in the pairs that the configuration says."""
        return rotate(x, cos, sin, interleaved=self.config.rope_interleave)
