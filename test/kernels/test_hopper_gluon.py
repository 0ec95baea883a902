"""Products whose halves take turns give what Triton's own give, bit for bit: statistics, bounds, kept exponentials."""

import math

import pytest
import torch

from liger_rl import LogitTransform
from liger_rl.kernels.saved_exponentials import Kept
from liger_rl.kernels.statistics import EXTRAS

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")

PLAIN = LogitTransform()
ALL = LogitTransform(temperature=0.7, softcap=3.0, scale=0.5)
SHAPES = [
    # tokens, hidden, vocab: fewer tiles than programs and several for each, one step of the product, as many as there
    # are buffers and more, tails on every side
    (1, 8, 300),
    (64, 64, 256),
    (65, 72, 257),
    (600, 136, 1000),
    (1030, 64, 9000),
    (1030, 136, 9000),
    (1030, 256, 9000),
    (8192, 512, 5003),
]


@pytest.fixture
def epilogue():
    from liger_rl.kernels import epilogue

    if not epilogue.gluon_is_known():
        pytest.skip("this Triton's Gluon is not known")
    return epilogue


@pytest.fixture
def both(epilogue, monkeypatch):
    """-> (call's result with the halves in turns, and as Triton's own product has it)."""

    def run(call):
        assert epilogue.gluon_for(torch.device("cuda:0")) is not None
        found = call()
        with monkeypatch.context() as context:
            context.setattr(epilogue, "gluon_for", lambda device: None)
            return found, call()

    return run


def make(tokens, size, vocab, dtype, bias):
    generator = torch.Generator("cuda").manual_seed(tokens + vocab)

    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    hidden, weight = random(tokens, size).to(dtype), (3 * random(vocab, size) * size**-0.5).to(dtype)
    biases = random(vocab).to(dtype) if bias else None
    return hidden, weight, biases, torch.randint(vocab, (tokens,), device="cuda", generator=generator)


def assert_same(found, expected):
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("transform", "bias", "entropy", "extras"), [
    (PLAIN, False, False, ()), (PLAIN, True, True, ()), (ALL, True, True, EXTRAS), (ALL, False, False, ()),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "size", "vocab"), SHAPES)
def test_fold(tokens, size, vocab, transform, bias, entropy, extras, dtype, both, epilogue):
    arguments = (*make(tokens, size, vocab, dtype, bias), transform)
    options = {"entropy": entropy, "extras": extras, "bounded": True}
    found, expected = both(lambda: [part for parts in epilogue.gemm_fold(*arguments, **options) for part in parts])
    assert_same(found, expected)
    logits = arguments[0].double() @ arguments[1].double().T
    assert found[0].isfinite().all()
    if transform is PLAIN and not bias:
        exact = logits.log_softmax(-1).gather(1, arguments[3][:, None]).squeeze(1)
        torch.testing.assert_close(found[0].double(), exact, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(("transform", "entropy", "dtype"), [
    (PLAIN, False, torch.bfloat16), (PLAIN, True, torch.float16), (ALL, True, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize(("tokens", "size", "vocab"), SHAPES)
def test_fold_that_keeps(tokens, size, vocab, transform, entropy, dtype, both, epilogue):
    hidden, weight, bias, targets = make(tokens, size, vocab, dtype, True)

    def call():
        kept = Kept.empty(tokens, vocab, hidden.device, dtype, 256)
        kept.values.fill_(math.nan)
        statistics, _ = epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=entropy, kept=kept)
        return (*statistics, kept.values, kept.peaks)

    found, expected = both(call)
    assert_same(found, expected)
    assert found[-2].isfinite().all()


def test_rows_of_a_wider_matrix(both, epilogue):
    hidden, weight, _, targets = make(700, 512, 3000, torch.bfloat16, False)
    arguments = (hidden[:, :200], weight[:, 8:208], None, targets, PLAIN)
    assert_same(*both(lambda: epilogue.gemm_fold(*arguments, entropy=True)[0]))


def test_the_same_from_run_to_run(epilogue):
    arguments = (*make(4096, 1024, 30000, torch.bfloat16, False), PLAIN)
    first, _ = epilogue.gemm_fold(*arguments, entropy=True)
    for _ in range(20):
        again, _ = epilogue.gemm_fold(*arguments, entropy=True)
        assert_same(again, first)
