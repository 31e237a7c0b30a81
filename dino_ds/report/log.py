"""Reads log.txt for a report: the run's facts at its start, its end, and its incidents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_OF_A_KIND = 50


@dataclass(frozen=True)
class Kind:
    """A sort of incident. level: bad, odd or plain."""

    name: str
    level: str
    pattern: re.Pattern[str]


KINDS = (
    Kind("collapse", "bad", re.compile(r"collapse after step")),
    Kind("not finite", "bad", re.compile(r".* after step \d+: nothing moved")),
    Kind("hang", "bad", re.compile(r"error {4}no progress on")),
    Kind("error", "bad", re.compile(r"error {4}")),
    Kind("save failed", "bad", re.compile(r"cannot save step")),
    Kind("warning", "odd", re.compile(r"warning {2}")),
    Kind("slow", "odd", re.compile(r"speed {4}after step")),
    Kind("overflow", "odd", re.compile(r"fp16 overflow after step")),
    Kind("unreadable image", "odd", re.compile(r"unreadable image")),
    Kind("save waited", "odd", re.compile(r"save {5}step \d+ waited")),
    Kind("stopped", "odd", re.compile(r"stopped {2}")),
    Kind("resumed", "plain", re.compile(r"resumed {2}")),
    Kind("note", "plain", re.compile(r"note {5}|evals {4}")),
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)Z ")
_FACTS = re.compile(r"(images|length|engine|kernels|memory|saves) {2,}(.*)")
_ENDS = {"done": "finished", "ended": "ended", "stopped": "stopped", "error": "failed", "images": ""}
_STEPS = re.compile(r"(\d+) steps = (\d+) images = ([\d.]+) epochs")
_MEMORY = re.compile(r"predicted peak ([\d.]+) GiB at (.+?): (.+)")
_PART = re.compile(r"(.+) ([\d.]+)")


@dataclass(frozen=True)
class Incident:
    """`time` such as "2026-11-21 16:47:54", UTC, or "" where the log does not say it."""

    kind: Kind
    time: str
    line: str


@dataclass
class RunLog:
    """facts: the newest lines of a start, by their first word; ended: finished, ended (by eval.stop_after), stopped,
    failed or "" where no line tells; incidents: in their order, at most 50 of a kind; counts: of all."""

    facts: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    incidents: list[Incident] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def planned_steps(self) -> int | None:
        """Steps of the recipe's length; a start may have been told to end before (--max_steps)."""
        found = _STEPS.match(self.facts.get("length", ""))
        return int(found[1]) if found else None

    @property
    def memory_parts(self) -> dict[str, float]:
        """GiB by part of the predicted peak; parts under 1 % are not in the log."""
        found = _MEMORY.match(self.facts.get("memory", ""))
        parts = (_PART.fullmatch(text) for text in found[3].split(", ")) if found else ()
        return {part[1]: float(part[2]) for part in parts if part}

    @property
    def memory_moment(self) -> str:
        found = _MEMORY.match(self.facts.get("memory", ""))
        return found[2] if found else ""


def read_log(lines: Iterable[str]) -> RunLog:
    log = RunLog()
    for text in lines:
        stamp = _STAMP.match(text)
        line = text[stamp.end() if stamp else 0 :].rstrip("\n")
        if line.startswith("step "):
            continue  # progress: most lines
        if fact := _FACTS.match(line):
            log.facts[fact[1]] = fact[2]
        word = line.partition(" ")[0]
        log.ended = _ENDS.get(word, log.ended)
        kind = next((kind for kind in KINDS if kind.pattern.match(line)), None)
        if kind is not None:
            log.counts[kind.name] = log.counts.get(kind.name, 0) + 1
            if log.counts[kind.name] <= MOST_OF_A_KIND:
                log.incidents.append(Incident(kind, " ".join(stamp.groups()) if stamp else "", line))
    return log
