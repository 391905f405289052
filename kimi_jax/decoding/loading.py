"""From a checkpoint's folder to an engine: the model's declarations for a layout, and its weights on the mesh."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax.checkpoint import huggingface
from kimi_jax.checkpoint.plan import SKIPPED_FAMILIES, plan
from kimi_jax.checkpoint.safetensors import open_checkpoint as open_tensors
from kimi_jax.checkpoint.sharded.manifest import VISION_FOLDER, is_sharded, read_manifest
from kimi_jax.checkpoint.sharded.reader import restore
from kimi_jax.config import ModelConfig
from kimi_jax.decoding.engine import Engine
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.loader import load_drafter
from kimi_jax.ledger import layout_rules
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.eplb import load_placements
from kimi_jax.parallel.exchange import exchange_of
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement, slots_of_layer
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Parameters, Rules
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.tower import VisionModel
from meshes.presets import Layout, expert_slots


def model_for(config: ModelConfig, layout: Layout, placements: Sequence[Placement] | None = None) -> CausalLM:
    """The model's declarations for a layout: expert slots padded to its ranks, its exchange chosen.

    Args:
      placements: one for each layer that has experts; by default experts lie in order, once each.

    Raises:
      LayoutError: a dimension that tp does not divide, naming the sizes that work; an exchange that does not exist.
    """
    layout_rules.check(config, layout)
    placement = placements or even_placement(config.n_routed_experts, layout.expert_ranks)
    return CausalLM(config, placement, exchange_of(layout))


def placements_of(
    checkpoint: Path, config: ModelConfig, layout: Layout, file: Path | None = None
) -> Sequence[Placement] | None:
    """A file's placements, or a sharded checkpoint's where the ranks share its slots evenly; None for neither.

    Raises:
      ValueError: the file is none, or made for another model or layout.
    """
    experts, ranks = config.n_routed_experts, layout.expert_ranks
    if file is not None:
        return load_placements(file, layers=config.num_moe_layers, num_experts=experts, ranks=ranks)
    if not is_sharded(checkpoint):
        return None
    stored = read_manifest(checkpoint).slot_experts
    each = [slots_of_layer(stored, (layer,)) for layer in range(config.first_k_dense_replace, config.num_hidden_layers)]
    spare = expert_slots(experts, ranks)
    fits = all(len(slots) == len(each[0]) == (spare if EMPTY in slots else len(slots)) for slots in each)
    return [Placement(tuple(slots), experts) for slots in each] if fits and len(each[0]) % ranks == 0 else None


def open_checkpoint(
    checkpoint: Path,
    mesh: Mesh,
    layout: Layout,
    dtype: DTypeLike = jnp.bfloat16,
    drafter: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    placement: Path | None = None,
    workers: int = 8,
) -> Engine:
    """Reads a checkpoint directory (HF layout, or sharded by convert.py), and a drafter's, onto a mesh.

    `placement` is a file that `eplb.save_placements` wrote. Without one, a sharded checkpoint's own placement is kept
    where the ranks share its slots evenly; else experts lie in order. `progress` is told of the target's bytes read and
    of those in all; `workers` threads read.

    Raises:
      ConfigError, LayoutError, TokenizerError, CheckpointError: naming the file and field that does not fit.
    """
    config = ModelConfig.from_json(checkpoint)
    model = model_for(config, layout, placements_of(checkpoint, config, layout, placement))
    tokenizer = Tokenizer.from_directory(checkpoint, vocab_size=config.vocab_size)
    places = rules(layout)
    parameters: Parameters = {}
    module = None
    if drafter is not None:  # first: it is small, and one that does not fit is refused before the long read
        layout_rules.check(config, layout, DrafterConfig.from_json(drafter))
        module, parameters["drafter"] = load_drafter(drafter, config, mesh, places, dtype=dtype)
    slots = model.slot_experts
    if is_sharded(checkpoint):
        parameters["target"] = restore(
            checkpoint, model, mesh, places, dtype=dtype, slot_experts=slots, progress=progress, workers=workers
        )
    else:
        parameters["target"] = huggingface.load(
            checkpoint, model, config.key_prefix, mesh, places,
            dtype=dtype, num_experts=config.n_routed_experts, slot_experts=slots, progress=progress, workers=workers,
        )  # fmt: skip
    vision = open_vision(checkpoint, config, mesh, places, dtype)
    if vision is not None:
        parameters["vision"] = vision[1]
    return Engine(
        model, parameters, tokenizer, mesh, layout, dtype, module, vision=None if vision is None else vision[0]
    )


def open_vision(
    checkpoint: Path, config: ModelConfig, mesh: Mesh, places: Rules, dtype: DTypeLike
) -> tuple[VisionModel, Parameters] | None:
    """Vision tower and projector, whole on every device; None for a model, or a copy of its weights, of text alone.

    Raises:
      ConfigError, CheckpointError: as `open_checkpoint`.
    """
    vision = VisionConfig.from_json(checkpoint)
    folder = checkpoint / VISION_FOLDER if is_sharded(checkpoint) else checkpoint
    if vision is None or not folder.exists():
        return None
    tensors = open_tensors(folder)
    if not any(name.startswith(SKIPPED_FAMILIES) for name in tensors):
        return None
    module = VisionModel(vision)
    matched = plan(tensors, module, "", mesh, places, dtype=dtype, num_experts=0, skip=(config.key_prefix,))
    return module, huggingface.read(matched, module)
