"""What the host decides at a boundary between two dispatches, as plain data that any process can execute.

Slots are numbered over all groups: slot `group * slots_per_group + local`. Pages are numbered in each group's own pool.
"""

import dataclasses
import json
import operator
from typing import Any

import numpy as np

from kimi_jax.vision.media import Medium, Placed


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that are compiled into the device's programs."""

    groups: int
    """Groups of ranks that hold requests of their own (dp × ep)."""
    slots_per_group: int
    pages: int
    """Pages in a group's pool."""
    page_tokens: int
    """Tokens in a page: 64, times the ranks that split the cache."""
    tiles: int
    """Pages of the longest request, the page table's width."""
    lanes: int
    """Prompts of a group that one chunk prefills at the same time, at most."""
    chunk: int
    """Tokens of a prompt that a lane prefills at a time, at most."""
    depth: int
    """Depth of draft trees; a round gives 1 to depth + 1 tokens."""
    rounds: tuple[int, ...] = (1, 2, 8)
    """Rounds that a dispatch without a chunk may run, ascending from 1; a chunk has one round at its side."""
    slot_counts: tuple[int, ...] = ()
    """Slots a group that rounds are compiled for, ascending to all; empty means all only."""
    admissions: int = 8
    """Slots of a group that one plan fills, at most."""
    until_one_ends: bool = False
    """The device ends the rounds of a dispatch with the first text that ends: no slot waits, however many are planned.
    It needs `ahead` 0, since nobody knows how many were run before it is read."""
    rounds_repeat: bool = False
    """Rounds of a dispatch without a chunk may give nothing, and are then run again: no text is sure to go on."""
    ahead: int = 1
    """Dispatches that may be in flight, unread, when the next one is planned: 0 or 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot_counts", self.slot_counts or (self.slots_per_group,))
        least = ("groups", "slots_per_group", "pages", "page_tokens", "tiles", "lanes", "chunk", "admissions")
        for name, lowest in [*((name, 1) for name in least), ("depth", 0), ("ahead", 0)]:
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {lowest}")
        if self.ahead > 1:
            raise ValueError(f"ahead is {self.ahead}; at most one dispatch may be in flight when the next is planned")
        if self.ahead and self.until_one_ends:
            raise ValueError("rounds that end with a text need ahead 0: what follows depends on how many were run")
        if self.rounds[:1] != (1,) or list(self.rounds) != sorted(set(self.rounds)):
            raise ValueError(f"rounds are {self.rounds}; they ascend from 1")
        counts = self.slot_counts
        if list(counts) != sorted(set(counts)) or counts[0] < 1 or counts[-1] != self.slots_per_group:
            raise ValueError(f"slot_counts are {counts}; they ascend to {self.slots_per_group}, all slots of a group")

    @property
    def slots(self) -> int:
        """Slots of all groups."""
        return self.groups * self.slots_per_group

    @property
    def capacity(self) -> int:
        """Tokens of prompt and answer that a request can have at most."""
        return min(self.tiles, self.pages) * self.page_tokens

    @property
    def no_page(self) -> int:
        """What the page table holds where there is no page: one past the last, which gathers clip and scatters drop."""
        return self.pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def group(self, slot: int) -> int:
        """The group that a slot belongs to."""
        return slot // self.slots_per_group

    def table(self) -> np.ndarray:
        """A page table int32 [slots, tiles] without pages."""
        return np.full((self.slots, self.tiles), self.no_page, np.int32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a request's tokens are drawn and what is reported of them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: tuple[int, int] = (0, 0)
    """Two uint32 that the noise of every position is drawn from."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text; none ignores the end."""
    min_tokens: int = 0
    """Tokens of the answer before which no stop token is drawn."""
    budget: int | None = None
    """Nodes of a draft tree; 0 decodes without drafts, None leaves it to the engine."""
    logprobs: int | None = None
    """Most likely tokens told beside each token of the answer; None tells no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for tokens of the prompt, but for its first."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how many tokens may follow it; a limit of 0 only scores the prompt."""

    id: str
    ids: tuple[int, ...]
    limit: int
    settings: Settings = Settings()
    salt: str = ""
    """Pages are shared among requests of the same salt only."""
    reusable: int | None = None
    """Tokens of the prompt that may come from kept pages, at most; by default all but the last, and none where
    log-probabilities of the prompt are wanted."""
    following: int | None = None
    """Token behind the prompt whose log-probability is wanted besides, without a row of its own."""
    media: tuple[Placed, ...] = ()
    """Images of the prompt, whose ids there are numbers of their content; see `Medium.ids`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(operator.index(token) for token in self.ids))
        if not self.ids:
            raise ValueError(f"request {self.id!r} has an empty prompt; it needs at least one token")
        if self.limit < 0:
            raise ValueError(f"request {self.id!r} has a limit of {self.limit} tokens; it must not be negative")


@dataclasses.dataclass(frozen=True)
class Admission:
    """A slot that is emptied for a request before anything else of the plan happens."""

    slot: int
    id: str
    prompt: int
    """Tokens to prefill: the request's prompt and, after a preemption, what was already told of its answer."""
    limit: int
    """Tokens that may still be emitted."""
    emitted: int
    """Tokens of the answer that stand at the prompt's end; min_tokens counts them."""
    settings: Settings
    cached: int = 0
    """Tokens of the prompt that the slot's pages hold already."""
    media: tuple[Placed, ...] = ()
    """Images of the prompt."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """A piece of the prompt of a slot: its tokens from position `start` on."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    last: bool
    """Whether the prompt ends here, so that the answer's first token is drawn."""
    following: int | None = None
    """The token behind the piece, as far as it is known and its log-probability may be wanted."""


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A change of the page table: from tile `start` on a slot has these pages and no others."""

    slot: int
    start: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One dispatch. Table rows change first, then slots are admitted, then lanes and rounds run."""

    number: int
    """Counts up from 0."""
    table: tuple[TableRow, ...] = ()
    admissions: tuple[Admission, ...] = ()
    lanes: tuple[Lane, ...] = ()
    rounds: int = 0
    """Beside lanes 1, or 0 where nothing runs; without lanes one of the shape's choices."""
    slots: int = 0
    """Slots of each group that rounds are computed for, one of the shape's counts; 0 without rounds."""
    active: tuple[int, ...] = ()
    """Slots that take part in the rounds, ascending; all others stand still."""
    exact: bool = False
    """Rounds are run by programs in which none has to be repeated."""
    released: tuple[int, ...] = ()
    """Slots that a request has left since the last plan, for information."""
    preempted: tuple[str, ...] = ()
    """Requests that were put back into the queue, for information."""

    def to_json(self) -> str:
        """The plan in one line."""
        return json.dumps(self, default=_fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """The plan that `to_json` wrote."""
        fields = json.loads(text, object_hook=_with_tuples)
        admissions = [
            fields
            | {"settings": Settings(**fields["settings"])}
            | {"media": tuple(Placed(each["first"], Medium.from_json(each["medium"])) for each in fields["media"])}
            for fields in fields["admissions"]
        ]
        made = {
            "table": tuple(TableRow(**row) for row in fields["table"]),
            "admissions": tuple(Admission(**admission) for admission in admissions),
            "lanes": tuple(Lane(**lane) for lane in fields["lanes"]),
        }
        return cls(**fields | made)


def _fields(value: Any) -> dict[str, Any]:
    return value.to_json() if isinstance(value, Medium) else vars(value)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def update_table(table: np.ndarray, plan: Plan, no_page: int) -> None:
    """Writes a plan's changes into a page table int32 [slots, tiles]."""
    for row in plan.table:
        table[row.slot, row.start :] = no_page
        table[row.slot, row.start : row.start + len(row.pages)] = row.pages
