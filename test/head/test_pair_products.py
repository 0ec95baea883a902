"""Two heads whose products fold, and make the gradient, in their epilogue: as from tiles in memory.

`test_divergence.py` holds the latter to float64.
"""

import pytest
import torch

import oracles
from devices import on_gpu
from head_calls import run_triton
from liger_rl import LogitTransform, linear_divergence, linear_logprobs
from liger_rl.head.head_options import HeadOptions, resolved
from liger_rl.head.interface import Head
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.pair import pair_call as divergence
from liger_rl.head.tiles import whole_waves

pytest.importorskip("triton", reason="Triton is not installed")

from liger_rl.head.pair import epilogue as pair_epilogue
from liger_rl.head.pair import products as pair_products
from liger_rl.head.pair.pair_reference import FORWARD, Measure
from liger_rl.kernels import epilogue as product_epilogue
from liger_rl.kernels.devices import PORTABLE, TMA, family_of
from liger_rl.kernels.statistics import BLOCK_VOCAB
from liger_rl.kernels.transform import HeadFactors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter makes no bfloat16 products
# Nothing is kept of a student under a softcap.
STUDENT_CAPPED = LogitTransform(softcap=3.0, scale=1.4), LogitTransform(temperature=0.6)
TEACHER_CAPPED = LogitTransform(temperature=0.6, scale=1.4), LogitTransform(softcap=3.0)


def heads(n, size, other_size, vocab, spread=3.0):
    def normal(*shape):
        return torch.randn(*shape).to(DEVICE, DTYPE)

    own, other = (normal(vocab, h) * (spread / h**0.5) for h in (size, other_size))
    return normal(n, size), own, normal(n, other_size), other


def test_a_rank_of_padding_alone_takes_tiles(monkeypatch):
    monkeypatch.setattr(pair_products.Pair, "epilogue_applies", lambda *_: True)
    head = Head(torch.ones(3, 8), torch.ones(4, 8), None, torch.zeros(3), TokenSelection(3))
    options = resolved(HeadOptions(), torch.float32)
    pair = pair_products.Pair(head, head, 0, options, options, Measure(FORWARD), targets=False)
    assert pair_products.PairRows(pair, head.live).epilogue is None
    assert pair_products.PairRows(pair._replace(vocab=4), head.live).epilogue is pair_epilogue


def step(given, kind, *, factors, **options):
    hidden, weight, teacher_hidden, teacher_weight = given
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = linear_divergence(*leaves, teacher_hidden, teacher_weight, kind=kind, **options)
    loss = (found.divergence * factors).sum() if found.loss is None else found.loss
    if loss is not found.loss and found.entropy is not None:
        loss = loss + 0.3 * (found.entropy * factors).sum()
    loss.backward()
    values = found.divergence, found.logps, found.entropy, found.teacher_logps
    return [part.detach().double() for part in (*values, *(leaf.grad for leaf in leaves)) if part is not None]


@pytest.fixture
def tiles_and_epilogue(monkeypatch):
    """-> a function's results from tiles, on CPU also with Triton's kernels, and from products with an epilogue."""
    monkeypatch.setattr(divergence, "vanishes", lambda *_: False)  # the interpreter has float16 alone

    def each(function):
        results = []
        for triton in (False, True) if DEVICE.type == "cpu" else (True,):
            with monkeypatch.context() as context:
                context.setattr(pair_products.Pair, "epilogue_applies", lambda *_: False)
                if triton and DEVICE.type == "cpu":
                    run_triton(context)
                results.append(function())
        if DEVICE.type == "cpu":
            run_triton(monkeypatch, epilogue=True)
        return [*results, function()]

    return each


KINDS, WAYS = ("forward_kl", "reverse_kl", "jsd"), ("two passes", "one pass")
ENGINES = [(kind, "", way) for kind in KINDS for way in WAYS] + [("jsd", "both", way) for way in WAYS]
HEADS = [("forward_kl", "both"), ("forward_kl", "student's"), ("reverse_kl", "both"), ("reverse_kl", "teacher's")]
WIDE = [(*head, way) for head in HEADS for way in WAYS]


