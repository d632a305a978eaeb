"""Orthogonalisation of matrices by matrix products only (Newton-Schulz)."""

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan 2024, https://kellerjordan.github.io/posts/muon: singular values end
between 0.7 and 1.2."""
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients of Amsel et al. 2025, arXiv 2505.16932, for 5 steps, a safety factor of 1.02 and a
cushion of 2."""
TAYLOR = (15 / 8, -10 / 8, 3 / 8)
"""Limit of the POLAR_EXPRESS polynomials, used for further steps."""
SAFETY = 1.02  # factor of POLAR_EXPRESS, since rounding may raise a singular value of 1 above 1
TINY = 1e-7


def coefficients(name: str, steps: int) -> tuple[list[tuple[float, float, float]], float]:
    """Return the polynomial of each step, and a safety factor for the norm of the matrix.

    name: `quintic` or `polar_express`.
    """
    if name == "quintic":
        return [QUINTIC] * steps, 1.0
    further = steps - len(POLAR_EXPRESS)
    return [*POLAR_EXPRESS[:steps], *[TAYLOR] * further], SAFETY


def orthogonalize(matrices: Tensor, name: str, steps: int) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    matrices: [count, rows, columns], in the number format of the computation.
    """
    polynomials, safety = coefficients(name, steps)
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / (norms * safety).clamp_min(TINY).to(x.dtype)
    for a, b, c in polynomials:
        gram = x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x if wide else x.mT
