"""Clients that go away, do not read, send nonsense or come in crowds: each gets what is right, and the server lives."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kimi_jax.server.app import HttpLimits
from tests.server.scripted import SHAPE, scripted

FOREVER = 900


@pytest.fixture(scope="module")
def letters(tokenizer):
    """A script that writes the prompt's last letter again and again."""
    return lambda request: [request.ids[-1]]


@pytest.fixture(scope="module")
def server(tokenizer, letters):
    with scripted(tokenizer, letters, seconds=0.005, waiting=4, limits=HttpLimits(body_bytes=1 << 20)) as running:
        yield running


def ask(server, prompt="a", **options):
    return server.post("/v1/completions", prompt=prompt, **{"max_tokens": 4} | options)


def open_request(server, **body):
    """A connection on which a request was sent and nothing is read."""
    data = json.dumps({"prompt": "a", "max_tokens": FOREVER} | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def at_rest(server):
    """Nothing is under way, in the server or in the engine."""
    scheduler = server.queue.scheduler
    return not (
        server.app.loop.under_way or server.app.answering or scheduler.occupied or scheduler.waiting
    ) and scheduler.free_pages == (SHAPE.pages,)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_slot(server, stream):
    connection = open_request(server, stream=stream)
    server.until(lambda: server.queue.scheduler.occupied == 1)
    steps = server.queue.steps
    connection.close()
    server.until(lambda: at_rest(server))
    assert server.queue.steps - steps < FOREVER / 6 / 2  # long before the text's end


def test_one_that_waits_leaves_the_queue(server):
    first = [open_request(server, stream=True) for _ in range(SHAPE.slots)]
    server.until(lambda: server.queue.scheduler.occupied == SHAPE.slots)
    waiting = open_request(server, stream=True)
    server.until(lambda: server.queue.scheduler.waiting == 1)
    waiting.close()
    server.until(lambda: server.queue.scheduler.waiting == 0)
    assert server.queue.scheduler.occupied == SHAPE.slots
    for connection in first:
        connection.close()
    server.until(lambda: at_rest(server))


def test_a_full_queue_says_when_to_come_again(server):
    held = [open_request(server, stream=True) for _ in range(SHAPE.slots + 4)]
    server.until(lambda: server.app.loop.under_way == SHAPE.slots + 4)
    refused = ask(server)
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json["error"]["type"] == "rate_limit_error"
    for connection in held:
        connection.close()
    server.until(lambda: at_rest(server))
    assert ask(server).json["choices"][0]["text"] == "aaaa"
    assert ask(server, n=SHAPE.slots + 5).status == 429


def test_one_that_does_not_read_is_let_go(tokenizer, letters):
    limits = HttpLimits(silence_seconds=0.3)
    with scripted(tokenizer, letters, limits=limits) as server:
        # A stream with log-probabilities is longer than what the sockets hold.
        connection = open_request(server, stream=True, logprobs=20)
        server.until(lambda: server.app.answering == 1)
        server.until(lambda: at_rest(server), 20)
        connection.close()
        assert ask(server).status == 200


def test_an_engine_that_dies_ends_the_server(tokenizer, letters):
    with scripted(tokenizer, letters, fails_at=5) as server:
        dead = ask(server, max_tokens=100)
        assert dead.status == 503
        assert dead.json["error"]["code"] == "engine_dead"
        with contextlib.suppress(OSError):
            assert server.request("GET", "/health").status == 503


def test_a_server_that_ends_answers_what_it_has_begun(tokenizer, letters):
    with scripted(tokenizer, letters, seconds=0.01) as server:
        replies = []
        thread = threading.Thread(target=lambda: replies.append(ask(server, max_tokens=200)))
        thread.start()
        server.until(lambda: server.app.answering == 1)
        server.app.draining = True
        assert server.request("GET", "/health").status == 503
        assert ask(server).status == 503
        thread.join()
        assert replies[0].json["choices"][0]["text"] == "a" * 200
    assert server.status == 0


def test_answers_that_take_too_long_are_cut_off(tokenizer, letters):
    with scripted(tokenizer, letters, seconds=0.05, drain_seconds=0.2) as server:
        connection = open_request(server, stream=True)
        server.until(lambda: server.app.answering == 1)
        server.app.draining = True
        server.until(lambda: server.status is not None, 20)
        connection.close()
    assert server.status == 143


def test_a_key_is_asked_for(tokenizer, letters):
    with scripted(tokenizer, letters, api_key="secret") as server:
        for path in ("/v1/models", "/tokenizer_info", "/v1/nothing"):
            assert server.request("GET", path).status == 401
            assert server.request("GET", path, headers={"Authorization": "Bearer secre"}).status == 401
        assert server.request("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
        assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "a JSON array"),
        (b"null", "a JSON null"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "a", "max_tokens": 1e400}', ""),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "number out of range"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens is -1"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens is"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is true"),
        ({"prompt": "a", "max_tokens": "4"}, 'max_tokens is "4"'),
        ({"prompt": "a", "max_tokens": 1 << 30}, "1,024"),
        ({"prompt": "a", "temperature": -0.1}, "temperature is -0.1"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0"),
        ({"prompt": "a", "seed": 1 << 63}, "seed is"),
        ({"prompt": "a", "n": 0}, "n is 0"),
        ({"prompt": "a", "stop": ["x"] * 10_000}, "stop is"),
        ({"prompt": "a", "stop": [""]}, "stop[0] is"),
        ({"prompt": "a", "stop": "x" * 100_000}, "stop[0] is"),
        ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids has the token id"),
        ({"prompt": "a", "logprobs": 21}, "logprobs is 21"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options are for streams"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is"),
        ({"prompt": "a", "best_of": True}, "best_of is true"),
        ({"prompt": "a", "tempreture": 1}, "did you mean 'temperature'"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": [1, "a"]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": [10**30]}, "token id"),
        ({"prompt": "a" * 5000}, "the prompt must be shorter"),
        ({}, "prompt is missing"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_does_not_fit_is_refused_by_name(server, body, said):
    reply = server.request("POST", "/v1/completions", body)
    assert reply.status == 400
    assert said in reply.json["error"]["message"]
    assert "\n" not in reply.json["error"]["message"]
    assert at_rest(server)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages is []"),
        ({"messages": "hi"}, "messages is"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, "tool_choice is"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2}, "keep one"),
        (
            {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "enabled"},
             "chat_template_kwargs": {"thinking": False}},
            "keep one",
        ),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_chats_that_do_not_fit_are_refused(server, body, said):
    reply = server.post("/v1/chat/completions", **body)
    assert reply.status == 400
    assert said in reply.json["error"]["message"]


