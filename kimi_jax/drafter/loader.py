"""Loads a drafter's checkpoint: the public keys, with or without `model.`, and nothing else."""

from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.huggingface import Progress, read
from kimi_jax.checkpoint.plan import plan
from kimi_jax.checkpoint.safetensors import Tensor, open_checkpoint
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DEFAULT_DRAFT_WINDOW, DrafterConfig
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.parameters import Parameters, Rules

PREFIX = "model."
ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
"""Names that converters write, and the public ones."""


def load_drafter(
    directory: str | Path,
    target: ModelConfig,
    mesh: Mesh,
    rules: Rules,
    *,
    dtype: DTypeLike,
    draft_window: int = DEFAULT_DRAFT_WINDOW,
    attention_factor: float | None = None,
    progress: Progress | None = None,
) -> tuple[DFlash, Parameters]:
    """A drafter's module and its sharded weights.

    Args:
      directory: holds `config.json` and `model.safetensors` or its shards with their index.
      target: the model it drafts for; a drafter made for another is refused.
      mesh: of the program; the size of its axis tp decides whether key-value heads are replicated.
      rules: logical axes to mesh axes (`parallel.sharding.rules`).
      dtype: type of the weights on the devices.
      draft_window, attention_factor: as for `DrafterConfig.from_dict`.
      progress: told of the bytes read.

    Raises:
      ConfigError: a configuration that cannot be run or does not fit the target, naming the field.
      CheckpointError: tensors that are missing, extra or misshapen, naming them.
    """
    config = DrafterConfig.from_json(directory, draft_window=draft_window, attention_factor=attention_factor)
    config.check(target, directory)
    module = DFlash(config, mesh.shape.get("tp", 1))
    tensors = canonical(open_checkpoint(directory))
    _check_taps(tensors, config)
    matched = plan(tensors, module, "", mesh, rules, dtype=dtype, num_experts=0, skip=())
    return module, read(matched, module, progress=progress)


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the public keys.

    Raises:
      CheckpointError: two tensors are the same weight.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = name.removeprefix(PREFIX)
        key = ALIASES.get(key, key)
        if key in named:
            raise CheckpointError(f"{tensor.file}: {name} and {named[key].name} are both {key}")
        named[key] = tensor
    return named


def _check_taps(tensors: dict[str, Tensor], config: DrafterConfig) -> None:
    """Names the configuration's field where `fc` was trained with another number of taps."""
    fc = tensors.get("fc.weight")
    taps, hidden = len(config.target_layer_ids), config.hidden_size
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != taps * hidden:
        raise fc.error(
            f"takes {fc.shape[1]} inputs, but target_layer_ids names {taps} taps of hidden_size {hidden} "
            f"({taps * hidden} inputs); configuration and weights belong to different drafters"
        )
