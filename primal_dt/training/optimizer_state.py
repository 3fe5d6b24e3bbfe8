"""Saved states of optimizers, checked before they are restored."""

import torch
from torch import Tensor

from primal_dt.schema import require_keys
from primal_dt.training.muon import Muon

__all__ = ["load_optimizer"]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
SLOTS: dict[type, tuple[str, ...]] = {torch.optim.Adam: MOMENTS, torch.optim.AdamW: MOMENTS, Muon: ("momentum",)}
"""Optimizer -> the tensors that it has for each parameter after its first step."""


def load_optimizer(optimizer: torch.optim.Optimizer, state: object, *, step: int) -> None:
    """Restore the state of an optimizer. Its settings stay those that it was built with, from the configuration.

    Args:
        optimizer: its state is replaced.
        state: the saved state.
        step: number of updates that the optimizer has made.

    Raises:
        ValueError: if the state is not one of these parameters.
    """
    own = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = require_keys(require_keys(state, ("state",), where="optimizer")["state"], (), where="optimizer.state")
    names = SLOTS[type(optimizer)]
    if step and parameters and not saved:
        raise ValueError(f"optimizer.state is empty after step {step}")
    for index, slots in saved.items():
        where = f"optimizer.state[{index!r}]"
        if index not in range(len(parameters)):
            raise ValueError(f"{where} is of no parameter: there are {len(parameters)}")
        require_keys(slots, names, where=where)
        for name in names:
            shape = () if name == "step" else parameters[index].shape
            if not isinstance(slots[name], Tensor) or slots[name].shape != shape:
                raise ValueError(f"{where}.{name} must be a tensor of shape {tuple(shape)}")
            if not slots[name].is_floating_point() or (name == "step" and slots[name] != step):
                raise ValueError(f"{where}.{name} must be {f'{step}.0' if name == 'step' else 'of floating point'}")
            if not slots[name].isfinite().all():
                raise ValueError(f"{where}.{name} must be finite")
    optimizer.load_state_dict({"state": dict(saved), "param_groups": own})
