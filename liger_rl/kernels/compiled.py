"""The kernels in Triton, under the names of `reference`."""

from liger_rl.kernels.logit_rows_triton import fold as fold
from liger_rl.kernels.logit_rows_triton import fold_rows as fold_rows
from liger_rl.kernels.logit_rows_triton import grad as grad
from liger_rl.kernels.logit_rows_triton import grad_rows as grad_rows
from liger_rl.kernels.select_tokens_triton import select_tokens as select_tokens
