"""What is written is what was trained, and the bundled assets are what the recipe makes."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import ModelConfig
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.decoding.loading import open_checkpoint
from kimi_jax.evaluation.tasks import score, together
from kimi_jax.quantization import Int4Weight
from kimi_jax.training import small, target
from kimi_jax.training.data import encode_chat
from kimi_jax.training.export import dequantize_experts, export_target, quantize_experts
from kimi_jax.training.generations import answer_text, generate_answers
from kimi_jax.training.recipes import DrafterRun, training_mesh
from kimi_jax.training.vocabulary import write_small_tokenizer
from meshes.presets import Layout

ASSETS = Path(kimi_jax.__file__).parent / "assets"
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 64,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Trained-looking float weights, and the checkpoint written from them."""
    directory = tmp_path_factory.mktemp("export")
    tokenizer = write_small_tokenizer(directory / "tokenizer")
    raw = small.config_dict(tokenizer, **TINY)
    parameters = target.initial_parameters(
        target.training_model(ModelConfig.from_dict(raw)), jax.random.key(3), TINY["num_hidden_layers"]
    )
    export_target(parameters, raw, directory / "tokenizer", directory / "out")
    return parameters, directory / "out"


def test_exported_weights_are_the_rounded_ones(tiny):
    """Experts to the bit of `quantize`, the rest to bfloat16, the router's bias untouched."""
    parameters, directory = tiny
    engine = open_checkpoint(directory, training_mesh(Layout()), Layout(), jnp.float32)
    expected = quantize_experts(parameters, engine.config)

    def is_int4(node):
        return isinstance(node, Int4Weight)

    written = jax.tree_util.tree_leaves_with_path(engine.parameters["target"], is_leaf=is_int4)
    wanted = jax.tree.leaves(expected, is_leaf=is_int4)
    assert len(written) == len(wanted)
    experts = 0
    for (path, actual), value in zip(written, wanted, strict=True):
        if is_int4(value):
            experts += 1
            assert (actual.packed == value.packed).all()
            assert (actual.scale == value.scale).all()
        elif "e_score_correction_bias" in jax.tree_util.keystr(path):
            assert (actual == value).all()
        else:
            assert (actual == value.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert experts == 3


def test_quantising_moves_an_expert_by_half_a_step_at_most(tiny):
    parameters, _ = tiny
    config = dataclasses.replace(ModelConfig.from_json(tiny[1]))
    rounded = dequantize_experts(quantize_experts(parameters, config))
    experts, original = (p["model"]["layers"][1]["mlp"]["experts"]["up_proj"] for p in (rounded, parameters))
    step = np.abs(np.asarray(original)).max(-1, keepdims=True) / 7  # one group of 32 a row here
    # A bfloat16 scale is off by up to 1/256, seven steps of it at the largest code.
    assert (np.abs(np.asarray(experts - original)) <= step * (0.5 + 7 / 256)).all()
    assert (np.asarray(experts) != np.asarray(original)).any()


@pytest.fixture(scope="module")
def bundled():
    return open_checkpoint(ASSETS / "small", training_mesh(Layout()), Layout(), jnp.float32, ASSETS / "small_drafter")


def test_bundled_configuration_and_tokenizer_are_the_recipe_s(bundled, tmp_path):
    tokenizer = write_small_tokenizer(tmp_path)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "small" / name).read_bytes()
    assert json.loads((ASSETS / "small" / "config.json").read_text()) == small.config_dict(tokenizer)
    config_json = DrafterRun().config_json(bundled)
    assert json.loads((ASSETS / "small_drafter" / "config.json").read_text()) == config_json


def test_bundle_stays_small():
    folders = (ASSETS / "small", ASSETS / "small_drafter")
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 3e6


CARD = {
    "Add 517 and 268.": "7+8+0=15, 1+6+1=08, 5+2+0=07 so 785",
    "Sort 7 3 9 1 5.": "1 3 5 7 9",
    'Count "k" in "kxkkb".': "k1x1k2k3b3 total 3",
    'Reverse "garden".': "nedrag",
    'Write "kxqwab" in capitals.': "KXQWAB",
    "Write the date 2024-03-17 in words.": "17 March 2024",
    "Convert 37 km to m.": "37 km = 37 * 1000 m = 37000 m",
    "Write as JSON: name=kxq, age=31, city=abcd.": '{"name": "kxq", "age": 31, "city": "abcd"}',
    "Table: Otto blue, Mila red, Nora green. Find Mila.": "The table says Mila red, so Mila has red.",
    "Table: Otto blue, Mila red, Nora green. Sort by name.": "Sorted: Mila red, Nora green, Otto blue.",
}


def test_the_card_s_examples_are_answered(bundled):
    answers = generate_answers(bundled, list(CARD), batch=len(CARD))
    assert [answer_text(bundled, ids) for ids in answers] == list(CARD.values())
    card = (ASSETS / "small" / "README.md").read_text()
    for prompt, answer in CARD.items():
        assert f"`{prompt}` | `{answer}`" in card


def test_asked_to_think_it_closes_its_thinking(tokenizer):
    """The first thing the model is taught to write is </think>, behind a prompt that opens <think>."""
    chat = encode_chat(tokenizer, "Sort 2 1.", tokenizer.encode("1 2"))
    assert tokenizer.decode(chat.ids[chat.answer_start - 1 : chat.answer_start + 1]) == "<think></think>"


@pytest.mark.slow
def test_scores_are_those_of_the_card(bundled):
    """50 prompts a family: each at 0.98 or more, chain 6.0 or more, a tree of 16 4 % above it (200 prompts: 5.9 %)."""
    plain, *drafted = score(bundled, 50, [PLAIN, Draft("chain", "auto"), Draft("ddtree", 16)])
    assert min(s.exact_match for s in plain.values()) >= 0.98
    chain, tree = (together(scores).acceptance for scores in drafted)
    assert chain >= 6.0
    assert tree >= 1.04 * chain


@pytest.mark.slow
def test_a_drafter_run_resumes_and_exports(bundled, tmp_path):
    from kimi_jax.training.loop import LoopOptions

    run = DrafterRun(target.Recipe(steps=4, warmup_steps=1), texts=16, texts_per_step=2, anchors=4)
    options = LoopOptions(log_every=1, evaluate_every=4, checkpoint_every=2)
    whole = run.train(bundled, tmp_path / "whole", Layout(), options, evaluation_prompts=1)
    run.train(bundled, tmp_path / "cut", Layout(), dataclasses.replace(options, stop_after=2), evaluation_prompts=0)
    resumed = run.train(bundled, tmp_path / "cut", Layout(), options, evaluation_prompts=0)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        assert (a == b).all()
    assert 1 <= whole.log[-1]["heldout_acceptance"] < 3
    run.export(bundled, tmp_path / "whole", tmp_path / "out")
    opened = open_checkpoint(ASSETS / "small", training_mesh(Layout()), Layout(), jnp.float32, tmp_path / "out")
    written = opened.parameters["drafter"]["fc"]["weight"]
    assert (written == whole.state.parameters["fc"]["weight"].astype(jnp.bfloat16).astype(jnp.float32)).all()
