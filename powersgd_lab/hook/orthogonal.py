"""Orthonormal columns, and the search for dead ones: the small linear algebra of PowerSGD.
Factors are stored rank-major (one factor column is one contiguous row), so "rows" here are the paper's columns.
"""

import math

import torch


def orthonormalize_(factor: torch.Tensor, epsilon: float = 0.0) -> None:
    """Make the rows of ``factor`` orthonormal in place, keeping their span (Vogels et al. 2019, algorithm 1, line 5).

    Args:
        factor: shape (rank, n) or (batch, rank, n) with rank ≤ n, any floating or complex dtype.
        epsilon: added to norms at rank ≤ 2, as ``orthogonalization_epsilon`` of PyTorch's ``PowerSGDState``.
            It has no effect at higher ranks, there as here.

    Rows without anything of their own get some orthonormal completion (with epsilon: zero), never NaN. Not finite
    values stay not finite.
    """
    if factor.shape[-2] == 1 and factor.device.type == "cpu" and not epsilon:
        norm = torch.linalg.vector_norm(factor, dim=-1, keepdim=True)
        if bool((norm > smallest_safe_norm(norm.dtype)).all()):
            factor.div_(norm)
            return
    # LAPACK knows no 16-bit floats.
    wide = factor.float() if factor.dtype in (torch.float16, torch.bfloat16) else factor
    if epsilon and factor.shape[-2] <= 2:
        _gram_schmidt_(wide, epsilon)
        if wide is not factor:
            factor.copy_(wide)
        return
    # A row-major (rank, n) factor is a column-major (n, rank) matrix: what LAPACK wants, without a transposition.
    factor.copy_(torch.linalg.qr(wide.mT).Q.mT)


def _gram_schmidt_(factor: torch.Tensor, epsilon: float) -> None:
    """One or two vectors in the order of operations that defines what PyTorch's epsilon does."""
    first = factor[..., :1, :]
    divide_rows_(first, row_norms(first) + epsilon)
    if factor.shape[-2] == 2:
        second = factor[..., 1:, :]
        second -= (first.conj() * second).sum(-1, keepdim=True) * first
        divide_rows_(second, row_norms(second) + epsilon)


def divide_rows_(rows: torch.Tensor, norms: torch.Tensor) -> None:
    """Divide each row by its norm, which may be in a wider dtype."""
    rows.div_(norms if rows.is_complex() else norms.to(rows.dtype))


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """Euclidean norms along the last dimension (kept), in double precision: tiny gradients' squares must not vanish."""
    wide = torch.complex128 if rows.is_complex() else torch.float64
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    return norms


def dead_rows(factor: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Rows of a Q factor that carry nothing: zero, or below the rounding of the matrix's largest; a mask (…, rank, 1).

    Args:
        factor: shape (…, rank, m).
        norms: its ``row_norms``.
    """
    return norms <= norms.amax(-2, keepdim=True) * rounding_of(factor.dtype)


def rounding_of(dtype: torch.dtype) -> float:
    """How small a row may be beside the largest before it is nothing but the rounding of the products."""
    eps = torch.finfo(dtype).eps
    # Seen on exactly low-rank gradients: spurious columns reach 6 eps in 32 and 64 bit, and stay below 1 in 16 bit,
    # where the products are accumulated in 32 bit and a larger bound would cost true columns.
    return eps if eps > 1e-4 else 16 * eps


def smallest_safe_norm(dtype: torch.dtype) -> float:
    """Above it a norm computed in ``dtype`` itself is right: the squares that matter do not underflow."""
    info = torch.finfo(dtype)
    return math.sqrt(info.tiny) / info.eps
