"""What a command's help says of defaults: their values, and nothing where there is none to name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import tyro

from kimi_jax.opening import ASSETS

EMPTY = ("None", "False", "")
"""Defaults that an option's sentence explains better than `(default: None)` behind it."""


def tell(form: Any) -> None:
    """Adds to the annotations of a dataclass, of those within it or of a union's, what the help says of defaults."""
    for kind in get_args(form) or (form,):
        _tell_fields(_plain(kind))


def tell_parameters(command: Callable[..., Any]) -> None:
    """The same for a function's parameters."""
    for parameter in inspect.signature(command).parameters.values():
        tell(parameter.annotation)
        if hint := _hint(parameter.annotation, parameter.default):
            command.__annotations__[parameter.name] = Annotated[parameter.annotation, hint]


@functools.cache
def _tell_fields(form: Any) -> None:
    if not isinstance(form, type) or not dataclasses.is_dataclass(form):
        return
    for field in dataclasses.fields(form):
        tell(field.type)
        owner = next(base for base in form.__mro__ if field.name in inspect.get_annotations(base))
        annotation = owner.__annotations__[field.name]
        if hint := _hint(annotation, field.default):
            owner.__annotations__[field.name] = Annotated[annotation, hint]


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _hint(annotation: Any, default: Any) -> Any:
    """How tyro is to speak of a default; None where its own words are right: an option without one is required."""
    if default in (dataclasses.MISSING, inspect.Parameter.empty) and get_origin(_plain(annotation)) is not tuple:
        return None
    return tyro.conf.arg(help_behavior_hint=_said)


def _said(default: str) -> str:
    if default.startswith(str(ASSETS)):
        return "(default: the bundled one)"
    return "" if default in EMPTY else f"(default: {default})"
