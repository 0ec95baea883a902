"""Two heads whose products fold, and make the gradient, in their epilogue: as from tiles in memory.

`test_divergence.py` holds the latter to float64.
"""

import pytest
import torch

from devices import NEEDS_GPU
from head_calls import run_triton
from liger_rl import FusedLinearGRPOLoss, LogitTransform, ReferenceHead, linear_divergence
from liger_rl.call.options import HeadOptions, resolved
from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.interface import Head
from liger_rl.engines.pair import run as divergence
from liger_rl.engines.tiles import whole_waves

pytest.importorskip("triton", reason="Triton is not installed")

from liger_rl.engines.pair import epilogue as pair_epilogue
from liger_rl.engines.pair import kept_triton as kept_pair_triton
from liger_rl.engines.pair import products as pair_products
from liger_rl.engines.pair.reference import (
    FORWARD,
    MIXTURE,
    REVERSE,
    KeptPair,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairStatistics,
    PairTile,
    Tile,
    fold_pair,
    grad_pair,
    mix_pair,
)
from liger_rl.kernels import epilogue as product_epilogue
from liger_rl.kernels.devices import PORTABLE, TMA, family_of
from liger_rl.kernels.statistics import BLOCK_VOCAB
from liger_rl.kernels.transform import HeadFactors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter makes no bfloat16 products
PLAIN = LogitTransform(), LogitTransform()
# Nothing is kept of a student under a softcap.
STUDENT_CAPPED = LogitTransform(softcap=3.0, scale=1.4), LogitTransform(temperature=0.6)
TEACHER_CAPPED = LogitTransform(temperature=0.6, scale=1.4), LogitTransform(softcap=3.0)


def heads(n, size, other_size, vocab, spread=3.0):
    def normal(*shape):
        return torch.randn(*shape).to(DEVICE, DTYPE)

    own, other = (normal(vocab, h) * (spread / h**0.5) for h in (size, other_size))
    return normal(n, size), own, normal(n, other_size), other


class Case:
    """One product's worth of both heads, and what plain PyTorch makes of float32 tiles of them."""

    def __init__(
        self, measure, transforms, *, more, n=20, size=48, other_size=24, vocab=700, gap=None, spread=3.0
    ):  # fmt: skip
        self.measure, self.more, self.n, self.vocab = measure, more, n, vocab
        *own, other, other_weight = heads(n, size, other_size, vocab, spread)
        self.hidden, self.weight = own
        if gap is not None:
            near = (self.weight[:, :8].float() * gap).to(DTYPE)
            other, other_weight = torch.cat([self.hidden, other[:, :8]], 1), torch.cat([self.weight, near], 1)
        self.bias, other_bias = torch.randn(2, vocab).to(DEVICE) if more else (None, None)
        logits = self.hidden.float() @ self.weight.float().T
        teacher = other.float() @ other_weight.float().T
        self.others = other, other_weight
        self.targets = torch.randint(vocab, (n,)).to(DEVICE)
        self.student, self.teacher = Tile(logits, self.bias, transforms[0]), Tile(teacher, other_bias, transforms[1])
        state = PairFold.start(n, DEVICE, measure, entropy=more, targets=True)
        self.pair = PairTile(self.student, self.teacher, self.targets, 0, measure)
        fold_pair(self.pair, state)
        self.known, self.mixed = PairStatistics.of(state, measure), MixtureSums.start(state.peak)
        if measure.kind == MIXTURE:
            mix_pair(self.pair, *self.known[:2], self.mixed)

    @property
    def value(self):
        return self.mixed.student if self.measure.kind == MIXTURE else self.known.divergence

    def tile(self, first=0, last=None):
        """What the epilogue takes of some columns."""
        at = slice(first, last)
        bias, other_bias = (None if bias is None else bias[at] for bias in (self.bias, self.teacher.bias))
        factors = HeadFactors(self.hidden, self.weight[at], bias, self.student.transform)
        teacher = HeadFactors(self.others[0], self.others[1][at], other_bias, self.teacher.transform)
        return factors, teacher, self.targets, first

    def tokens(self):
        w, g, e = torch.randn(3, self.n).to(DEVICE)
        others = (g, -torch.expm1(self.known.logps) * g, e, self.known.entropy) if self.more else (None,) * 4
        return PairGradients(*self.known[:2], w, self.value, *others)

    def gradient(self, tokens):
        out = torch.empty(self.n, self.vocab, device=DEVICE)
        grad_pair(self.pair, tokens, out)
        return out

    def of_kept(self, kept, tokens):
        """The gradient."""
        out = torch.empty(self.n, self.vocab, device=DEVICE)
        kept_pair_triton.grad_kept_pair(kept, self.targets, self.student.transform, self.measure, tokens, out)
        return out

    def folded(self, *, kept=True):
        parts = pair_epilogue.unwritten_tiles(self.n, self.vocab, DEVICE, self.measure, entropy=self.more, targets=True)
        found = KeptPair.empty(self.n, self.vocab, DEVICE) if kept else None
        cut = 2 * BLOCK_VOCAB
        for first, last in ((0, cut), (cut, self.vocab)):
            pair_epilogue.fold_pair(*self.tile(first, last), self.measure, parts, found)
        return parts, found


