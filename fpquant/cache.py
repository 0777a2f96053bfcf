"""Where finished work is kept between runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fpquant.errors import FpquantError


def cache_dir() -> Path:
    """FPQUANT_CACHE, or `fpquant` under the user's cache directory. Not created here."""
    if named := os.environ.get("FPQUANT_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fpquant"


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside `target`, for a file or a directory; renames it to `target` when all went well.

    On any failure, an interrupt included, the temporary path is removed and `target` stays as it was. A directory
    that `target` names is replaced. An OSError (a full disk, no permission) becomes an FpquantError.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if target.is_dir():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.replace(target)
    except OSError as error:
        raise FpquantError(
            f"cannot write {target}: {error.strerror or error}; free space or choose another place"
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
