"""One line of the doctor's page."""

from __future__ import annotations

from dataclasses import dataclass

FINE, WARNING, FAILURE = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """level: FINE, WARNING (training works, but ...) or FAILURE (training stops); remedy: what to do about it."""

    topic: str
    level: str
    text: str
    remedy: str = ""


def fine(topic: str, text: str) -> Finding:
    return Finding(topic, FINE, text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, WARNING, text, remedy)


def failure(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, FAILURE, text, remedy)
