"""The two runs of `scripts/train.py`: which model, which data, which mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import specs
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.training import data, small, tasks
from kimi_jax.training.loop import LoopOptions, Run, run
from kimi_jax.training.target import (
    TargetRecipe,
    TrainState,
    initial_parameters,
    initial_state,
    num_parameters,
    teacher_forced,
    train_step,
    training_model,
)
from kimi_jax.training.vocabulary import write_small_tokenizer
from meshes.presets import Layout


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Packed sequences of a step."""

    sequences: int = 8
    length: int = 128
    answers: int = 80


def training_mesh(layout: Layout) -> Mesh:
    """The first devices of this process on the axes dp, ep and tp."""
    devices = jax.devices()
    if len(devices) < layout.num_devices:
        raise ValueError(f"{layout} needs {layout.num_devices} devices and there are {len(devices)}")
    sizes = layout.axis_sizes
    return Mesh(np.array(devices[: layout.num_devices]).reshape(*sizes.values()), tuple(sizes))


def shard_state(state: TrainState, model: Any, mesh: Mesh, layout: Layout) -> TrainState:
    """Lays weights and their optimiser moments on the mesh by the model's declarations, the rest on every device."""
    weights = specs(model, rules(layout))
    by_path = dict(jax.tree_util.tree_leaves_with_path(weights, is_leaf=lambda x: isinstance(x, PartitionSpec)))

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        matching = (spec for ending, spec in by_path.items() if path[-len(ending) :] == ending)
        return jax.device_put(leaf, NamedSharding(mesh, next(matching, PartitionSpec())))

    return jax.tree_util.tree_map_with_path(place, state)


def held_out_evaluation(
    model: Any, tokenizer: Tokenizer, mesh: Mesh, prompts: int, length: int = 96
) -> Callable[[TrainState], Mapping[str, float]]:
    """Teacher-forced exact match by family on held-out prompts, as a function of the state."""
    batches = {}
    for family in tasks.FAMILIES:
        chats = [data.encode_example(tokenizer, example) for example in tasks.held_out(family, prompts)]
        rows = [data.pack([chat], 1, length, length) for chat in chats]
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
        batches[family] = jax.device_put(joined, NamedSharding(mesh, PartitionSpec()))
    exact = jax.jit(functools.partial(teacher_forced, model))

    def evaluate(state: TrainState) -> Mapping[str, float]:
        scores = {f"em_{family}": float(exact(state.parameters, batch).mean()) for family, batch in batches.items()}
        return {"em": float(np.mean(list(scores.values()))), **scores}

    return evaluate


def train_target(
    directory: Path,
    recipe: TargetRecipe,
    shape: BatchShape,
    layout: Layout,
    seed: int = 0,
    options: LoopOptions | None = None,
    evaluation_prompts: int = 20,
    sizes: Mapping[str, int] | None = None,
) -> Run:
    """Trains the small target in `directory`, resuming where a checkpoint exists."""
    tokenizer = write_small_tokenizer(directory / "tokenizer")
    config = small.config(tokenizer, **(sizes or {}))
    model = training_model(config)
    mesh = training_mesh(layout)
    state = initial_state(initial_parameters(model, jax.random.key(seed), config.num_hidden_layers), recipe)
    state = shard_state(state, model, mesh, layout)
    step = jax.jit(functools.partial(train_step, model, recipe, mesh), donate_argnums=0)

    def batch(index: int) -> data.Batch:
        made = data.training_batch(tokenizer, seed, index, **dataclasses.asdict(shape))
        return jax.device_put(made, NamedSharding(mesh, PartitionSpec("dp")))

    described = {
        "parameters": num_parameters(state.parameters),
        "seed": seed,
        "sizes": dict(sizes or {}),
        **dataclasses.asdict(recipe),
        **dataclasses.asdict(shape),
    }
    evaluate = held_out_evaluation(model, tokenizer, mesh, evaluation_prompts) if evaluation_prompts else None
    return run(state, step, batch, recipe.steps, directory, described, options, evaluate)
