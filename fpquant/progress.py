"""How long work tells that it is going on, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    """Wraps an iterable of `total` items so that going through it shows progress under `label`."""

    def __call__(self, items: Iterable[T], label: str, total: int, /) -> Iterable[T]: ...


def no_progress(items: Iterable[T], label: str, total: int, /) -> Iterable[T]:
    """The Track that shows nothing."""
    return items
