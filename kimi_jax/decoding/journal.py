"""A file that remembers which prompts have been answered, so that a run that was stopped goes on where it was."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.decoding.generate import Request

BEGINNING = '{"key": "'
"""Of every line."""


class Journal:
    """One line of JSON for each answered request, appended as it ends: its key and its result.

    A line that was cut off when a run was killed counts as none.

    Raises:
      ValueError: the file holds something else than a journal.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]):
        """`run` is what, beside a request, decides its answer: the checkpoint and how it decodes."""
        self._run = dict(run)
        self.results: dict[str, dict[str, Any]] = {}
        text = path.read_text("utf-8") if path.exists() else ""
        *lines, rest = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self.results[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no line of a journal; give --journal another file") from error
        if not rest.startswith(BEGINNING[: len(rest)]):  # not ours to cut off
            raise ValueError(f"{path} is no journal; give --journal another file")
        self._file = path.open("a", encoding="utf-8")
        if rest:
            self._file.truncate(len(text.encode()) - len(rest.encode()))

    def key(self, request: Request, **more: Any) -> str:
        """Names a request by all that decides its answer."""
        fields = {**vars(request), "ids": list(request.ids), "sampling": vars(request.sampling)}
        asked = json.dumps([self._run, fields, more], sort_keys=True, default=str)
        return hashlib.sha256(asked.encode()).hexdigest()

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Writes a result down at once."""
        self._file.write(json.dumps({"key": key, "result": result}) + "\n")
        self._file.flush()
        self.results[key] = dict(result)
