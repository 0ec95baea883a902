"""Every kernel in PyTorch, under the names of `compiled`."""

from liger_rl.kernels.divergence import fold_pair, grad_pair, mix_pair
from liger_rl.kernels.eager import fold, grad
from liger_rl.kernels.given_logits import fold_rows, grad_rows
from liger_rl.kernels.saved_exponentials import grad_kept, keep, scale_
from liger_rl.kernels.selection import scatter_rows, select
from liger_rl.kernels.several import keep_largest, put

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
