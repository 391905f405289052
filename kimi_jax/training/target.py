"""Training of the target: float experts in the inference model, answer loss, auxiliary-loss-free balancing."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from kimi_jax.config import ModelConfig
from kimi_jax.model.moe import MixtureOfExperts
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters, bind, declarations, from_leaves, weight
from kimi_jax.training.data import Batch


class Load(nnx.Intermediate):
    """Rows each expert of a layer received."""


class Chosen(nnx.Intermediate):
    """Slots that each row of a layer chose."""


class FloatExperts(nnx.Module):
    """Routed experts with float weights, every expert over an equal number of places.

    An expert has `capacity_factor` times its even share of places; rows beyond it are dropped, as in Switch
    Transformers (Fedus et al. 2021, arXiv 2101.03961), which the balancing keeps rare. With `capacity_factor` =
    experts / top_k nothing is ever dropped. Inference never drops.
    """

    def __init__(self, config: ModelConfig, slots: int, capacity_factor: float = 2.0):
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = weight((slots, width, hidden), ("expert", "expert_mlp", None))
        self.up_proj = weight((slots, width, hidden), ("expert", "expert_mlp", None))
        self.down_proj = weight((slots, hidden, width), ("expert", None, "expert_mlp"))
        self.capacity_factor = capacity_factor

    @property
    def num_local(self) -> int:
        """Slots this rank holds."""
        return self.gate_proj.get_value().shape[0]

    def __call__(
        self,
        x: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        routed_rows: int | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Weighted sum over the slots; `load` and `chosen` are left for the balancing and for statistics."""
        experts, (rows, top_k) = self.num_local, slots.shape
        places = min(rows, math.ceil(self.capacity_factor * rows * top_k / experts))
        flat = slots.reshape(-1)
        chosen = (flat[:, None] == jnp.arange(experts)).astype(jnp.int32)
        load = chosen.sum(0)
        self.load, self.chosen = Load(load), Chosen(slots)
        order = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(1)
        nowhere = experts * places
        place = jnp.where((flat < experts) & (order < places), flat * places + order, nowhere)
        source = jnp.full(nowhere + 1, rows, jnp.int32).at[place].set(jnp.arange(rows * top_k) // top_k)[:-1]
        gathered = jnp.concatenate([x, jnp.zeros_like(x[:1])])[source].reshape(experts, places, -1)
        gate, up, down = (p[...] for p in (self.gate_proj, self.up_proj, self.down_proj))
        hidden = jax.nn.silu(jnp.einsum("eph,ewh->epw", gathered, gate)) * jnp.einsum("eph,ewh->epw", gathered, up)
        out = jnp.einsum("epw,ehw->eph", hidden, down).reshape(nowhere, -1)
        out = jnp.concatenate([out, jnp.zeros_like(out[:1])])[place].reshape(rows, top_k, -1)
        return (out * weights[..., None].astype(x.dtype)).sum(1)


def training_model(config: ModelConfig, capacity_factor: float = 2.0) -> CausalLM:
    """The model as it is trained; its weights are those of the inference model but for the experts' float type."""
    return CausalLM(config, make_experts=functools.partial(FloatExperts, capacity_factor=capacity_factor))


def initial_parameters(model: nnx.Module, key: PRNGKeyArray, layers: int) -> Parameters:
    """Float32 weights: norms 1, router bias 0, matrices normal with deviation 1/sqrt(inputs), less into the residual.

    The matrices that write into the residual stream are divided by sqrt(2 · layers) (GPT-2, Radford et al. 2019).
    """
    residual = ("o_proj", "down_proj")
    leaves: dict[Any, Array] = {}
    for index, declaration in enumerate(declarations(model, jnp.float32)):
        names, shape = declaration.path, declaration.shape
        if names[-1] == "e_score_correction_bias":
            leaves[names] = jnp.zeros(shape, jnp.float32)
        elif len(shape) == 1:
            leaves[names] = jnp.ones(shape, jnp.float32)
        else:
            deviation = 0.5 if "embed_tokens" in names else shape[-1] ** -0.5
            if any(name in names for name in residual):
                deviation /= math.sqrt(2 * layers)
            leaves[names] = deviation * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
    return from_leaves(model, leaves)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW with warm-up, cosine and clipping."""

    steps: int
    learning_rate: float = 2e-3
    final_fraction: float = 0.02
    warmup_steps: int = 100
    weight_decay: float = 0.05
    beta2: float = 0.98
    clip: float = 1.0

    def schedule(self) -> optax.Schedule:
        """Learning rate by step."""
        return optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, min(self.warmup_steps, self.steps // 2), self.steps,
            self.learning_rate * self.final_fraction,
        )  # fmt: skip

    def optimizer(self) -> optax.GradientTransformation:
        """Clipped AdamW; only matrices decay."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(), b2=self.beta2, weight_decay=self.weight_decay,
                mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
            ),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TargetRecipe(Recipe):
    """The target's recipe: with the balancing."""

    bias_rate: float = 0.01
    """Step of the router's correction bias at the peak of the schedule; it follows the learning rate."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What the sequences of one dp rank add to a step's figures."""

    tokens: Float[Array, ""]
    correct: Float[Array, ""]
    loads: dict[int, Int[Array, " experts"]]
    """Rows that chose each expert, by layer."""


