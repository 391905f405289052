"""The parts of a step. Named scopes, `--explain`, the estimator and the profiler have these names and no others."""

from collections.abc import Sequence

PARTS = (
    "attention", "router", "experts", "shared_expert", "dense", "head", "embedding", "drafter", "tree", "exchange",
    "reductions", "other",
)  # fmt: skip
"""In the order of a table. `drafter` includes its own reductions and its use of the head; `other` commits a round."""

SCOPES = {part: part for part in PARTS} | {"sampling": "head"}
"""Part by named scope."""

_BY_NAME = {
    "embed_tokens": "embedding",
    "shared_experts": "shared_expert",
    "experts": "experts",
    "gate": "router",
    "mlp": "dense",
    "self_attn": "attention",
    "input_layernorm": "attention",
    "post_attention_layernorm": "attention",
    "lm_head": "head",
    "norm": "head",
}
"""Part by a name in a weight's path; the first that occurs counts."""


def part_of(path: Sequence[str | int]) -> str:
    """The part that a weight belongs to, by its path in the model or in `{"target": …, "drafter": …}`.

    Raises:
      ValueError: the path belongs to no known part.
    """
    if path[0] == "drafter":
        return "drafter"
    for name, part in _BY_NAME.items():
        if name in path:
            return part
    raise ValueError(f"{'.'.join(map(str, path))} belongs to no known part of the model")
