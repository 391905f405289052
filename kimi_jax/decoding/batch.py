"""Prompts that are decoded together: their texts as they come, and what a program is told of them afterwards."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.requests import Request, generate_all
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

    @classmethod
    def of(
        cls,
        engine: Engine,
        draft: Draft,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        size: int,
        **how: bool,
    ) -> "Batch":
        """A batch that has not begun; `how` the texts are read is `raw` and `thinking`, as `Reader` takes them."""
        stops = engine.stop_ids
        readers = [Reader(engine.tokenizer, stops, tools=each.tools, stops=each.wishes.stop, **how) for each in prompts]
        return cls(engine, draft, prompts, requests, readers, Report(len(prompts)), min(size, len(prompts)))

    @property
    def ids(self) -> list[Sequence[int]]:
        """The prompts' ids."""
        return [request.ids for request in self.requests]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))

    @property
    def limits(self) -> Limits:
        """New tokens of the request that wants most."""
        return Limits(max_new_tokens=max(request.max_new_tokens for request in self.requests))

    @property
    def sampling(self) -> Sampling:
        """The first request's."""
        return self.requests[0].sampling

    def __iter__(self) -> Iterator[None]:
        """Decodes, and stops after every dispatch; the readers have then what can be shown."""
        for progress in generate_all(
            self.engine, self.requests, self.draft, self.size, lambda at: self.readers[at].finished
        ):
            arrived = zip(self.readers, progress.new_tokens, progress.finished, strict=True)
            kept = [reader.push(new, finished) for reader, new, finished in arrived]
            self.report.add(dataclasses.replace(progress, new_tokens=kept))
            yield

    def results(self) -> list[dict[str, Any]]:
        """One entry for each prompt, for JSON."""
        return [
            {
                **({} if prompt.id is None else {"id": prompt.id}),
                "prompt": prompt.text,
                "prompt_tokens": len(request.ids),
                "thinking": reader.response.thinking,
                "text": reader.response.answer,
                "tool_calls": [dataclasses.asdict(call) for call in reader.response.tool_calls],
                "token_ids": reader.ids,
                "finish_reason": reader.finish_reason,
            }
            for prompt, request, reader in zip(self.prompts, self.requests, self.readers, strict=True)
        ]
