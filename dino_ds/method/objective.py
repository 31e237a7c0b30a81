"""The contract of a loss term, the objective as the weighted sum of terms, and the state of users' terms beside
`statistics`: found among their attributes, saved by each rank for itself, and restored."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dino_ds.basics.own_code import is_own
from dino_ds.basics.ranges import rehearsing
from dino_ds.config.crops import Masks
from dino_ds.engine.process import device
from dino_ds.engine.schedules import ScheduleValues
from dino_ds.errors import ConfigError
from dino_ds.models.network import Output, Query
from dino_ds.models.prototypes import Comparison


def _others(part: Term) -> dict[str, bytes]:
    """The attributes that `Term.state_dict` leaves out, pickled where they can be; without objects of dino_ds."""
    left_out, pickled = {"statistics", *Term.state_dict(part), *vars(nn.Module())}, dict[str, bytes]()
    for name, value in vars(part).items():
        if name not in left_out and is_own(value) and not isinstance(value, nn.Module):
            try:
                pickled[name] = pickle.dumps(value)
            except Exception:  # whatever a user's object raises
                continue
    return pickled


class OwnStates:
    """The states of the users' terms among `terms`, by name, on this rank."""

    def __init__(self, terms: Mapping[str, Any]) -> None:
        self._terms = {name: term for name, term in terms.items() if is_own(term) and not rehearsing()}
        self._plain = {name: term for name, term in self._terms.items() if type(term).state_dict is Term.state_dict}
        self._built, self._told = self.copy(), set[tuple[str, str]]()
        self._others = {(name, key): it for name, term in self._terms.items() for key, it in _others(term).items()}

    def copy(self) -> dict[str, Tensor]:
        """A copy of all states, for `load`; the host does not wait for the device."""
        states = [(name, term.state_dict()) for name, term in self._terms.items()]
        return {f"{name}.{key}": value.detach().clone() for name, state in states for key, value in state.items()}

    def moved(self) -> dict[str, Tensor]:
        """The states of terms that a checkpoint holds: without attributes that have not changed since the terms were
        built from the recipe, unless a term has a `state_dict` of its own."""

        def has_moved(key: str, value: Tensor) -> bool:
            built = self._built.get(key)
            if built is None or key.partition(".")[0] not in self._plain:
                return True
            return (value.dtype, value.device) != (built.dtype, built.device) or not torch.equal(value, built)

        return {key: value for key, value in self.copy().items() if has_moved(key, value)}

    def unsaved(self) -> list[str]:
        """Lines, each once, on attributes that have changed and that no checkpoint holds."""
        lines = []
        for name, term in self._plain.items():
            for key, value in _others(term).items():
                if value != self._others.get((name, key)) and (name, key) not in self._told:
                    self._told.add((name, key))
                    lines.append(
                        f"warning  a resume can't be exact: {key} of loss term {name} changes and is in no checkpoint: "
                        "keep it in tensors or a torch.Generator, or define the term's state_dict and load_state_dict"
                    )
        return lines

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `copy` or `moved` gave; terms that are new stay as they are."""
        for name, term in self._terms.items():
            if mine := {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}:
                term.load_state_dict(mine)


StudentOutputs = Mapping[str, Output]
"""The outputs of the student's network, by their names; see `dino_ds.models.network.Network`."""
Outputs = Mapping[str, Mapping[str, Output]]  # the outputs of each teacher's network, by the teacher's name


@dataclass(frozen=True)
class Needs:
    """The outputs that a term reads from the student's network and from each teacher's: names of `queries`, or features
    such as "cls/global" (v * b, d) and "patches/global" (v * b, n, d), crop-major."""

    student: tuple[str, ...]
    teachers: Mapping[str, tuple[str, ...]]
    queries: Mapping[str, Query] = field(default_factory=dict)


class TermLoss(NamedTuple):
    """loss: a scalar with gradient, the mean over the images of the micro-batch; scalars: logged values by name."""

    loss: Tensor
    scalars: dict[str, Tensor]


class TargetEntropy(NamedTuple):
    """Facts about a term's scalar that is the mean entropy of targets.

    prototypes: number of prototypes; cross_entropy: name of the scalar with the cross-entropy (None: the term's loss);
    rows: what has one target each, as messages name it.
    """

    prototypes: int
    cross_entropy: str | None = None
    rows: str = "image"


