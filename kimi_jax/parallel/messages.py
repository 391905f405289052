"""What a message is: a collective of a step, with the mesh axes it runs along and its bytes."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

Kind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "dispatch", "combine",
]  # fmt: skip
"""XLA's collectives, and the two of kernels that send a row to the ranks of its experts and back, and nothing else."""

WORD = 4
"""Bytes of an id, a weight, a float32 logit."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective, as a device sees it. Its mesh axes tell which links it crosses on a machine."""

    what: str
    kind: Kind
    axes: tuple[str, ...]
    bytes: float
    """Of one: what a device contributes to a sum or sends, what it holds after a gather, its rows once for a dispatch
    or combine."""
    count: int = 1
    """In a step."""
    copies: int = 1
    """Experts that each row of a dispatch or combine may go to."""
    joined: bool = False
    """Whether a GPU's compiler sends it together with the message before it."""


def as_sent(messages: Iterable[Message]) -> list[Message]:
    """The messages as a GPU's program sends them: joined ones together, equal ones counted together."""
    found: list[Message] = []
    for message in messages:
        if message.joined:
            found[-1] = dataclasses.replace(found[-1], bytes=found[-1].bytes + message.bytes)
        else:
            found.append(message)
    equal: dict[tuple[Kind, tuple[str, ...], float, int], list[Message]] = {}
    for message in found:
        equal.setdefault((message.kind, message.axes, message.bytes, message.copies), []).append(message)
    return [
        dataclasses.replace(same[0], count=sum(message.count for message in same)) if same[1:] else same[0]
        for same in equal.values()
    ]
