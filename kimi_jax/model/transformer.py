"""The language model: one forward over rows that see cached prefixes and each other through tree masks.

Prefill, one-token decoding and tree verification are the same call. A causal chunk is a tree that is a path; one new
token is a tree of one node.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import ModelConfig
from kimi_jax.model.attention import LatentAttention
from kimi_jax.model.layers import Embedding, GatedMLP, Linear, RMSNorm
from kimi_jax.model.moe import Experts, MakeExperts, MixtureOfExperts
from kimi_jax.model.pages import Cache, Latents, empty_cache
from kimi_jax.model.rows import Rows, join, split
from kimi_jax.parallel.collectives import all_reduce
from kimi_jax.parallel.exchange import Exchange, allgather
from kimi_jax.parallel.placement import Placement, even_placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What one forward leaves."""

    hidden: Float[Array, "requests rows hidden"]
    """After the final norm, what the head takes."""
    latents: list[Latents]
    """The rows' own latents, one entry a layer, to commit to the cache."""
    taps: list[Float[Array, "requests rows hidden"]]
    """Residual stream after each tapped layer, before any further norm."""


class DecoderLayer(nnx.Module):
    """x + attention(norm x), then + mlp(norm ·); each half ends in one sum over tp."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement | None, exchange: Exchange,
        make_experts: MakeExperts,
    ):  # fmt: skip
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size)
            if placement is None
            else MixtureOfExperts(config, placement, exchange, make_experts)
        )

    def __call__(
        self, x: Float[Array, "all_rows hidden"], groups: Sequence[Rows], cached: Latents, expanded: bool | None
    ) -> tuple[Float[Array, "all_rows hidden"], list[Latents]]:
        with jax.named_scope("attention"):
            partial, own = self.self_attn(self.input_layernorm(x), groups, cached, expanded)
        with jax.named_scope("reductions"):
            x = x + all_reduce(partial, "tp")
        normalised = self.post_attention_layernorm(x)
        if isinstance(self.mlp, GatedMLP):
            with jax.named_scope("dense"):
                partial = self.mlp(normalised)
        else:
            partial = self.mlp(normalised, join([rows.valid for rows in groups]))
        with jax.named_scope("reductions"):
            return x + all_reduce(partial, "tp"), own


class Transformer(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, placements: Mapping[int, Placement], exchange: Exchange, make_experts: MakeExperts
    ):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, placements.get(layer), exchange, make_experts)
                for layer in range(config.num_hidden_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.config = config

    def __call__(
        self, rows: Rows, cache: Cache | None = None, tap_layers: Sequence[int] = (), expanded: bool | None = None
    ) -> Output:
        """Runs one group of rows; see `of_groups`."""
        return self.of_groups([rows], cache, tap_layers, expanded)[0]

    def of_groups(
        self,
        groups: Sequence[Rows],
        cache: Cache | None = None,
        tap_layers: Sequence[int] = (),
        expanded: bool | None = None,
    ) -> list[Output]:
        """Runs the rows of all groups together; an output for each group.

        Attention goes group by group, everything else over all rows at once. The cache is read, not written:
        `pages.commit` does that; None where nothing is cached. `tap_layers` are 0-based ids of layers whose output
        residual stream is kept, in ascending order of use.
        """
        x = self.embed_tokens(join([rows.tokens for rows in groups]))
        if any(rows.embeddings is not None for rows in groups):
            nothing = [jnp.zeros((*rows.tokens.shape, x.shape[-1]), x.dtype) for rows in groups]
            given = [rows.embeddings for rows in groups]
            x = x + join([zeros if own is None else own for zeros, own in zip(nothing, given, strict=True)])
        cache = empty_cache(self.config, 0, x.dtype) if cache is None else cache
        latents, taps = [], {}
        for index, (layer, cached) in enumerate(zip(self.layers, cache, strict=True)):
            with jax.named_scope(f"layer{index}"):
                x, own = layer(x, groups, cached, expanded)
            latents.append(own)
            if index in tap_layers:
                taps[index] = split(x, groups)
        return [
            Output(hidden, [own[group] for own in latents], [taps[layer][group] for layer in tap_layers])
            for group, hidden in enumerate(split(self.norm(x), groups))
        ]


class CausalLM(nnx.Module):
    """The whole language model. Building it allocates nothing: see `parameters`.

    Attribute names are the checkpoint's, so a weight's path in this tree is its key in the file.

    Args:
      placement: of the experts of all layers alike, or one for each layer that has experts, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement | Sequence[Placement] | None = None,
        exchange: Exchange = allgather,
        make_experts: MakeExperts = Experts,
    ):
        placement = placement or even_placement(config.n_routed_experts, 1)
        layers = range(config.first_k_dense_replace, config.num_hidden_layers)
        each = placement if isinstance(placement, Sequence) else [placement] * max(1, len(layers))
        placements = dict(zip(layers, each, strict=bool(layers)))
        self.model = Transformer(config, placements, exchange, make_experts)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, ("vocab", None))
        self.config = config
        self.placement = each[0]
        """Of the first layer that has experts; the others have as many slots, by default with the same experts."""
        self.slot_experts = {layer: placement.slot_experts for layer, placement in placements.items()}
        """Expert in each slot, by layer, as checkpoints are read and written."""

    def logits(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of this tp rank's part of the vocabulary."""
        with jax.named_scope("head"):
            return self.lm_head(hidden).astype(jnp.float32)
