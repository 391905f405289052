"""Batches of requests: the same as one by one, shapes shared, stop strings, truncation."""

import numpy as np
import pytest

from kimi_jax.decoding.engine import PLAIN
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.scoring import Window
from kimi_jax.evaluation.batches import Writing, bucket, score_all, write_all

PROMPTS = [[5], [7, 8, 9, 10, 11], [300, 301, 302], [40, 41]]
NEW_TOKENS = 24


@pytest.mark.parametrize(("length", "expected"), [(1, 64), (64, 64), (65, 128), (128, 128), (1000, 1024)])
def test_lengths_share_buckets(length, expected):
    assert bucket(length) == expected


def test_scores_in_batches_are_those_one_by_one(engines, monkeypatch):
    engine = engines("local")
    windows = [Window([3, 4, 5], [4, 5, 6]), Window([9] * 20, [8]), Window([3, 4, 5], [4, 5, 6]), Window([1], [2])]
    alone = [next(engine.score([window]))[1] for window in windows]
    run = []
    real = type(engine).score
    monkeypatch.setattr(type(engine), "score", lambda e, part, *more: run.append(part) or real(e, part, *more))
    found = list(score_all(engine, windows, batch=2))
    assert sorted(indices for indices, _ in found) == [[0, 2], [1], [3]]  # equal ones together
    for indices, result in found:
        np.testing.assert_allclose(result.logprobs, alone[indices[0]].logprobs, atol=1e-5)
    assert run == [[windows[3], windows[0], windows[1]]]
    assert list(score_all(engine, [], batch=2)) == []


def test_choices_of_questions_behind_examples_are_run_once(engines, monkeypatch):
    """Multiple choice as lm-eval asks it: five examples before every question, four choices each."""
    engine, rng = engines("local"), np.random.default_rng(0)
    examples, windows = rng.integers(0, 300, 5 * 32).tolist(), []
    for _ in range(6):
        asked = [*examples, *rng.integers(0, 300, 40).tolist()]
        choices = rng.integers(0, 300, (4, 6)).tolist()
        windows += [Window([*asked, *choice][:-1], choice) for choice in choices]

    def scored():
        found, run = np.zeros((6, 4)), 0
        for (index,), scores in score_all(engine, windows, batch=4):
            found[divmod(index, 4)] = scores.logprobs.sum(dtype="float64")
            run += len(windows[index].inputs) - scores.reused
        return found, run

    found, run = scored()
    monkeypatch.setattr("kimi_jax.decoding.engine.any_share_a_page", lambda prompts, page_tokens: False)
    expected, all_tokens = scored()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (found.argmax(1) == expected.argmax(1)).all()
    assert all_tokens == sum(len(window.inputs) for window in windows)
    print(f"{run} of {all_tokens} prompt tokens run, {run / all_tokens:.1%}")
    assert run <= 0.35 * all_tokens


@pytest.fixture(scope="module")
def texts(engines):
    """What the model writes behind each prompt alone."""
    engine, limits = engines("local"), Limits(NEW_TOKENS, least_capacity=64 + NEW_TOKENS)
    found = []
    for prompt in PROMPTS:
        steps = engine.generate([prompt] * 3, limits, Sampling())
        found.append([token for step in steps for token in step.new_tokens[0]])
    return [engine.tokenizer.decode([token for token in ids if token not in engine.stop_ids]) for ids in found]


def test_texts_in_batches_are_those_one_by_one(engines, texts):
    written = list(write_all(engines("local"), PROMPTS, Writing(max_new_tokens=NEW_TOKENS), batch=3, draft=PLAIN))
    assert sorted(index for index, _ in written) == [0, 1, 2, 3]
    assert dict(written) == dict(enumerate(texts))
    assert len(set(texts)) > 1


def test_a_batch_ends_when_all_its_texts_have_met_a_stop_string(engines, texts, monkeypatch):
    engine = engines("local")
    stops = tuple({text[2:4] for text in texts})
    dispatches = []
    real = type(engine).serve

    def counted(*arguments, **options):
        for step in real(*arguments, **options):
            dispatches.append(step)
            yield step

    monkeypatch.setattr(type(engine), "serve", counted)
    writing = Writing(stops, NEW_TOKENS)
    written = dict(write_all(engine, PROMPTS, writing, batch=3, draft=PLAIN))
    for index, text in enumerate(texts):
        assert written[index] == text[: min(at for stop in stops if (at := text.find(stop)) >= 0)]
    unstopped = 1 + -(-(NEW_TOKENS - 2) // 8)
    assert len(dispatches) < 2 * unstopped


def test_a_long_prompt_loses_its_beginning(engines, texts):
    engine = engines("local")
    room = 64
    new = engine.config.max_position_embeddings - room
    monkey = []

    def serve(self, requests, *_, **options):
        monkey.append([request.ids for request in requests])
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "serve", serve)
        list(write_all(engine, [list(range(100))], Writing(max_new_tokens=new), batch=1, draft=PLAIN))
    assert monkey == [[list(range(36, 100))]]
    with pytest.raises(ValueError, match="leave no room for a prompt"):
        list(write_all(engine, [[1]], Writing(max_new_tokens=new + room), batch=1, draft=PLAIN))


@pytest.mark.parametrize(
    ("said", "chat", "thinking", "stops", "expected"),
    [
        ("hm</think>an answer<|im_end|>", True, True, (), "an answer"),
        ("hm, an", True, True, (), ""),
        ("an answer<|im_end|>", True, False, (), "an answer"),
        ("one two<|im_end|>", False, False, (), "one two"),
        ("one two three", False, False, ("three", "two"), "one "),
        ("stop</think>then stop", True, True, ("stop",), "then "),
        ("one", False, False, ("",), "one"),
    ],
)
def test_what_ids_say(engines, said, chat, thinking, stops, expected):
    engine = engines("local")
    ids = engine.tokenizer.encode(said, allow_special=True)
    assert Writing(stops, chat=chat, thinking=thinking).text(engine, ids)[0] == expected
