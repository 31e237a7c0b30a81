"""Every benchmark gives on two ranks what it gives on one."""

from __future__ import annotations

import pytest

from dino_ds.evals.suite import EVALUATIONS
from tests.evals.protocols.tiny import clips, context_of, copies, landmarks
from tests.ranks import run_on_ranks


def _evaluate(name, root, size):
    return EVALUATIONS[name](context_of(root, size=size))


@pytest.mark.parametrize(
    ("name", "make", "size"),
    [("paris", lambda root: landmarks(root, "rparis6k"), 64), ("copydays", copies, 24), ("davis", clips, 64)],
)
def test_two_ranks_give_what_one_gives(name, make, size, tmp_path):
    """Three clips on two ranks are unequal shares."""
    make(tmp_path)
    one = _evaluate(name, tmp_path, size)
    for two in run_on_ranks(_evaluate, name, tmp_path, size):
        assert two == pytest.approx(one, abs=1e-9)
