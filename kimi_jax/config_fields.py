"""How a config.json is read: every field named, of the kind that is expected, and every number within a range."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from kimi_jax.checkpoint.errors import require_finished

MAX_INT32 = 2**31 - 1
MAX_WIDTH = 2**20
"""Far above any size of a published model; a number beyond it is damage."""
SMALLEST, LARGEST = 1e-6, 1e6
"""Range of factors that multiply activations or frequencies."""


class ConfigError(ValueError):
    """A config.json this project cannot run, with the field and what would be accepted."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """One JSON object of a configuration. All readers raise ConfigError naming the field."""

    values: Mapping[str, Any]
    path: str = ""
    """Put before names in errors, such as `rope_scaling.`."""

    def object(self, name: str) -> "Fields":
        """An object that may be missing or null, which is one without fields."""
        value = self.values.get(name)
        return Fields({} if value is None else as_object(value, self.path + name), f"{self.path}{name}.")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer of low..high; without a default it must be there."""
        value = self._present(name, default)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{self.path}{name} is {shown(value)}; expected an integer from {low:,} to {high:,}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number of low..high; without a default it must be there."""
        value = self._present(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise ConfigError(f"{self.path}{name} is {shown(value)}; expected a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false; `default` where it is missing. Null is refused: readers disagree on what it means."""
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.path}{name} is {shown(value)}; expected true or false")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.path}{name} is missing")
        return value

    def require(self, accepted: Mapping[str, tuple[Any, ...]], *, present: bool = False) -> None:
        """Refuses other values than those accepted, field by field; missing and null are accepted unless `present`."""
        for name, values in accepted.items():
            value = self.values.get(name)
            if present and name not in self.values:
                raise ConfigError(f"{self.path}{name} is missing")
            if value not in values and (present or value is not None):
                only = f"only {json.dumps(values[0])} is supported" if values else "it is not supported"
                raise ConfigError(f"{self.path}{name} is {shown(value)}; {only}")

    def only(self, known: Iterable[str], what: str) -> None:
        """Refuses fields whose meaning is not known here; `what` says what has them."""
        unknown = [name for name in self.values if name not in {*known}]
        if unknown:
            raise ConfigError(f"{self.path}{unknown[0]} is no field of {what}; known are {', '.join(known)}")


def shown(value: Any) -> str:
    """A value in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def as_object(value: object, name: str) -> Mapping[str, Any]:
    """A value of a configuration that must be a JSON object.

    Raises:
      ConfigError: naming it.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {shown(value)}; expected a JSON object")
    return cast("Mapping[str, Any]", value)


def token_ids(fields: Fields, name: str, vocab_size: int) -> set[int]:
    """The ids of a field that holds one, a list of them, or nothing.

    Raises:
      ConfigError: outside the vocabulary.
    """
    value = fields.values.get(name)
    ids = cast("list[Any]", value if isinstance(value, list) else [] if value is None else [value])
    if not all(type(each) is int and 0 <= each < vocab_size for each in ids):
        raise ConfigError(
            f"{fields.path}{name} is {shown(value)}; expected a token id of 0 to {vocab_size - 1:,} or a list of them"
        )
    return set(ids)


def read_config[Config](path: str | Path, where: str, parse: Callable[[Any], Config]) -> Config:
    """Parses a config.json, or the one in a folder; `where` says what holds one.

    Raises:
      ConfigError: naming the file.
      CheckpointError: a checkpoint's folder that was never finished.
    """
    path = Path(path)
    if path.suffix != ".json":
        require_finished(path)
        path = path / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {where} holds a config.json") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); was the download complete?") from None
    try:
        return parse(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
