"""The part of a network that is trained, in plain numbers. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL, NORMS, LORA = "all", "norms_and_biases", "lora"


@dataclass(frozen=True)
class TrainedPart:
    """The part of a backbone that is trained; heads always are.

    kind: "all", "last N blocks", "norms_and_biases" or "lora": adapters of `rank`, scaled by `alpha` / `rank`,
    in the linear layers named `layers`, or in all linear layers if that is empty.
    """

    kind: str = ALL
    rank: int = 8
    alpha: float = 16.0
    layers: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """N of "last N blocks", else 0."""
        match = re.fullmatch(r"last (\d+) blocks?", self.kind)
        return int(match[1]) if match else 0


def describe_trained(part: TrainedPart, trained: int, weights: int) -> str:
    """The trained part in words, and its share of the weights of backbone and heads."""
    layers = ", ".join(part.layers) or "all linear layers"
    name = f"{LORA}, rank {part.rank}, alpha {part.alpha:g}, in {layers}" if part.kind == LORA else part.kind
    share = f"{trained:,} of {weights:,} weights ({trained / weights:.1%}), heads included"
    return f"{name} of the backbone: {share}; the others keep their values"


def parse_trained(text: str) -> str:
    """A value of model.train in its canonical spelling. Raises ValueError."""
    words = re.sub(r"[\s_]+", " ", str(text)).strip().lower()
    if match := re.fullmatch(r"last (\d{1,4}) blocks?", words):
        if int(match[1]):
            return f"last {int(match[1])} blocks"
    elif words.replace(" ", "_") in (ALL, NORMS, LORA):
        return words.replace(" ", "_")
    raise ValueError(f"{str(text)[:40]!r} is not {ALL}, 'last N blocks' (such as 'last 2 blocks'), {NORMS} or {LORA}")
