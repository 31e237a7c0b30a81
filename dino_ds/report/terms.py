"""The loss terms of a run as its metrics.jsonl shows them: any term's curves are found by how their keys end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dino_ds.report.curves import Metrics

_ENTROPY, _KL, _CROSS_ENTROPY, _LOSS = "teacher_entropy", "kl", "cross_entropy", "_loss"
_SCALARS = {_ENTROPY: "teacher entropy", _KL: "KL of teacher and student", _CROSS_ENTROPY: "cross-entropy"}
"""Ends of the keys that are in nats, and what they are."""


@dataclass(frozen=True)
class TermKeys:
    """Keys of one term's curves: its `loss` is the sum of `entropy` and `kl` if it has targets, else these are "".

    `name` is "" for the only term of an objective, whose metrics don't tell it.
    """

    name: str
    loss: str
    entropy: str = ""
    kl: str = ""


def find_terms(metrics: Metrics) -> list[TermKeys]:
    """The terms of a run in the order of its metrics, where a term's scalars stand before its NAME_loss."""
    found, scalars = list[TermKeys](), list[str]()
    for key in metrics.curves:
        if key.endswith(_LOSS):
            name = key.removesuffix(_LOSS)
            found += _with_targets(name, key, scalars) or [TermKeys(name, key)]
            scalars.clear()
        else:
            scalars.append(key)
    return found + _with_targets(None, "loss", scalars)


def _with_targets(name: str | None, loss: str, scalars: list[str]) -> list[TermKeys]:
    """The targets among a term's scalars; without a `name` each is named by its prefix."""
    found = []
    for entropy in (key for key in scalars if key.endswith(_ENTROPY)):
        prefix = entropy.removesuffix(_ENTROPY)
        compared = [key for key in scalars if key.endswith(_CROSS_ENTROPY)]
        own = [key for key in compared if key == f"{prefix}{_CROSS_ENTROPY}"] or compared or [loss]
        found.append(TermKeys(prefix.rstrip("_") if name is None else name, own[0], entropy, f"{prefix}{_KL}"))
    return found


def title_of_term(name: str, titles: Mapping[str, str]) -> str:
    """The loss of a term in a few words: its own of `titles`, where the run's recipe tells it."""
    return titles.get(name, f"Loss of {name}") if name else "Loss"


def title_of_scalar(key: str, titles: Mapping[str, str]) -> tuple[str, str]:
    """Title and unit of a curve that a term writes."""
    for end, words in _SCALARS.items():
        if key == end or key.endswith(f"_{end}"):
            name = key.removesuffix(end).rstrip("_")
            return f"{title_of_term(name, titles)}: {words}" if name else words[0].upper() + words[1:], "nats"
    return (title_of_term(key.removesuffix(_LOSS), titles) if key.endswith(_LOSS) else key), ""
