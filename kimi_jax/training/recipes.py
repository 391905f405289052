"""The two runs of `scripts/train.py`: which model, which data, which mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.decoding.engine import Engine
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.drafter.loss import DraftLoss
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Parameters, bind, specs
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.training import data, small, tasks
from kimi_jax.training.drafter import anchored_texts, block_logits, chain_rounds, draft_step
from kimi_jax.training.export import dequantize_experts, export_drafter, export_target
from kimi_jax.training.generations import finished_chats, generate_answers, training_generations
from kimi_jax.training.loop import LoopOptions, Run, restore, run
from kimi_jax.training.routing import RoutingStatistics, measure
from kimi_jax.training.target import (
    Recipe,
    TargetRecipe,
    TrainState,
    initial_parameters,
    initial_state,
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


@dataclasses.dataclass(frozen=True)
class TargetRun:
    """The target's run: everything that its result depends on."""

    recipe: TargetRecipe = dataclasses.field(default_factory=lambda: TargetRecipe(steps=10_000))
    shape: BatchShape = dataclasses.field(default_factory=BatchShape)
    seed: int = 0
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fields of the text config that replace the small model's."""

    def described(self) -> dict[str, Any]:
        """What a run directory is checked against."""
        return {
            "seed": self.seed,
            "sizes": dict(self.sizes),
            **dataclasses.asdict(self.recipe),
            **dataclasses.asdict(self.shape),
        }

    def build(self, directory: Path, layout: Layout) -> tuple[Tokenizer, Any, Mesh, TrainState]:
        """Tokenizer (written into the run's directory), model, mesh and the state before the first step."""
        tokenizer = write_small_tokenizer(directory / "tokenizer")
        config = small.config(tokenizer, **self.sizes)
        model = training_model(config)
        mesh = training_mesh(layout)
        parameters = initial_parameters(model, jax.random.key(self.seed), config.num_hidden_layers)
        return tokenizer, model, mesh, shard_state(initial_state(parameters, self.recipe), model, mesh, layout)

    def train(
        self, directory: Path, layout: Layout, options: LoopOptions | None = None, evaluation_prompts: int = 20
    ) -> Run:
        """Trains in `directory`, resuming where a checkpoint exists."""
        tokenizer, model, mesh, state = self.build(directory, layout)
        step = jax.jit(functools.partial(train_step, model, self.recipe, mesh), donate_argnums=0)

        def batch(index: int) -> data.Batch:
            made = data.training_batch(tokenizer, self.seed, index, **dataclasses.asdict(self.shape))
            return jax.device_put(made, NamedSharding(mesh, PartitionSpec("dp")))

        evaluate = held_out_evaluation(model, tokenizer, mesh, evaluation_prompts) if evaluation_prompts else None
        return run(state, step, batch, self.recipe.steps, directory, self.described(), options, evaluate)

    def export(self, directory: Path, output: Path) -> None:
        """Writes the last checkpoint of a run as an HF folder."""
        tokenizer, _, _, state = self.build(directory, Layout())
        state, _ = restore(directory, state)
        export_target(state.parameters, small.config_dict(tokenizer, **self.sizes), directory / "tokenizer", output)


