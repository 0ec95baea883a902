"""Two heads with a tolerance: what the backward leaves out is no more than promised, and what it keeps is right.

The steps are those of every device. `test/kernels/test_divergence_kernels.py` has the sums, in Triton and in PyTorch.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from devices import skip_without_interpreter
from head_calls import Products, run_triton
from host_reads import host_reads
from liger_rl import LogitTransform, LowRank, linear_divergence
from liger_rl.head.engines import divergence as engine
from liger_rl.head.engines import divergence_parts
from liger_rl.kernels import divergence, divergence_tiles

KINDS = {
    "forward": {"kind": "forward_kl"},
    "reverse": {"kind": "reverse_kl"},
    **{f"jsd {beta}": {"kind": "jsd", "beta": beta} for beta in (0.02, 0.5, 0.97)},
}
TILE = 1024 if torch.cuda.is_available() else 128  # Triton's kernels have their own; on CPU smaller ones save time
TOKENS, VOCAB = 40, 11 * TILE + 104


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    for module in (divergence, engine, divergence_tiles):
        monkeypatch.setattr(module, "TILE_VOCAB", TILE)


class Pair(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    grad: Tensor  # dL/d divergence

    def gradients(self, of_logps: Tensor | None = None, **options) -> tuple[Tensor, ...]:
        """With `of_logps` (N,) targets have log-probabilities with that gradient."""
        leaves = [part.detach().requires_grad_() for part in self[:3]]
        found = linear_divergence(*leaves[:2], *self[3:5], bias=leaves[2], **options)
        loss = (found.divergence * self.grad).sum()
        return torch.autograd.grad(loss if of_logps is None else loss + (found.logps * of_logps).sum(), leaves)


def pair(device="cpu", dtype=torch.float32, tokens=TOKENS, sizes=(48, 64)) -> Pair:
    """Peaked at a few entries, most of them of the first tile; the teacher is near."""
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    weight = random(VOCAB, sizes[0]) / sizes[0] ** 0.5
    targets = (torch.rand(tokens, generator=generator) ** 4 * VOCAB).long()
    hidden = random(tokens, sizes[0]) + 30.0 * torch.rand(tokens, 1, generator=generator) * weight[targets]
    mixed = torch.nn.init.orthogonal_(torch.empty(sizes[1], sizes[0]), generator=generator)
    teacher_hidden = (hidden + 0.2 * random(*hidden.shape)) @ mixed.T
    parts = (hidden, weight, 0.1 * random(VOCAB), teacher_hidden, weight @ mixed.T)
    return Pair(*(part.to(device, dtype) for part in parts), random(tokens).to(device))


class Kept(list):
    """The parts that each choice keeps."""

    def share(self, at: int = -1) -> float:
        return self[at].double().mean().item()


@pytest.fixture
def kept(monkeypatch) -> Kept:
    found, choose = Kept(), divergence_parts.choose

    def recorded(*given) -> divergence_parts.Chosen:
        chosen = choose(*given)
        found.append(chosen.keep)
        return chosen

    monkeypatch.setattr(divergence_parts, "choose", recorded)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# --- the certificate --------------------------------------------------------------------------------------------------


def _sure(z: Tensor) -> Tensor:
    z[torch.arange(TOKENS), torch.randint(z.shape[1], (TOKENS,))] += 16 * torch.rand(TOKENS)
    return z


def near(z: Tensor) -> tuple[Tensor, Tensor]:
    return _sure(z), z + 0.01 * torch.randn_like(z)


def far(z: Tensor) -> tuple[Tensor, Tensor]:
    return _sure(z), _sure(torch.randn_like(z))


def same_but_for_one_tile(z: Tensor) -> tuple[Tensor, Tensor]:
    """All others differ by the normalisers alone, and each of their parts is of one sign."""
    t = _sure(z).clone()
    t[:, TILE : 2 * TILE] += torch.randn(TOKENS, 1)
    return z, t


def alternating(z: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of parts are 0, or nearly, and each part is as large as ever."""
    t = z.clone()
    t[:, ::2] = z[:, 1::2]
    t[:, 1::2] = z[:, ::2]
    return z, t


