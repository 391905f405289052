"""Weights as the matrix products of one CPU read them: laid out once, when a checkpoint is opened.

XLA's products of several rows on a CPU read a matrix that lies as [in, out] up to twice as fast as the checkpoint's
[out, in], and six times from a cold cache; the INT4 reference, which unpacks a small stack whole, would do so in every
dispatch; and a product of each head's own is run head by head, at several times its cost (docs/small_model.md). Texts
do not change: a code times its scale is exact in float32, and a product of two matrices in advance only rounds
elsewhere. Memory does: a stack takes seven times its INT4 bytes. Simulated meshes keep the checkpoint's form, because
they stand for GPUs.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.attention import LatentAttention
from kimi_jax.model.layers import GatedMLP, Linear
from kimi_jax.model.moe import Experts, MixtureOfExperts
from kimi_jax.model.pages import Latents
from kimi_jax.model.rows import Rows, join, split
from kimi_jax.model.transformer import DecoderLayer
from kimi_jax.parameters import Parameters, Path, weight
from kimi_jax.quantization import Int4Weight
from pallas_kernels.int4_moe.reference import UNPACKED_WEIGHTS, unpack_inputs, unpack_outputs, unpacked_moe
from pallas_kernels.tree_attention import tree_attention


class UnpackedExperts(nnx.Module):
    """The routed experts of one layer in float32, all slots in one matrix for each projection."""

    def __init__(self, config: ModelConfig, slots: int):
        hidden, stacked = config.hidden_size, slots * config.moe_intermediate_size
        self.gate_up = weight((hidden, 2 * stacked), (None, None), jnp.float32)
        self.down = weight((stacked, hidden), (None, None), jnp.float32)
        self.num_local = slots

    def __call__(
        self,
        x: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        routed_rows: int | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Weighted sum over the slots; other ids contribute nothing."""
        y = unpacked_moe(x, slots, weights, self.gate_up[...], self.down[...], slots=self.num_local)
        return y.astype(x.dtype)


class MergedMLP(GatedMLP):
    """A gated MLP with gate and up in one matrix."""

    def __init__(self, mlp: GatedMLP):
        width, hidden = mlp.gate_proj.weight.get_value().shape
        self.gate_up = weight((hidden, 2 * width), (None, None))
        self.down = weight((width, hidden), (None, None))

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ self.down[...]


