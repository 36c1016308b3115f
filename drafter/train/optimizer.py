"""AdamW on fp32 masters, with learning-rate schedule, gradient clipping and optional L2-SP towards the warm start."""

import math

import torch
from torch import Tensor

from drafter.config import Train
from drafter.errors import ContractError
from drafter.train import distributed

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, total: int, train: Train) -> float:
    """Linear warm-up, then a cosine to `min_lr_share`. Depends only on the step, so resuming does not change it."""
    warmup = max(1, round(train.warmup_share * total))
    if step <= warmup:
        return train.lr * step / warmup
    cosine = 0.5 * (
        1 + math.cos(math.pi * (step - warmup) / (total - warmup + 1))
    )  # not yet the minimum in the last step
    return train.lr * (train.min_lr_share + (1 - train.min_lr_share) * cosine)


class Optimizer:
    """Updates `parameters`, by native name, sharded or not.

    `anchor` holds whole tensors under the same names, towards which L2-SP pulls.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], train: Train, anchor: dict[str, Tensor] | None):
        self.parameters, self.train = parameters, train
        decayed = [p for p in parameters.values() if p.ndim > 1]
        plain = [p for p in parameters.values() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=True)
        self._anchor = None
        if anchor is not None:
            whole = ((anchor[name].float(), p) for name, p in parameters.items())
            self._anchor = [distributed.local_part(distributed.place_like(tensor, p)).clone() for tensor, p in whole]

    def clip(self) -> Tensor:
        """Clip the gradients to `grad_clip`; returns their norm over all ranks before clipping."""
        return distributed.gather(
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.train.grad_clip)
        )

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._anchor is not None:
            own = [distributed.local_part(p).detach() for p in self.parameters.values()]
            torch._foreach_lerp_(own, self._anchor, lr * self.train.l2_sp)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments as `<native name>.exp_avg` and `.exp_avg_sq`, sharded like their parameters."""
        state = self._adamw.state
        return {f"{name}.{kind}": state[p][kind] for name, p in self.parameters.items() for kind in MOMENTS}

    def check(self, moments: dict[str, Tensor]) -> None:
        """Raises ContractError when the whole `moments` do not fit the parameters."""
        for name, parameter in self.parameters.items():
            for key in (f"{name}.{kind}" for kind in MOMENTS):
                if key not in moments or moments[key].shape != parameter.shape:
                    raise ContractError(f"the checkpoint's moments do not fit the drafter: {key}")

    def load(self, moments: dict[str, Tensor], step: int) -> None:
        """Continue after `step` steps with rank 0's whole `moments`; the other ranks need none."""
        for name, parameter in self.parameters.items():
            kinds = {kind: distributed.scatter(moments.get(f"{name}.{kind}"), parameter) for kind in MOMENTS}
            steps = torch.tensor(float(step), device=parameter.device)
            self._adamw.state[parameter] = {"step": steps, **kinds}
