"""The drafter against the reference package's rounds, against numpy, and sharded against whole."""

import functools
import runpy
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax import parameters
from kimi_jax.ddtree.tree import chain, greedy_path
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.context import CONTEXT, empty_context, write
from kimi_jax.drafter.dflash import DFlash, stack_taps

CASE = np.load(Path(__file__).parents[1] / "data" / "ddtree" / "drafter_case.npz")
FIXTURE = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_target_layers": 8,
    "block_size": 8, "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 96},
}  # fmt: skip
FIXTURE2 = FIXTURE | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
RAW = {"dflash1": FIXTURE, "dflash2": FIXTURE2}
BATCH = PartitionSpec(("dp", "ep"))
RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp"}


reference = types.SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("drafter_numpy.py"))))


def weights_of(kind: str) -> dict[str, np.ndarray]:
    prefix = f"{kind}/w/"
    named = {key.removeprefix(prefix): CASE[key] for key in CASE.files if key.startswith(prefix)}
    return {key.replace("codebook.weight", "codebook"): value for key, value in named.items()}


class Drafter:
    """A drafter with the fixture's weights, on one device or inside a shard_map."""

    def __init__(self, kind: str, raw: dict, draft_window: int, mesh: Mesh | None = None, **overrides):
        self.config = DrafterConfig.from_dict(raw, draft_window=draft_window, **overrides)
        self.dtype = jnp.float32
        self.mesh, self.tp = mesh, mesh.shape["tp"] if mesh else 1
        self.module = DFlash(self.config, self.tp)
        self.weights = weights_of(kind)
        leaves = {d.path: jnp.asarray(self.weights[d.key()]) for d in parameters.declarations(self.module, jnp.float32)}
        assert len(leaves) == len(self.weights)
        self.parameters = parameters.from_leaves(self.module, leaves)
        self.embed, self.head = CASE[f"{kind}/embed"], CASE[f"{kind}/lm_head"]

    def context(self, requests: int):
        return empty_context(self.config, requests, self.dtype, self.tp)

    def _jit(self, function, in_specs, out_specs):
        """Under a mesh: requests on dp and ep, weights by their rules, the head's vocabulary on tp."""
        if self.mesh is None:
            return jax.jit(function)
        specs = (parameters.specs(self.module, RULES), CONTEXT, *in_specs)
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False))

    @functools.cached_property
    def _extend(self):
        def extend(p, context, taps, start, count):
            rows = parameters.bind(self.module, p).context_rows(taps, start)
            return write(context, rows, start, count)

        return self._jit(extend, (BATCH, BATCH, BATCH), CONTEXT)

    @functools.cached_property
    def _propose(self):
        def propose(p, context, anchor, start, head):
            module = parameters.bind(self.module, p)
            hidden = module.draft(context, anchor, start, lambda ids: jnp.asarray(self.embed)[ids])
            logits = module.logits(hidden, lambda h: h @ head.T)
            return hidden, logits, module.candidates(hidden, logits, anchor, 4)

        out = (BATCH, PartitionSpec(("dp", "ep"), None, "tp"), BATCH)
        return self._jit(propose, (BATCH, BATCH, PartitionSpec("tp")), out)

    def extend(self, context, taps, start, count):
        return self._extend(self.parameters, context, taps, start, count)

    def propose(self, context, anchor, start):
        """Hidden states, logits, and four candidates of each drafted position."""
        return self._propose(self.parameters, context, anchor, start, jnp.asarray(self.head))


