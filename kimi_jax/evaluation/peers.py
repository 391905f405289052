"""Other programs decoding the same checkpoint, prompts and machine: ratios from one run, never figures alone.

transformers' DeepseekV3ForCausalLM has K2.6's architecture; it gets the experts dequantised to float32, which is the
fastest form it has for them on a CPU, and its own greedy `generate` with a cache. llama.cpp is not here: its converter
knows tokenizers by a hash of what they make of one text, and refuses any vocabulary that it has not been taught, so the
bundled checkpoint cannot become a GGUF file.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax.decoding.engine import Engine
from kimi_jax.evaluation.speed import Speed
from kimi_jax.parameters import Parameters
from kimi_jax.quantization import Int4Weight, dequantize

OURS = ("yarn", "eos_token_ids", "quantization_group_size", "key_prefix", "latent_norm_eps")
"""Fields of a configuration that transformers has not; the others are called the same."""


class PeerMissingError(RuntimeError):
    """A package that a comparison needs is not installed."""


def _required(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise PeerMissingError(
            f"{package} cannot be imported ({error}); uv run --group fixtures scripts/benchmark.py peers brings it"
        ) from error


def transformers_model(engine: Engine) -> Any:
    """DeepseekV3ForCausalLM in float32 on the CPU with the weights of an engine on one device.

    Raises:
      PeerMissingError: naming the command that brings torch and transformers.
    """
    torch, transformers = _required("torch"), _required("transformers")
    fields = dataclasses.asdict(engine.config)
    fields["rope_scaling"] = fields["yarn"] and {"rope_type": "yarn", **fields["yarn"]}
    sizes = {name: value for name, value in fields.items() if name not in OURS}
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes, n_group=1, topk_group=1, tie_word_embeddings=False)
    )
    state = {name: torch.from_numpy(np.array(value)) for name, value in _state(engine.parameters["target"])}
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def _state(parameters: Parameters) -> Iterator[tuple[str, np.ndarray]]:
    """Names as transformers has them: those of the checkpoint, but gate and up of all experts in one array."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters, is_leaf=lambda leaf: isinstance(leaf, Int4Weight))
    arrays = {
        ".".join(str(key.key) for key in path): np.asarray(
            dequantize(leaf) if isinstance(leaf, Int4Weight) else leaf, np.float32
        )
        for path, leaf in leaves
    }
    for name, array in arrays.items():
        if name.endswith("experts.gate_proj"):
            up = arrays[name.replace("gate_proj", "up_proj")]
            yield name.replace("gate_proj", "gate_up_proj"), np.concatenate([array, up], axis=1)
        elif not name.endswith("experts.up_proj"):
            yield name, array


def generate(
    model: Any, prompt: Sequence[int], *, stop_ids: Sequence[int], max_new_tokens: int
) -> tuple[list[int], float]:
    """Greedy text of transformers, and the seconds from its first token to its last (prefill excluded)."""
    torch, transformers = _required("torch"), _required("transformers")
    seen: list[float] = []

    class Clock(transformers.StoppingCriteria):
        """Notes when each token is there; never stops."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            seen.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=list(stop_ids), pad_token_id=0, stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )  # fmt: skip
    return out[0, len(prompt) :].tolist(), seen[-1] - seen[0]


def measure_transformers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[], None] | None = None,
) -> Speed:
    """transformers' speed over all prompts, one at a time, `repeats` times; one more run warms up.

    Raises:
      PeerMissingError: torch or transformers is not installed.
    """
    model = transformers_model(engine)
    limits = {"stop_ids": engine.stop_ids, "max_new_tokens": max_new_tokens}
    rates: list[float] = []
    texts: list[list[int]] = []
    for repeat in range(repeats + 1):
        runs = [generate(model, prompt, **limits) for prompt in prompts]
        texts = [text for text, _ in runs]
        if repeat:
            rates.append(sum(len(text) - 1 for text in texts) / sum(seconds for _, seconds in runs))
        if progress:
            progress()
    return Speed("transformers", None, rates, 1.0, texts)