def answer_loss(model: CausalLM, parameters: Parameters, batch: Batch) -> tuple[Float[Array, ""], Sums]:
    """Summed cross-entropy (nats) of the answer tokens, and what goes with it."""
    bound = bind(model, parameters)
    output = bound.model(batch.rows(), expanded=True)
    hidden = jnp.take_along_axis(output.hidden, batch.predictors[..., None], axis=1)
    logits = bound.logits(hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    correct = (logits.argmax(-1) == batch.targets) * batch.weights
    loads = {
        index: layer.mlp.experts.load.get_value()  # pyright: ignore[reportAttributeAccessIssue]
        for index, layer in enumerate(bound.model.layers)
        if isinstance(layer.mlp, MixtureOfExperts)
    }
    return (losses * batch.weights).sum(), Sums(batch.weights.sum(), correct.sum(), loads)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run needs to go on: saved and restored whole."""

    step: Int[Array, ""]
    parameters: Parameters
    optimizer: optax.OptState


def initial_state(parameters: Parameters, recipe: Recipe) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.int32(0), parameters, recipe.optimizer().init(parameters))


def updated(
    state: TrainState, recipe: Recipe, gradients: Parameters, count: Float[Array, ""]
) -> tuple[TrainState, Float[Array, ""]]:
    """The state after one step of the optimiser, and the gradients' norm; `gradients` are sums over `count`."""
    gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
    updates, optimizer = recipe.optimizer().update(gradients, state.optimizer, state.parameters)
    parameters: Parameters = optax.apply_updates(state.parameters, updates)  # pyright: ignore[reportAssignmentType]
    return TrainState(state.step + 1, parameters, optimizer), optax.tree.norm(gradients)


def over_dp[T](mesh: Mesh, function: Callable[[Any, Any], T], replicated: Any, spread: Any) -> T:
    """Sum over dp of a function of each rank's part of `spread`; ep and tp are left to the compiler.

    Inside, `replicated` varies over dp, so that gradients stay a rank's own and are summed once.
    """
    if mesh.shape["dp"] == 1:
        return function(replicated, spread)

    def local(replicated: Any, spread: Any) -> T:
        replicated = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "dp", to="varying"), replicated)
        return jax.lax.psum(function(replicated, spread), "dp")

    whole = PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, PartitionSpec("dp")), out_specs=whole, axis_names={"dp"})(
        replicated, spread
    )


def train_step(
    model: CausalLM, recipe: TargetRecipe, mesh: Mesh, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One update of weights and correction biases.

    Sequences are spread over dp, where gradients are summed; ep and tp are left to the compiler, which follows the
    shardings of the weights. The bias of an expert that received more rows than the mean falls by the rate, of one
    that received fewer it rises (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, section 2.1.2). No gradient
    reaches it.
    """

    def gradient(parameters: Parameters, batch: Batch) -> tuple[tuple[Array, Sums], Parameters]:
        return jax.value_and_grad(functools.partial(answer_loss, model), has_aux=True)(parameters, batch)

    (loss, sums), gradients = over_dp(mesh, gradient, state.parameters, batch)
    count = jnp.maximum(sums.tokens, 1)
    state, gradient_norm = updated(state, recipe, gradients, count)
    rate = recipe.bias_rate * recipe.schedule()(state.step - 1) / recipe.learning_rate
    worst = jnp.float32(0)
    for index, load in sums.loads.items():
        load = load.astype(jnp.float32)
        gate = state.parameters["model"]["layers"][index]["mlp"]["gate"]
        gate["e_score_correction_bias"] += rate * jnp.sign(load.mean() - load)
        worst = jnp.maximum(worst, load.max() / load.mean())
    metrics = {
        "loss": loss / count,
        "accuracy": sums.correct / count,
        "gradient_norm": gradient_norm,
        "worst_load": worst,
    }
    return state, metrics


def teacher_forced(model: CausalLM, parameters: Parameters, batch: Batch) -> Bool[Array, " sequences"]:
    """Whether every answer token of a sequence is the most likely one: what greedy decoding would write exactly."""
    bound = bind(model, parameters)
    output = bound.model(batch.rows(), expanded=True)
    hidden = jnp.take_along_axis(output.hidden, batch.predictors[..., None], axis=1)
    return ((bound.logits(hidden).argmax(-1) == batch.targets) | (batch.weights == 0)).all(-1)
