"""DFlash: a block of masks is turned into a distribution for each position by one forward that sees the target's taps.

Model of the package `dflash` 0.1.0 (`DFlashDraftModel`, `DFlash2DraftModel`). A tap is the residual stream after a
target layer (0-based id, attention and MLP added, before the model's final norm). The taps of a token are fused once,
c = RMSNorm(W_fc [tap; tap; ...]), and every layer computes keys and values from the same c beside those of the block.
Embedding and head are the target's.

Heads and MLP width are sharded on tp; where tp does not divide the key-value heads, their projections are whole on
every device, which computes and stores the one head its queries read.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ddtree.tree import top_log_probs
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.context import Context, LayerContext, slot_positions
from kimi_jax.drafter.dflash2 import CandidateSelector, GroupedDynamicConv
from kimi_jax.model.layers import GatedMLP, Linear, RMSNorm
from kimi_jax.model.rope import Rotation, inverse_frequencies, rotate, rotation
from kimi_jax.parallel.collectives import all_gather, all_reduce, axis_index

Embed = Callable[[Int[Array, "requests block"]], Float[Array, "requests block hidden"]]
"""The target's embedding."""
Head = Callable[[Float[Array, "requests depth hidden"]], Float[Array, "requests depth vocab_local"]]
"""The target's output head, without its final norm."""


