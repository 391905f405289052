"""The server on the bundled model: what clients get is what the engine gives without it."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import threading
import time

import numpy as np
import openai
import pytest

import kimi_jax
from kimi_jax.chat import render
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.scoring import Window
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.server.start import Serving, app_on
from tests.server.scripted import running

pytestmark = pytest.mark.slow
PROMPTS = (
    "Add 612 and 259.", 'Count "k" in "kxkkbkxb".', "Convert 37 km to m.", 'Reverse "garden".', "Add 5 and 77.",
    "Tell a story about a fox named Mila, a forest and a coin.", "Write as JSON: name=kxq, age=31, city=abcd.",
)  # fmt: skip
SLOTS = 8


@pytest.fixture(scope="module")
def engine():
    return kimi_jax.load()


@pytest.fixture(scope="module")
def server(engine):
    serving = Serving("small", SLOTS, draft=kimi_jax.Draft("ddtree", 7), warm_up="none", thinking=False, waiting=256)
    with running(app_on(engine, BUNDLED_CHECKPOINT, serving)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0, timeout=600) as client:
        yield client


def ask(client, prompt, **options):
    messages = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(model="small", messages=messages, **{"temperature": 0} | options)


def test_chats_are_the_engines(engine, client):
    for prompt in PROMPTS[:3]:
        own = engine.chat(prompt, thinking=False)
        told = ask(client, prompt)
        plain = ask(client, prompt, extra_body={"speculation": "none"})
        assert told.choices[0].message.content == plain.choices[0].message.content == own.text
        assert told.usage.completion_tokens == len(own.token_ids)
        assert told.usage.prompt_tokens == len(own.prompt_ids)


def test_drawn_texts_follow_from_seed_and_choice(engine, client):
    ids = render([{"role": "user", "content": PROMPTS[5]}], engine.tokenizer, thinking=False)
    texts = [[], [], []]
    for progress in engine.generate([ids] * 3, Limits(24), Sampling(5.0), seed=7, samples=[0, 1, 2]):
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
    told = ask(client, PROMPTS[5], temperature=5, seed=7, n=3, max_tokens=24, extra_body={"return_token_ids": True})
    assert [choice.token_ids for choice in told.choices] == texts
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_echo_tells_what_the_engine_scores(engine, client):
    ids = engine.tokenizer.encode("Add 612 and 259. The sum is 871, as one sees.")
    ((_, scores),) = engine.score([Window(ids[:-1], ids[1:])])
    asked = {"model": "small", "prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    for most in (0, 1):
        told = client.completions.create(**asked, max_tokens=most).choices[0].logprobs
        assert len(told.token_logprobs) == len(ids) + most
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        np.testing.assert_allclose(told.token_logprobs[1 : len(ids)], scores.logprobs, atol=1e-4)
        best = [
            value == max(top.values())
            for value, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)
        ]
        assert best[: len(ids) - 1] == scores.greedy.tolist()
        assert told.text_offset[: len(ids)] == [len(engine.tokenizer.decode(ids[:at])) for at in range(len(ids))]


def test_ids_that_never_end_and_those_that_stop(engine, client):
    stop = engine.tokenizer.encode("=")[0]
    whole = ask(client, PROMPTS[0], extra_body={"return_token_ids": True}).choices[0]
    cut = ask(client, PROMPTS[0], extra_body={"return_token_ids": True, "stop_token_ids": [stop]}).choices[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    string = ask(client, PROMPTS[0], stop=["so", "=11"], extra_body={"return_token_ids": True}).choices[0]
    assert string.message.content == whole.message.content.partition("=11")[0]
    assert string.stop_reason == "=11"
    longer = ask(client, PROMPTS[0], max_tokens=60, extra_body={"ignore_eos": True})
    assert (longer.choices[0].finish_reason, longer.usage.completion_tokens) == ("length", 60)


SOAK_SECONDS = 120


def test_a_crowd_for_two_minutes(engine, server):
    """64 clients, some of which go away: texts are those of the engine alone, and nothing is left behind."""
    kinds = [(prompt, temperature, seed) for prompt in PROMPTS for temperature, seed in ((0, 0), (1, 3))]
    expected = {}
    for prompt, temperature, seed in kinds:
        sampling = Sampling(temperature)
        expected[prompt, temperature] = engine.chat(
            prompt, thinking=False, max_new_tokens=48, sampling=sampling, seed=seed, draft=kimi_jax.Draft("none")
        ).text
    for prompt, temperature, seed in kinds:  # compiled before the time is taken
        assert chat(server, prompt, temperature, seed)["content"] == expected[prompt, temperature]
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    until, wrong, answered, gone = time.monotonic() + SOAK_SECONDS, [], [0] * 64, [0] * 64

    def client(number):
        random_ = random.Random(number)
        while time.monotonic() < until:
            prompt, temperature, seed = random_.choice(kinds)
            leaves = random_.random() < 0.3
            message = chat(server, prompt, temperature, seed, random_.random() * 0.5 if leaves else None)
            if message is None:
                gone[number] += 1
            elif message["content"] != expected[prompt, temperature]:
                wrong.append((prompt, temperature, message))
            else:
                answered[number] += 1

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        list(pool.map(client, range(64)))
    assert not wrong, wrong[:3]
    assert min(answered) > 0
    assert sum(gone) > 100
    scheduler = server.queue.scheduler
    server.until(lambda: not (server.app.answering or scheduler.occupied or scheduler.waiting), 30)
    assert scheduler.free_pages == (scheduler.shape.pages,)
    assert not server.app.metrics._times
    assert not server.app.loop._mailboxes
    server.until(lambda: len(os.listdir("/proc/self/fd")) <= files + 8, 30)
    assert threading.active_count() <= threads + 40
    print(f"{sum(answered)} answers, {sum(gone)} clients gone in {SOAK_SECONDS} s")


def chat(server, prompt, temperature, seed, leaves_after=None):
    """An answer's message; None for one that was not waited for."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "temperature": temperature, "seed": seed, "max_tokens": 48,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        if leaves_after is not None:
            time.sleep(leaves_after)
            return None
        reply = json.loads(connection.getresponse().read())
        return reply["choices"][0]["message"]