class Entropy(NamedTuple):
    """Names of the scalars of a cross-entropy, `loss`, and of the mean entropy of its targets, `scalar`. Their
    difference is logged as `kl`; entropy and KL together show a collapse. prototypes: their number, whose ln is the
    largest entropy; rows: see `TargetEntropy`."""

    scalar: str
    loss: str
    kl: str
    prototypes: int
    rows: str


class RunningMean:
    """An FP32 mean: gather() per micro-batch, commit() once per applied optimizer step, drop() after a skipped one.
    Source: DINO, equation 4 (arXiv 2104.14294): c <- m c + (1 - m) mean of the teacher's logits over all ranks. Sums
    and counts are kept, so micro-batches and ranks of unequal size get their right weights."""

    def __init__(self, width: int, momentum: float, device: torch.device | str = "cpu") -> None:
        self.value = torch.zeros(width, device=device)
        self.momentum = momentum
        self._pending = torch.zeros(width + 1, device=device)

    @torch.no_grad()
    def gather(self, total: Tensor, count: int) -> None:
        """Add the sum (k,) of `count` rows of one micro-batch to the window."""
        self._pending[:-1] += total
        self._pending[-1] += count

    def pending(self) -> Tensor:
        """This rank's window, (k + 1,): the sum of the rows and their number; to be summed over ranks."""
        return self._pending

    @torch.no_grad()
    def commit(self, total: Tensor) -> None:
        """Update the mean with the window's total (k + 1,) over all ranks, unless it has no rows, and begin a new
        window."""
        moves = total[-1].clamp_max(1 - self.momentum)  # or 0 without rows: total[-1] is an integer
        self.value.lerp_(total[:-1] / total[-1].clamp_min(1), moves)
        self.drop()

    def drop(self) -> None:
        """Forget the window: its optimizer step was not applied."""
        self._pending = torch.zeros_like(self._pending)

    def load(self, value: Tensor) -> None:
        """Set the mean (k,), such as from a checkpoint, and begin a new window."""
        self.value.copy_(value)
        self.drop()


