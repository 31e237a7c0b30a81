"""The Hugging Face hub, which has timm's weights, where it may be out of reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SECONDS = 5.0


@contextmanager
def hub_or_cache() -> Iterator[str]:
    """Inside, its client works as always; where the hub does not answer on the cache alone, and the value says so.

    Of a file that is not in the cache it would ask for most of a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"{constants.ENDPOINT} does not answer"
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(address: str) -> bool:
    """By the client itself, which knows of proxies; a thread, for the search of a name heeds no time limit."""
    answers: list[object] = []

    def ask() -> None:
        from huggingface_hub.utils import get_session

        with suppress(Exception):  # of its own, of httpx or of requests
            answers.append(get_session().head(address, timeout=_SECONDS))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return bool(answers)
