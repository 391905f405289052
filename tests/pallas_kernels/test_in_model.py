"""The kernels inside the model on the presets' meshes: the sharded program runs, and every rank's call to a public
function is served by the kernel in the interpreter, with race detection.

The interpreter cannot run on several devices of a process at once: its simulated memory is one for all of them, and at
the end of a kernel on one device it refuses barriers that another device still holds ("Barrier remains allocated").
So the model's call becomes a host callback that runs one rank's kernel at a time, with the operands of that rank.
"""

import contextlib
import dataclasses
import functools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding

from kimi_jax.config import ModelConfig
from kimi_jax.ddtree.tree import build_tree
from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.loading import model_for
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.model import attention, moe
from kimi_jax.model.pages import Latents
from kimi_jax.model.rows import Rows
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import declarations, from_leaves
from kimi_jax.tokenizer import Tokenizer
from meshes.devices import build_mesh
from meshes.presets import preset
from pallas_kernels.int4_moe import int4_moe
from pallas_kernels.operation import Device
from pallas_kernels.registry import OPERATIONS
from pallas_kernels.tree_attention import tree_attention

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny_random"  # its tokenizer, and most of its sizes
HGX, NVL36, NVL72 = preset("hgx-ib-16"), preset("nvl36"), preset("nvl72")
H200, GB300 = Device("NVIDIA H200", "9.0", 3), Device("NVIDIA GB300", "10.3", 3)
# Every preset with the kernels of the card it is made of.
PRESETS = {
    "local": (preset("local"), GB300),
    "hgx-ib-16": (HGX, H200),
    "hgx-ib-16 replicas": (HGX.with_axes(dp=2, ep=1, tp=8), H200),
    "hgx-ib-16 wide ep": (HGX.with_axes(dp=1, ep=16, tp=1), H200),
    "nvl36": (NVL36, GB300),
    "nvl72": (NVL72, GB300),
    "nvl72 ep 72": (NVL72.with_axes(dp=1, ep=72, tp=1), GB300),
}
DEFAULT_RUN = {"hgx-ib-16": (0, 13)}
"""The default run checks attention on these ranks; the slow and the exhaustive run all ranks, and the experts, which
compile longer."""
LONG_RUNS = [
    pytest.param(name, marks=pytest.mark.slow if name in DEFAULT_RUN else pytest.mark.exhaustive) for name in PRESETS
]
ROWS, CAPACITY = 9, 128
INTERPRETER = threading.Lock()
"""One for both operations: replicas run at their own pace, one in its experts while another is in attention."""


def kernel_sized(config: ModelConfig) -> ModelConfig:
    """The tiny model with latents as wide as a kernel's tiles need, one layer of each kind."""
    return dataclasses.replace(config, num_hidden_layers=2, kv_lora_rank=128, qk_rope_head_dim=64)


def random_engine(machine) -> Engine:
    """The same random weights on every mesh: a weight's values follow from its name."""
    config = kernel_sized(ModelConfig.from_json(CHECKPOINT))
    mesh, model = build_mesh(machine, jax.devices()), model_for(config, machine.layout)
    experts = np.maximum(model.placement.slot_experts, 0)  # an empty slot holds anything
    leaves = {}
    for number, d in enumerate(declarations(model)):
        rng = np.random.default_rng(number)
        shape = (config.n_routed_experts, *d.shape[1:]) if d.stacked else d.shape
        if d.dtype == jnp.int32:
            value = rng.integers(-(2**31), 2**31, shape)
        elif d.stacked:
            value = rng.uniform(0.005, 0.02, shape)
        elif len(shape) == 1:
            value = rng.normal(0, 0.1, shape) + (0 if d.path[-1] == "e_score_correction_bias" else 1)
        else:
            value = rng.normal(0, 1 / np.sqrt(shape[-1]), shape)
            if d.path[-2] == "lm_head":  # a few loud tokens: the best one leads by more than bfloat16 rounds
                value *= np.exp(rng.normal(0, 1, (shape[0], 1)))
        value = np.asarray(value[experts] if d.stacked else value).astype(d.dtype)
        leaves[d.path] = jax.device_put(value, NamedSharding(mesh, d.spec(rules(machine.layout))))
    tokenizer = Tokenizer.from_directory(CHECKPOINT, vocab_size=config.vocab_size)
    return Engine(model, {"target": from_leaves(model, leaves)}, tokenizer, mesh, machine.layout, jnp.bfloat16)


