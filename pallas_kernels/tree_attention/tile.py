"""Sizes of the kernels, without the kernels: what a choice needs before Mosaic is imported, which takes a second."""

import dataclasses

PAGE = 64
"""Cached positions a page."""
TILE_ROWS = 64
"""Query rows of a block of threads: a query row is one head of one tree row."""
BLOCK = 64
"""Positions a tile, one page or more: two tiles of 64 x 576 bfloat16, queries and probabilities fill shared memory."""
STAGES = 2
"""Tiles of keys in shared memory."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a launch is cut: `splits` pieces along the context, each of at least `min_tiles` tiles."""

    splits: int = 1
    min_tiles: int = 1
    cluster: int = 1
    """Hopper: query tiles that share each copied tile."""
    lazy: float = 8.0
    """Blackwell: the rise of a row's maximum, in base 2, that forces a rescale of the values."""

    @property
    def row_multiple(self) -> int:
        """Query rows are padded to a multiple of this."""
        return TILE_ROWS * self.cluster

    def query_tiles(self, query_rows: int) -> int:
        """Tiles of padded query rows."""
        return -(-query_rows // self.row_multiple) * self.cluster