@pytest.mark.parametrize("measure", [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.3)])
@pytest.mark.parametrize("tiles", [1, 150])
def test_merged_tiles(measure, tiles):
    """Of more tiles than a program reads at a time; some ban all that they have, and a token is NaN."""
    n, width = 35, 4
    z = 5.0 * torch.randn(n, tiles * width, device=DEVICE)
    t = z + torch.randn_like(z) - 300.0
    z[1, 1:] = t[2, 1:] = t[3:5, ::2] = z[4:6, ::2] = -torch.inf
    z[7] = torch.nan
    folds = []
    for first in range(0, tiles * width, width):
        state = PairFold.start(n, DEVICE, measure, entropy=True, targets=False)
        student, teacher = (Tile(x[:, first : first + width], None, LogitTransform()) for x in (z, t))
        fold_pair(PairTile(student, teacher, torch.zeros(n, device=DEVICE), 0, measure), state)
        lowest = torch.finfo(torch.float32).min  # of NaN, too, as the epilogue leaves it
        folds.append(state._replace(peak=torch.where(state.peak.isnan(), lowest, state.peak)))
    fold = PairFold._make(None if part[0] is None else torch.stack(part) for part in zip(*folds, strict=True))
    found = pair_epilogue.merged(fold, measure)
    expected = fold.over_ranks(measure, lambda peaks: peaks.amax(1), lambda parts: parts.sum(1))
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3, equal_nan=True)
    assert found.sum_exp[7].isnan()


@pytest.mark.parametrize("measure", [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.3)])
@pytest.mark.parametrize(
    ("transforms", "family"),
    [(transforms, TMA) for transforms in (PLAIN, STUDENT_CAPPED, TEACHER_CAPPED)]
    + [(STUDENT_CAPPED, PORTABLE[0]), (TEACHER_CAPPED, PORTABLE[0]), (TEACHER_CAPPED, PORTABLE[2])],
)
def test_kernels(measure, transforms, family, monkeypatch):
    """Fold, gradient and what is kept for one, over two products, the last tile not a whole one."""
    if family.tma and DEVICE.type == "cuda" and not family_of(DEVICE).tma:
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(product_epilogue, "family_of", lambda device: family)
    case = Case(measure, transforms, more=transforms != PLAIN)
    parts, kept = case.folded()
    found = PairStatistics.of(pair_epilogue.merged(parts, measure), measure)
    for mine, other in zip(found, case.known, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)
    tokens = case.tokens()
    exact = case.gradient(tokens).double()
    made = pair_epilogue.grad_pair(*case.tile(), measure, tokens)
    assert (made.double() - exact).norm() <= 0.6 * torch.finfo(DTYPE).eps * exact.norm()
    if transforms == STUDENT_CAPPED:
        return
    assert (case.of_kept(kept, tokens).double() - exact).norm() <= 1.5e-3 * exact.norm()
    if measure.kind != FORWARD:
        sums = kept_pair_triton.sum_kept(kept, measure, *case.known[:2])
        expected = case.mixed if measure.kind == MIXTURE else (case.value, torch.zeros_like(case.value))
        for mine, other in zip(sums, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=5e-4, atol=1e-4)


