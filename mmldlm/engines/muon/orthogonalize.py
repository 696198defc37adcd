"""Newton-Schulz iteration of Muon (Jordan et al., kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from torch import Tensor

NUM_ITERATIONS = 5
# As in the reference implementation and in torch.optim.Muon. Without gradients, momentum decays
# until its squares underflow in fp32: without a bound its update would stay as large as any, and
# become NaN after a thousand such steps.
_MIN_NORM = 1e-7
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrix, U V^T of the singular value decomposition
    U S V^T.

    Args:
        matrix: [..., m, n], any floating dtype. The products are in bf16 on GPUs and in fp32 on
            CPUs.

    Returns:
        [..., m, n] fp32, singular values between about 0.7 and 1.2; smaller ones of a matrix of a
        norm below 1e-7. Zeros stay zeros.
    """
    x = matrix.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_MIN_NORM)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def orthogonalization_flops(rows: int, columns: int) -> float:
    """FLOPs of `orthogonalize` for one [rows, columns] matrix."""
    short, long = sorted((rows, columns))
    return NUM_ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)


def update_scale(rows: int, columns: int) -> float:
    """Factor of an orthogonal update: its largest effect on a row's RMS is then the same for every
    shape.

    sqrt(max(1, rows / columns)), as in the reference implementation and in torch.optim.Muon
    ("original").
    """
    return max(1.0, rows / columns) ** 0.5


def block_shape(rows: int, columns: int, block_rows: int | None) -> tuple[int, int, int]:
    """Number, rows and columns of the blocks that are orthogonalized by themselves
    (optimizer.muon_block_rows).
    """
    block = rows if block_rows is None else min(block_rows, rows)
    return rows // block, block, columns


def orthogonal_update(matrix: Tensor, block_rows: int | None = None) -> Tensor:
    """Update of a matrix [m, n] from its momentum, fp32: its blocks of rows orthogonalized and
    scaled.
    """
    blocks = matrix.view(block_shape(*matrix.shape, block_rows))
    return (orthogonalize(blocks) * update_scale(*blocks.shape[1:])).view(matrix.shape)


def update_flops(rows: int, columns: int, block_rows: int | None = None) -> float:
    """FLOPs of `orthogonal_update` for one [rows, columns] matrix."""
    count, rows, columns = block_shape(rows, columns, block_rows)
    return count * orthogonalization_flops(rows, columns)