def close(got, expected, tolerance=1e-5):
    """Within `tolerance` of the largest expected magnitude: float32 rounding through two random layers."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["dflash1", "dflash2"])
def test_two_reference_rounds(kind):
    """Prefill of 11 tokens and a round; 3 accepted tokens and another. The ring has exactly the 14 slots needed."""
    drafter = Drafter(kind, RAW[kind], 14)
    context, start = drafter.context(1), 0
    for number, count in ((1, 11), (2, 3)):
        taps = CASE[f"{kind}/target_hidden_{number}"].reshape(1, count, 3, 64)
        context = drafter.extend(context, taps, jnp.array([start]), jnp.array([count]))
        start += count
        anchor = jnp.asarray(CASE[f"{kind}/block_{number}"][:, 0], jnp.int32)
        hidden, logits, (log_probs, ids) = drafter.propose(context, anchor, jnp.array([start]))
        close(hidden, CASE[f"{kind}/hidden_{number}"][:, 1:])
        if number == 1:
            keys = context[0].keys[:, :, :11]
            close(keys, CASE[f"{kind}/layer0_keys_after_crop"])
        else:
            close(logits, CASE[f"{kind}/logits_2"][:, 1:])
        path = greedy_path(log_probs[0], ids[0])
        if kind == "dflash2":
            np.testing.assert_array_equal(path[1], CASE[f"{kind}/proposal_{number}"][0])
            assert (path[1] != logits[0].argmax(axis=-1)).any()
            np.testing.assert_allclose(jnp.exp(log_probs).sum(axis=-1), 1, rtol=1e-5)
        else:
            np.testing.assert_array_equal(path[1], logits[0].argmax(axis=-1))
            np.testing.assert_allclose(path[0], jax.nn.log_softmax(logits)[0].max(axis=-1), atol=1e-5)
        assert chain(*path).tokens.shape == (8,)


def test_numpy_agrees_with_the_reference_package():
    """So that the cases below, which the fixture lacks, stand on the same ground."""
    for kind in RAW:
        config = DrafterConfig.from_dict(RAW[kind])
        taps = np.concatenate([CASE[f"{kind}/target_hidden_{n}"][0] for n in (1, 2)]).astype(np.float64)
        got = reference.draft(config, weights_of(kind), CASE[f"{kind}/embed"], taps.reshape(-1, 3, 64), 23)
        close(got, CASE[f"{kind}/hidden_2"][0])


YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 4, "beta_slow": 1,
}  # fmt: skip
SLIDING = ["sliding_attention"] * 2
VARIANTS = {
    "plain": ("dflash1", {}, 64, {}),
    "ring": ("dflash1", {}, 7, {}),
    "yarn": ("dflash1", {"rope_scaling": YARN}, 64, {"attention_factor": 1.25}),
    "sliding": ("dflash1", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}, 9, {}),
    "not causal": ("dflash2", {"layer_types": SLIDING, "sliding_window": 4, "is_causal": False}, 64, {}),
    "causal": ("dflash2", {"is_causal": True, "input_embedding_scale": 1.5}, 10, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_unequal_batch_in_chunks_against_numpy(name):
    """Two requests with contexts of 19 and 6 positions, extended in chunks with stale rows behind the real ones.

    A ring of 7 wraps several times, and its first chunk is longer than it is.
    """
    kind, changes, window, overrides = VARIANTS[name]
    drafter = Drafter(kind, RAW[kind] | changes, window, **overrides)
    rng = np.random.default_rng(0)
    lengths, anchors = (19, 6), (17, 23)
    taps = [rng.normal(size=(length, 3, 64)) for length in lengths]
    context, done = drafter.context(2), [0, 0]
    for counts in ((11, 5), (0, 1), (1, 0), (7, 0)):
        chunk = np.full((2, 11, 3, 64), np.nan)
        for r, count in enumerate(counts):
            chunk[r, :count] = taps[r][done[r] : done[r] + count]
        context = drafter.extend(context, jnp.asarray(chunk, jnp.float32), jnp.array(done), jnp.array(counts))
        done = [a + b for a, b in zip(done, counts, strict=True)]
    assert tuple(done) == lengths
    hidden, *_ = drafter.propose(context, jnp.array(anchors), jnp.array(done))
    for r in range(2):
        expected = reference.draft(drafter.config, drafter.weights, drafter.embed, taps[r], anchors[r])
        close(hidden[r], expected[1:])


def test_variants_differ():
    """Each option above changes the result by far more than the tolerance: the comparisons can fail."""
    taps = np.random.default_rng(0).normal(size=(19, 3, 64))
    results = []
    for kind, changes, window, overrides in VARIANTS.values():
        config = DrafterConfig.from_dict(RAW[kind] | changes, draft_window=window, **overrides)
        results.append(reference.draft(config, weights_of(kind), CASE[f"{kind}/embed"], taps, 17))
    for a in range(len(results)):
        for b in range(a):
            assert np.abs(results[a] - results[b]).max() > 1e-3


def test_empty_context_drafts_from_the_anchor_alone():
    drafter = Drafter("dflash1", FIXTURE, 8)
    hidden, *_ = drafter.propose(drafter.context(1), jnp.array([5]), jnp.array([0]))
    close(hidden[0], reference.draft(drafter.config, drafter.weights, drafter.embed, np.zeros((0, 3, 64)), 5)[1:])


def test_blocks_anywhere_in_a_text_share_its_keys_and_values():
    """Training's use: one text's context rows, and a block at each of three positions that sees only what is before."""
    drafter = Drafter("dflash1", FIXTURE, 64)
    taps = np.random.default_rng(5).normal(size=(1, 12, 3, 64))

    @jax.jit
    def blocks(p, taps, anchors, starts):
        module = parameters.bind(drafter.module, p)
        context = module.context_rows(taps, jnp.zeros(1, jnp.int32))
        context = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), context)
        return module.draft(context, anchors, starts, lambda ids: jnp.asarray(drafter.embed)[ids])

    anchors, starts = [4, 5, 6], [3, 12, 7]
    hidden = blocks(drafter.parameters, jnp.asarray(taps, jnp.float32), jnp.array(anchors), jnp.array(starts))
    for r in range(3):
        before = taps[0, : starts[r]]
        close(hidden[r], reference.draft(drafter.config, drafter.weights, drafter.embed, before, anchors[r])[1:])


def test_bfloat16_is_kept_and_close():
    """Types as on a GPU. Eight bits of mantissa are 0.4 % a rounding, some ten roundings a layer: 3 % of the largest.

    A dropped norm, rotation or residual changes the result by its own size, an order of magnitude more. (DFlash 2's
    random weights amplify rounding several times, as its float32 comparison with the reference shows too.)
    """
    drafter = Drafter("dflash1", FIXTURE, 16)
    whole = whole_rounds("dflash1")
    drafter.parameters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drafter.parameters)
    drafter.dtype, drafter.embed, drafter.head = (
        jnp.bfloat16, jnp.asarray(drafter.embed, jnp.bfloat16), jnp.asarray(drafter.head, jnp.bfloat16)
    )  # fmt: skip
    assert drafter.context(1)[0].keys.dtype == jnp.bfloat16
    hidden, logits, (log_probs, _) = rounds(drafter)
    assert (hidden.dtype, logits.dtype, log_probs.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    close(hidden.astype(jnp.float32), whole[0], 0.03)
    close(logits, whole[1], 0.03)


def test_logits_are_scaled_and_capped():
    raw = FIXTURE | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    module = DFlash(DrafterConfig.from_dict(raw))
    logits = module.logits(jnp.array([[[2.0, 40.0]]]), lambda h: h)
    np.testing.assert_allclose(logits, [[[3 * np.tanh(1 / 3), 3 * np.tanh(20 / 3)]]], rtol=1e-6)


@functools.cache
def whole_rounds(kind: str):
    drafter = Drafter(kind, RAW[kind], 16)
    return rounds(drafter)


def rounds(drafter: Drafter):
    rng = np.random.default_rng(3)
    taps = jnp.asarray(rng.normal(size=(4, 9, 3, 64)), drafter.dtype)
    counts = jnp.array([9, 2, 5, 7])
    context = drafter.extend(drafter.context(4), taps, jnp.zeros(4, jnp.int32), counts)
    return drafter.propose(context, jnp.array([1, 2, 3, 4]), counts)


@pytest.mark.parametrize(("kind", "dp", "ep", "tp"), [("dflash1", 1, 2, 2), ("dflash2", 2, 1, 4)])
def test_sharded_equals_whole(kind, dp, ep, tp):
    """Two key-value heads on tp 2, and on tp 4, where each device holds the one its query head reads."""
    mesh = Mesh(np.array(jax.devices()[: dp * ep * tp]).reshape(dp, ep, tp), ("dp", "ep", "tp"))
    drafter = Drafter(kind, RAW[kind], 16, mesh)
    # 97 tokens do not divide by tp: a row that cannot win completes the head.
    padding = -CASE[f"{kind}/lm_head"].shape[0] % tp
    drafter.head = np.pad(drafter.head, ((0, padding), (0, 0)))
    drafter.parameters = jax.device_put(
        drafter.parameters,
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameters.specs(drafter.module, RULES)),
    )
    hidden, logits, (log_probs, ids) = rounds(drafter)
    whole = whole_rounds(kind)
    close(hidden, whole[0])
    close(logits[..., :97], whole[1])
    np.testing.assert_array_equal(ids, whole[2][1])
    # The padding's zero logits weigh in DFlash's normalisation; DFlash 2 normalises over its candidates.
    if kind == "dflash2":
        np.testing.assert_allclose(log_probs, whole[2][0], atol=1e-4)
    else:
        with_padding = jax.nn.log_softmax(jnp.pad(whole[1], ((0, 0), (0, 0), (0, padding))), axis=-1)
        np.testing.assert_allclose(log_probs[:, :, 0], jax.lax.top_k(with_padding, 4)[0], atol=1e-4)


def test_tp_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp 3 does not divide 4 heads"):
        DFlash(DrafterConfig.from_dict(FIXTURE), 3)


def test_taps_are_stacked_in_order():
    taps = [jnp.full((2, 3, 4), value) for value in (1.0, 2.0)]
    assert stack_taps(taps)[1, 2].tolist() == [[1.0] * 4, [2.0] * 4]
