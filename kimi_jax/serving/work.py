"""A request on its way through the scheduler: how far it is, and how far it may be once what is in flight has run."""

import dataclasses

from kimi_jax.serving.plan import Admission, Request
from kimi_jax.serving.prefix import page_key


@dataclasses.dataclass(eq=False)
class Work:
    """A request with its slot, its pages and its counts."""

    request: Request
    arrival: int
    """Place in the order of arrival."""
    ids: tuple[int, ...] = ()
    """Tokens to prefill: the prompt and what a preemption has to compute again."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The answer so far, as far as it was read."""
    slot: int | None = None
    group: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    """Tokens of `ids` that were planned."""
    committed: int = 0
    """Tokens of `ids` that are known to be in the pages: what was found there, and chunks that were read."""
    reused: int = 0
    """Tokens of the prompt that pages held when it was first admitted."""
    kept: int = 0
    """Pages at the beginning that others may share."""
    flying_first: int = 0
    """1 while the dispatch that draws the first token is in flight."""
    flying_rounds: int = 0
    """Rounds in flight."""
    sure_rounds: int = 0
    """Those among them that give at least one token each."""
    preemptions: int = 0
    overtaken: int = 0
    """Later requests that were admitted while this one waited."""
    ended: bool = False
    _keys: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = self.request.ids

    @property
    def total(self) -> int:
        """Tokens of the prompt and of the longest answer: no position from here on ever needs a page."""
        return len(self.request.ids) + self.request.limit

    @property
    def ready(self) -> bool:
        """Whether the whole prompt was planned, so that rounds may follow."""
        return self.prefilled == len(self.ids)

    @property
    def least(self) -> int:
        """Tokens of the answer that there are at least once what is in flight has run, if it was not ended."""
        return len(self.tokens) + self.flying_first + self.sure_rounds

    @property
    def complete(self) -> bool:
        """Whether what was planned is sure to end it."""
        return self.ready and self.least >= self.request.limit

    @property
    def reusable(self) -> int:
        """Tokens of `ids` that may come from kept pages."""
        request, most = self.request, len(self.ids) - 1
        if self.preemptions:  # what was wanted of the prompt has been told
            return most
        asked = 0 if request.settings.prompt_logprobs is not None else most
        return min(most, asked if request.reusable is None else request.reusable)

    @property
    def cached(self) -> int:
        """Tokens known to be in the pages: what was committed, then the answer but for its last token."""
        if self.committed < len(self.ids):
            return self.committed
        return max(self.committed, len(self.request.ids) + len(self.tokens) - 1)

    def keys(self, tokens: int, page_tokens: int) -> list[bytes]:
        """Keys of the full pages among the first so many tokens of the prompt and the answer."""
        count = tokens // page_tokens
        if len(self._keys) < count:
            text = (*self.request.ids, *self.tokens)
            for start in range(len(self._keys) * page_tokens, count * page_tokens, page_tokens):
                salt = "" if start else self.request.salt
                self._keys.append(page_key(text[start : start + page_tokens], salt))
        return self._keys[:count]

    def needed(self, rounds: int, depth: int) -> int:
        """Tokens that need pages when so many rounds follow what is in flight."""
        most = len(self.tokens) + self.flying_first + (self.flying_rounds + rounds) * (depth + 1)
        return min(len(self.request.ids) + most - 1, self.total)

    def admit(self, slot: int, group: int) -> Admission:
        """Takes a slot."""
        self.slot, self.group, self.prefilled = slot, group, 0
        emitted = len(self.tokens)
        request = self.request
        return Admission(
            slot, request.id, len(self.ids), request.limit - emitted, emitted, request.settings, media=request.media
        )

    def recompute(self) -> None:
        """Goes back to the queue with what it has: the next slot starts with a longer prompt and a shorter limit."""
        self.ids = (*self.request.ids, *self.tokens)
        self.slot, self.prefilled, self.committed = None, 0, 0
        self.preemptions += 1
