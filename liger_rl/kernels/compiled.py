"""Every kernel in Triton, under the names of `plain`."""

from liger_rl.kernels.divergence_triton import fold_pair, grad_pair, mix_pair
from liger_rl.kernels.saved_exponentials_triton import grad_kept, keep, scale_
from liger_rl.kernels.selection_triton import scatter_rows, select
from liger_rl.kernels.several_triton import keep_largest, put
from liger_rl.kernels.tile_triton import fold, fold_rows, grad, grad_rows

__all__ = [
    "fold",
    "fold_pair",
    "fold_rows",
    "grad",
    "grad_kept",
    "grad_pair",
    "grad_rows",
    "keep",
    "keep_largest",
    "mix_pair",
    "put",
    "scale_",
    "scatter_rows",
    "select",
]
