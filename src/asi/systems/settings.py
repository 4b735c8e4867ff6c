"""What a row of the table sets, as plain values that can be kept in a file and compared with those of another day."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

Plain = dict[str, Any] | list[Any] | str | int | float | bool | None


def plain(value: Any) -> Plain:
    """Functions by their names, functions with arguments set and dataclasses by what is in them.

    >>> plain(partial(sorted, reverse=True))
    {'function': 'builtins.sorted', 'reverse': True}
    """
    if isinstance(value, partial):
        given = dict(enumerate(value.args)) | value.keywords
        return {"function": plain(value.func), **{str(name): plain(own) for name, own in given.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(own) for name, own in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(own) for own in value]
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else value
