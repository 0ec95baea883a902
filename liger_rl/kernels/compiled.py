"""The kernels in Triton, under the names of `reference`, and its functions that serve every device."""

from liger_rl.kernels.reference import put as put
from liger_rl.kernels.reference import scatter_rows as scatter_rows
from liger_rl.kernels.saved_exponentials_triton import grad_kept as grad_kept
from liger_rl.kernels.saved_exponentials_triton import keep as keep
from liger_rl.kernels.saved_exponentials_triton import scale_ as scale_
from liger_rl.kernels.selection_triton import select as select
from liger_rl.kernels.tile_triton import fold as fold
from liger_rl.kernels.tile_triton import fold_rows as fold_rows
from liger_rl.kernels.tile_triton import grad as grad
from liger_rl.kernels.tile_triton import grad_rows as grad_rows
from liger_rl.kernels.tile_triton import keep_largest as keep_largest
