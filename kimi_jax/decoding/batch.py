"""Prompts that are decoded together: their texts as they come, and what a program is told of them afterwards."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kimi_jax.decoding.engine import DEFAULT_LIMITS, Draft, Engine
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.prompts import Prompt
from kimi_jax.text_output import Reader


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts, the requests made of them, and the reader that follows each one's text."""

    engine: Engine
    draft: Draft
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    readers: Sequence[Reader]
    report: Report
    size: int
    """Prompts decoded together at most; the others wait for their turn."""
    limits: Limits = DEFAULT_LIMITS
    failed: dict[int, int] = dataclasses.field(default_factory=dict)
    """Prompts whose logits were not finite, and the positions."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        draft: Draft,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        size: int,
        limits: Limits = DEFAULT_LIMITS,
        *,
        raw: bool,
        thinking: bool,
    ) -> "Batch":
        """A batch that has not begun; `raw` and `thinking` say how its texts are read, as `Reader` takes them."""
        readers = [
            Reader(
                engine.tokenizer, engine.stop_ids,
                raw=raw, thinking=thinking, tools=each.tools, stops=each.wishes.stop,
            )
            for each in prompts
        ]  # fmt: skip
        return cls(engine, draft, prompts, requests, readers, Report(len(prompts)), min(size, len(prompts)), limits)

    @property
    def ids(self) -> list[Sequence[int]]:
        """The prompts' ids."""
        return [request.ids for request in self.requests]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))

    @property
    def most(self) -> int:
        """New tokens of the request that wants most."""
        return max(request.max_new_tokens for request in self.requests)

    @property
    def sampling(self) -> Sampling:
        """The first request's."""
        return self.requests[0].sampling

    def only(self, indices: Sequence[int]) -> "Batch":
        """Some of the prompts."""
        kept = {name: [getattr(self, name)[at] for at in indices] for name in ("prompts", "requests", "readers")}
        return dataclasses.replace(self, **kept, report=Report(len(indices)), size=min(self.size, len(indices)))

    def __iter__(self) -> Iterator[list[int]]:
        """Decodes, and stops after every dispatch; the readers have then what can be shown. Yields who has ended.

        Raises NonFiniteLogitsError as `Engine.serve`, at the end.
        """
        if not self.prompts:
            return
        serve = self.engine.serve(
            self.requests, self.limits, self.draft, self.size, ended=lambda at: self.readers[at].finished
        )
        for progress in serve:
            self.failed.update(progress.failed)
            before = [reader.finished for reader in self.readers]
            arrived = zip(self.readers, progress.new_tokens, progress.finished, strict=True)
            kept = [reader.push(new, finished) for reader, new, finished in arrived]
            self.report.add(dataclasses.replace(progress, new_tokens=kept))
            yield [at for at, reader in enumerate(self.readers) if reader.finished and not before[at]]

    def result(self, index: int) -> dict[str, Any]:
        """What came of one prompt, for JSON."""
        prompt, reader = self.prompts[index], self.readers[index]
        return {
            **({} if prompt.id is None else {"id": prompt.id}),
            "prompt": prompt.text,
            "prompt_tokens": len(self.requests[index].ids),
            "thinking": reader.response.thinking,
            "text": reader.response.answer,
            "tool_calls": [dataclasses.asdict(call) for call in reader.response.tool_calls],
            "token_ids": reader.ids,
            "finish_reason": "error" if index in self.failed else reader.finish_reason,
        }
