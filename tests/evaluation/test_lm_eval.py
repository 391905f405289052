"""The adapter under the real lm-eval, with the bundled model.

uv run --group evaluation pytest -m slow tests/evaluation/test_lm_eval.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.chat import render
from kimi_jax.decoding.forcing import Window, score
from kimi_jax.evaluation.perplexity import Document, perplexity

pytest.importorskip("lm_eval", reason="lm-eval is in the dependency group `evaluation`")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

from kimi_jax.evaluation.lm_eval import KimiJax

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": 'Reverse "garden".'}]
LENGTH = 24


def asked(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def model():
    return KimiJax(speculation="none", batch_size=3, max_length=LENGTH)


def logprob(model, before, after):
    (scores,) = score(model.engine, [Window((before + after)[:-1], after)])
    return float(scores.logprobs.sum()), bool(scores.greedy.all())


def test_log_likelihoods(model):
    engine = model.engine
    prompt = model.apply_chat_template(QUESTION)
    before = render(QUESTION, engine.tokenizer, thinking=False)
    pairs = [(prompt, "nedrag"), (prompt, "garden"), ("", "Once there"), ("Once there ", "was a fox")]
    results = model.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    encode, bos = engine.tokenizer.encode, engine.tokenizer.special_id("[BOS]")
    expected = [
        logprob(model, before[-LENGTH:], encode("nedrag")),
        logprob(model, before[-LENGTH:], encode("garden")),
        logprob(model, [bos], encode("Once there")),
        logprob(model, encode("Once there"), encode(" was a fox")),  # the space belongs to what follows
    ]
    np.testing.assert_allclose([value for value, _ in results], [value for value, _ in expected], atol=1e-3)
    assert [greedy for _, greedy in results] == [greedy for _, greedy in expected]
    assert results[0][1]
    assert not results[1][1]


def test_rolling_log_likelihoods_are_the_perplexitys(model):
    texts = ["Once there was a fox named Mila. Mila lived near a forest. " * 4, "One day"]
    results = model.loglikelihood_rolling([asked("loglikelihood_rolling", text) for text in texts], disable_tqdm=True)
    bos = model.engine.tokenizer.special_id("[BOS]")
    documents = [Document("", [bos, *model.engine.tokenizer.encode(text)], 1) for text in texts]
    assert len(documents[0].ids) > 2 * LENGTH
    expected = perplexity(model.engine, documents, window=LENGTH, stride=LENGTH, batch=3)
    np.testing.assert_allclose(results, [-likelihood.nats for likelihood in expected], rtol=1e-5)


def test_texts_end_at_stop_strings_and_at_the_turns_end(model):
    prompt = model.apply_chat_template(QUESTION)
    wanted = [{"until": ["\n"], "max_gen_toks": 24}, {"until": "r", "max_new_tokens": 24}, {"max_gen_toks": 3}]
    requests = [asked("generate_until", prompt, options) for options in wanted]
    assert model.generate_until(requests, disable_tqdm=True) == ["nedrag", "ned", "ned"]


def test_a_message_can_be_left_open(model):
    begun = [*QUESTION, {"role": "assistant", "content": "ned"}]
    prompt = model.apply_chat_template(begun, add_generation_prompt=False)
    assert prompt == model.apply_chat_template(QUESTION) + "ned"
    request = asked("generate_until", prompt, {"until": ["\n"], "max_gen_toks": 24})
    assert model.generate_until([request], disable_tqdm=True) == ["rag"]


def test_templates_are_the_chats_own_ids(model):
    assert model.tok_encode(model.apply_chat_template(QUESTION)) == render(
        QUESTION, model.engine.tokenizer, thinking=False
    )
    with pytest.raises(ValueError, match="no chat template 'other'"):
        model.chat_template("other")


def test_options_that_are_not_known_are_refused(model):
    with pytest.raises(ValueError, match="says beams, which is not known"):
        model.generate_until([asked("generate_until", "a", {"beams": 4})], disable_tqdm=True)


def test_answers_are_cached(model, tmp_path, monkeypatch):
    cached = CachingLM(model, str(tmp_path / "cache.db"))
    requests = {
        "loglikelihood": [asked("loglikelihood", "Once", " there")],
        "loglikelihood_rolling": [asked("loglikelihood_rolling", "Once there was")],
        "generate_until": [asked("generate_until", model.apply_chat_template(QUESTION), {"max_gen_toks": 24})],
    }
    first = {kind: getattr(cached, kind)(each) for kind, each in requests.items()}
    for kind in requests:
        monkeypatch.setattr(model, kind, lambda *_: pytest.fail("asked again"))
    assert {kind: getattr(cached, kind)(each) for kind, each in requests.items()} == first


def run(output, *arguments):
    """The command of docs/checkpoints.md."""
    subprocess.run(
        [sys.executable, "-m", "kimi_jax.evaluation.lm_eval", "--model", "kimi_jax", "--include_path",
         "docs/data/lm_eval", "--tasks", "kimi_answers,kimi_choices,kimi_stories", "--apply_chat_template",
         "--output_path", str(output), "--log_samples", *arguments],
        cwd=ROOT, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "hf")},
    )  # fmt: skip
    return written(output)


def written(output):
    """Scores by task, and the texts of kimi_answers."""
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_kimi_answers_*.jsonl")
    scores = {
        task: {name.removesuffix(",none"): value for name, value in found.items() if name.endswith(",none")}
        for task, found in json.loads(results.read_text())["results"].items()
    }
    return scores, [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]


def test_the_command_scores_the_same_with_and_without_speculation(tmp_path):
    plain, answers = run(tmp_path / "plain", "--model_args", "speculation=none", "--batch_size", "4")
    tree, drafted = run(tmp_path / "tree", "--model_args", "speculation=ddtree,budget=16", "--batch_size", "auto")
    assert len(answers) == 12
    assert drafted == answers
    for scores in (plain, tree):
        assert scores["kimi_answers"]["exact_match"] == 1.0
        assert scores["kimi_choices"]["acc"] == 1.0
    for name in ("word_perplexity", "bits_per_byte"):
        assert tree["kimi_stories"][name] == pytest.approx(plain["kimi_stories"][name], rel=1e-5)
