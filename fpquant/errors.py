"""The errors a user can cause. The CLI prints the message on one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FpquantError(ValueError):
    """A mistake in what the user gave us. The message says what, got, remedy, on one line."""


def unknown(what: str, got: object, choices: Iterable[str]) -> FpquantError:
    """The error for a name that is not in a registry: lists the choices and names the nearest."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return FpquantError(f"unknown {what} {got!r}; {hint}choices: {', '.join(names)}")
