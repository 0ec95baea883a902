"""A fold in which what a token gets does not depend, in its last bit, on the tokens beside it.

A sum of floats depends on its order, and libraries choose the order of a product's sums by its shape: by how many
tokens there are. Two things are fixed here. Where the product of our own applies, every tile of it is computed in one
way, and it is taken whatever the number of tokens is; elsewhere every product has one shape, (INVARIANT_TOKENS, H)
times the same tiles of the weight. Tokens are made up to that with rows of zeros.
What is left to the library is to treat all rows of one product alike, wherever they lie. The tests shuffle rows to see
that it does; numpy's OpenBLAS is one that does not.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from liger_rl.head.engines.two_pass import ProjectionOptions, fold_projection, plan_tiles
from liger_rl.kernels import epilogue_for
from liger_rl.kernels.devices import MIN_TOKENS, compiles
from liger_rl.kernels.statistics import TokenStatistics

INVARIANT_TOKENS = 128  # of one product; a library may still treat far rows of a larger one in another way


def fold_invariant(
    hidden: Tensor,  # (n, H) in the compute dtype
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (n,)
    options: ProjectionOptions,
) -> TokenStatistics:
    """As `fold_projection`, each token's statistics a function of its own row and the head alone, bit for bit."""
    n = hidden.shape[0]
    rows, ids = _made_up(hidden, MIN_TOKENS), _made_up(targets, MIN_TOKENS)
    if epilogue_for(rows, weight) is None:
        rows, ids = _made_up(hidden, INVARIANT_TOKENS), _made_up(targets, INVARIANT_TOKENS)
        vocab, hidden_size = weight.shape
        bytes_per_logit = 4 if compiles(hidden.device) else 12
        options = replace(options, chunk_tokens=None, chunk_vocab=None, kernels_fit=False)
        tiles = plan_tiles(
            INVARIANT_TOKENS, vocab, hidden_size, hidden.device, options, bytes_per_logit=bytes_per_logit
        )
        options = replace(options, chunk_tokens=INVARIANT_TOKENS, chunk_vocab=tiles.vocab)
    statistics, _ = fold_projection(rows, weight, bias, ids, options)
    return TokenStatistics._make(None if part is None else part[:n] for part in statistics)


def _made_up(values: Tensor, multiple: int) -> Tensor:
    """(n, ...) with zeros up to a multiple of rows."""
    missing = -values.shape[0] % multiple
    return pad(values, (0,) * (2 * values.dim() - 1) + (missing,)) if missing else values
