"""Media to rows of the language model on a mesh: every device takes one medium at a time."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.sharding import REQUESTS, over_mesh
from kimi_jax.parameters import Parameters, Rules, bind, specs
from kimi_jax.vision.media import Medium, Placed, bucket, with_content
from kimi_jax.vision.tower import VisionModel
from meshes.presets import AXES

DEVICES = PartitionSpec(AXES)
"""A medium lies on one device, whatever the axes are."""
Encode = Callable[[Parameters, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Tower and projector on a mesh; compiled once for each bucket of patches.

    A group of ranks sees the media of its own requests: they are spread over its tp ranks, and of their rows each host
    gets those of its own groups.
    """

    module: VisionModel
    parameters: Parameters
    mesh: Mesh
    rules: Rules

    def place(self, ids: Sequence[int], media: Sequence[Medium]) -> tuple[list[int], tuple[Placed, ...]]:
        """A prompt's ids, with numbers of content where its media are; see `media.with_content`."""
        return with_content(ids, media, self.module.config.placeholder_id)

    @functools.cached_property
    def program(self) -> Encode:
        """`program(parameters, patches, grids)`: uint8 patches [devices, patches, pixels] and grids [devices, 3] to
        rows [devices, tokens, text_hidden], those of a group on all its ranks."""

        def encode(
            parameters: Parameters, patches: UInt8[Array, "1 patches pixels"], grids: Int[Array, "1 3"]
        ) -> Float[Array, "ranks tokens text_hidden"]:
            see = bind(self.module, parameters)
            shape = jax.eval_shape(see, patches[0], grids[0])
            # A device without a picture rests: simulated devices share their cores with those that have one.
            rows = jax.lax.cond(
                grids[0].prod() > 0, see, lambda *_: jnp.zeros(shape.shape, shape.dtype), patches[0], grids[0]
            )
            return all_gather(rows[None], "tp")

        in_specs = (specs(self.module, self.rules), DEVICES, DEVICES)
        return over_mesh(encode, self.mesh, in_specs, REQUESTS)

    def __call__(self, media: Sequence[tuple[int, Medium]]) -> list[Float[np.ndarray, "tokens text_hidden"] | None]:
        """Rows of media, each with the group of ranks (dp, ep) whose request it belongs to.

        None stands for rows that no device of this process has. All processes call it alike.
        """
        found: list[np.ndarray | None] = [None] * len(media)
        sizes = [bucket(len(medium.patches)) for _, medium in media]
        ranks = self.mesh.shape["tp"]
        for size in sorted({*sizes}):
            waiting = [index for index, own in enumerate(sizes) if own == size]
            while waiting:
                placed: dict[int, int] = {}
                for index in waiting:
                    first = media[index][0] * ranks
                    device = next((d for d in range(first, first + ranks) if d not in placed), None)
                    if device is not None:
                        placed[device] = index
                waiting = [index for index in waiting if index not in placed.values()]
                rows = self._run(size, {device: media[index][1] for device, index in placed.items()})
                for device, index in placed.items():
                    found[index] = rows.get(device)
        return found

    def _run(self, size: int, placed: dict[int, Medium]) -> dict[int, np.ndarray]:
        """One call: the media on some devices, and the rows that this process has of them."""
        pixels = next(iter(placed.values())).patches.shape[1]
        patches = np.zeros((self.mesh.size, size, pixels), np.uint8)
        grids = np.zeros((self.mesh.size, 3), np.int32)
        for device, medium in placed.items():
            patches[device, : len(medium.patches)] = medium.patches
            grids[device] = medium.grid
        given = [host_arrays.place(values, self.mesh, DEVICES) for values in (patches, grids)]
        out = self.program(self.parameters, *given)
        rows: dict[int, np.ndarray] = {}
        for shard in out.addressable_shards:
            first, end, _ = shard.index[0].indices(out.shape[0])
            if first not in rows:
                values = np.asarray(shard.data)
                for device in range(first, end):
                    if device in placed:
                        rows[device] = values[device - first, : placed[device].tokens]
        return rows
