"""Muon for matrices and AdamW for everything else, as one optimiser (Liu et al. 2025, arXiv:2502.16982)."""

from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on weights with two dimensions, ``torch.optim.AdamW`` on the others.

    Both share the groups' rate: by default an orthogonal update is multiplied by 0.2 * sqrt(max(rows, columns)), which
    is about the size of AdamW's (equation 4), so that one rate suits both.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        super().__init__(params, {"lr": lr})
        matrices = [{**group, "params": [p for p in group["params"] if p.ndim == 2]} for group in self.param_groups]
        others = [{**group, "params": [p for p in group["params"] if p.ndim != 2]} for group in self.param_groups]
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        muon |= {"weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
        self._parts: list[torch.optim.Optimizer] = []
        if any(group["params"] for group in matrices):
            self._parts.append(torch.optim.Muon([group for group in matrices if group["params"]], **muon))
        if any(group["params"] for group in others):
            rest = [group for group in others if group["params"]]
            self._parts.append(torch.optim.AdamW(rest, betas=betas, eps=eps, weight_decay=weight_decay))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both."""
        for part in self._parts:
            part.step()
