"""The Hugging Face hub: whether it answers, told in seconds, and its clients kept off the network where it does not."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIMEOUT_S = 4.0
REMEMBERED_S = 60.0

_last_silence: tuple[float, str] | None = None  # (when, reason)


def silence(question: Callable[[], object]) -> str | None:
    """Why the hub does not answer `question`, a call of its client, or None where it does.

    Takes at most TIMEOUT_S, name lookup included; the clients' own time limits hold for each step of a request, and
    they try again. A hub that was silent is not asked again for REMEMBERED_S. That the hub has no such repository
    is an answer: RepositoryNotFoundError passes.
    """
    global _last_silence
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if _last_silence is not None and time.monotonic() - _last_silence[0] < REMEMBERED_S:
        return _last_silence[1]
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            question()
            answers.put(None)
        except Exception as error:  # whatever the client and the library under it raise
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        error = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        error = TimeoutError()
    if isinstance(error, RepositoryNotFoundError):
        raise error
    if error is None:
        return None
    _last_silence = (time.monotonic(), f"the hub is out of reach ({type(error).__name__})")
    return _last_silence[1]


@contextmanager
def offline(when: bool = True) -> Iterator[None]:
    """Local copies only: without this each client tries every file several times, for minutes together."""
    if not when:
        yield
        return
    from huggingface_hub import constants

    flags = [constants, *(sys.modules[n] for n in ("datasets.config",) if n in sys.modules)]
    before = [(flag, flag.HF_HUB_OFFLINE) for flag in flags]
    for flag in flags:
        vars(flag)["HF_HUB_OFFLINE"] = True
    try:
        yield
    finally:
        for flag, value in before:
            vars(flag)["HF_HUB_OFFLINE"] = value
