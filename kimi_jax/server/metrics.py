"""Figures for Prometheus, under the names that dashboards of LLM servers read."""

import dataclasses
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kimi_jax.decoding.snapshot import Snapshot
from kimi_jax.server.loop import EngineLoop, Listener
from kimi_jax.serving.events import Event
from kimi_jax.serving.plan import Request

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)  # fmt: skip
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


@dataclasses.dataclass
class _Times:
    """Where one request stands."""

    request: Request
    arrived: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


class Metrics(Listener):
    """Counts what the engine's thread is told, and reads the queue when it is asked."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._times: dict[str, _Times] = {}
        self._running = self._gauge("num_requests_running", "Requests in slots.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a slot.")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the pages in use, from 0 to 1.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generation_tokens", "Tokens of answers.")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their slot back.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that the cache held.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with drafts.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at each depth.", (*LABELS, "position"),
            registry=self.registry,
        )  # fmt: skip
        self._success = Counter(
            "vllm:request_success", "Requests that have ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens.", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", WHOLE)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to a slot.", WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", "From a slot to the first token.", WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", WHOLE)
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._counted = {"preemptions": 0, "prompt_tokens": 0, "reused_tokens": 0}

    def _counter(self, name: str, help: str) -> Any:
        return Counter(f"vllm:{name}", help, LABELS, registry=self.registry).labels(**self._labels)

    def _gauge(self, name: str, help: str) -> Any:
        return Gauge(f"vllm:{name}", help, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(f"vllm:{name}", help, LABELS, buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)

    def submitted(self, request: Request) -> None:
        self._times[request.id] = _Times(request, time.perf_counter())

    def admitted(self, id: str) -> None:
        times = self._times.get(id)
        if times is not None and times.admitted is None:
            times.admitted = time.perf_counter()
            self._queued.observe(times.admitted - times.arrived)

    def came(self, event: Event, snapshot: Snapshot | None) -> None:
        times = self._times.get(event.id)
        if times is None:
            return
        if event.tokens:
            self._tokens(times, len(event.tokens))
        if event.reason is not None:
            self._end(times, event.reason)
            if snapshot is not None and event.slot >= 0:
                self._speculation(snapshot, event.slot)

    def cancelled(self, id: str) -> None:
        times = self._times.get(id)
        if times is not None:
            self._end(times, "abort")

    def _tokens(self, times: _Times, count: int) -> None:
        now = time.perf_counter()
        self._generated.inc(count)
        if times.first is None or times.last is None:
            times.first = now
            self._first.observe(now - times.arrived)
            if times.admitted is not None:
                self._prefill.observe(now - times.admitted)
        else:  # several tokens of a round have come together: each has taken its part of the time
            for _ in range(count):
                self._between.observe((now - times.last) / count)
        times.last, times.tokens = now, times.tokens + count

    def _end(self, times: _Times, reason: str) -> None:
        del self._times[times.request.id]
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._whole.observe(time.perf_counter() - times.arrived)
        self._prompts.observe(len(times.request.ids))
        self._prompt.inc(len(times.request.ids))
        self._answers.observe(times.tokens)
        if times.first is not None and times.last is not None:
            self._decode.observe(times.last - times.first)

    def _speculation(self, snapshot: Snapshot, slot: int) -> None:
        """Drafts of a request that has ended: [n] counts the rounds that gave more than n tokens."""
        rounds = snapshot.round_tokens[slot].tolist()
        nodes = int(snapshot.nodes[slot])
        if not nodes:
            return
        self._drafts.inc(rounds[0])
        self._drafted.inc(nodes)
        self._accepted.inc(sum(rounds[1:]))
        for position, accepted in enumerate(rounds[1:]):
            self._at.labels(**self._labels, position=position).inc(accepted)

    def text(self, loop: EngineLoop) -> bytes:
        """All figures as Prometheus reads them."""
        queue = loop.queue
        if queue is not None:
            scheduler = queue.scheduler
            pages = scheduler.shape.groups * scheduler.shape.pages
            self._running.set(scheduler.occupied)
            self._waiting.set(scheduler.waiting)
            self._usage.set(1 - sum(scheduler.free_pages) / pages)
            totals = {name: getattr(scheduler, name) for name in self._counted}
            counters = (self._preemptions, self._queries, self._hits)
            for counter, (name, total) in zip(counters, totals.items(), strict=True):
                counter.inc(total - self._counted[name])
                self._counted[name] = total
        return generate_latest(self.registry)
