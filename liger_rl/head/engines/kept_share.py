"""Which share of its blocks the last block-sparse backward of a weight kept: what decides whether one pass pays.

A step in blocks costs the forward's product and, for the kept share, the backward's three. One pass costs three
products whatever is kept. On an H200 the two meet at 0.6 for heads of three models, at 0.45 with a frozen head.
"""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

ONE_PASS_SHARE = 0.6
CALLS = 16  # after so many in one pass, blocks are tried again, because training makes distributions surer

_known = WeakIdKeyDictionary()  # weight -> [share, calls that asked since]


def record(weight: Tensor, share: float) -> None:
    _known[weight] = [share, 0]


def one_pass_pays(weight: Tensor) -> bool:
    """Whether more than ONE_PASS_SHARE was kept; to be asked once a call."""
    known = _known.get(weight)
    if known is None or known[0] <= ONE_PASS_SHARE:
        return False
    known[1] += 1
    return known[1] % CALLS != 0