def test_values_that_ask_for_nothing_pass(server):
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "user": "me",
        "suffix": None,
    }
    assert ask(server, **neutral, stop=None, n=1, metadata={"a": "b"}).json["choices"][0]["text"] == "aaaa"


def test_names_of_control_tokens_are_text_in_chats(server, tokenizer):
    told = server.post("/tokenize", messages=[{"role": "user", "content": "<|im_end|><|im_system|>"}]).json["tokens"]
    assert told.count(tokenizer.special_id("<|im_end|>")) == 1
    assert told.count(tokenizer.special_id("<|im_system|>")) == 0
    raw = server.post("/tokenize", prompt="<|im_end|>").json
    assert raw == {"tokens": [tokenizer.special_id("<|im_end|>")], "count": 1, "max_model_len": 1024}
    assert server.post("/detokenize", tokens=raw["tokens"]).json == {"prompt": "<|im_end|>"}


def test_bodies_have_a_size_and_a_time(tokenizer, letters, server):
    assert ask(server, "a" * (2 << 20)).status == 413
    with scripted(tokenizer, letters, limits=HttpLimits(body_seconds=0.2)) as slow:
        connection = socket.create_connection(("127.0.0.1", slow.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in connection.recv(100)
        connection.close()
        assert ask(slow).status == 200


def test_paths_and_methods(server):
    assert server.request("GET", "/nothing").json["error"]["type"] == "not_found_error"
    assert server.request("GET", "/v1/completions").status == 405
    assert server.request("GET", "/v1/models/other").json["error"]["code"] == "model_not_found"
    assert server.request("GET", "/version").json["version"]


def figures(server):
    data = server.request("GET", "/metrics").data.decode()
    samples = [sample for family in text_string_to_metric_families(data) for sample in family.samples]
    found = {}
    for sample in samples:
        labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
        found[sample.name, *labels.values()] = sample.value
    return found


def test_figures_add_up(tokenizer, letters):
    with scripted(tokenizer, letters) as server:
        for count in (1, 5, 30):
            ask(server, "abc", max_tokens=count)
        found = figures(server)
        assert found["vllm:prompt_tokens_total",] == 3 * len(tokenizer.encode("abc"))
        assert found["vllm:generation_tokens_total",] == 36
        assert found["vllm:request_success_total", "length"] == 3
        assert found["vllm:time_to_first_token_seconds_count",] == 3
        assert found["vllm:inter_token_latency_seconds_count",] == 33
        assert found["vllm:e2e_request_latency_seconds_count",] == 3
        assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
        assert found["vllm:request_queue_time_seconds_count",] == 3
        assert found["vllm:kv_cache_usage_perc",] == 0


def test_tokens_that_were_cached_are_told(tokenizer, letters):
    prompt = "once upon a time " * 20
    count = len(tokenizer.encode(prompt))
    with scripted(tokenizer, letters, prefix_cache=True) as server:
        first, second = (ask(server, [prompt, prompt[:-9]], n=2).json["usage"] for _ in range(2))
        assert second["prompt_tokens"] == first["prompt_tokens"] < 2 * count
        page = SHAPE.page_tokens
        cached = second["prompt_tokens_details"]["cached_tokens"]
        assert cached == sum((len(tokenizer.encode(each)) - 1) // page * page for each in (prompt, prompt[:-9])) > 0
        assert figures(server)["vllm:prefix_cache_hits_total",] >= cached


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(tokenizer, letters):
    """Texts stay whole while others are cut off at random moments."""
    with scripted(tokenizer, letters, waiting=64) as server:
        wrong, threads = [], threading.active_count()

        def client(number):
            random_ = random.Random(number)
            for _ in range(8):
                letter, count = random_.choice("bcdefg"), random_.randrange(1, 80)
                if random_.random() < 0.4:
                    with open_request(server, prompt=letter, stream=random_.random() < 0.5):
                        time.sleep(random_.random() * 0.02)
                    continue
                reply = ask(server, letter, max_tokens=count)
                if reply.json["choices"][0]["text"] != letter * count:
                    wrong.append(reply)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert not wrong
        server.until(lambda: at_rest(server))
        assert threading.active_count() <= threads + 40  # the pool of the event loop's threads is bounded
        assert server.queue.most_at_once == SHAPE.slots
        assert not server.app.metrics._times
