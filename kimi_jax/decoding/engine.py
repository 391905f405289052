"""A checkpoint on a mesh, ready to decode: the one object a script or an evaluation opens."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax.checkpoint import huggingface
from kimi_jax.config import ModelConfig
from kimi_jax.decoding.generate import Limits, Progress, generate
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.exchange import allgather
from kimi_jax.parallel.placement import even_placement
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Parameters, Rules
from kimi_jax.tokenizer import Tokenizer
from meshes.presets import Layout, check_layout

STOP_TOKENS = ("<|im_end|>", "[EOS]")
"""K2.6 ends a turn with <|im_end|> and then [EOS]; config.json names only one of the two."""

EXCHANGES = {"allgather": allgather}


@dataclasses.dataclass(frozen=True)
class Engine:
    """Model, weights and tokenizer of one checkpoint, laid out on one mesh."""

    model: CausalLM
    parameters: Parameters
    tokenizer: Tokenizer
    mesh: Mesh
    rules: Rules
    dtype: DTypeLike
    load_seconds: float

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those config.json names and the tokenizer's own."""
        return tuple(sorted({*self.config.eos_token_ids, *(self.tokenizer.special_id(name) for name in STOP_TOKENS)}))

    @functools.cached_property
    def _programs(self) -> dict[Sampling, Programs]:
        return {}

    def programs(self, sampling: Sampling) -> Programs:
        """The programs for one way of sampling, compiled once."""
        if sampling not in self._programs:
            self._programs[sampling] = Programs(
                self.model, self.mesh, self.rules, sampling, self.stop_ids, self.dtype
            )
        return self._programs[sampling]

    def generate(
        self, prompts: Sequence[Sequence[int]], limits: Limits, sampling: Sampling, seed: int = 0
    ) -> Iterator[Progress]:
        """Decodes a batch of prompts given as ids; see `decoding.generate`."""
        # On GPUs float32 matrix products would be rounded to TF32 otherwise; bfloat16 ones do not change.
        with jax.default_matmul_precision("highest"):
            yield from generate(self.programs(sampling), {"target": self.parameters}, prompts, limits, seed)


def model_for(config: ModelConfig, layout: Layout) -> CausalLM:
    """The model's declarations for a layout: expert slots padded to its ranks, its exchange chosen.

    Raises:
      LayoutError: a dimension that tp does not divide, naming the sizes that work.
    """
    check_layout(
        layout,
        num_heads=config.num_attention_heads,
        widths={
            "dense width": config.intermediate_size,
            "shared expert width": config.n_shared_experts * config.moe_intermediate_size,
        },
        vocab_size=config.vocab_size,
        expert_width=config.moe_intermediate_size,
        group_size=config.quantization_group_size,
    )
    placement = even_placement(config.n_routed_experts, layout.expert_ranks)
    exchange = functools.partial(EXCHANGES[layout.exchange], expert_axes=layout.expert_axes)
    return CausalLM(config, placement, exchange)


def open_checkpoint(
    checkpoint: Path,
    mesh: Mesh,
    layout: Layout,
    dtype: DTypeLike = jnp.bfloat16,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Reads a checkpoint directory onto a mesh; `progress` is told of the bytes read and of those in all.

    Raises:
      ConfigError, LayoutError, TokenizerError, CheckpointError: naming the file and field that does not fit.
    """
    started = time.perf_counter()
    config = ModelConfig.from_json(checkpoint)
    model = model_for(config, layout)
    tokenizer = Tokenizer.from_directory(checkpoint, vocab_size=config.vocab_size)
    parameters = huggingface.load(
        checkpoint,
        model,
        config.key_prefix,
        mesh,
        rules(layout),
        dtype=dtype,
        num_experts=config.n_routed_experts,
        slot_experts=model.placement.slot_experts,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    return Engine(model, parameters, tokenizer, mesh, rules(layout), dtype, seconds)
