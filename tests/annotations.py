"""Executes the array annotations of the packages' functions and dataclasses: dimensions and types of every call.

A plugin of pytest's (`-p tests.annotations`). jaxtyping's import hook hands each function to `checked`, which looks at
arrays alone; all else is pyright's business.
"""

import functools
import inspect
import types
import typing

from jaxtyping import AbstractArray, install_import_hook

PACKAGES = [
    *(f"kimi_jax.{name}" for name in ("ddtree", "drafter", "model", "parallel", "quantization", "vision")),
    *(f"pallas_kernels.{name}.reference" for name in ("int4_moe", "tree_attention")),
]


def pytest_load_initial_conftests() -> None:
    """Installs the hook before any test or conftest.py imports the packages."""
    install_import_hook(PACKAGES, f"{__name__}.{checked.__name__}")


def fits(value: object, hint: object) -> bool:
    """Whether what a hint names as an array has its dimensions and type.

    Trees of arrays are also filled with their shapes or, without either, with shardings.
    """
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return not hasattr(value, "dtype") or isinstance(value, of_any_library(hint))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) if arrays_in(part) else matches(value, part) for part in parts)
    if origin is tuple and arrays_in(hint):
        parts = parts[:1] * len(value) if parts[-1:] == (...,) else parts
        return len(value) == len(parts) and all(map(fits, value, parts))
    return True


@functools.cache
def of_any_library(hint: type[AbstractArray]) -> type[AbstractArray]:
    """The same dimensions and type of anything that has both."""
    return hint.dtype[typing.Any, hint.dim_str]


def arrays_in(hint: object) -> bool:
    """Whether a hint names an array anywhere."""
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(arrays_in, typing.get_args(hint)))


def matches(value: object, hint: object) -> bool:
    """Whether a value is of a union's member without arrays."""
    origin = typing.get_origin(hint) or hint
    return isinstance(value, origin) if inspect.isclass(origin) else value is hint


def checked(function):
    """Calls of the function fail with a TypeError where an array is not what its annotation says."""
    hints = {name: hint for name, hint in function.__annotations__.items() if arrays_in(hint)}
    if not hints:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        for name, hint in hints.items():
            if name in given and not fits(given[name], hint):
                raise TypeError(f"{function.__qualname__}: {name} is not {hint}: {given[name]!r}")
        result = function(*args, **kwargs)
        if "return" in hints and not fits(result, hints["return"]):
            raise TypeError(f"{function.__qualname__}: the result is not {hints['return']}: {result!r}")
        return result

    return wrapped
