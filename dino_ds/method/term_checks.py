"""Refuses loss terms whose names clash in metrics or checkpoints, or that read what nothing gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dino_ds.config.crops import CropGroup
from dino_ds.errors import ConfigError
from dino_ds.method.objective import Needs, Objective, Term
from dino_ds.method.specs.base import OF_EVERY_RUN


def check_names(terms: Mapping[str, Term]) -> None:
    """Raises ConfigError without a term, and where a term's scalar or statistic has the name of another one."""
    if not terms:
        raise ConfigError("objective: all weights are 0, those of objective.terms too: give one above 0")
    owners = dict.fromkeys(OF_EVERY_RUN, "every run's metrics") | {f"{name}_loss": f"term {name}'s" for name in terms}
    statistics: dict[str, str] = {}
    for name, term in terms.items():
        if not isinstance(term, Term) or not isinstance(getattr(term, "needs", None), Needs):
            raise ConfigError(f"loss term {name}: build() gave a {type(term).__name__}: return a Term that has `needs`")
        for kind, names, taken in (("scalar", term.scalars, owners), ("statistic", term.statistics, statistics)):
            for key in names:
                if key in taken:
                    raise ConfigError(
                        f"loss term {name}: its {kind} {key} is {taken[key]} too, and one would be lost: give it "
                        f"another name, such as {name}_{key}, which may be made of its spec's name"
                    )
                taken[key] = f"term {name}'s"


def check_needs(objective: Objective, groups: Iterable[CropGroup], teachers: Iterable[str]) -> None:
    """Raises ConfigError where a term reads a teacher that there is not, or a feature that the student or a teacher
    does not give with these crops."""
    groups, teachers = list(groups), list(teachers)
    for name, term in objective.terms.items():
        if unknown := sorted(term.needs.teachers.keys() - set(teachers)):
            raise ConfigError(
                f"loss term {name} reads teacher {unknown[0]}: teachers here are {', '.join(teachers)}; teacher.others "
                "adds EMA teachers"
            )
        readers = {"the student": term.needs.student} | {f"teacher {t}": n for t, n in term.needs.teachers.items()}
        for reader, outputs in readers.items():
            seen = [g for g in groups if (g.student if reader == "the student" else reader[8:] in g.teachers)]
            for output in outputs:
                feature = objective.queries[output].feature if output in objective.queries else output
                _check_feature(f"loss term {name} reads {output} of {reader}", feature, seen)


def _check_feature(reads: str, feature: str, seen: list[CropGroup]) -> None:
    kind, _, group = feature.partition("/")
    names = [crops.name for crops in seen]
    if feature != "cls" and (kind not in ("cls", "patches", "masked") or not group):
        raise ConfigError(
            f"{reads}: a feature is cls, cls/GROUP, patches/GROUP or masked/GROUP, or a query of the term"
        )
    if group and group not in names:
        raise ConfigError(f"{reads}, which sees {', '.join(names) or 'no'} crops and none of {group}")
    if not names:
        raise ConfigError(f"{reads}, which sees no crops: teachers of teacher.others see those of `sees`")
    if kind == "masked" and not next(crops for crops in seen if crops.name == group).masked:
        raise ConfigError(f"{reads}, and no patches of {group} crops are hidden: set crops.mask")
