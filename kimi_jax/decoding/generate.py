"""The host's part of decoding: requests in, tokens out between dispatches."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
from jaxtyping import Int

from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.sampling import Sampling, request_keys
from kimi_jax.decoding.snapshot import Snapshot
from kimi_jax.decoding.state import STOPS
from kimi_jax.serving import plan
from kimi_jax.serving.events import Event
from kimi_jax.vision.media import Medium

SMALLEST_CHUNK = 16


class NonFiniteLogitsError(RuntimeError):
    """The target's logits held NaN or infinity: broken weights or a broken kernel, never a token."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how its answer is drawn."""

    ids: Sequence[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    sample: int = 0
    """Number among the requests that share a seed: each has noise of its own."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end the text; by default the checkpoint's."""
    min_tokens: int = 0
    """Tokens of the text before which none of them is drawn."""
    media: tuple[Medium, ...] = ()
    """Images of the prompt, in order; its ids have a placeholder for each of their tokens."""


@dataclasses.dataclass
class Counts:
    """What the device has counted, as NumPy arrays over all requests in their order."""

    round_tokens: Int[np.ndarray, "requests steps"]
    """[n]: rounds that put more than n tokens into the text."""
    hits: Int[np.ndarray, "requests depth"]
    """[d]: rounds whose draft of depth d + 1 the target would have written too, be it behind the end of the text."""
    nodes: Int[np.ndarray, " requests"]
    """Draft tree nodes verified, over all rounds."""
    rounds_run: int = 0
    """Rounds of the whole engine, one counting once for all its requests."""
    slot_rounds: int = 0
    """Slots whose texts they went on with, added up over the rounds."""
    seen: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    """What the last dispatch told of each request."""
    prompt_tokens: int = 0
    """Of the prompts that came into slots; after a preemption again, with what there was of the answer."""
    reused_tokens: int = 0
    """Those of them that were not run, because pages held them already."""
    drafter_misses: int = 0
    """Those of them that pages held and that were run all the same, for a drafter that cannot go on from pages."""
    exchanges: int | None = None
    """Exchanges through bounded buffers; None where there are none."""
    overflows: int | None = None
    """Those among them that took the exact path."""

    @property
    def rounds(self) -> Int[np.ndarray, " requests"]:
        """Rounds in which the request was running: each gives a token at least."""
        return self.round_tokens[:, 0]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one dispatch brought."""

    new_tokens: list[list[int]]
    """For each request its new ones, in order; the last one of a text may be a stop token."""
    finished: list[bool]
    seconds: float
    """Since generation started."""
    counts: Counts
    """Everything counted so far. It goes on with generation."""
    failed: dict[int, int]
    """Requests whose logits were not finite, and the positions. It goes on with generation."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of a generation that a user may set."""

    max_new_tokens: int = 128
    prefill_chunk: int = 512
    """Prompt tokens that a chunk runs at most, of one prompt or of several; on CPUs of each prompt."""
    rounds_per_dispatch: int = 8
    """Rounds the device runs before the host looks, at most; one while requests wait."""
    least_capacity: int = 1
    """Tokens to provide for each request at least: calls that give the same share compiled programs."""
    each: tuple[int, ...] | None = None
    """New tokens of each prompt at most, where they differ; none exceeds max_new_tokens."""
    pages: int | None = None
    """Pages of each device group; by default enough for the longest request in every slot, or what memory holds."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and np.min(value) < 1:
                raise ValueError(f"{field.name} is {value}; it must be positive")
        if self.each is not None and max(self.each) > self.max_new_tokens:
            raise ValueError(f"a prompt may have {max(self.each)} new tokens and all at most {self.max_new_tokens}")

    def of_each(self, prompts: int) -> list[int]:
        """New tokens of each of so many prompts at most.

        Raises:
          ValueError: `each` has another number of them.
        """
        return one_each("limits", self.max_new_tokens if self.each is None else self.each, prompts)


PagesThatFit = Callable[[int, int], int]
"""Slots of a device group and tokens of the longest request to the pages that its memory holds beside them."""


def shape_of(
    programs: Programs,
    prompts: Sequence[int],
    most: Sequence[int],
    limits: Limits,
    slots: int | None = None,
    fit: PagesThatFit | None = None,
) -> plan.Shape:
    """Slots and pages for requests whose prompts have so many tokens, and answers at most so many.

    Args:
      slots: requests at work at the same time, over the whole mesh; by default all of them.
      fit: bounds the pages; without it they are not bounded.

    Raises:
      ValueError: more pages than fit, or fewer than the longest request needs, naming what would fit.
    """
    capacity = max(max(map(sum, zip(prompts, most, strict=True))), limits.least_capacity)
    slots = slots or len(prompts)
    # Prompts that all come at once run together; later ones come one by one, and idle lanes cost what busy ones do.
    at_once = programs.ends_early and len(prompts) <= slots
    # Most prompts should fit one chunk, and few leave much of it empty.
    usual = sorted(prompts)[len(prompts) * 3 // 4]
    return shape_for(programs, slots, usual, capacity, limits, fit, at_once=at_once)


def shape_for(
    programs: Programs,
    slots: int,
    usual: int,
    capacity: int,
    limits: Limits,
    fit: PagesThatFit | None = None,
    *,
    at_once: bool = False,
    slot_counts: tuple[int, ...] = (),
) -> plan.Shape:
    """Slots and pages for requests of any number.

    Args:
      slots: requests at work at the same time, over the whole mesh.
      usual: tokens that most prompts have at most: what one chunk holds.
      capacity: tokens of the longest prompt with its answer.
      fit: bounds the pages.
      at_once: as many prompts come together as there are slots.
      slot_counts: slots of a group that rounds are compiled for; by default all only.

    Raises:
      ValueError: as `shape_of`.
    """
    tiles = -(-capacity // programs.page_tokens)
    each = -(-slots // programs.groups)
    chunk = chunk_rows(usual, limits)
    lanes = each if at_once else min(each, max(1, limits.prefill_chunk // chunk))
    return plan.Shape(
        groups=programs.groups,
        slots_per_group=each,
        pages=_pages(programs.page_tokens, each, tiles, capacity, limits, fit),
        page_tokens=programs.page_tokens,
        tiles=tiles,
        lanes=lanes,
        chunk=chunk,
        depth=programs.speculation.max_depth,
        rounds=tuple(sorted({1, min(2, limits.rounds_per_dispatch), limits.rounds_per_dispatch})),
        slot_counts=slot_counts,
        admissions=lanes,  # each has a lane from the start
        until_one_ends=programs.ends_early,
        rounds_repeat=programs.exchange_may_overflow,
        ahead=0 if programs.ends_early else 1,
    )


def _pages(page_tokens: int, slots: int, tiles: int, capacity: int, limits: Limits, fit: PagesThatFit | None) -> int:
    """Pages of a device group: those that were asked for, or for all its slots as far as memory goes."""
    wanted = slots * tiles if limits.pages is None else limits.pages
    held = wanted if fit is None else fit(slots, tiles * page_tokens)
    if limits.pages is not None and limits.pages > held:
        raise ValueError(f"{limits.pages:,} pages of {page_tokens} tokens are wanted of each group; {held:,} fit")
    if tiles > min(held, wanted):
        pages = min(held, wanted)
        why = "as memory holds" if held < wanted else "as were asked for"
        raise ValueError(
            f"the longest request takes up to {capacity:,} tokens with its answer, and there is room for "
            f"{pages * page_tokens:,}, {pages:,} pages of {page_tokens} {why}: ask for fewer new tokens or a shorter "
            "prompt"
        )
    return min(held, wanted)


def settings_of(requests: Sequence[Request], stop_ids: tuple[int, ...]) -> list[plan.Settings]:
    """How each request's tokens are drawn, as plans carry it; `stop_ids` are those of requests that name none.

    Raises:
      ValueError: a request with more stop tokens than a slot holds.
    """
    for index, each in enumerate(requests, 1):
        if len(each.stop_ids or stop_ids) > STOPS:
            raise ValueError(f"prompt {index} has {len(each.stop_ids or stop_ids)} stop tokens; at most {STOPS} fit")
    keys = request_keys([each.seed for each in requests], [each.sample for each in requests])
    return [
        plan.Settings(
            **dataclasses.asdict(each.sampling),
            key=(key[0], key[1]),
            stop_ids=stop_ids if each.stop_ids is None else each.stop_ids,
            min_tokens=each.min_tokens,
        )
        for each, key in zip(requests, keys.tolist(), strict=True)
    ]


def generate(
    queue: Queue,
    requests: Sequence[Request],
    stop_ids: tuple[int, ...],
    ended: Callable[[int], bool] = lambda index: False,
) -> Iterator[Progress]:
    """Decodes requests of any lengths, yielding whenever some of them have new tokens or have ended.

    A stop token is the last of its text.

    Args:
      queue: with nothing in it; it is emptied at the end, and when the iterator is dropped.
      stop_ids: of requests that name none.
      ended: whether the host has ended a request's text; it is asked after a yield of those that had news. What still
        comes for such a request is dropped.

    Raises:
      NonFiniteLogitsError: at the end, when all others have their texts, naming the requests and their positions.
    """
    started, count = time.perf_counter(), len(requests)
    for index, (each, settings) in enumerate(zip(requests, settings_of(requests, stop_ids), strict=True)):
        ids, media = queue.session.placed(each.ids, each.media)
        queue.submit(plan.Request(str(index), tuple(ids), each.max_new_tokens, settings, media=media))
    steps, finished = queue.session.programs.steps, [False] * count
    counts = Counts(np.zeros((count, steps), int), np.zeros((count, steps - 1), int), np.zeros(count, int))
    failed: dict[int, int] = {}
    try:
        while not queue.idle:
            new: list[list[int]] = [[] for _ in requests]
            events = queue.step()
            for event, snapshot in events:
                index = int(event.id)
                new[index] += event.tokens
                finished[index] = event.reason is not None
                _count(counts, index, event, snapshot)
                if event.reason == "error":
                    failed[index] = event.failed
            if events:
                snapshot = events[-1][1]
                counts.rounds_run, counts.slot_rounds = queue.rounds, queue.slot_rounds
                for name in ("prompt_tokens", "reused_tokens", "drafter_misses"):
                    setattr(counts, name, getattr(queue.scheduler, name))
                if queue.session.programs.exchange_may_overflow:
                    counts.exchanges, counts.overflows = int(snapshot.exchanges[0]), int(snapshot.overflows[0])
                yield Progress(new, list(finished), time.perf_counter() - started, counts, failed)
            for index in {int(event.id) for event, _ in events}:
                if not finished[index] and ended(index):
                    queue.cancel(str(index), "stop")
                    finished[index] = True
    finally:
        queue.close()
    if failed:
        each = "; ".join(f"prompt {index + 1}: behind position {at}" for index, at in sorted(failed.items()))
        raise NonFiniteLogitsError(
            f"the logits are not finite ({each}); check the checkpoint (scripts/evaluate.py logits) and the kernels in "
            "use"
        )


def _count(counts: Counts, index: int, event: Event, snapshot: Snapshot) -> None:
    """Takes over what the device has counted of a request."""
    for name in ("round_tokens", "hits", "nodes"):
        now = np.array(getattr(snapshot, name)[event.slot])
        totals, seen = getattr(counts, name), counts.seen.get((name, index), 0)
        # A request that was preempted is counted from 0 again.
        totals[index] += now - (seen if np.all(now >= seen) else 0)
        counts.seen[name, index] = now


def token_rows(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts as lists of ints.

    Raises:
      ValueError: naming the prompt whose ids are no integers.
    """
    rows = []
    for index, prompt in enumerate(prompts, 1):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"prompt {index} is {prompt!r:.60}; it must be a row of integer ids")
        rows.append(ids.tolist())
    return rows


def one_each(what: str, value: int | Sequence[int], prompts: int) -> list[int]:
    """A value for each prompt, where one may be given for all.

    Raises:
      ValueError: their numbers differ.
    """
    values = list(cast(Sequence[int], value)) if np.ndim(value) else [cast(int, value)] * prompts
    if len(values) != prompts:
        raise ValueError(f"there are {len(values)} {what} for {prompts} prompts")
    return values


def check_prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, positions: int, max_new_tokens: Sequence[int]
) -> None:
    """Refuses what would index outside the embedding or the positions.

    Raises:
      ValueError: naming the prompt.
    """
    if not prompts:
        raise ValueError("there is no prompt")
    for index, (prompt, most) in enumerate(zip(prompts, max_new_tokens, strict=True), 1):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise ValueError(f"prompt {index} has an id outside 0..{vocab_size - 1}; does the tokenizer fit the model?")
        if len(prompt) + most > positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {most} new ones it exceeds the model's "
                f"{positions} positions"
            )


def chunk_rows(longest: int, limits: Limits) -> int:
    """Rows of each request in a prefill step, for prompts of at most `longest` tokens: a power of two, or the limit."""
    return min(limits.prefill_chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
