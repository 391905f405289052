"""A checkpoint on a mesh, ready to decode: the one object a script or an evaluation opens."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float

from kimi_jax.config import ModelConfig
from kimi_jax.ddtree.budget import ROW_COUNTS
from kimi_jax.decoding.automatic import AutomaticBudget, RoundCosts
from kimi_jax.decoding.conversation import Answer, ChatOptions, Messages, Text, TextOptions, of_messages, of_text
from kimi_jax.decoding.cpu_form import cpu_form
from kimi_jax.decoding.dflash_drafter import DFlashContext, DFlashDrafter
from kimi_jax.decoding.forcing import force, logits_of
from kimi_jax.decoding.generate import (
    Limits,
    PagesThatFit,
    Progress,
    Request,
    check_prompts,
    generate,
    one_each,
    shape_for,
    shape_of,
    token_rows,
)
from kimi_jax.decoding.kernels import Pick, picks
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.rebalance import Rebalancer
from kimi_jax.decoding.room import pages_that_fit
from kimi_jax.decoding.sampling import Draws, Sampling
from kimi_jax.decoding.scoring import Scores, Window, check_windows, score
from kimi_jax.decoding.session import Session
from kimi_jax.decoding.speculation import PLAIN, Draft, Drafter, Speculation
from kimi_jax.decoding.timing import measure_rounds, part_seconds
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.exchange.choice import may_overflow
from kimi_jax.parallel.host_arrays import bytes_of_process_0, require_agreement
from kimi_jax.parallel.processes import Watchdog, coordinator_host
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Parameters, Rules
from kimi_jax.serving.plan import Shape
from kimi_jax.serving.prefix import any_share_a_page
from kimi_jax.serving.transport import Receiver, Sender, connect
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.vision.encoder import Encoder
from kimi_jax.vision.media import Medium
from kimi_jax.vision.tower import VisionModel
from meshes.presets import Layout

STOP_TOKENS = ("<|im_end|>", "[EOS]")
"""K2.6 ends a turn with <|im_end|> and then [EOS]; config.json names only one of the two."""

Costs = Callable[[int, int], RoundCosts]
"""Requests of a batch, over the whole mesh, and cached positions of each, to what a round costs by its rows."""


DEFAULT_LIMITS = Limits()

MOST_NODES = ROW_COUNTS[-1] - 1
"""Tree nodes that `auto` chooses at most."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Model, weights and tokenizer of one checkpoint, and perhaps a drafter, laid out on one mesh."""

    model: CausalLM
    parameters: Parameters
    """`target`, and `drafter` where there is one."""
    tokenizer: Tokenizer
    mesh: Mesh
    layout: Layout
    dtype: DTypeLike
    drafter: DFlash | None = None
    watchdog: Watchdog | None = None
    """Told of every dispatch that has ended."""
    rebalancer: Rebalancer | None = None
    """Moves experts between dispatches; then `placement` is among the parameters, and the model's own is outdated."""
    costs: Costs | None = None
    """What rounds cost on the machine that simulated devices stand for; None for real devices, which are measured."""
    vision: VisionModel | None = None
    """Tower and projector; then their weights are `vision` among the parameters."""
    prefix_cache: bool = True
    """Prompts that begin alike share the pages of what they have in common, and its tokens are run once."""

    @property
    def rules(self) -> Rules:
        """How weights lie on the mesh."""
        return rules(self.layout)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those config.json names and the tokenizer's own."""
        return tuple(sorted({*self.config.eos_token_ids, *(self.tokenizer.special_id(name) for name in STOP_TOKENS)}))

    @property
    def known_ids(self) -> int | None:
        """Ids that the tokenizer knows, where the head has rows beyond them (padding, which must not be drawn)."""
        known = self.tokenizer.vocab_size
        return known if known < self.config.vocab_size else None

    @functools.cached_property
    def encoder(self) -> Encoder | None:
        """What sees images; None without a tower."""
        if self.vision is None:
            return None
        return Encoder(self.vision, self.parameters["vision"], self.mesh, self.rules)

    @functools.cached_property
    def _programs(self) -> dict[Draft, Programs]:
        return {}

    @functools.cached_property
    def _automatic(self) -> dict[tuple[Draft, tuple[int, ...]], AutomaticBudget]:
        return {}

    def programs(self, draft: Draft = PLAIN) -> Programs:
        """The programs for one way of drafting, compiled once: for greedy requests; `drawing` gives those for others.

        With an automatic budget they draft nothing by themselves: `with_rows` gives those that do.

        Raises:
          ValueError: drafting without a drafter.
        """
        if draft not in self._programs:
            self._programs[draft] = Programs(
                self.model, self.mesh, self.rules, Draws(), self.dtype, self._speculation(draft),
                experts_move=self.rebalancer is not None,
                exchange_may_overflow=may_overflow(
                    self.layout, self.model.config.num_experts_per_tok, self.model.placement.num_slots
                ),
                known_ids=self.known_ids,
                ends_early=self.mesh.devices.flat[0].platform == "cpu",
            )  # fmt: skip
        return self._programs[draft]

    def automatic(
        self, draft: Draft, requests: int, longest: int, most: int, fewer: Sequence[int] = ()
    ) -> AutomaticBudget | None:
        """What picks the rows of every dispatch; None where the budget is fixed.

        It is kept while the engine is open, one for each number of slots, with the costs of its first call: those
        the engine has, or measured now.

        Args:
          requests: at work at the same time, over the whole mesh.
          longest, most: tokens of the longest prompt and of the longest answer.
          fewer: slots that rounds are compiled for besides all.
        """
        if draft.kind != "ddtree" or draft.budget != "auto":
            return None
        assert self.drafter is not None
        key = (draft, (requests, *fewer))
        if key not in self._automatic:
            config, costs = (
                self.drafter.config,
                [self._costs(draft, slots, longest, most) for slots in (requests, *fewer)],
            )
            known = config.block_size, config.acceptance_length
            self._automatic[key] = AutomaticBudget(costs[0], *known, dict(zip(fewer, costs[1:], strict=True)))
        return self._automatic[key]

    def _costs(self, draft: Draft, requests: int, longest: int, most: int) -> RoundCosts:
        if self.costs is not None:
            return self.costs(requests, longest + most)
        return measure_rounds(self.programs(), self.programs(draft), self.parameters, requests, longest, most)

    def begin(self, draft: Draft, requests: int, longest: int, most: int) -> tuple[Programs, AutomaticBudget | None]:
        """The programs of new slots, and what picks their rows; plain ones where drafts are not expected to pay."""
        automatic = self.automatic(draft, requests, longest, most)
        if automatic is not None and not automatic.begin():
            return self.programs(), None
        return self.programs(draft), automatic

    def next_programs(self, draft: Draft, requests: int, longest: int, most: int) -> Programs:
        """The programs that a dispatch would run now: those of the rows an automatic budget picks."""
        automatic = self.automatic(draft, requests, longest, most)
        programs = self.programs(draft)
        return programs if automatic is None else programs.with_rows(automatic.next(1)[0])

    def _speculation(self, draft: Draft) -> Speculation:
        if draft.kind == "none" or draft.budget == 0:
            return Speculation()
        if draft.kind not in DRAFTERS:
            raise ValueError(f"speculation is {draft.kind!r}; choose from {', '.join(['none', *DRAFTERS])}")
        return Speculation(DRAFTERS[draft.kind](self, draft), draft.synthetic)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling,
        seed: int | Sequence[int] = 0,
        draft: Draft = PLAIN,
        samples: Sequence[int] | None = None,
        media: Sequence[Sequence[Medium]] | None = None,
    ) -> Iterator[Progress]:
        """Decodes prompts given as ids together, with one seed or one for each; see `serve`.

        Args:
          samples: number of each prompt among those that share its seed; 0 by default, so equal prompts with equal
            seeds get equal texts.
          media: images of each prompt, where they have any; see `Request.media`.
        """
        prompts = token_rows(prompts)
        each = zip(
            prompts,
            one_each("seeds", seed, len(prompts)),
            limits.of_each(len(prompts)),
            one_each("samples", 0 if samples is None else samples, len(prompts)),
            [()] * len(prompts) if media is None else media,
            strict=True,
        )
        requests = [
            Request(ids, sampling, seed, most, sample, media=tuple(own)) for ids, seed, most, sample, own in each
        ]
        return self.serve(requests, limits, draft)

    def serve(
        self,
        requests: Sequence[Request],
        limits: Limits = DEFAULT_LIMITS,
        draft: Draft = PLAIN,
        slots: int | None = None,
        ended: Callable[[int], bool] = lambda index: False,
    ) -> Iterator[Progress]:
        """Decodes requests of any number: as many at a time as there are slots, the others as slots become free.

        All processes call it alike.

        Args:
          limits: sizes of dispatches; the requests' own limits count.
          slots: requests at work at the same time, over the whole mesh; by default all.
          ended: whether the host has ended a request's text; see `generate.generate`.

        Raises:
          ValueError: an empty prompt, ids that are no integers or outside the vocabulary, more positions than the model
            has, a seed that does not fit 64 bits, or processes with other arguments than process 0, which it names.
          NonFiniteLogitsError: at the end, naming the requests and the positions.
        """
        ways = (self.layout, np.dtype(self.dtype).name, self.prefix_cache, limits, draft, slots)
        require_agreement("prompts or options", (requests, *ways))
        prompts, most = [each.ids for each in requests], [each.max_new_tokens for each in requests]
        check_prompts(prompts, self.config.vocab_size, self.config.max_position_embeddings, most)
        longest = max(map(len, prompts))
        programs, automatic = self.begin(draft, min(slots or len(requests), len(requests)), longest, max(most))
        shares = self._shares(programs, prompts)
        shape = shape_of(programs, [*map(len, prompts)], most, limits, slots, self._fit(programs, shares))
        yield from generate(self._queue(programs, shape, automatic, shares), requests, self.stop_ids, ended)

    def score(
        self, windows: Sequence[Window], slots: int | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> Iterator[tuple[int, Scores]]:
        """Log-probabilities of given ids, each window's with its index, as they are known.

        All processes call it alike.

        Args:
          slots: windows at work at the same time, over the whole mesh; by default all.

        Raises:
          ValueError: an empty window, targets that do not follow its rows, ids outside the vocabulary, more rows than
            the model has positions, or log-probabilities that are not finite, at the end.
        """
        ways = (self.layout, np.dtype(self.dtype).name, self.prefix_cache, limits, slots)
        require_agreement("windows or options", (windows, *ways))
        lengths, nothing = [len(window.inputs) for window in windows], [0] * len(windows)
        check_prompts([each.inputs for each in windows], self.config.vocab_size,
                      self.config.max_position_embeddings, nothing)  # fmt: skip
        check_windows(windows, self.config.vocab_size)
        programs = self.programs()
        shares = self._shares(programs, [each.inputs for each in windows])
        shape = shape_of(programs, lengths, nothing, limits, slots, self._fit(programs, shares))
        yield from score(self._queue(programs, shape, None, shares), windows)

    def queue(
        self,
        slots: int,
        capacity: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        draft: Draft = PLAIN,
        slot_counts: tuple[int, ...] = (),
    ) -> Queue:
        """Slots and pages for requests that come and go, for as long as the caller likes.

        All processes call it alike; then process 0 submits and steps, and the others `follow` until it closes.

        Args:
          slots: requests at work at the same time, over the whole mesh.
          capacity: tokens of prompt and answer that a request may have at most; by default the model's positions.
          limits: sizes of chunks, dispatches and the pool of pages.
          slot_counts: slots of a device group that rounds are compiled for, ascending to all; by default all only.

        Raises:
          ValueError: more slots, pages or tokens than fit in memory, naming what would.
        """
        positions = self.config.max_position_embeddings
        capacity = positions if capacity is None else capacity
        if not 2 <= capacity <= positions:
            raise ValueError(f"a request may have {capacity:,} tokens; the model has {positions:,} positions")
        programs = self.programs(draft)
        longest = min(limits.prefill_chunk, capacity - 1)
        fewer = [count * self.layout.groups for count in slot_counts[:-1]]
        automatic = self.automatic(draft, slots, longest, min(limits.max_new_tokens, capacity - longest), fewer)
        fit = self._fit(programs, self.prefix_cache)
        shape = shape_for(programs, slots, capacity - 1, capacity, limits, fit, slot_counts=slot_counts)
        link = None
        if jax.process_count() > 1:
            link = connect(jax.process_index(), jax.process_count(), coordinator_host(), bytes_of_process_0)
        return self._queue(programs, shape, automatic, self.prefix_cache, link)

    def _shares(self, programs: Programs, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether pages are kept for prompts that are all known: where two have one in common."""
        return self.prefix_cache and any_share_a_page(prompts, programs.page_tokens)

    def _fit(self, programs: Programs, shares: bool) -> PagesThatFit:
        return functools.partial(pages_that_fit, self, programs, shares)

    def _queue(
        self,
        programs: Programs,
        shape: Shape,
        automatic: AutomaticBudget | None,
        shares: bool,
        link: Sender | Receiver | None = None,
    ) -> Queue:
        beat = (lambda: None) if self.watchdog is None else self.watchdog.beat
        session = Session(programs, self.parameters, shape, self.encoder, shares)
        return Queue(session, automatic, self.rebalancer, beat, link)

    @property
    def default_draft(self) -> Draft:
        """The best tree of the size that pays, or nothing where there is no drafter."""
        return PLAIN if self.drafter is None else Draft()

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """The model's answer to a user's text, or to a conversation of OpenAI-style messages.

        Raises:
          MessageError: a message or a tool is malformed.
          ValueError: an option out of its range, or more tokens than the model has positions.
          NonFiniteLogitsError: the checkpoint or a kernel is broken.
        """
        return of_messages(self, messages, **options).answer()

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Text:
        """As `chat`, to iterate over: pieces of thinking and of the answer as they come."""
        return of_messages(self, messages, **options)

    def complete(self, text: str, **options: Unpack[TextOptions]) -> Answer:
        """The continuation of a text as it is, without the chat template. Raises as `chat`."""
        return of_text(self, text, **options).answer()

    def logits(self, ids: Sequence[int], media: Sequence[Medium] = ()) -> Float[np.ndarray, "rows vocab"]:
        """Float32 logits behind every token of one sequence, run in chunks behind a cache.

        `media` are its images, in order; the ids have a placeholder for each of their tokens.

        Raises:
          MediumError: images that do not fit the placeholders.
          ValueError: no token, an id outside the vocabulary, or more than the model has positions.
        """
        chunks = force(self, logits_of, [ids], media=[media])
        return np.concatenate([chunk.values[0, : chunk.counts[0]] for chunk in chunks])

    def rebalancing(self, every: int) -> "Engine":
        """The same with experts that move every so many rounds to where measured loads are even.

        It takes this engine's arrays over: as experts move, those of this one are kept beside them until it is dropped.

        Raises:
          ValueError: less than one round, or a layout with all experts on one rank.
        """
        rebalancer = Rebalancer(self.model, self.mesh, self.layout, every)
        parameters = jax.tree.map(lambda x: x, self.parameters) | {"placement": rebalancer.tables()}
        return dataclasses.replace(self, parameters=parameters, rebalancer=rebalancer)

    def for_cpu(self) -> "Engine":
        """The same with weights as one CPU's products read them; see `decoding.cpu_form`. It decodes the same text.

        Raises:
          ValueError: several devices, a GPU, or another type than float32.
        """
        if self.mesh.size > 1 or self.mesh.devices.flat[0].platform != "cpu" or self.dtype != jnp.float32:
            place = f"{self.mesh.size} {self.mesh.devices.flat[0].platform} devices in {jnp.dtype(self.dtype).name}"
            raise ValueError(f"weights are laid out for one CPU device in float32, and this engine has {place}")
        model, target = cpu_form(self.model, self.parameters["target"])
        drafter, parameters = self.drafter, self.parameters | {"target": target}
        if drafter is not None:
            drafter, parameters["drafter"] = cpu_form(drafter, parameters["drafter"])
        return dataclasses.replace(self, model=model, drafter=drafter, parameters=parameters)

    def picks(self, draft: Draft, requests: int, capacity: int) -> list[Pick]:
        """What serves the hot operations of a round."""
        rows = 1
        if draft.kind == "ddtree":
            rows += MOST_NODES if draft.budget == "auto" else draft.budget
        elif draft.kind != "none":
            longest = self._speculation(draft).max_depth
            rows += longest if draft.budget == "auto" else min(draft.budget, longest)
        return picks(
            self.config, self.model.placement, self.layout, self.mesh, self.dtype,
            requests=requests, rows=rows, capacity=capacity,
        )  # fmt: skip

    def part_seconds(self, prompts: Sequence[Sequence[int]], most: int, draft: Draft = PLAIN) -> dict[str, float]:
        """Seconds of a round by part, with answers of at most so many tokens; see `decoding.timing`."""
        programs = self.next_programs(draft, len(prompts), max(map(len, prompts)), most)
        return part_seconds(programs, self.parameters, prompts, most)


def _dflash(engine: Engine, draft: Draft) -> DFlashDrafter:
    if engine.drafter is None:
        raise ValueError(f"speculation {draft.kind} needs a drafter: open the checkpoint with one")
    longest = engine.drafter.config.block_size - 1
    if draft.kind == "chain":
        budget = longest if draft.budget == "auto" else min(draft.budget, longest)
    else:
        budget = 0 if draft.budget == "auto" else draft.budget
    return DFlashDrafter(
        DFlashContext(engine.drafter, engine.mesh.shape["tp"]),
        shape="chain" if draft.kind == "chain" else "tree",
        budget=budget,
        keep_chain=draft.keep_chain or draft.synthetic is not None,
        shared=draft.shared,
        known_ids=engine.known_ids,
    )


DRAFTERS: dict[str, Callable[[Engine, Draft], Drafter]] = {"chain": _dflash, "ddtree": _dflash}
"""What makes an engine's drafter, by the name that `Draft.kind` takes."""
