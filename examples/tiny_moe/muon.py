"""Muon: momentum whose update is orthogonalised (Jordan et al. 2024), for weight matrices and stacks of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly the closest semi-orthogonal matrices, by five quintic Newton-Schulz steps.

    Args:
        matrices: Shape (..., N, K), float32.

    Returns:
        The same shape; singular values lie within about 0.7 to 1.2.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    first, second, third = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = first * x + (second * gram + third * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Updates matrices in place; `lr` is the update's root mean square relative to an Adam step's usual 0.2."""

    def __init__(self, parameters: Sequence[Tensor], *, momentum: float = 0.95) -> None:
        """Take parameters of shape (..., N, K): each trailing matrix is orthogonalised by itself."""
        self._parameters = list(parameters)
        self._momentum = momentum
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with Nesterov momentum, then drop the gradients."""
        for parameter, velocity in zip(self._parameters, self._velocities, strict=True):
            if parameter.grad is None:
                continue
            velocity.lerp_(parameter.grad, 1 - self._momentum)
            update = orthogonalise(parameter.grad.lerp(velocity, self._momentum))
            # Entries of an orthogonal N x K matrix have root mean square max(N, K) ** -0.5 (Moonlight's scaling).
            parameter.add_(update, alpha=-lr * 0.2 * max(parameter.shape[-2:]) ** 0.5)
            parameter.grad = None