class OneRankAtATime:
    """A public function for the model to call, which serves each rank's call by the kernel for a card."""

    def __init__(self, function, device: Device, ranks=None):
        self.ranks, self.errors = ranks, []
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        self.kernel = functools.cache(
            lambda **options: jax.jit(functools.partial(function, device=device, interpret=interpret, **options))
        )
        self.reference = functools.cache(
            lambda **options: jax.jit(functools.partial(function, implementation="reference", **options))
        )

    def __call__(self, *operands, **options):
        options = {name: value for name, value in options.items() if value is not None}
        dtype = options.pop("dtype", None)  # compared before the last rounding
        reference, kernel = self.reference(**options), self.kernel(**options)

        def host(rank, *operands):
            operands = jax.tree.map(np.asarray, operands)
            if self.ranks is not None and int(rank) not in self.ranks:
                return jax.tree.map(np.asarray, reference(*operands))
            with INTERPRETER:  # until the values have arrived
                got = jax.tree.map(np.asarray, kernel(*operands))
            want = jax.tree.map(np.asarray, reference(*operands))
            self.errors.append(relative_error(jax.tree.leaves(got)[0], jax.tree.leaves(want)[0]))
            return got

        rank = jax.lax.axis_index(("dp", "ep", "tp"))
        out = jax.pure_callback(host, jax.eval_shape(reference, *operands), rank, *operands)
        return out if dtype is None else out.astype(dtype)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))


@contextlib.contextmanager
def served_by(monkeypatch, *, experts=None, attention_kernel=None):
    with monkeypatch.context() as patch:
        if experts is not None:
            patch.setattr(moe, "int4_moe", experts)
        if attention_kernel is not None:
            patch.setattr(attention, "tree_attention", attention_kernel)
        yield


def fresh(engine: Engine) -> Engine:
    """The same engine with nothing compiled yet."""
    return dataclasses.replace(engine, model=model_for(engine.config, engine.layout))


def tree_rows(engine: Engine):
    """A random tree of rows for each of two requests, and a cache of random latents behind them."""
    rng = np.random.default_rng(0)
    config, lengths = engine.config, np.array([70, 33], np.int32)
    cache = [
        Latents(*(rng.normal(size=(2, CAPACITY, width)).astype(jnp.bfloat16) for width in widths))
        for widths in [(config.kv_lora_rank, config.qk_rope_head_dim)] * config.num_hidden_layers
    ]
    sees = np.zeros((2, ROWS, ROWS), bool)
    for tree in sees:
        for row in range(ROWS):
            tree[row] = tree[rng.integers(row)] if row else False
            tree[row, row] = True
    sees[1, 5:] = False  # padding rows
    depths = np.maximum(sees.sum(-1) - 1, 0)
    tokens = rng.integers(0, 300, (2, ROWS)).astype(np.int32)
    nowhere = np.zeros((2, 0), np.int32)  # `forward` puts the cache into pages
    return Rows(tokens, (lengths[:, None] + depths).astype(np.int32), sees, lengths, nowhere), cache


@pytest.mark.parametrize(
    ("name", "ranks"), [*DEFAULT_RUN.items(), *(pytest.param(*run.values, None, marks=run.marks) for run in LONG_RUNS)]
)
def test_every_rank_of_a_preset_gets_what_the_reference_gives(name, ranks, forward, monkeypatch):
    machine, target = PRESETS[name]
    engine = random_engine(machine)
    rows, cache = tree_rows(engine)
    want = forward(engine, rows, cache)
    attend, experts = OneRankAtATime(tree_attention, target, ranks), OneRankAtATime(int4_moe, target)
    with served_by(monkeypatch, attention_kernel=attend, experts=experts if ranks is None else None):
        got = forward(fresh(engine), rows, cache)
    served = engine.mesh.size if ranks is None else len(ranks)
    assert len(attend.errors) == 2 * served
    assert max(attend.errors) < OPERATIONS["tree_attention"].tolerances[0].frobenius
    if ranks is None:
        assert len(experts.errors) == served
        assert max(experts.errors) < OPERATIONS["int4_moe"].tolerances[0].frobenius
    # Both are bfloat16 models that round in other places, and a row whose router was undecided may take another expert.
    pairs = zip(got.logits[rows.valid], want.logits[rows.valid], strict=True)
    errors = [relative_error(*pair) for pair in pairs]
    assert 0 < np.median(errors) < 0.02, errors


class FixedTree:
    """Drafts the best tree of one table of log-probabilities, whatever the text."""

    max_depth, context = 3, None

    def propose(self, model, state):
        table = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (3, model.config.vocab_size)))
        return jax.vmap(lambda root: build_tree(table, 7, root=root))(state.anchors)


def greedy_texts(engine: Engine, drafter, served) -> list[list[int]]:
    prompts = [list(range(5, 40)), [7, 301, 12]]
    programs = dataclasses.replace(engine.programs(), speculation=Speculation(drafter))
    return served(engine, programs, prompts, Limits(max_new_tokens=6)).texts


@pytest.mark.parametrize("name", LONG_RUNS)
def test_greedy_text_is_unchanged(name, monkeypatch, served):
    machine, target = PRESETS[name]
    engine = random_engine(machine)
    want = greedy_texts(engine, FixedTree(), served)
    attend = OneRankAtATime(tree_attention, target)
    with served_by(monkeypatch, attention_kernel=attend):
        assert greedy_texts(fresh(engine), FixedTree(), served) == want
    assert [len(text) for text in want] == [6, 6]
    assert len(attend.errors) >= 4 * engine.mesh.size  # prefill and at least one round, two layers
    assert max(attend.errors) < OPERATIONS["tree_attention"].tolerances[0].frobenius
