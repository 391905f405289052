"""Teacher forcing: given ids run through the model in chunks behind a cache, by one compiled step for each shape."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from kimi_jax.config import ModelConfig
from kimi_jax.decoding.programs import BATCH_AXES
from kimi_jax.model.pages import Cache, commit, empty_cache, places_of
from kimi_jax.model.rows import causal_rows
from kimi_jax.model.transformer import CausalLM, Output
from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_multiple, cache_spec, over_mesh
from kimi_jax.parameters import Parameters, bind, specs
from kimi_jax.vision.media import NO_TOWER, Medium, MediumError

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Engine

CHUNK = 512
"""Rows that a step runs for each request."""
SMALLEST_LENGTH = 16

Read = Callable[[CausalLM, Output, Int[Array, "requests rows"]], PyTree]
"""What is kept of a step: model, its output and each row's target to arrays [requests, rows, …]; see `logits_of`."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one step left of every sequence of a batch."""

    first: int
    """Position of its first row."""
    counts: list[int]
    """Real rows of each sequence."""
    values: PyTree
    """NumPy arrays [sequences, rows, …]; rows behind a sequence's count are arbitrary."""


def force(
    engine: "Engine",
    read: Read,
    inputs: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]] | None = None,
    *,
    requests: int = 1,
    length: int = 1,
    chunk: int = CHUNK,
    tap_layers: tuple[int, ...] = (),
    media: Sequence[Sequence[Medium]] | None = None,
) -> Iterator[Chunk]:
    """Runs one batch of sequences of any lengths, chunk by chunk.

    Calls that agree in `read` and in the shapes share a compiled step: give the same `requests` and `length` for every
    batch of a text. Lengths are rounded up to a power of two up to `chunk` and to a multiple of it beyond.

    Args:
      engine: the checkpoint on its mesh.
      read: chooses what is kept.
      inputs: ids of each sequence.
      targets: for each sequence an id for each of its rows, if `read` needs them.
      requests, length: least batch and length to compile for; both are raised to what the inputs need.
      chunk: rows a step runs for each request.
      tap_layers: layers whose residual stream `read` finds in `Output.taps`.
      media: images of each sequence, for the placeholders among its ids.

    Raises:
      MediumError: images that do not fit the placeholders, or a checkpoint without a tower.
      ValueError: an empty sequence, an id outside the vocabulary, more tokens than the model has positions, or an
        engine whose experts move (the compiled step reads the model's own placement).
    """
    if engine.rebalancer is not None:
        raise ValueError("experts of this engine move: score with the engine that it was made from, or open it again")
    positions, vocab_size = engine.config.max_position_embeddings, engine.config.vocab_size
    for index, ids in enumerate(inputs, 1):
        if not 1 <= len(ids) <= positions:
            raise ValueError(f"sequence {index} has {len(ids)} tokens; the model takes 1 to {positions}")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(f"sequence {index} has an id outside 0..{vocab_size - 1}")
    lengths = [len(ids) for ids in inputs]
    longest = max(length, *lengths, SMALLEST_LENGTH)
    chunk = min(chunk, 1 << (longest - 1).bit_length())
    page = cache_multiple(engine.rules, engine.mesh.shape)
    cached = math.lcm(chunk, page)
    capacity = -(-longest // cached) * cached
    groups = engine.layout.groups
    requests = -(-max(requests, len(inputs)) // groups) * groups

    def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
        result = np.zeros((requests, capacity), np.int32)
        for row, ids in enumerate(rows):
            result[row, : len(ids)] = ids
        return result

    wanted = padded(targets or [])
    embeddings = None
    if media is not None and any(media):
        inputs, embeddings = _seen(engine, inputs, media, (requests, capacity))
    tokens = padded(inputs)
    places = tuple(engine.rules.items())
    step = _step(engine.model, engine.mesh, places, read, tap_layers)
    tiles = capacity // page
    cache = _start(engine.config, engine.mesh, places, requests * tiles, np.dtype(engine.dtype))()
    ends = np.zeros(requests, np.int32)
    ends[: len(inputs)] = lengths
    for first in range(0, max(lengths), chunk):
        if engine.watchdog is not None:
            engine.watchdog.beat()
        before = np.minimum(ends, first)
        counts = np.minimum(ends, first + chunk) - before
        columns = slice(first, first + chunk)
        given = (before, counts, tokens[:, columns], wanted[:, columns])
        given = (*given, None if embeddings is None else embeddings[:, columns])
        placed = [None if values is None else host_arrays.place(values, engine.mesh, REQUESTS) for values in given]
        cache, values = step(engine.parameters["target"], cache, *placed)
        kept = jax.tree.map(lambda x: np.asarray(x)[: len(inputs)], values)
        yield Chunk(first, counts[: len(inputs)].tolist(), kept)


def _seen(
    engine: "Engine", inputs: Sequence[Sequence[int]], media: Sequence[Sequence[Medium]], shape: tuple[int, int]
) -> tuple[list[Sequence[int]], Float[np.ndarray, "requests rows hidden"]]:
    """The sequences with numbers of content where their images are, and the images' rows there."""
    if engine.encoder is None:
        raise MediumError(NO_TOWER)
    placed = [engine.encoder.place(ids, own) for ids, own in zip(inputs, media, strict=True)]
    embeddings = np.zeros((*shape, engine.config.hidden_size), engine.dtype)
    flat = [(row, each) for row, (_, own) in enumerate(placed) for each in own]
    in_group = shape[0] // engine.layout.groups
    found = engine.encoder([(row // in_group, each.medium) for row, each in flat])
    for (row, each), rows in zip(flat, found, strict=True):
        if rows is not None:
            embeddings[row, each.first : each.first + len(rows)] = rows
    return [ids for ids, _ in placed], embeddings


@functools.cache
def _start(config: ModelConfig, mesh: Mesh, rules: tuple[Any, ...], pages: int, dtype: np.dtype) -> Callable[[], Cache]:
    """Makes an empty cache."""
    axis = cache_axis(dict(rules))
    make = functools.partial(empty_cache, config, pages, dtype, axis, 1 if axis is None else mesh.shape[axis])
    return jax.jit(make, out_shardings=NamedSharding(mesh, cache_spec(dict(rules))))


@functools.cache
def _step(
    model: CausalLM, mesh: Mesh, rules: tuple[Any, ...], read: Read, tap_layers: tuple[int, ...]
) -> Callable[..., Any]:
    """`step(parameters, cache, lengths, counts, tokens, targets, embeddings)`: the cache with the rows, and what `read`
    keeps."""

    def step(
        parameters: Parameters,
        cache: Cache,
        lengths: Array,
        counts: Array,
        tokens: Array,
        targets: Array,
        embeddings: Array | None,
    ) -> tuple[Cache, PyTree]:
        bound = bind(model, parameters)
        tiles = cache[0].latent.shape[0] // len(lengths)  # each request has pages of its own, in order
        pages = jnp.arange(len(lengths) * tiles, dtype=jnp.int32).reshape(len(lengths), tiles)
        output = bound.model(causal_rows(tokens, lengths, counts, pages, embeddings), cache, tap_layers)
        kept = jax.tree.map(lambda x: all_gather(x, BATCH_AXES), read(bound, output, targets))
        places = places_of(cache, pages, lengths, counts, tokens.shape[1])
        return commit(cache, [output.latents], [places]), kept

    cache_places = cache_spec(dict(rules))
    in_specs = (specs(model, dict(rules)), cache_places, *[REQUESTS] * 5)
    out_specs = (cache_places, PartitionSpec())  # every process reads all that is kept
    return over_mesh(step, mesh, in_specs, out_specs, donate=(1,))


def logits_of(model: CausalLM, output: Output, targets: Array) -> Float[Array, "requests rows vocab"]:
    """Keeps the float32 logits of every row."""
    return all_gather(model.logits(output.hidden), "tp", dimension=2)