@pytest.mark.parametrize("measure", [Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.5)])
def test_what_is_kept_of_heads_that_are_near(measure):
    """p - q and log p - log q of heads a thousandth of a nat apart to float16's digits, not to those of p."""
    case = Case(measure, PLAIN, more=False, gap=1e-3)
    _, kept = case.folded()
    tokens = case.tokens()
    exact, found = case.gradient(tokens).double(), case.of_kept(kept, tokens)
    assert exact.abs().max() > 0
    assert (found.double() - exact).norm() <= 2e-3 * exact.norm()


def test_targets_past_the_last_id():
    """Those of another rank, though a tile of this one's would have room for them."""
    case = Case(Measure(FORWARD), PLAIN, more=False, n=3)
    case.targets[1:] = torch.tensor([case.vocab, case.vocab + 3])
    parts, _ = case.folded(kept=False)
    for mine, tile in ((parts.target, case.student), (parts.teacher_target, case.teacher)):
        torch.testing.assert_close(mine[0], tile.logits[0, case.targets[0]], rtol=1e-5, atol=2e-5)
        assert not mine[1:].any()


@pytest.mark.parametrize("measure", [Measure(FORWARD), Measure(REVERSE)])
def test_the_lowest_finite_logits_have_no_probability(measure):
    """Of the teacher, in all columns of a part before the others."""
    case = Case(measure, PLAIN, more=True, n=3)
    case.teacher.bias[:64] = torch.finfo(torch.float32).min
    case.bias[:64] = -torch.inf
    parts, _ = case.folded(kept=False)
    found = PairStatistics.of(pair_epilogue.merged(parts, measure), measure)
    log_p, log_q = ((tile.logits + tile.bias)[:, 64:].double().log_softmax(1) for tile in (case.student, case.teacher))
    over = log_p.exp() * (log_p - log_q) if measure.kind == REVERSE else log_q.exp() * (log_q - log_p)
    torch.testing.assert_close(found.divergence.double(), over.sum(1), rtol=1e-5, atol=2e-5)


def test_a_rank_of_padding_alone_takes_tiles(monkeypatch):
    monkeypatch.setattr(pair_products.Pair, "epilogue_applies", lambda *_: True)
    head = Head(torch.ones(3, 8), torch.ones(4, 8), None, None, None, torch.zeros(3), TokenSelection(3))
    options = resolved(HeadOptions(), torch.float32)
    pair = pair_products.Pair(head, head, 0, options, options, Measure(FORWARD), targets=False)
    assert pair_products.PairRows(pair, head.live).epilogue is None
    assert pair_products.PairRows(pair._replace(vocab=4), head.live).epilogue is pair_epilogue


@pytest.mark.parametrize("measure", [Measure(REVERSE), Measure(MIXTURE, 0.3)])
def test_a_row_of_the_kept_gradient_adds_up_to_0(measure):
    """Whatever rounding has done to the probabilities, of which the mean is taken."""
    case = Case(measure, PLAIN, more=False, spread=6.0)
    parts, kept = case.folded()
    known = PairStatistics.of(pair_epilogue.merged(parts, measure), measure)
    value = kept_pair_triton.sum_kept(kept, measure, known.lse, known.teacher_lse).student
    tokens = PairGradients(known.lse, known.teacher_lse, torch.ones_like(known.lse), value, *[None] * 4)
    grad = case.of_kept(kept, tokens).double()
    assert (grad.sum(1).abs() <= 1e-5 * grad.abs().sum(1) + 2e-6 * value.double().abs()).all()


def step(given, kind, *, factors, **options):
    hidden, weight, teacher_hidden, teacher_weight = given
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = linear_divergence(*leaves, teacher_hidden, teacher_weight, kind=kind, **options)
    loss = (found.divergence * factors).sum() if found.loss is None else found.loss
    loss.backward()
    values = found.divergence, found.logps, found.teacher_logps
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


ENGINES = [
    (kind, wide, way)
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for wide in ("", "both", {"forward_kl": "student's", "reverse_kl": "teacher's"}.get(kind, "both"))
    for way in ("two passes", "one pass", "fixed shape")
]


@pytest.mark.parametrize(("kind", "wide", "way"), dict.fromkeys(ENGINES))
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
    options |= {"one pass": {"token_weights": factors}, "fixed shape": {"fixed_shape": True}}.get(way, {})
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
    [("forward_kl", "student's"), ("reverse_kl", "student's")]
    + [(kind, head) for kind in ("forward_kl", "reverse_kl", "jsd") for head in ("teacher's", "both")],
)
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