@dataclasses.dataclass(frozen=True)
class DrafterRun:
    """The drafter's run. The target and its answers to the training prompts are part of the recipe."""

    recipe: Recipe = dataclasses.field(default_factory=lambda: Recipe(steps=2500, learning_rate=3e-3))
    loss: DraftLoss = dataclasses.field(default_factory=DraftLoss)
    texts: int = 8192
    """Training prompts answered by the target."""
    texts_per_step: int = 8
    length: int = 80
    """Longest text, prompt and answer; longer ones are left out."""
    anchors: int = 16
    seed: int = 0
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fields of the drafter's config that replace the small drafter's."""

    def config_json(self, engine: Engine) -> dict[str, Any]:
        """The drafter's config.json for this target."""
        return small.drafter_config_dict(engine.config, engine.tokenizer.special_id("[UNK]"), **self.sizes)

    def train(
        self,
        engine: Engine,
        directory: Path,
        layout: Layout,
        options: LoopOptions | None = None,
        evaluation_prompts: int = 8,
        progress: Callable[[int], None] | None = None,
    ) -> Run:
        """Trains in `directory`, resuming where a checkpoint exists; the target's answers are generated first."""
        directory.mkdir(parents=True, exist_ok=True)
        generated = training_generations(engine, directory / "generations.json", self.texts, self.seed, progress)
        chats = [chat for chat in generated if len(chat.ids) <= self.length]
        drafter, target, mesh = self._drafter(engine), self._target(engine), training_mesh(layout)
        everywhere = NamedSharding(mesh, PartitionSpec())
        frozen = jax.device_put(dequantize_experts(jax.device_get(engine.parameters["target"])), everywhere)
        step = jax.jit(functools.partial(draft_step, drafter, target, self.recipe, self.loss, mesh), donate_argnums=1)

        def batch(index: int) -> Any:
            rng = np.random.default_rng([self.seed, 2, index])
            chosen = [chats[i] for i in rng.choice(len(chats), self.texts_per_step, replace=False)]
            texts = anchored_texts(chosen, rng, length=self.length, anchors=self.anchors)
            return jax.device_put(texts, NamedSharding(mesh, PartitionSpec("dp")))

        evaluate = None
        if evaluation_prompts:
            measure = self._evaluation(engine, drafter, target, mesh, evaluation_prompts)
            evaluate = functools.partial(measure, frozen)
        described = {"sizes": dict(self.sizes), **dataclasses.asdict(self)} | dataclasses.asdict(self.recipe)
        return run(
            jax.device_put(self._initial(drafter), everywhere), functools.partial(step, frozen), batch,
            self.recipe.steps, directory, described, options, evaluate,
        )  # fmt: skip

    def export(self, engine: Engine, directory: Path, output: Path) -> None:
        """Writes the last checkpoint of a run with the public drafters' keys."""
        state, _ = restore(directory, self._initial(self._drafter(engine)))
        export_drafter(state.parameters, self.config_json(engine), output)

    def _drafter(self, engine: Engine) -> DFlash:
        return DFlash(DrafterConfig.from_dict(self.config_json(engine)))

    def _target(self, engine: Engine) -> Any:
        return training_model(engine.config, engine.config.n_routed_experts / engine.config.num_experts_per_tok)

    def _initial(self, drafter: DFlash) -> TrainState:
        key = jax.random.fold_in(jax.random.key(self.seed), 1)
        return initial_state(initial_parameters(drafter, key, drafter.config.num_hidden_layers), self.recipe)

    def _evaluation(
        self, engine: Engine, drafter: DFlash, target: Any, mesh: Mesh, prompts: int
    ) -> Callable[[Parameters, TrainState], Mapping[str, float]]:
        """Chain acceptance length by family on held-out prompts, following the target's own answers."""
        asked = [example.prompt for family in tasks.FAMILIES for example in tasks.held_out(family, prompts)]
        answers = generate_answers(engine, asked, batch=len(asked))
        families: dict[str, tuple[list[data.Chat], Any]] = {}
        for index, family in enumerate(tasks.FAMILIES):
            part = slice(index * prompts, (index + 1) * prompts)
            finished = finished_chats(engine, asked[part], answers[part])
            chats = [chat for chat in finished if len(chat.ids) <= self.length]
            if chats:
                every = anchored_texts(chats, np.random.default_rng(0), length=self.length, anchors=self.length)
                families[family] = chats, jax.device_put(every, NamedSharding(mesh, PartitionSpec()))

        def drafts(parameters: Parameters, frozen: Parameters, texts: Any) -> jax.Array:
            return block_logits(bind(drafter, parameters), bind(target, frozen), texts).argmax(-1)

        compiled = jax.jit(drafts)

        def measure(frozen: Parameters, state: TrainState) -> Mapping[str, float]:
            scores: dict[str, float] = {}
            for family, (chats, batch) in families.items():
                drafted, anchors = np.asarray(compiled(state.parameters, frozen, batch)), np.asarray(batch.anchors)
                rounds: list[int] = []
                for row, chat in enumerate(chats):
                    by_position = np.zeros((self.length, drafted.shape[2]), np.int64)
                    by_position[anchors[row][anchors[row] >= 0]] = drafted[row][anchors[row] >= 0]
                    # The prompt ends with </think>, so the first anchor is the first token of the answer.
                    rounds += chain_rounds(by_position, chat.ids, chat.answer_start + 1)
                scores[f"acceptance_{family}"] = float(np.mean(rounds))
            return {"heldout_acceptance": float(np.mean(list(scores.values()))), **scores}

        return measure


def routing_statistics(engine: Engine, texts: int, batch: int = 50) -> RoutingStatistics:
    """Routing of a target and its drafter on held-out texts, as many of each family, answered by reference."""
    assert engine.drafter is not None
    each = texts // len(tasks.FAMILIES)
    chats = [
        data.encode_example(engine.tokenizer, example)
        for family in tasks.FAMILIES
        for example in tasks.held_out(family, each)
    ]
    chats = [chats[i] for i in np.random.default_rng(0).permutation(len(chats))]
    target = training_model(engine.config, engine.config.n_routed_experts / engine.config.num_experts_per_tok)
    weights = dequantize_experts(engine.parameters["target"])
    return measure(target, engine.drafter, weights, engine.parameters["drafter"], chats, batch=batch)
