"""Every kernel in PyTorch, under the names of `compiled`."""

from liger_rl.kernels.divergence import fold_pair as fold_pair
from liger_rl.kernels.divergence import grad_pair as grad_pair
from liger_rl.kernels.divergence import mix_pair as mix_pair
from liger_rl.kernels.eager import fold as fold
from liger_rl.kernels.eager import grad as grad
from liger_rl.kernels.given_logits import fold_rows as fold_rows
from liger_rl.kernels.given_logits import grad_rows as grad_rows
from liger_rl.kernels.saved_exponentials import grad_kept as grad_kept
from liger_rl.kernels.saved_exponentials import keep as keep
from liger_rl.kernels.saved_exponentials import scale_ as scale_
from liger_rl.kernels.selection import scatter_rows as scatter_rows
from liger_rl.kernels.selection import select as select
from liger_rl.kernels.several import keep_largest as keep_largest
from liger_rl.kernels.several import put as put
