"""The optimum of a linear classifier whose images are shared over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.evals.subject import GaveUp


def minimise(
    loss_and_gradient: Callable[[Tensor], Tensor],
    parameters: Tensor,
    strength: float,
    steps: int,
    give_up: Callable[[], bool] = lambda: False,
) -> Tensor:
    """L-BFGS to the optimum, or for `steps`; all ranks call it, and get the same.

    parameters: (classes, width + 1), where to begin; the last column is the bias. loss_and_gradient: such parameters ->
    (1 + classes * (width + 1),), summed over all ranks; `strength` * |weights|^2 / 2 is added here.
    Rank 0 decides where to look next, so that no rounding can part the ranks; the others compute with it. `give_up` is
    asked before each look; where it says yes on any rank, all raise GaveUp.
    """

    def look(values: Tensor) -> Tensor:
        if float(distributed.sum_across_ranks(values.new_tensor(float(give_up())))):
            raise GaveUp
        return loss_and_gradient(values)

    message = parameters.new_zeros(1 + parameters.numel())  # whether to go on, and where
    if distributed.rank() > 0:
        while float(distributed.broadcast_from_first(message)[0]):
            look(message[1:].view_as(parameters))
        return message[1:].view_as(parameters)
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=steps, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def tell(go_on: float) -> None:
        message[0], message[1:] = go_on, parameters.detach().flatten()
        distributed.broadcast_from_first(message)

    def closure() -> Tensor:
        tell(1.0)
        values = look(parameters.detach())
        parameters.grad = values[1:].view_as(parameters).clone()
        weight = parameters.detach()[:, :-1]
        parameters.grad[:, :-1] += strength * weight
        return values[0] + 0.5 * strength * weight.square().sum()

    optimizer.step(closure)
    tell(0.0)
    return parameters.detach()
