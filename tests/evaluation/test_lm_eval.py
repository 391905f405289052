"""The adapter under the real lm-eval, with the bundled model.

uv run --group evaluation pytest -m slow tests/evaluation/test_lm_eval.py
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.chat import render
from kimi_jax.decoding.scoring import Window
from kimi_jax.evaluation.perplexity import Document, perplexity
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.provenance import fingerprint

pytest.importorskip("lm_eval", reason="lm-eval is in the dependency group `evaluation`")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

from kimi_jax.evaluation.lm_eval import KimiJax, checked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": 'Reverse "garden".'}]
LENGTH = 24


def asked(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module", autouse=True)
def devices():
    assert len(jax.devices()) == 72, "started for all tests, before one asks for fewer"


@pytest.fixture(scope="module")
def model():
    jax.devices()  # all 72, before a model of one device starts as many
    return KimiJax(speculation="none", batch_size=3, max_length=LENGTH)


def logprob(model, before, after):
    ((_, scores),) = model.engine.score([Window((before + after)[:-1], after)])
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
    config = json.loads(results.read_text())["config"]
    assert results.parent.name == config["model_name"] == "small"
    assert config["run"]["checkpoint"]["fingerprint"] == fingerprint(BUNDLED_CHECKPOINT)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mseh=nvl72", "there is no argument 'mseh'; did you mean mesh?"),
        ("colour=red", "there is no argument 'colour'; there are checkpoint, mesh, dp"),
        ("dtype=float16", "dtype=float16 does not fit; dtype takes auto or bfloat16 or float32"),
        ("budget=many", "budget=many does not fit; budget takes a whole number or auto"),
        ("budget=2.5", "budget=2.5 does not fit"),
        ("thinking=2", "thinking=2 does not fit; thinking takes True or False"),
        ("ep=True", "ep=True does not fit; ep takes a whole number"),
        ("exchange=ring", "exchange is 'ring': choose from auto, allgather"),
        ("cache=whole", "cache=whole does not fit; cache takes copied or split"),
        ("mesh", "mesh has no value; arguments are NAME=VALUE"),
        ("mesh=nvl99", "nvl99"),
        ("speculation=chain,checkpoint=tests/data/tiny_random", "needs --drafter DIR"),
    ],
)
def test_bad_model_args_are_one_line_that_names_them(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        KimiJax.create_from_arg_string(arguments, {"batch_size": 1, "device": None})
    assert "\n" not in str(error.value)


def test_a_five_shot_task_reuses_what_its_choices_share():
    """The log-likelihoods, and so the accuracy, of a model that runs every prompt from its first token."""
    words = ["garden", "river", "candle", "window", "forest", "market", "letter", "basket", "winter"]
    examples = "".join(f'Question: what is "{word}" reversed? Answer: {word[::-1]}\n' * 2 for word in words[:5])
    requests = []
    for word in words[5:]:
        asked_of = f'{examples}Question: what is "{word}" reversed? Answer:'
        for choice in (word[::-1], word, word[1:], f"{word[::-1]}s"):
            requests.append(asked("loglikelihood", asked_of, f" {choice}"))
    found = {}
    for kept in (True, False):
        made = KimiJax(speculation="none", batch_size=4, no_prefix_cache=not kept)
        values = made.loglikelihood(requests, disable_tqdm=True)
        run = made.get_model_info()["run"]
        found[kept] = np.array([value for value, _ in values]), run["scored_tokens"], run["reused_tokens"]
    (got, tokens, reused), (expected, all_tokens, none) = found[True], found[False]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert (got.reshape(-1, 4).argmax(1) == expected.reshape(-1, 4).argmax(1)).all()
    assert (tokens, none) == (all_tokens, 0)
    print(f"{tokens - reused} of {tokens} prompt tokens run, {1 - reused / tokens:.1%}")
    assert tokens - reused <= 0.35 * tokens


def test_values_that_only_look_like_numbers_or_none_are_text():
    assert checked({"speculation": None}) == {"speculation": "none"}, "as lm-eval parses speculation=none"
    assert KimiJax.create_from_arg_string("speculation=none,seed=5").draft.kind == "none"
    assert checked({"checkpoint": 7, "budget": "auto", "dp": 2}) == {"checkpoint": "7", "budget": "auto", "dp": 2}


def test_the_command_ends_in_one_line(tmp_path):
    command = [sys.executable, "-m", "kimi_jax.evaluation.lm_eval", "--model", "kimi_jax", "--include_path",
               "docs/data/lm_eval", "--tasks", "kimi_answers", "--model_args", "budget=many"]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: --model_args: budget=many does not fit")


def test_layouts_and_automatic_budgets_reach_the_engine():
    arguments = "mesh=hgx-ib-8,ep=2,tp=4,budget=auto,experts=slots,exchange=alltoall,cache=split,keep_chain=True"
    made = KimiJax.create_from_arg_string(arguments, {"batch_size": 2})
    layout = made.engine.layout
    assert (layout.experts, layout.exchange, layout.cache) == ("slots", "alltoall", "split")
    assert (made.draft.budget, made.draft.keep_chain) == ("auto", True)
    request = asked("generate_until", made.apply_chat_template(QUESTION), {"max_gen_toks": 24})
    assert made.generate_until([request], disable_tqdm=True) == ["nedrag"]
    run = made.get_model_info()["run"]
    assert run["layout"]["cache"] == "split"
    assert run["speculation"]["budget"] == "auto"


def test_lm_evals_seed_reaches_the_sampler(model):
    """By name, lm-eval makes the model right after seeding `random`."""
    sampled = {"max_gen_toks": 24, "do_sample": True, "temperature": 3.0}
    texts = {}
    for run, seed in enumerate((0, 0, 1)):
        random.seed(seed)
        made = KimiJax.create_from_arg_string("speculation=none", {"batch_size": 1})
        assert random.random() == random.Random(seed).random(), "lm-eval's own draws stay what they were"
        request = asked("generate_until", made.apply_chat_template(QUESTION), sampled)
        texts[run] = (made.get_model_info()["run"]["seed"], made.generate_until([request], disable_tqdm=True))
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0]
    assert texts[0][1] != texts[2][1]
    assert KimiJax.create_from_arg_string("speculation=none,seed=5").seed == 5
