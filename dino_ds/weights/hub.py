"""The Hugging Face hub, which has timm's weights, where it may be out of reach."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dino_ds.names import hub_id

_SECONDS = 5.0


def on_a_hub(name: str) -> str | None:
    """What to do with the name that another hub has for weights; None if it looks like none."""
    torch_hub = re.fullmatch(r"(dinov2)_vit([sblg])14(_reg)?(_lc)?|dino_vit([sb])(8|16)", name)
    if torch_hub:
        size = {"s": "small", "b": "base", "l": "large", "g": "giant"}[torch_hub[2] or torch_hub[5]]
        old = f"vit_{size}_patch{torch_hub[6]}_224.dino"
        timm = f"vit_{size}_patch14_{'reg4_' if torch_hub[3] else ''}dinov2.lvd142m" if torch_hub[1] else old
        return f"that is torch.hub's name: timm has these weights as {timm}"
    found = hub_id(name)
    if found is None:
        return None
    return f"if {found} is on the Hugging Face Hub: hf download {found} --local-dir DIR, then give DIR"


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