def one_entry_of_each_tile(z: Tensor) -> tuple[Tensor, Tensor]:
    """Shares that are of one entry, where what is left out is of many."""
    z[: TOKENS // 2, ::TILE] += 8
    return z, z + torch.randn_like(z)


def large(z: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of which float32 knows few digits."""
    return _sure(z) + 3000.0, z - 1000.0 + 0.3 * torch.randn_like(z)


def opposite(z: Tensor) -> tuple[Tensor, Tensor]:
    """What is likely for one is all but impossible for the other, so log-ratios are large where nothing is likely."""
    return 1.5 * z, -1.5 * z


PAIRS = [near, far, same_but_for_one_tile, alternating, one_entry_of_each_tile, large, opposite]


def in_float64(z: Tensor, t: Tensor, grad: Tensor, kind: str, beta: float = 0.5, vocab: int = VOCAB) -> Tensor:
    """dL/dlogits, from the formulas."""
    log_p, log_q = (x.double()[:, :vocab].log_softmax(-1) for x in (z, t))
    p = log_p.exp()
    if kind == "forward_kl":
        found = p - log_q.exp()
    else:
        over = log_p - log_q
        if kind == "jsd":
            over = log_p - torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        found = p * (over - (p * over).sum(-1, keepdim=True)) * (1 - beta if kind == "jsd" else 1)
    return found * grad.double()[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", PAIRS)
def test_the_certificate(kind, make, kept):
    """Of one-hot hidden states the weight's gradient is dL/dlogits: its error is within the tolerance, of any loss."""
    z, t = make(2.0 * torch.randn(TOKENS, VOCAB))
    eye = torch.eye(TOKENS)
    grad = torch.randn(TOKENS) * torch.logspace(0, -3, TOKENS) * 1e-18  # the tolerance is relative
    given = Pair(eye, z.T, torch.zeros(VOCAB), eye, t.T, grad)
    exact = in_float64(z, t, grad, **KINDS[kind])
    rounding = distance(given.gradients(**KINDS[kind])[1].T, exact)
    for tolerance in (1e-3, 3e-2, 0.4):
        found = given.gradients(**KINDS[kind], grad_tolerance=tolerance)[1].T
        assert distance(found, exact) <= tolerance + 2 * rounding
    assert len(kept) == 3
    assert kept.share() < 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", PAIRS)
@pytest.mark.parametrize("weight", [0.0, 1e-3, 1.0])
def test_the_certificate_with_log_probabilities(kind, make, weight, kept):
    """As the gradient of a policy with a penalty: that of the target's log-probability is larger, or alone."""
    z, t = make(2.0 * torch.randn(TOKENS, VOCAB))
    eye = torch.eye(TOKENS)
    targets = torch.where(torch.rand(TOKENS) < 0.5, z.argmax(-1), torch.randint(VOCAB, (TOKENS,)))
    grad, of_logps = weight * torch.randn(TOKENS), torch.randn(TOKENS) * torch.logspace(0, -3, TOKENS)
    of_logps[::7] = 0.0
    given = Pair(eye, z.T, torch.zeros(VOCAB), eye, t.T, grad)
    p = z.double().softmax(-1)
    own = torch.nn.functional.one_hot(targets, VOCAB) - p
    exact = in_float64(z, t, grad, **KINDS[kind]) + of_logps[:, None] * own
    rounding = distance(given.gradients(of_logps, targets=targets, **KINDS[kind])[1].T, exact)
    for tolerance in (1e-3, 3e-2, 0.4):
        found = given.gradients(of_logps, targets=targets, **KINDS[kind], grad_tolerance=tolerance)[1].T
        assert distance(found, exact) <= tolerance + 2 * rounding
    assert len(kept) == 3
    assert kept.share() < 0.5


def test_factors_too_small_to_square():
    """Of a saturated token the gradient is tiny, so that of a token with a tiny factor is a part of all."""
    z = torch.full((2, 8 * TILE), -200.0)
    z[0, 0] = 0.0
    t = z.clone()
    z[0, TILE : 2 * TILE], t[0, TILE : 2 * TILE] = -50.0, -52.0
    z[1, ::2] = torch.randn(4 * TILE)
    z[1, 1::2] = -z[1, ::2]  # sums of its parts are 0
    t[1] = -z[1]
    eye, grad = torch.eye(2), torch.tensor([1.0, 1e-21])
    given = Pair(eye, z.T, torch.zeros(8 * TILE), eye, t.T, grad)
    exact = in_float64(z, t, grad, "forward_kl", vocab=8 * TILE)
    size = exact.abs().max()  # whose square float64 has
    found = given.gradients(grad_tolerance=1e-3)[1].T
    assert distance(found.double() / size, exact / size) <= 1e-3


def test_a_temperature_and_padding(kept):
    z, t = near(2.0 * torch.randn(TOKENS, VOCAB))
    eye, grad, vocab = torch.eye(TOKENS), torch.randn(TOKENS), VOCAB - 150
    given = Pair(eye, z.T, torch.zeros(VOCAB), eye, t.T, grad)
    transform = LogitTransform(temperature=0.7, scale=1.4)
    found = given.gradients(kind="reverse_kl", grad_tolerance=0.1, vocab=vocab, transform=transform)[1].T
    exact = 2.0 * in_float64(2.0 * z, t, grad, "reverse_kl", vocab=vocab)
    assert distance(found[:, :vocab], exact) <= 0.1
    assert not found[:, vocab:].any()
    assert kept.share(0) < 0.5


# --- the gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_logps", [False, True])
def test_gradients_are_close_and_the_same_again(kind, dtype, with_logps, kept, device):
    """The tolerance is of dL/dlogits; the products with weight and hidden enlarge an error by no more than here."""
    given, of_logps, targets = pair(device, dtype), None, None
    if with_logps:
        of_logps, targets = 0.3 * given.grad.flip(0), torch.arange(TOKENS, device=device) * 29
    exact, eps = given.gradients(of_logps, targets=targets, **KINDS[kind]), torch.finfo(dtype).eps
    for tolerance in (1e-2, 1e-1):
        found, repeated = (
            given.gradients(of_logps, targets=targets, **KINDS[kind], grad_tolerance=tolerance) for _ in range(2)
        )
        for mine, other, again in zip(found, exact, repeated, strict=True):
            assert mine.dtype == dtype
            assert torch.equal(mine, again)
            assert distance(mine, other) <= 4 * tolerance + 1.5 * eps
    assert kept.share(0) > kept.share(2) > 0
    assert kept.share(2) < 0.3


@pytest.mark.parametrize("with_logps", [False, True])
def test_what_is_left_out_adds_up(with_logps, device):
    """Rows of a trained head have much in common; dL/dhidden has no error along it."""
    given, of_logps = pair(device), None
    options = {"transform": LogitTransform(temperature=0.5)}
    if with_logps:
        of_logps, options["targets"] = 0.3 * given.grad.flip(0), torch.arange(TOKENS, device=device) * 29
    shift = 3.0 * torch.randn(1, given.weight.shape[1], device=device)
    shifted = given._replace(weight=given.weight + shift)
    (plain, found), (plain_exact, exact) = (
        [heads.gradients(of_logps, **options, grad_tolerance=tolerance)[0] for heads in (given, shifted)]
        for tolerance in (1e-1, 0.0)
    )
    assert distance(found, exact) <= 1.2 * distance(plain, plain_exact)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs(frozen):
    given, options = pair(), {"grad_tolerance": 1e-1}
    leaves = [part.detach().requires_grad_(i != frozen) for i, part in enumerate(given[:3])]
    found = linear_divergence(*leaves[:2], *given[3:5], bias=leaves[2], **options).divergence
    rest = torch.autograd.grad((found * given.grad).sum(), [leaf for leaf in leaves if leaf.requires_grad])
    expected = [part for i, part in enumerate(given.gradients(**options)) if i != frozen]
    assert all(torch.equal(mine, other) for mine, other in zip(rest, expected, strict=True))


def test_flat_distributions_are_exact(kept, device):
    """Everything is kept, and what runs is the exact backward, of rows that lie elsewhere."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((TOKENS, 48), (VOCAB, 48), (VOCAB,), (TOKENS, 64), (VOCAB, 64), (TOKENS,))
    given = Pair(*((torch.randn(shape, generator=generator) * 0.1).to(device) for shape in shapes))
    given.grad[:3] = 0
    found, exact = (given.gradients(grad_tolerance=tolerance) for tolerance in (1e-2, 0.0))
    assert kept.share(0) > 0.8
    assert all(distance(mine, other) <= 1e-5 for mine, other in zip(found, exact, strict=True))


def test_equal_heads_are_exact(kept):
    """Their gradient is rounding, of which nothing can be promised but itself."""
    given = pair(sizes=(48, 48))
    given = given._replace(teacher_hidden=given.hidden, teacher_weight=given.weight, bias=torch.zeros(VOCAB))
    found, exact = (given.gradients(grad_tolerance=tolerance) for tolerance in (0.1, 0.0))
    assert kept.share(0) == 1.0
    assert all(torch.equal(mine, other) for mine, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("dead", ["mask", "gradient", "both", "all"])
def test_tokens_that_do_not_count(dead, kept, device):
    """They take part in nothing: NaN among them stays where it is."""
    given = pair(device)
    masked, zero = (torch.arange(TOKENS, device=device) % step == 1 for step in (3, 5))
    if dead == "all":
        masked, zero = torch.zeros_like(masked), torch.ones_like(zero)
    masked, zero = (part & (dead in ("all", "both", name)) for name, part in (("mask", masked), ("gradient", zero)))
    given.grad[zero] = 0.0
    found, exact = (given.gradients(mask=~masked, grad_tolerance=tolerance) for tolerance in (1e-1, 0.0))
    given.hidden[masked | zero] = math.nan
    given.teacher_hidden[masked] = math.inf
    again = given.gradients(mask=~masked, grad_tolerance=1e-1)
    for mine, other, same in zip(found, exact, again, strict=True):
        assert torch.equal(mine, same)
        assert not mine.any() if dead == "all" else distance(mine, other) <= 0.6
    assert kept.share(0) < 0.3
    assert not found[0][masked | zero].any()


def test_nan_is_not_left_out():
    given = pair()
    given.grad[3] = math.nan
    found = given.gradients(grad_tolerance=0.5)
    assert found[0][3].isnan().all()
    assert found[1].isnan().all()


def test_no_token():
    given = pair()
    for found in (
        given.gradients(mask=torch.zeros(TOKENS), grad_tolerance=0.1),
        pair(tokens=0).gradients(grad_tolerance=0.1),
    ):
        assert all((part == 0).all() for part in found)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd 0.5"])
def test_in_triton(kind, monkeypatch, kept):
    """In the interpreter, where tiles are as wide as the kernels' blocks."""
    skip_without_interpreter()
    for module in (divergence, engine, divergence_tiles):
        monkeypatch.setattr(module, "TILE_VOCAB", 1024)
    monkeypatch.setattr(divergence_tiles, "SAMPLES", 8)
    given = [values[:10] for values in near(2.0 * torch.randn(TOKENS, 2100))]
    eye = torch.eye(10)
    given = Pair(eye, given[0].T, torch.zeros(2100), eye, given[1].T, torch.randn(10))
    plain = given.gradients(**KINDS[kind], grad_tolerance=0.2)
    run_triton(monkeypatch)
    found = given.gradients(**KINDS[kind], grad_tolerance=0.2)
    assert torch.equal(*kept)
    assert kept.share() < 0.5
    for mine, other in zip(found, plain, strict=True):
        assert distance(mine, other) < 1e-2


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_all_in_triton(kind, monkeypatch, kept):
    """Products, folds, the choice and the sums of parts; NaN where nothing counts, padding, and log-probabilities."""
    skip_without_interpreter()
    for module in (divergence, engine, divergence_tiles):
        monkeypatch.setattr(module, "TILE_VOCAB", 1024)
    given, vocab = pair(dtype=torch.float16, tokens=12), VOCAB - 50
    mask, targets = torch.arange(12) % 5 != 3, torch.arange(12) * 29
    of_logps = 0.3 * given.grad.flip(0)
    of_logps[1] = given.grad[1] = 0.0
    given.hidden[~mask], given.teacher_hidden[~mask], targets[3] = math.nan, math.inf, -100
    options = {"targets": targets, "mask": mask, "vocab": vocab, "grad_tolerance": 0.1, **KINDS[kind]}
    plain = given.gradients(of_logps, **options)
    run_triton(monkeypatch, epilogue=True)
    found, again = (given.gradients(of_logps, **options) for _ in range(2))
    assert torch.equal(kept[1], kept[2])
    assert (kept[0] != kept[1]).double().mean() < 0.02
    assert 0 < kept.share() < 0.6
    for mine, other, same in zip(found, plain, again, strict=True):
        assert torch.equal(mine, same)
        assert distance(mine, other) < 2e-2
        assert mine.shape[0] == 12 or not mine[vocab:].any()


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_products_and_host_reads(kept):
    """Of kept parts alone, and of the tokens that say the shares: products of the backward, and one sync."""
    given = pair(tokens=400)
    given.grad[::2] = 0.0
    leaves = [part.detach().requires_grad_() for part in given[:2]]
    found = linear_divergence(*leaves, *given[3:5], grad_tolerance=0.1).divergence
    loss = (found * given.grad).sum()
    with host_reads(torch.device("cpu")) as reads, Products() as products:
        loss.backward()
    assert len(reads.names) == 1
    dense = 2 * VOCAB * (3 * 48 + 64)
    samples = divergence_tiles.SAMPLES * 2 * VOCAB * (48 + 64)
    assert kept.share(0) < 0.15
    assert products.flops - samples < 2.0 * kept.share(0) * 400 * dense + 30 * dense


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_vocab": 200},
        {"transform": LogitTransform(softcap=5.0)},
        {"low_rank": [LowRank(a=torch.ones(1, 48), b=torch.ones(VOCAB, 1), scaling=0.1)]},
        {"entropy": True, "of": "entropy"},
    ],
    ids=["chunk", "softcap", "low rank", "entropy"],
)
def test_without_a_certificate_the_gradient_is_exact(options, kept):
    of = options.get("of", "divergence")
    options, given = {name: value for name, value in options.items() if name != "of"}, pair()

    def gradients(tolerance: float) -> tuple[Tensor, ...]:
        leaves = [part.detach().requires_grad_() for part in given[:2]]
        found = linear_divergence(*leaves, *given[3:5], **options, grad_tolerance=tolerance)
        return torch.autograd.grad(((found.divergence + getattr(found, of)) * given.grad).sum(), leaves)

    for mine, other in zip(gradients(0.3), gradients(0.0), strict=True):  # whose tiles may be other ones
        assert distance(mine, other) <= 1e-5
    assert not kept


def test_two_backwards_of_one_forward():
    given = pair()
    leaves = [part.detach().requires_grad_() for part in given[:2]]
    found = linear_divergence(*leaves, *given[3:5], kind="jsd", grad_tolerance=1e-1).divergence
    exact = torch.autograd.grad(linear_divergence(*leaves, *given[3:5], kind="jsd").divergence.sum(), leaves)
    for _ in range(2):
        for mine, other in zip(torch.autograd.grad(found.sum(), leaves, retain_graph=True), exact, strict=True):
            assert distance(mine, other) <= 0.4


def test_autocast(kept):
    """Weights are converted a few tiles at a time."""
    given = pair()
    with torch.autocast("cpu", torch.bfloat16):
        found, exact = (given.gradients(grad_tolerance=tolerance) for tolerance in (1e-1, 0.0))
    assert kept.share(0) < 0.3
    for mine, other in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32
        assert distance(mine, other) <= 0.4