@pytest.mark.parametrize(("kind", "wide", "way"), [*ENGINES, *on_gpu(*WIDE)])
def test_engines(kind, wide, way, tiles_and_epilogue, monkeypatch):
    """Of a padded vocabulary, in several products, with tokens that do not count; of float32 weights, which are copied,
    one of them laid out the other way."""
    n, vocab = (600, 9000) if DEVICE.type == "cuda" else (64, 608)
    hidden, weight, other, other_weight = heads(n, 32, 16, vocab)
    if wide in ("both", "student's"):
        weight = weight.float().T.contiguous().T
    if wide in ("both", "teacher's"):
        other_weight = other_weight.float()
    given, factors = (hidden, weight, other, other_weight), torch.rand(n).to(DEVICE)
    options = {"compute_dtype": DTYPE} if wide else {}
    options |= {"vocab": vocab - 20, "targets": torch.randint(vocab - 20, (n,)).to(DEVICE)}
    options["mask"] = torch.arange(n).to(DEVICE) % 50 != 7
    options |= {"token_weights": factors} if way == "one pass" else {}
    monkeypatch.setattr(pair_epilogue, "MERGE_TILES", 2)  # fewer than there are
    # The spans of copied weights are smaller than all there is.
    monkeypatch.setattr(pair_products, "COPIED_BYTES", 2 * (32 + 16) * 2 * BLOCK_VOCAB)
    truth, *results = tiles_and_epilogue(lambda: step(given, kind, factors=factors, **options))
    exact = 1e-4 if kind == "jsd" and way == "one pass" else 5e-6
    for found in results:
        for place, (mine, other) in enumerate(zip(found, truth, strict=True)):
            bound = max(0.7 * torch.finfo(DTYPE).eps, 2e-3) if place >= 3 else exact
            assert (mine - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize(
    ("kind", "banned"),
    [
        ("forward_kl", "student's"), ("reverse_kl", "teacher's"), ("jsd", "both"),
        *on_gpu(("reverse_kl", "student's"), ("jsd", "teacher's"), ("forward_kl", "teacher's")),
        *on_gpu(("forward_kl", "both"), ("reverse_kl", "both")),
    ],
)  # fmt: skip
def test_ids_that_one_head_bans(kind, banned, passes, tiles_and_epilogue):
    """In whole tiles, with a bias of that head alone: as from tiles in memory, infinite values and all."""
    n, vocab = (512, 1024) if DEVICE.type == "cuda" else (32, 512)
    given, bias = heads(n, 16, 16, vocab), torch.zeros(vocab, device=DEVICE)
    bias[3:9], bias[256:512] = -torch.inf, -torch.inf
    names = {"student's": ["bias"], "teacher's": ["teacher_bias"], "both": ["bias", "teacher_bias"]}[banned]
    options, factors = dict.fromkeys(names, bias), torch.rand(n).to(DEVICE)
    options |= {"token_weights": factors} if passes == "one" else {}
    expected, *results = tiles_and_epilogue(lambda: step(given, kind, factors=factors, **options))
    for found in results:
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine.isfinite(), other.isfinite())
            mine, other = (part.nan_to_num(0.0, 0.0, 0.0) for part in (mine, other))
            # Where both are rounded to bfloat16, small differences become whole units in the last place.
            assert (mine - other).norm() <= max(0.7 * torch.finfo(DTYPE).eps, 2e-3) * other.norm()


def test_an_infinite_divergence_without_a_gradient(tiles_and_epilogue):
    """The teacher alone bans ids. The gradient is that of the log-probabilities and entropies."""
    n, vocab = (512, 1024) if DEVICE.type == "cuda" else (16, 300)
    (hidden, weight, *teacher), bias = heads(n, 16, 16, vocab), torch.zeros(vocab, device=DEVICE)
    bias[3:9], targets = -torch.inf, torch.randint(vocab, (n,)).to(DEVICE)

    def grads(call, *teacher, **more):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found = call(*leaves, *teacher, targets=targets, entropy=True, **more)
        divergence = torch.zeros_like(found.logps) if call is linear_logprobs else found.divergence
        assert divergence.isinf().all() == (call is not linear_logprobs)
        loss = found.logps + torch.where(divergence.isfinite(), divergence, 0.0)
        (loss - 0.3 * found.entropy).sum().backward()
        return [leaf.grad.double() for leaf in leaves]

    expected = grads(linear_logprobs)
    for found in tiles_and_epilogue(lambda: grads(linear_divergence, *teacher, kind="reverse_kl", teacher_bias=bias)):
        for mine, other in zip(found, expected, strict=True):
            assert (mine - other).norm() <= max(0.7 * torch.finfo(DTYPE).eps, 2e-3) * other.norm()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(
    ("transforms", "family", "one_pass"),
    [
        (STUDENT_CAPPED, TMA, False), (TEACHER_CAPPED, TMA, True), (TEACHER_CAPPED, PORTABLE[2], True),
        *on_gpu((STUDENT_CAPPED, TMA, True), (TEACHER_CAPPED, TMA, False)),
        *on_gpu((STUDENT_CAPPED, PORTABLE[0], False), (TEACHER_CAPPED, PORTABLE[0], True)),
    ],
)  # fmt: skip
def test_transforms_and_families(kind, transforms, family, one_pass, tiles_and_epilogue, monkeypatch):
    """With biases and entropies."""
    if family.tma and DEVICE.type == "cuda" and not family_of(DEVICE).tma:
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(product_epilogue, "family_of", lambda device: family)
    n, vocab = (512, 1300) if DEVICE.type == "cuda" else (20, 700)
    given, factors = heads(n, 48, 24, vocab), torch.rand(n).to(DEVICE)
    bias, teacher_bias = torch.randn(2, vocab).to(DEVICE)
    options = {"transform": transforms[0], "teacher_transform": transforms[1], "bias": bias}
    options |= {"teacher_bias": teacher_bias, "entropy": True}
    options |= {"token_weights": factors} if one_pass else {}
    truth, *results = tiles_and_epilogue(lambda: step(given, kind, factors=factors, **options))
    for found in results:
        for mine, other in zip(found, truth, strict=True):
            assert (mine - other).norm() <= max(0.7 * torch.finfo(DTYPE).eps, 2e-3) * other.norm()


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("ban", [-1e5, torch.finfo(torch.float32).min, *on_gpu(-1e9)])
def test_ids_that_a_finite_number_bans(ban, kind, tiles_and_epilogue):
    """Log ratios beyond float16, of ids that the student may say, and of a whole part that neither may."""
    n = 512 if DEVICE.type == "cuda" else 32
    given = heads(n, 16, 16, 300, spread=1.0)  # the student gives banned ids more than float16 can lose
    bias, teacher_bias = torch.zeros(2, 300, device=DEVICE).unbind()
    bias[:64], teacher_bias[:64], bias[70:74], teacher_bias[70:74] = -torch.inf, ban, -4.0, ban
    factor = 1e-3 if kind == "forward_kl" else -1e4 / ban  # of gradients that are in the range of float16
    options = {"bias": bias, "teacher_bias": teacher_bias, "token_weights": torch.full((n,), factor, device=DEVICE)}
    expected, *results = tiles_and_epilogue(lambda: step(given, kind, factors=None, **options))
    for found in results:
        for mine, other in zip(found, expected, strict=True):
            assert other.isfinite().all()
            assert (mine - other).norm() <= max(0.7 * torch.finfo(DTYPE).eps, 2e-3) * other.norm()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("case", ["sure", "near"])