class AbsorbedAttention(LatentAttention):
    """Latent attention with both halves of kv_b_proj multiplied into their neighbours (DeepSeek-V2, section 2.1.2).

    q_a_proj and kv_a_proj_with_mqa stand side by side.
    """

    def __init__(self, attention: LatentAttention):
        config = self.config = attention.config
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.q_a_layernorm, self.kv_a_layernorm = attention.q_a_layernorm, attention.kv_a_layernorm
        self.a_proj = weight((config.hidden_size, config.q_lora_rank + rank + config.qk_rope_head_dim), (None, None))
        self.q_absorbed = weight((config.q_lora_rank, heads * (rank + config.qk_rope_head_dim)), (None, None))
        self.o_absorbed = weight((heads * rank, config.hidden_size), (None, None))

    def absorbed(self, held: Parameters) -> Parameters:
        """The weights of a `LatentAttention` as this module takes them."""
        config = self.config
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        a = [held.pop(name)["weight"].T for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        q, kv, o = (held.pop(name)["weight"] for name in ("q_b_proj", "kv_b_proj", "o_proj"))
        q, kv, o = q.reshape(heads, -1, q.shape[1]), kv.reshape(heads, -1, kv.shape[1]), o.reshape(len(o), heads, -1)
        keys = jnp.einsum("hnq,hnc->qhc", q[:, :nope], kv[:, :nope], precision="highest")
        joined = jnp.concatenate([keys, q[:, nope:].transpose(2, 0, 1)], axis=-1)
        values = jnp.einsum("hvc,ohv->hco", kv[:, nope:], o, precision="highest")
        return held | {
            "a_proj": jnp.concatenate(a, axis=1),
            "q_absorbed": joined.reshape(len(joined), -1),
            "o_absorbed": values.reshape(-1, values.shape[-1]),
        }

    def __call__(
        self, x: Float[Array, "all_rows hidden"], groups: Sequence[Rows], cached: Latents, expanded: bool | None = None
    ) -> tuple[Float[Array, "all_rows hidden"], list[Latents]]:
        """As `LatentAttention`, always in its absorbed form."""
        rank = self.config.kv_lora_rank
        compressed, keys = jnp.split(x @ self.a_proj[...], [self.config.q_lora_rank], axis=-1)
        queries = self.q_a_layernorm(compressed) @ self.q_absorbed[...]
        outs, latents = [], []
        for rows, q, own in zip(groups, split(queries, groups), split(keys, groups), strict=True):
            cos, sin = turn = self.turn(rows.positions)
            latents.append(self.latents(own, turn))
            q = q.reshape(*q.shape[:-1], self.config.num_attention_heads, -1)
            q_rope = self.rotate(q[..., rank:], cos[..., None, :], sin[..., None, :])
            out, _ = tree_attention(
                q[..., :rank], q_rope, cached.latent, cached.rope, rows.pages, rows.lengths, latents[-1].latent,
                latents[-1].rope, rows.ancestors, scale=self.config.attention_scale,
            )  # fmt: skip
            outs.append(out.reshape(*out.shape[:2], -1))
        return join(outs) @ self.o_absorbed[...], latents


def cpu_form[M: nnx.Module](module: M, parameters: Parameters) -> tuple[M, Parameters]:
    """A module and its float32 parameters, projections transposed, experts and attention merged where small enough."""
    module, parameters = nnx.clone(module), jax.tree.map(lambda leaf: leaf, parameters)

    def parts() -> list[tuple[Any, Parameters]]:
        """Every module, and the parameters it holds."""
        paths = [(cast(Path, path), part) for path, part in nnx.iter_modules(module)]
        return [(part, functools.reduce(lambda node, name: node[name], path, parameters)) for path, part in paths]

    for part, held in parts():
        if isinstance(part, DecoderLayer) and _attention_weights(part.self_attn.config) <= UNPACKED_WEIGHTS:
            part.self_attn = AbsorbedAttention(part.self_attn)
            held["self_attn"] = part.self_attn.absorbed(held["self_attn"])
        if isinstance(part, MixtureOfExperts) and _expert_weights(part) <= UNPACKED_WEIGHTS:
            part.experts = UnpackedExperts(part.gate.config, part.experts.num_local)
            gate, up, down = (held["experts"][name] for name in ("gate_proj", "up_proj", "down_proj"))
            both = (unpack_outputs(gate.packed, gate.scale), unpack_outputs(up.packed, up.scale))
            merged = {"gate_up": jnp.concatenate(both, axis=1), "down": unpack_inputs(down.packed, down.scale)}
            held["experts"] = merged
        for name, mlp in vars(part).items():
            if type(mlp) is GatedMLP:
                setattr(part, name, MergedMLP(mlp))
                gate, up, down = (held[name][p]["weight"].T for p in ("gate_proj", "up_proj", "down_proj"))
                held[name] = {"gate_up": jnp.concatenate([gate, up], axis=1), "down": down}
    for part, held in parts():
        if isinstance(part, Linear):
            outputs, inputs = part.weight.get_value().shape
            part.weight, part.transposed = weight((inputs, outputs), (None, None)), True
            held["weight"] = held["weight"].T
    return module, parameters


def _attention_weights(config: ModelConfig) -> int:
    """Weights of the two merged matrices."""
    rank = config.kv_lora_rank
    inputs = config.q_lora_rank * (rank + config.qk_rope_head_dim)
    return config.num_attention_heads * (inputs + rank * config.hidden_size)


def _expert_weights(mixture: MixtureOfExperts) -> int:
    """Weights of the stack, by which the reference too decides whether to unpack it whole."""
    experts = mixture.experts
    assert isinstance(experts, Experts)
    stacks = (experts.gate_proj, experts.up_proj, experts.down_proj)
    return sum(math.prod(cast(Int4Weight, stack.get_value()).shape) for stack in stacks)
