"""Goodput, the part of the wall time that ends up in the model when machines fail at random: formula and simulation.

Model: failures are a Poisson process over the time in which the job runs or starts again. All times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_FAILURES, _SEEDS = 500, 20


@dataclass(frozen=True)
class Costs:
    """Seconds. mtbf: mean time between failures of the job; stall: training stands still for a save; save: from its
    begin until it can be loaded (>= stall); detect: from a failure until it is noticed; restart: from there to the
    first new step."""

    mtbf: float
    stall: float
    save: float
    detect: float
    restart: float


@dataclass(frozen=True)
class Goodput:
    """fraction: useful time / wall time; lost: seconds of training that a failure throws away, on average."""

    fraction: float
    lost: float


def expected_goodput(interval: float, costs: Costs) -> Goodput:
    """Exact for `interval` seconds of training between two saves (J. T. Daly, 2006, with late commits)."""
    cycle, late = interval + costs.stall, costs.save - costs.stall
    saves = math.exp(-(costs.restart + late) / costs.mtbf) / math.expm1(cycle / costs.mtbf)
    running = costs.mtbf * math.exp(-costs.restart / costs.mtbf)
    return Goodput(saves * interval / (costs.mtbf + costs.detect), running - saves * cycle)


def simulate_goodput(interval: float, costs: Costs) -> Goodput:
    """The same by drawing 20 x 500 failures."""
    until_failure = np.random.default_rng(0).exponential(costs.mtbf, (_SEEDS, _FAILURES))
    running = np.maximum(until_failure - costs.restart, 0.0)
    cycle, late = interval + costs.stall, costs.save - costs.stall
    saves = np.floor(np.maximum(running - late, 0.0) / cycle)
    wall = (until_failure + costs.detect).sum()
    return Goodput(float(saves.sum() * interval / wall), float((running - saves * cycle).mean()))
