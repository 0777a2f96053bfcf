"""A comparison's directory: finished rows, a file each, and what they are rows of."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpquant.cache import check_place, written_whole
from fpquant.errors import FpquantError

FORMAT_VERSION = 1
MANIFEST = "comparison.json"

_log = logging.getLogger("fpquant")


class Store:
    """Rows under a directory, by key. All belong to one fingerprint: {what: anything JSON}."""

    def __init__(self, directory: Path, fingerprint: Mapping[str, Any]) -> None:
        """Raises FpquantError, saying what differs, where the directory holds another comparison."""
        check_directory(directory)
        self.directory = directory
        path = directory / MANIFEST
        ours = json.loads(json.dumps({"format_version": FORMAT_VERSION, **fingerprint}))
        if path.is_file():
            theirs = _read(path)
            if theirs is None:
                raise FpquantError(f"{path} is damaged; delete {directory} or name another --out")
            for what in ours | theirs:
                if ours.get(what) != theirs.get(what):
                    raise FpquantError(
                        f"{directory} holds a comparison with another {what.replace('_', ' ')} "
                        f"({_short(theirs.get(what))}, now {_short(ours.get(what))}); name another --out or delete it"
                    )
        else:
            write_json(path, ours)

    def load(self, key: str) -> dict[str, Any] | None:
        """A finished row, or None where there is none."""
        path = self._path(key)
        if not path.is_file():
            return None
        record = _read(path)
        if record is None:
            _log.warning("%s is damaged; it is measured anew", path)
        return record

    def save(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep a finished row, whole or not at all."""
        write_json(self._path(key), record)

    def _path(self, key: str) -> Path:
        return self.directory / "cells" / f"{key}.json"


def check_directory(directory: Path) -> None:
    """Raise FpquantError, before any work, for a place that cannot hold a comparison."""
    check_place(directory, "--out")
    if directory.exists() and not directory.is_dir():
        raise FpquantError(f"cannot write {directory}: it is a file; name another --out")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise FpquantError(f"{directory} holds something that is no comparison; name another --out")


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
