"""Every kernel in Triton, under the names of `plain`."""

from liger_rl.kernels.saved_exponentials_triton import grad_kept, keep, scale_
from liger_rl.kernels.selection_triton import scatter_rows, select
from liger_rl.kernels.tile_triton import fold, fold_rows, grad, grad_rows

__all__ = ["fold", "fold_rows", "grad", "grad_kept", "grad_rows", "keep", "scale_", "scatter_rows", "select"]
