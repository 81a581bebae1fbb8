"""PowerSGD on whole matrices, as plainly as the paper writes it: what the hooks are tested against.
It sees every rank's gradient at once, so there is nothing to communicate and nothing to keep in order.
"""

import torch


class Reference:
    """One matrix. ``q`` is the first Q, (cols, rank); ``errors`` has one matrix a rank."""

    def __init__(self, q: torch.Tensor, error_feedback: bool = True, warm_start: bool = True) -> None:
        self.q, self.error_feedback, self.warm_start = q, error_feedback, warm_start
        self.errors: list[torch.Tensor | float] = []

    def step(self, gradients: list[torch.Tensor], q: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient that all ranks apply (Vogels et al. 2019, algorithms 1 and 2)."""
        errors = self.errors if self.error_feedback and self.errors else [0.0] * len(gradients)
        matrices = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        start = self.q if q is None else q
        p = torch.linalg.qr(sum(m @ torch.linalg.qr(start).Q for m in matrices) / len(matrices)).Q
        q = sum(m.mH @ p for m in matrices) / len(matrices)
        approximation = p @ q.mH
        self.errors = [m - approximation for m in matrices]
        if self.warm_start:
            self.q = q
        return approximation
