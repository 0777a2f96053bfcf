"""Where finished work is kept between runs."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fpquant.errors import FpquantError


def cache_dir() -> Path:
    """FPQUANT_CACHE, or `fpquant` under the user's cache directory. Not created here."""
    if named := os.environ.get("FPQUANT_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fpquant"


def check_place(target: Path, option: str) -> None:
    """Raise FpquantError, before any work, where no file or directory `target` can be made; option: what names it."""
    parent = next(p for p in target.absolute().parents if p.exists())
    if not parent.is_dir():
        raise FpquantError(f"cannot write {target}: {parent} is a file; choose another {option}")
    try:  # permissions do not tell of read-only file systems and of quotas
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        why = "is read-only to you" if denied else f"takes no file ({error.strerror})"
        raise FpquantError(f"cannot write {target}: {parent} {why}; choose another {option}") from error


def check_file_place(target: Path, option: str) -> None:
    """As check_place, for what must become a file."""
    check_place(target, option)
    if target.is_dir():
        raise FpquantError(f"cannot write {target}: it is a directory; give {option} a file")


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside `target`, for a file or a directory; renames it to `target` when all went well.

    On any failure, an interrupt included, what was written is removed and `target` stays as it was. A directory takes
    the place of a directory. A full disk, or a place where nobody may write, becomes an FpquantError. A device or a
    pipe is written in place.
    """
    if target.exists() and not target.is_file() and not target.is_dir():
        with _write_errors(target):
            yield target
        return
    target = target.resolve()  # what a link points at
    token = f"{os.getpid()}-{secrets.token_hex(3)}"
    temporary, old = (target.with_name(f".{target.name}.{token}.{kind}") for kind in ("tmp", "old"))
    missing = [p for p in target.parents if not p.exists()]
    try:
        with _write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with _uninterrupted():
                if target.is_dir() and temporary.is_dir():
                    target.rename(old)
                temporary.replace(target)
    finally:
        with _uninterrupted():
            if old.exists() and not target.exists():
                old.rename(target)
            for left in (temporary, old):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    with suppress(OSError):
                        left.unlink()
            for parent in missing:
                with suppress(OSError):  # it holds the target
                    parent.rmdir()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keeps Ctrl-C waiting, so that a rename and a clean-up are whole."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if waiting:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """What stops writing, as an FpquantError. safetensors and tokenizers raise exceptions of their own, which name the
    operating system's error in their text only."""
    try:
        yield
    except Exception as error:
        found = re.search(r"([^:]+) \(os error \d+\)", str(error))
        if isinstance(error, FpquantError) or not (found or isinstance(error, OSError)):
            raise
        reason = found[1].strip() if found else getattr(error, "strerror", None) or error
        raise FpquantError(f"cannot write {target}: {reason}; free space or choose another place") from error
