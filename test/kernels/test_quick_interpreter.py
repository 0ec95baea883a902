"""What makes Triton's interpreter quicker here leaves its language as each launch found it."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from quick_interpreter import TRITONS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU"),
    pytest.mark.skipif(not triton.__version__.startswith(TRITONS), reason="another Triton's interpreter runs as it is"),
]


@triton.jit
def _twice(x):
    return 2 * x


@triton.jit
def _kernel(numbers, FAILS: tl.constexpr):
    tl.store(numbers, _twice(_twice(tl.load(numbers))))
    tl.static_assert(not FAILS)


def test_the_language_is_given_back():
    before, numbers = dict(vars(tl)), torch.ones(1)
    _kernel[(2,)](numbers, False)
    assert dict(vars(tl)) == before
    with pytest.raises(Exception, match="AssertionError"):
        _kernel[(1,)](numbers, True)
    assert dict(vars(tl)) == before
    _kernel[(1,)](numbers, False)
    assert numbers.item() == 4**4