def test_a_tokens_own_gradient_in_one_pass(case, kind, monkeypatch):
    """Of sure tokens whose teacher prefers an id nearby, what is rounded of the likeliest id's log ratio nearly cancels
    its mean's. Of heads that are 1e-3 nats apart, p - q and log p - log q are kept to float16's digits, not those of p.
    """
    if DEVICE.type == "cpu":
        run_triton(monkeypatch, epilogue=True)
    n, vocab = 512 if DEVICE.type == "cuda" else 64, 600
    hidden, weight, other, other_weight = heads(n, 32, 32, vocab, spread=1.0 if case == "sure" else 3.0)
    bias, teacher_bias = torch.zeros(2, vocab, device=DEVICE).unbind()
    if case == "sure":
        bias[7], teacher_bias[7], teacher_bias[8] = 12.0, 12.0, 13.0
    else:
        near = (1e-3 * weight[:, :8].float()).to(DTYPE)
        other, other_weight = torch.cat([hidden, other[:, :8]], 1), torch.cat([weight, near], 1)
    leaf, options = hidden.clone().requires_grad_(), {"kind": kind, "bias": bias, "teacher_bias": teacher_bias}
    weights = torch.ones(n, device=DEVICE)
    one = linear_divergence(leaf, weight, other, other_weight, token_weights=weights, **options)
    exact = hidden.double().requires_grad_()
    log_p = (exact @ weight.double().T + bias).log_softmax(1)
    log_q = (other.double() @ other_weight.double().T + teacher_bias).log_softmax(1)
    (truth,) = torch.autograd.grad(oracles.divergence(log_p, log_q, kind).sum(), exact)
    (found,) = torch.autograd.grad(one.loss, leaf)
    errors = (found.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.median() < (2 if case == "sure" else 8) * torch.finfo(DTYPE).eps
    assert case == "near" or log_p[:, 7].exp().mean() > 0.98


def test_targets_past_the_last_id():
    """Those of another rank, though a tile of this one's would have room for them."""
    hidden, weight, other, other_weight = heads(3, 48, 24, 700)
    targets = torch.tensor([5, 700, 703], device=DEVICE)
    parts = pair_epilogue.unwritten_tiles(3, 700, DEVICE, Measure(FORWARD), entropy=False, targets=True)
    factors = (HeadFactors(*head, None, LogitTransform()) for head in ((hidden, weight), (other, other_weight)))
    pair_epilogue.fold_pair(*factors, targets, 0, Measure(FORWARD), parts, None)
    for mine, own, of in ((parts.target, hidden, weight), (parts.teacher_target, other, other_weight)):
        torch.testing.assert_close(mine[0], (own[0].float() @ of[5].float()), rtol=1e-5, atol=2e-5)
        assert not mine[1:].any()


def test_whole_waves():
    """Of 33 tiles of 32 rows each of 132 programs has 8; of 36 some have 8 and some 9."""
    assert whole_waves(4096, 36 * 256, 132) == 33 * 256
    assert whole_waves(1, 100, 132) == 256
    for tokens, columns in ((1664, 20000), (8192, 6000), (130, 512)):
        found = whole_waves(tokens, columns, 132)
        assert columns // 2 - 256 < found <= max(columns, 256)
        assert found % 256 == 0