class Attention(nnx.Module):
    """Grouped-query attention of the block on the context and itself."""

    def __init__(self, config: DrafterConfig, layer: int, tp: int):
        hidden, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"tp {tp} does not divide {heads} heads and {kv_heads} key-value heads evenly")
        kv_axes = (None if kv_heads % tp else "heads", None)
        self.q_proj = Linear(hidden, heads * size, ("heads", None))
        self.k_proj = Linear(hidden, kv_heads * size, kv_axes)
        self.v_proj = Linear(hidden, kv_heads * size, kv_axes)
        self.o_proj = Linear(heads * size, hidden, (None, "heads"))
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)
        self.head_dim, self.group = size, heads // kv_heads
        self.causal, self.window = config.causal(layer), config.window(layer)

    def keys_and_values(
        self, x: Float[Array, "requests rows hidden"], turn: Rotation
    ) -> tuple[Float[Array, "requests kv_heads rows head_dim"], Float[Array, "requests kv_heads rows head_dim"]]:
        """Of context or block rows: the same projections, for this device's heads."""

        def project(projection: Linear) -> Array:
            # All layers project the same context: without the barrier XLA joins their weights anew for one product.
            rows, w = lax.optimization_barrier((x, self._own(projection)))
            return projection.product(rows, w).reshape(*x.shape[:-1], -1, self.head_dim)

        keys, values = _rotate(self.k_norm(project(self.k_proj)), turn), project(self.v_proj)
        return keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def _own(self, projection: Linear) -> Array:
        """Weights of the key-value heads that this device's queries read: all of them unless they are replicated."""
        queries = self.q_proj.outputs // self.head_dim
        own = max(1, queries // self.group)
        if projection.outputs == own * self.head_dim:
            return projection.weight[...]
        first = axis_index("tp") * queries // self.group
        return projection.part(first * self.head_dim, own * self.head_dim)

    def __call__(
        self,
        x: Float[Array, "requests block hidden"],
        turn: Rotation,
        context: LayerContext,
        start: Int[Array, " requests"],
    ) -> Float[Array, "requests block hidden"]:
        """Output for the block at positions `start` and on, seeing context positions before `start`."""
        q = self.q_proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
        q = _rotate(self.q_norm(q), turn)
        keys, values = self.keys_and_values(x, turn)
        q = q.reshape(*q.shape[:2], keys.shape[1], -1, self.head_dim)
        past, present = self._masks(start, context.keys.shape[2], x.shape[1])

        def scores(k: Array, mask: Array) -> Array:
            s = jnp.einsum("rqhgd,rhkd->rhgqk", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
            return jnp.where(mask[:, None, None], s * self.head_dim**-0.5, -jnp.inf)

        # Scores are joined, never the cache; each block token sees at least itself, so no row is empty.
        joined = jnp.concatenate([scores(context.keys, past), scores(keys, present)], axis=-1)
        weights = jax.nn.softmax(joined, axis=-1).astype(values.dtype)
        split = context.keys.shape[2]
        out = jnp.einsum("rhgqk,rhkd->rqhgd", weights[..., :split], context.values.astype(values.dtype))
        out = out + jnp.einsum("rhgqk,rhkd->rqhgd", weights[..., split:], values)
        return all_reduce(self.o_proj(out.reshape(*x.shape[:-1], -1)), "tp")

    def _masks(
        self, start: Int[Array, " requests"], window: int, block: int
    ) -> tuple[Bool[Array, "requests block window"], Bool[Array, "1 block block"]]:
        """What each block token sees of the context's slots and of the block."""
        position, filled = slot_positions(start, window)
        offset = jnp.arange(block)
        distance = start[:, None, None] + offset[:, None] - position[:, None]
        between = offset[:, None] - offset
        past, present = filled[:, None] & (distance > 0), jnp.ones((block, block), bool)
        if self.causal:
            present &= between >= 0
        if self.window is not None:
            past &= distance < self.window
            present &= abs(between) < self.window
        return past, present[None]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated MLP, each between two convolutions in DFlash 2."""

    def __init__(self, config: DrafterConfig, layer: int, tp: int):
        hidden = config.hidden_size
        self.self_attn = Attention(config, layer, tp)
        self.mlp = GatedMLP(hidden, config.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.attention_conv, self.mlp_conv = _conv(config), _conv(config)

    def __call__(
        self,
        x: Float[Array, "requests block hidden"],
        turn: Rotation,
        context: LayerContext,
        start: Int[Array, " requests"],
    ) -> Float[Array, "requests block hidden"]:
        """The block after this layer."""

        def attend(h: Array) -> Array:
            return self.self_attn(h, turn, context, start)

        def transform(h: Array) -> Array:
            return all_reduce(self.mlp(h), "tp")

        x = x + _between(self.attention_conv, attend, self.input_layernorm(x))
        return x + _between(self.mlp_conv, transform, self.post_attention_layernorm(x))


class DFlash(nnx.Module):
    """The drafter; paths of its weights are the keys of the public checkpoints.

    All methods run inside the program's `shard_map` and see their device's requests and shards.

    Args:
      config: of a DFlash or DFlash 2 drafter.
      tp: size of the mesh axis that heads are sharded on.

    Raises:
      ValueError: tp does not divide the heads.
    """

    def __init__(self, config: DrafterConfig, tp: int = 1):
        hidden = config.hidden_size
        self.fc = Linear(len(config.target_layer_ids) * hidden, hidden, ("mlp", None))
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nnx.List([DecoderLayer(config, layer, tp) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        rank = config.selector_rank
        self.candidate_selector = CandidateSelector(config.vocab_size, hidden, rank) if rank else None
        self.config = config

    def fuse(self, taps: Float[Array, "*rows taps hidden"]) -> Float[Array, "*rows hidden"]:
        """The context feature of each token from its taps, in the order of `target_layer_ids`."""
        fused = self.fc(taps.reshape(*taps.shape[:-2], -1))
        return self.hidden_norm(all_gather(fused, "tp", dimension=fused.ndim - 1))

    def context_rows(self, taps: Float[Array, "requests rows taps hidden"], start: Int[Array, " requests"]) -> Context:
        """Keys and values of rows at positions `start` and on, as `context.write` takes them.

        With `start` 0 and whole texts, position p stands in slot p: a context for blocks anywhere in them, as training
        uses it.
        """
        turn = self.turn(start, taps.shape[1])
        fused = self.fuse(taps)
        return [LayerContext(*layer.self_attn.keys_and_values(fused, turn)) for layer in self.layers]

    def draft(
        self,
        context: Context,
        anchor: Int[Array, " requests"],
        start: Int[Array, " requests"],
        embed: Embed,
        block: int | None = None,
    ) -> Float[Array, "requests depth hidden"]:
        """Hidden states of the drafted positions `start` + 1 and on; `logits` takes them.

        Args:
          context: of the positions before `start`; a request's context may have any length.
          anchor: the last token of the text: sampled, not yet run by the target, at position `start`.
          start: position of the anchor, the number of tokens whose context is there.
          embed: the target's embedding.
          block: tokens of the block, the anchor included; the configuration's `block_size` by default.
        """
        block = block or self.config.block_size
        ids = jnp.full((anchor.shape[0], block), self.config.mask_token_id, anchor.dtype).at[:, 0].set(anchor)
        x = embed(ids) * self.config.input_embedding_scale
        turn = self.turn(start, block)
        for layer, ring in zip(self.layers, context, strict=True):
            x = layer(x, turn, ring, start)
        return self.norm(x)[:, 1:]

    def logits(self, hidden: Float[Array, "requests depth hidden"], head: Head) -> Float[Array, "requests depth local"]:
        """Logits of this device's part of the vocabulary, in float32."""
        logits = head(hidden).astype(jnp.float32) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def candidates(
        self,
        hidden: Float[Array, "requests depth hidden"],
        logits: Float[Array, "requests depth vocab_local"],
        anchor: Int[Array, " requests"],
        k: int,
    ) -> tuple[Float[Array, "requests depth parents k"], Int[Array, "requests depth k"]]:
        """Candidates of each position and their log-probabilities after each candidate of the position before.

        What `ddtree.tree.build_lattice` takes. DFlash's positions are independent (one parent, the top `k`); DFlash 2's
        selector has its own number of candidates, `selector_top_k`.
        """
        if self.candidate_selector is None:
            values, ids = top_log_probs(logits, k)
            return values[:, :, None], ids
        values, ids = top_log_probs(logits, self.config.selector_top_k or k)
        return self.candidate_selector(hidden, values, ids, anchor), ids

    def turn(self, start: Int[Array, " requests"], rows: int) -> Rotation:
        """Rotation of the rows that begin at each request's position `start`."""
        config = self.config
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.yarn)
        return rotation(start[:, None] + jnp.arange(rows), frequencies, config.attention_factor)


def _conv(config: DrafterConfig) -> GroupedDynamicConv | None:
    kernel, group = config.conv_kernel_size, config.conv_group_size
    return GroupedDynamicConv(config.hidden_size, kernel, group) if kernel and group else None


def _between(
    conv: GroupedDynamicConv | None, sublayer: Callable[[Array], Array], x: Float[Array, "requests block hidden"]
) -> Float[Array, "requests block hidden"]:
    if conv is None:
        return sublayer(x)
    x, kernel = conv.prepare(x)
    return conv.finish(sublayer(x), kernel)


def _rotate(x: Float[Array, "requests rows heads dim"], turn: Rotation) -> Float[Array, "requests rows heads dim"]:
    cos, sin = (part[:, :, None] for part in turn)
    return rotate(x, cos, sin, interleaved=False)


def stack_taps(taps: Sequence[Float[Array, "requests rows hidden"]]) -> Float[Array, "requests rows taps hidden"]:
    """Taps as `context_rows` takes them, from one array for each of `target_layer_ids`."""
    return jnp.stack(list(taps), axis=-2)