class Term(ABC):
    """One summand of the objective. `scalars`: names of what `loss` measures besides the loss. `entropies`: those that
    are mean entropies of targets; their names end in teacher_entropy. `spread`: the one that is 0 if all images have
    the same feature and 1 if the features are far apart, or "". `statistics`: by their names in checkpoints. No other
    term may use these names. `whole_step`: targets depend on all micro-batches of a step."""

    needs: Needs
    scalars: tuple[str, ...] = ()
    entropies: Mapping[str, TargetEntropy] = MappingProxyType({})
    spread: str = ""
    statistics: Mapping[str, RunningMean] = MappingProxyType({})
    whole_step = False

    @abstractmethod
    def targets(self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues) -> Sequence[Any]:
        """Make the targets of each micro-batch of a window from the teachers' outputs and the masks, without gradient,
        and gather statistics. Targets for a query are `Comparison`s."""

    @abstractmethod
    def loss(self, student: StudentOutputs, targets: Any, schedule: ScheduleValues) -> TermLoss:
        """The loss of one micro-batch."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state that the term keeps from step to step, besides `statistics`, by name, saved for each rank: the
        tensors, numbers, states of `torch.Generator`s, and buffers of modules among its attributes; by reference."""
        modules = {"": self, **vars(self)}.items()
        state: dict[str, Tensor] = {
            f"{name}.{key}".lstrip("."): buffer
            for name, module in modules
            if isinstance(module, nn.Module)
            for key, buffer in module.named_buffers()
        }
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                state[name] = value.detach()
            elif isinstance(value, torch.Generator):
                state[name] = value.get_state()
            elif isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
                state[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave, after a resume or a skipped step; an attribute that is not there yet becomes
        a tensor on this process's device."""
        for name, saved in state.items():
            path, _, leaf = name.rpartition(".")
            holder = attrgetter(path)(self) if path else self
            value = getattr(holder, leaf, None)
            if isinstance(value, torch.Generator):
                value.set_state(saved.cpu())
            elif isinstance(value, Tensor) and value.shape == saved.shape:
                value.copy_(saved)
            elif isinstance(value, (int, float)):
                setattr(holder, leaf, type(value)(saved.item()))
            else:
                setattr(holder, leaf, saved.to(device(), copy=True))


class Objective:
    """The weighted sum of named terms, and the running statistics of all of them. A term's weight is the schedule's
    weight of that name, or 1. With several terms, the unweighted loss of each is among the scalars, as NAME_loss;
    `queries`: of all terms, by output; `spreads`: the scalars that are a term's `spread`; `whole_step`: whether targets
    depend on all micro-batches of a step."""

    def __init__(self, terms: Mapping[str, Term]) -> None:
        self.terms, self.own = dict(terms), OwnStates(terms)
        self.statistics = {name: s for term in self.terms.values() for name, s in term.statistics.items()}
        self.scalars = tuple(scalar for name in self.terms for scalar in (*self.terms[name].scalars, *self._own(name)))
        self.entropies = [
            Entropy(scalar, loss or (*self._own(name), "loss")[0], scalar.replace("teacher_entropy", "kl"), count, rows)
            for name, term in self.terms.items()
            for scalar, (count, loss, rows) in term.entropies.items()
        ]
        self.queries = {name: query for term in terms.values() for name, query in term.needs.queries.items()}
        self.spreads = [term.spread for term in terms.values() if term.spread]
        self.whole_step = any(term.whole_step for term in terms.values())

    def _own(self, name: str) -> tuple[str, ...]:
        """The name of the scalar of a term's own loss; none if this term is the whole objective."""
        return (f"{name}_loss",) if len(self.terms) > 1 else ()

    def targets(
        self, window: Sequence[Outputs], masks: Sequence[Masks], schedule: ScheduleValues
    ) -> list[dict[str, Any]]:
        """Make every term's targets, by the term's name, for each micro-batch of a window, and gather statistics."""
        by_term = {name: term.targets(window, masks, schedule) for name, term in self.terms.items()}
        for name, made in by_term.items():
            if not isinstance(made, Sequence) or len(made) != len(window):
                count = f"{len(made)} of" if isinstance(made, Sequence) else f"a {type(made).__name__}, not"
                raise ConfigError(f"loss term {name}: targets() gave {count} {len(window)}, one for each micro-batch")
        return [{name: targets[i] for name, targets in by_term.items()} for i in range(len(window))]

    def comparisons(self, targets: Mapping[str, Any]) -> dict[str, Comparison]:
        """The targets of a micro-batch that heads compare their logits with, by query."""
        compared = [(targets[n], t.needs) for n, t in self.terms.items() if isinstance(targets[n], Comparison)]
        return {query: comparison for comparison, needs in compared for query in needs.queries}

    def loss(self, student: StudentOutputs, targets: Mapping[str, Any], schedule: ScheduleValues) -> TermLoss:
        total: Tensor | None = None
        scalars: dict[str, Tensor] = {}
        for name, term in self.terms.items():
            loss, measured = _checked(name, term, term.loss(student, targets[name], schedule))
            scalars |= measured | {scalar: loss.detach() for scalar in self._own(name)}
            weight = schedule.weights.get(name, 1.0)
            weighted = loss if weight == 1 else weight * loss
            total = weighted if total is None else total + weighted
        assert total is not None, "an objective has at least one term"
        return TermLoss(total, scalars)

    def student_features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for term in self.terms.values() for name in term.needs.student))

    def teacher_features(self, teacher: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for term in self.terms.values() for n in term.needs.teachers.get(teacher, ())))

    def pending(self) -> list[Tensor]:
        """This rank's window of each statistic, flat; to be concatenated, summed over ranks and passed to `commit`."""
        return [statistic.pending() for statistic in self.statistics.values()]

    def commit(self, total: Tensor) -> None:
        sizes = [len(pending) for pending in self.pending()]
        for statistic, part in zip(self.statistics.values(), total.split(sizes), strict=True):
            statistic.commit(part)

    def drop(self) -> None:
        for statistic in self.statistics.values():
            statistic.drop()

    def state(self) -> dict[str, Tensor]:
        """The statistics by name, by reference."""
        return {name: statistic.value for name, statistic in self.statistics.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Raises KeyError for a missing statistic."""
        for name, statistic in self.statistics.items():
            statistic.load(state[name])


def _checked(name: str, term: Term, result: object) -> TermLoss:
    gave = f"loss term {name}: loss() gave"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise ConfigError(f"{gave} a {type(result).__name__}: return TermLoss(loss, {{scalar: value}})")
    loss, scalars = result
    for key, value in {"loss": loss, **scalars}.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"{gave} {kind} as its {key}: give a tensor of one number, such as a mean")
    if scalars.keys() != set(term.scalars):
        returned, declared = (", ".join(sorted(names)) or "none" for names in (scalars, term.scalars))
        raise ConfigError(f"{gave} the scalars {returned}, and its class declares {declared}: name them in `scalars`")
    return TermLoss(loss, scalars)
