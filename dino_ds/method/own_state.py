"""What users' loss terms keep from step to step besides `statistics`: found among their attributes, saved by each rank
for itself, and restored. dino_ds's own terms keep nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dino_ds.basics.own_code import is_own
from dino_ds.basics.rehearsal import rehearsing
from dino_ds.engine.device import device


def state_of(part: object) -> dict[str, Tensor]:
    """The tensors, numbers, states of `torch.Generator`s, and buffers of modules among the attributes of `part`, by
    name; tensors by reference."""
    modules = {"": part, **vars(part)}.items()
    state: dict[str, Tensor] = {
        f"{name}.{key}".lstrip("."): buffer
        for name, module in modules
        if isinstance(module, nn.Module)
        for key, buffer in module.named_buffers()
    }
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            state[name] = value.detach()
        elif isinstance(value, torch.Generator):
            state[name] = value.get_state()
        elif isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
            state[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return state


@torch.no_grad()
def load_state(part: object, state: Mapping[str, Tensor]) -> None:
    """Restore what `state_of` gave; an attribute that is not there yet becomes a tensor on this process's device."""
    for name, saved in state.items():
        path, _, leaf = name.rpartition(".")
        holder = attrgetter(path)(part) if path else part
        value = getattr(holder, leaf, None)
        if isinstance(value, torch.Generator):
            value.set_state(saved.cpu())
        elif isinstance(value, Tensor) and value.shape == saved.shape:
            value.copy_(saved)
        elif isinstance(value, (int, float)):
            setattr(holder, leaf, type(value)(saved.item()))
        else:
            setattr(holder, leaf, saved.to(device(), copy=True))


def _others(part: object) -> dict[str, bytes]:
    """The attributes that `state_of` leaves out, pickled where they can be; without objects of dino_ds."""
    left_out, pickled = {"statistics", *state_of(part), *vars(nn.Module())}, dict[str, bytes]()
    for name, value in vars(part).items():
        if name not in left_out and is_own(value) and not isinstance(value, nn.Module):
            try:
                pickled[name] = pickle.dumps(value)
            except Exception:  # whatever a user's object raises
                continue
    return pickled


def _equal(one: Tensor, other: Tensor | None) -> bool:
    alike = other is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)  # type: ignore[arg-type]


def _is_ours(term: Any) -> bool:
    """Whether the `state_dict` of a user's term is dino_ds's."""
    return bool(type(term).state_dict.__module__.startswith("dino_ds."))


class OwnStates:
    """The states of the users' terms among `terms`, by name, on this rank."""

    def __init__(self, terms: Mapping[str, Any]) -> None:
        self._terms = {name: term for name, term in terms.items() if is_own(term) and not rehearsing()}
        self._built, self._told = self.copy(), set[tuple[str, str]]()
        self._others = {(name, key): it for name, term in self._terms.items() for key, it in _others(term).items()}

    def copy(self) -> dict[str, Tensor]:
        """A copy of all states, for `load`; the host does not wait for the device."""
        states = {name: term.state_dict() for name, term in self._terms.items()}
        return {
            f"{name}.{key}": value.detach().clone() for name, state in states.items() for key, value in state.items()
        }

    def moved(self) -> dict[str, Tensor]:
        """What a checkpoint holds: states without attributes that are as when the terms were built, which the recipe
        says, unless a term has a `state_dict` of its own."""
        whole = [name for name, term in self._terms.items() if not _is_ours(term)]
        return {
            key: value
            for key, value in self.copy().items()
            if key.partition(".")[0] in whole or not _equal(value, self._built.get(key))
        }

    def unsaved(self) -> list[str]:
        """Lines, each once, on attributes that have changed and that no checkpoint holds."""
        lines = []
        for name, term in self._terms.items():
            for key, value in _others(term).items() if _is_ours(term) else ():
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
