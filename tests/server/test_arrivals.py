"""Requests by the clock: their times, shared contexts, and figures that agree with a server whose pace is known."""

import asyncio
import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kimi_jax.commands import benchmark_serve
from kimi_jax.commands.benchmark_serve import ServeOptions
from kimi_jax.evaluation.arrivals import Felt, Goal, InProcess, OverHttp, poisson, read_trace, replay, summary
from kimi_jax.server import start
from tests.server.scripted import SHAPE, scripted, scripted_app


def test_poisson_arrivals_have_their_rate_and_their_lengths():
    arrivals = poisson(5.0, [3] * 4000, [7] * 4000, seed=1)
    gaps = np.diff([arrival.at for arrival in arrivals])
    assert arrivals[0].at == 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)  # exponential
    assert {(len(arrival.ids), arrival.limit) for arrival in arrivals} == {(3, 7)}
    assert {arrival.at for arrival in poisson(math.inf, [1] * 9, [1] * 9)} == {0.0}


def test_a_sessions_context_grows(tmp_path):
    rows = [
        {"at": 0, "prompt_tokens": 10, "max_tokens": 4, "session": "a"},
        {"at": 2, "prompt_tokens": 5, "max_tokens": 3, "session": "a"},
        {"at": 1, "prompt_tokens": 6, "max_tokens": 2},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, alone, second = read_trace(path)
    assert [len(each.ids) for each in (first, alone, second)] == [10, 6, 10 + 4 + 5]
    assert second.ids[:10] == first.ids
    assert (alone.at, alone.limit, second.limit) == (1.0, 2, 3)


@pytest.mark.parametrize("line", ["{}", "5", '{"at": -1, "prompt_tokens": 1, "max_tokens": 1}', "", '{"at": "x"}'])
def test_traces_that_are_none(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"trace\.jsonl"):
        read_trace(path)


def test_a_summary_counts_what_was_felt():
    felt = [Felt(0.0, [(0.5, 1), (1.5, 4)]), Felt(1.0, [(3.0, 1), (4.0, 10)])]
    before = {"prefix_cache_queries_total": 5.0}
    after = {
        "spec_decode_num_drafts_total": 4.0,
        "spec_decode_num_accepted_tokens_total": 10.0,
        "prefix_cache_queries_total": 15.0,
        "prefix_cache_hits_total": 5.0,
    }
    found = summary("x", felt, 4.0, before, after, Goal(first=1.0, between=0.3))
    assert found["tokens_per_second"] == 4.0
    assert found["first_token_ms_median"] == 1250
    assert found["between_tokens_ms_median"] == pytest.approx((250 + 100) / 2)
    assert found["tokens_a_round"] == 3.5
    assert found["prompt_tokens_cached"] == 0.5
    assert found["good_requests_per_second"] == 0.25
    assert found["queue_ms_mean"] is None


@pytest.mark.parametrize("over_http", [True, False])
def test_figures_agree_with_the_engines_pace(tokenizer, over_http):
    """Four slots, steps of 10 ms that give three tokens each or six: all figures follow."""
    with scripted(tokenizer, lambda request: [65], seconds=0.01) as server:
        target = OverHttp(server.url) if over_http else InProcess(server.app)

        async def run():
            before = await target.figures()
            arrivals = poisson(math.inf, [20] * 12, [60] * 12)
            return (*await replay(target, arrivals, clients=SHAPE.slots), before, await target.figures())

        if over_http:
            felt, seconds, before, after = asyncio.run(run())
        else:  # on the loop that the server runs on
            felt, seconds, before, after = asyncio.run_coroutine_threadsafe(run(), server.app.loop._events).result(60)
        assert all(each.tokens == 60 for each in felt)
        steps = server.queue.steps
        assert seconds >= 0.01 * steps
        assert after["generation_tokens_total"] - before.get("generation_tokens_total", 0) == 720
        found = summary("x", felt, seconds, before, after, Goal(10, 10))
        assert found["good_requests_per_second"] == pytest.approx(12 / seconds, abs=1e-3)
        assert 1e3 * 0.01 / 6 * 0.9 < found["between_tokens_ms_median"] < 1e3 * seconds / 60


def test_the_benchmark_lays_ways_side_by_side(tokenizer, monkeypatch, capsys):
    opened = SimpleNamespace(engine=None, folder=None, where="a scripted engine")
    monkeypatch.setattr(benchmark_serve, "open_engine", lambda *_: opened)

    def app_on(engine, folder, serving):
        return scripted_app(tokenizer, lambda request: [65], seconds=0.002, waiting=serving.waiting)

    monkeypatch.setattr(start, "app_on", app_on)
    options = ServeOptions(requests=30, slots=SHAPE.slots, ways=("none", "http"), clients=8)
    benchmark_serve.serve(dataclasses.replace(options, json=True))
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["way"] for row in rows] == ["none", "http"]
    assert all(row["tokens_per_second"] > 0 and row["queue_ms_mean"] > 0 for row in rows)
    benchmark_serve.serve(options)
    shown = capsys.readouterr().out
    ratio = float(re.search(r"Over HTTP (\d\.\d\d) × the engine fed directly", shown)[1])
    assert 0.1 < ratio < 3
    assert max(map(len, shown.splitlines())) <= 80


def test_a_rate_is_positive():
    with pytest.raises(ValueError, match="--rate is 0"):
        benchmark_serve.serve(ServeOptions(rate=0.0))
