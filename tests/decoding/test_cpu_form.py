"""One CPU's form of the weights: the same numbers in another place, so the same text."""

import numpy as np
import pytest
from rich.console import Console

from kimi_jax.commands.options import EngineOptions, LayoutOptions
from kimi_jax.commands.progress import open_engine
from kimi_jax.decoding import cpu_form
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.model.attention import LatentAttention
from kimi_jax.model.moe import Experts
from kimi_jax.model.rows import causal_rows
from kimi_jax.parameters import declarations
from kimi_jax.quantization import dequantize


def experts_of(engine):
    return engine.parameters["target"]["model"]["layers"][engine.config.first_k_dense_replace]["mlp"]["experts"]


def generated(engine, prompts, draft):
    texts = [[] for _ in prompts]
    for progress in engine.generate(prompts, Limits(max_new_tokens=24), Sampling(), draft=draft):
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
    return texts


def test_logits_are_the_references(engines, forward, reference):
    tokens = reference["input_ids"]
    rows = causal_rows(tokens, np.zeros(len(tokens), np.int32), np.full(len(tokens), tokens.shape[1], np.int32))
    logits = forward(engines().for_cpu(), rows).logits
    # As for the checkpoint's own form: float32 sums in another order against transformers'.
    np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)


@pytest.mark.parametrize(
    "draft", [PLAIN, pytest.param(Draft("chain"), marks=pytest.mark.slow), Draft("ddtree", 16)], ids=str
)
def test_text_is_that_of_the_checkpoints_form(shallow, reference, draft):
    prompts = [reference["input_ids"][0].tolist(), reference["input_ids"][1][:9].tolist()]
    assert generated(shallow().for_cpu(), prompts, draft) == generated(shallow(), prompts, draft)


def test_every_weight_is_the_same_number(engines):
    """Projections lie transposed, gates beside ups; experts are exactly codes times scales; the rest is as it was."""
    engine = engines()
    changed = engine.for_cpu()
    seen = set()
    for name, module in (("target", changed.model), ("drafter", changed.drafter)):
        for declaration in declarations(module, engine.dtype):
            *parents, last = declaration.path
            before, after = engine.parameters[name], changed.parameters[name]
            for key in parents:
                before, after = before[key], after[key]
            assert after[last].shape == declaration.shape
            if last == "gate_up":
                halves = [stored(before[half]) for half in ("gate_proj", "up_proj")]
                np.testing.assert_array_equal(after[last].T, np.concatenate(halves))
            elif last == "down":
                expected = before["down_proj"]
                expected = stored_inputs(expected) if "experts" in parents else expected["weight"].T
                np.testing.assert_array_equal(after[last], expected)
            elif last == "a_proj":
                halves = [before[half]["weight"] for half in ("q_a_proj", "kv_a_proj_with_mqa")]
                np.testing.assert_array_equal(after[last].T, np.concatenate(halves))
            elif last not in ("q_absorbed", "o_absorbed"):
                same = after[last].shape == before[last].shape and np.array_equal(after[last], before[last])
                np.testing.assert_array_equal(after[last], before[last] if same else before[last].T)
            seen.add(last)
    assert {"gate_up", "down", "a_proj", "q_absorbed", "o_absorbed", "weight"} <= seen


def stored(projection):
    """A gate or up projection as [outputs, inputs], all slots below one another."""
    return projection["weight"] if isinstance(projection, dict) else np.concatenate(dequantize(projection))


def stored_inputs(projection):
    return np.concatenate(dequantize(projection).swapaxes(1, 2))


def test_a_large_stack_stays_int4(engines, reference, monkeypatch):
    monkeypatch.setattr(cpu_form, "UNPACKED_WEIGHTS", 1)
    engine = engines().for_cpu()
    assert isinstance(engine.model.model.layers[1].mlp.experts, Experts)
    assert type(engine.model.model.layers[1].self_attn) is LatentAttention
    np.testing.assert_array_equal(experts_of(engine)["gate_proj"].packed, experts_of(engines())["gate_proj"].packed)
    prompt = reference["input_ids"][0].tolist()
    assert generated(engine, [prompt], PLAIN) == generated(engines(), [prompt], PLAIN)


def test_several_devices_are_refused(engines):
    with pytest.raises(ValueError, match="one CPU device in float32, and this engine has 36 cpu devices"):
        engines("nvl36").for_cpu()


def test_commands_take_it_on_one_cpu_alone():
    def transposed(mesh):
        options = EngineOptions(layout=LayoutOptions(mesh))
        return open_engine(options, Console(quiet=True)).engine.model.lm_head.transposed

    assert transposed("local")
    assert not transposed("hgx-ib-16")
