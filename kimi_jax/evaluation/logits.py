"""Logits of given token ids, for comparing a checkpoint with a reference."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from kimi_jax.decoding.engine import Engine
from kimi_jax.model.cache import Cache, commit, empty_cache
from kimi_jax.model.transformer import causal_rows
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import Parameters, bind, specs

CHUNK = 512


class InputError(ValueError):
    """Ids that cannot be evaluated; the text says what is expected."""


def read_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """A JSON list of id lists of equal length. Raises InputError naming the file and the list that does not fit."""
    try:
        value: Any = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, list) or not value or not all(isinstance(ids, list) and ids for ids in value):
        raise InputError(f"{path}: expected a list of non-empty lists of token ids")
    for index, ids in enumerate(value):
        if len(ids) != len(value[0]):
            raise InputError(f"{path}: list {index} has {len(ids)} ids and list 0 has {len(value[0])}; make them equal")
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if wrong:
            raise InputError(f"{path}: list {index} holds {wrong[0]!r}, which is no id of 0..{vocab_size - 1}")
    return value


def logits(
    engine: Engine, sequences: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
) -> Float[np.ndarray, "sequences tokens vocab"]:
    """Float32 logits of every position. Sequences have equal lengths; chunks of them run one after the other."""
    count, length = len(sequences), len(sequences[0])
    multiple = engine.mesh.shape["dp"] * engine.mesh.shape["ep"]
    requests = -(-count // multiple) * multiple
    chunk = min(CHUNK, length)
    capacity = -(-length // chunk) * chunk
    model, config = engine.model, engine.config

    def step(parameters: Parameters, cache: Cache, lengths: Array, tokens: Array, counts: Array):
        bound = bind(model, parameters)
        rows = causal_rows(tokens, lengths, counts)
        output = bound.model(rows, cache)
        full = all_gather(bound.logits(output.hidden), "tp", dimension=2)
        return commit(cache, output.latents, lengths), lengths + counts, full

    weights = specs(model, engine.rules)
    run = jax.jit(
        jax.shard_map(
            step,
            mesh=engine.mesh,
            in_specs=(weights, REQUESTS, REQUESTS, REQUESTS, REQUESTS),
            out_specs=REQUESTS,
            check_vma=False,
        ),
        donate_argnums=(1,),
    )
    sharding = NamedSharding(engine.mesh, REQUESTS)
    cache = jax.jit(lambda: empty_cache(config, requests, capacity, engine.dtype), out_shardings=sharding)()
    lengths = jax.device_put(jnp.zeros(requests, jnp.int32), sharding)
    padded = np.zeros((requests, capacity), np.int32)
    padded[:count, :length] = sequences
    parts = []
    for first in range(0, length, chunk):
        counts = np.where(np.arange(requests) < count, min(chunk, length - first), 0).astype(np.int32)
        tokens = jax.device_put(padded[:, first : first + chunk], sharding)
        with jax.default_matmul_precision("highest"):
            counts = jax.device_put(counts, sharding)
            cache, lengths, part = run(engine.parameters["target"], cache, lengths, tokens, counts)
        parts.append(np.asarray(part)[:count, : min(chunk, length - first)])
        if progress:
            progress(min(first + chunk, length), length)
    return np.concatenate(parts, axis=1)