@pytest.mark.parametrize("ban", [-1e5, -1e9])
def test_ids_that_a_finite_number_bans(ban, monkeypatch):
    """Log ratios beyond float16, of ids that the student may say."""
    if DEVICE.type == "cpu":
        run_triton(monkeypatch, epilogue=True)
    n = 512 if DEVICE.type == "cuda" else 32
    given = heads(n, 16, 16, 300)
    bias, teacher_bias = torch.zeros(2, 300, device=DEVICE).unbind()
    bias[40:44], teacher_bias[40:44] = -9.0, ban
    options = {"bias": bias, "teacher_bias": teacher_bias, "token_weights": torch.full((n,), 1e-3, device=DEVICE)}
    assert all(part.isfinite().all() for part in step(given, "reverse_kl", factors=None, **options))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_sure_tokens_whose_teacher_prefers_an_id_nearby(kind, monkeypatch):
    """A token's own gradient in one pass: what is rounded of the likeliest id's log ratio nearly cancels its mean's."""
    if DEVICE.type == "cpu":
        run_triton(monkeypatch, epilogue=True)
    n, vocab = 512 if DEVICE.type == "cuda" else 64, 600
    given = heads(n, 32, 32, vocab, spread=1.0)
    bias, teacher_bias = torch.zeros(2, vocab, device=DEVICE).unbind()
    bias[7], teacher_bias[7], teacher_bias[8] = 12.0, 12.0, 13.0
    hidden = given[0].clone().requires_grad_()
    options = {"kind": kind, "bias": bias, "teacher_bias": teacher_bias}
    one = linear_divergence(hidden, *given[1:], token_weights=torch.ones(n, device=DEVICE), **options)
    exact = given[0].double().requires_grad_()
    log_p = (exact @ given[1].double().T + bias).log_softmax(1)
    log_q = (given[2].double() @ given[3].double().T + teacher_bias).log_softmax(1)
    assert log_p[:, 7].exp().mean() > 0.98
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    parts = {"forward_kl": q * (log_q - log_p), "reverse_kl": p * (log_p - log_q)}
    parts["jsd"] = (p * (log_p - log_m) + q * (log_q - log_m)) / 2
    (truth,) = torch.autograd.grad(parts[kind].sum(), exact)
    (found,) = torch.autograd.grad(one.loss, hidden)
    errors = (found.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.median() < 2 * torch.finfo(DTYPE).eps


def test_whole_waves():
    """Of 33 tiles of 32 rows each of 132 programs has 8; of 36 some have 8 and some 9."""
    assert whole_waves(4096, 36 * 256, 132) == 33 * 256
    assert whole_waves(1, 100, 132) == 256
    for tokens, columns in ((1664, 20000), (8192, 6000), (130, 512)):
        found = whole_waves(tokens, columns, 132)
        assert columns // 2 - 256 < found <= max(columns, 256)
        assert found % 256 == 0


@NEEDS_GPU
@pytest.mark.parametrize("passes", ["one", "two"])
def test_exact_kl_takes_the_epilogue(passes, tiles_and_epilogue):
    """A loss with an exact KL to a reference: the same loss and gradients as from tiles."""
    n, vocab = 600, 3000
    hidden, weight, other_hidden, other_weight = heads(n, 16, 8, vocab)
    ids, advantages, mask = torch.randint(vocab, (2, n // 2)).to(DEVICE), torch.randn(2).to(DEVICE), None
    loss_fn = FusedLinearGRPOLoss("dapo", beta=0.1, kl_estimator="exact", passes=passes)
    reference = ReferenceHead(hidden=other_hidden.view(2, n // 2, -1), weight=other_weight)

    def run():
        leaves = [hidden.view(2, n // 2, -1).clone().requires_grad_(), weight.clone().requires_grad_()]
        loss, _ = loss_fn(*leaves, ids, advantages, mask, reference=reference)
        loss.backward()
        return [loss.detach().double(), *(leaf.grad.double() for leaf in leaves)]

    for other, mine in zip(*tiles_and_epilogue(run), strict=True):  # two results, on a GPU
        assert (mine - other).norm() <= 3e-3 * other.norm()
