"""Texts of the bundled model, and of a random one whose sizes fit the kernels."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.kernels import Pick
from kimi_jax.decoding.loading import model_for, open_checkpoint
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.gpu_check.round import random_parameters
from kimi_jax.opening import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
from kimi_jax.parameters import Parameters, abstract
from kimi_jax.prompts import Prompt, encode
from meshes.devices import build_mesh
from meshes.presets import preset

PROMPTS = ("Add 612 and 259.", "Tell a story about a fox named Mila, a forest and a coin.")
DRAFTS = {"plain": PLAIN, "drafted": Draft("ddtree", 16)}
NEW_TOKENS = 32
FITTING = {"moe_intermediate_size": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 64}
"""What the bundled model has too small for a kernel, as small as a kernel takes it."""


def bundled_texts() -> Iterator[tuple[str, list[int], list[int]]]:
    """Prompts with the bundled model's greedy tokens, decoded plainly and drafted in trees, in float32."""
    engine = _bundled()
    for prompt, ids in zip(PROMPTS, _ids(engine), strict=True):
        plain, drafted = (_greedy(engine, ids, draft) for draft in DRAFTS.values())
        yield prompt, plain, drafted


def fitting_texts() -> Iterator[tuple[str, list[Pick], Float[np.ndarray, " tokens"]]]:
    """Greedy bfloat16 text of a small random model that kernels can serve, judged by the float32 references.

    Yields the way of drafting, what served, and by how much each token's logit is below the row's best, in standard
    deviations of the row's logits: 0 where the references choose the same token.
    """
    bundled = _bundled()
    model = model_for(dataclasses.replace(bundled.config, **FITTING), bundled.layout)

    def declared(dtype: DTypeLike) -> Parameters:
        parts = {"target": model, "drafter": bundled.drafter}
        return {name: abstract(part, dtype, bundled.mesh, bundled.rules) for name, part in parts.items()}

    drawn = bundled.parameters | {"target": random_parameters(declared(jnp.bfloat16)["target"])}
    served, exact = (
        dataclasses.replace(
            bundled,
            model=model,
            dtype=dtype,
            parameters=jax.tree.map(lambda leaf, kind: leaf.astype(kind.dtype), drawn, declared(dtype)),
        )
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    ids = _ids(bundled)[0]
    for name, draft in DRAFTS.items():
        tokens = _greedy(served, ids, draft)
        rows = exact.logits([*ids, *tokens[:-1]])[len(ids) - 1 :, : exact.known_ids]
        below = rows.max(-1) - rows[np.arange(len(tokens)), tokens]
        yield name, served.picks(draft, 1, 64), below / rows.std(-1)


def _bundled() -> Engine:
    machine = preset("local")
    mesh = build_mesh(machine, jax.devices())
    return open_checkpoint(BUNDLED_CHECKPOINT, mesh, machine.layout, jnp.float32, BUNDLED_DRAFTER)


def _ids(engine: Engine) -> list[list[int]]:
    prompts = [Prompt.of(text) for text in PROMPTS]
    return encode(prompts, engine.tokenizer, raw=False, thinking=False, system=None)


def _greedy(engine: Engine, ids: list[int], draft: Draft) -> list[int]:
    dispatches = engine.generate([ids], Limits(max_new_tokens=NEW_TOKENS), Sampling(), draft=draft)
    return [token for progress in dispatches for token in progress.new_tokens[0]]
