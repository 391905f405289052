"""Operands, routings and a NumPy oracle shared by the tests of this folder."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.int4_moe import Stack


def pack(codes: np.ndarray) -> np.ndarray:
    """Codes q + 8 in 0..15 along the last axis as int32 words, low nibble first (compressed-tensors' order)."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for j in range(8):
        words |= codes[..., j::8].astype(np.uint32) << np.uint32(4 * j)
    return words.view(np.int32)


class Problem:
    """Weights by code and scale, and the operation in float64."""

    def __init__(self, slots: int, hidden: int, width: int, seed: int = 0, scale=(0.005, 0.02)) -> None:
        self.rng = np.random.default_rng(seed)
        self.slots, self.hidden, self.width = slots, hidden, width
        self.codes, self.scales = [], []
        for out, into in ((width, hidden), (width, hidden), (hidden, width)):
            self.codes.append(self.rng.integers(0, 16, (slots, out, into)).astype(np.uint8))
            self.scales.append(self.rng.uniform(*scale, (slots, out, into // 32)).astype(ml_dtypes.bfloat16))

    def weights(self) -> list:
        return [Stack(jnp.asarray(pack(c)), jnp.asarray(s)) for c, s in zip(self.codes, self.scales, strict=True)]

    def activations(self, rows: int, dtype=np.float32) -> np.ndarray:
        return self.rng.normal(size=(rows, self.hidden)).astype(dtype)

    def routing(self, rows: int, top_k: int, kind: str = "random") -> tuple[np.ndarray, np.ndarray]:
        """Ids (some foreign in "random") and router weights."""
        weights = self.rng.uniform(0.1, 1.0, (rows, top_k)).astype(np.float32)
        pairs = np.arange(rows * top_k).reshape(rows, top_k)
        ids = {
            "random": lambda: (
                np.stack([self.rng.permutation(self.slots + 2)[:top_k] - 1 for _ in range(rows)]) if rows else pairs
            ),
            "one expert": lambda: np.where(pairs % top_k == 0, self.slots - 1, self.slots + 3),
            "every expert once": lambda: np.where(pairs < self.slots, pairs[::-1] % self.slots, -1),
            "the same experts": lambda: pairs % top_k,
            "foreign": lambda: np.where(pairs % 2 == 0, -1, self.slots),
        }[kind]()
        return ids.astype(np.int32), weights

    def expected(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        gate, up, down = (
            (c.astype(np.float64) - 8) * np.repeat(s.astype(np.float64), 32, -1)
            for c, s in zip(self.codes, self.scales, strict=True)
        )
        out = np.zeros((x.shape[0], self.hidden))
        for row, experts in enumerate(ids):
            a = x[row].astype(np.float64)
            for k, e in enumerate(experts):
                if 0 <= e < self.slots:
                    g = gate[e] @ a
                    out[row] += weights[row, k] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ a)))
        return out


def relative_error(got, expected: np.ndarray) -> float:
    """Relative Frobenius error; absolute where nothing is expected."""
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(np.asarray(got, np.float64) - expected) / (norm or 1.0))
