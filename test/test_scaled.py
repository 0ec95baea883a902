"""The gradient of hidden alone as scaled rows of what the epilogue keeps, against float64.

In float32 where Triton's interpreter runs it, which truncates to bfloat16 and misreads descriptors of it; on a GPU in
bfloat16, whose descriptors of float32 would not fit.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import oracles
from liger_rl import FusedLinearGRPOLoss, LogitTransform, one_pass, projection
from liger_rl.kernels import epilogue, gemm, scaled_triton
from liger_rl.kernels.kept import LIMIT, Kept
from liger_rl.kernels.statistics import TokenGradients, TokenStatistics

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
# Of a row: the exact gradient of the logits, rounded, has an error of 1.7e-3 in bfloat16, and single rows more.
TOLERANCE = 6e-3 if CUDA else 2e-5
TOKENS, VOCAB, HIDDEN = 150, 301, 80  # whole tiles of none of them
CASES = {
    # transform, bias
    "plain": (LogitTransform(), False),
    "bias": (LogitTransform(), True),
    "softcap": (LogitTransform(softcap=3.0), False),
    "temperature": (LogitTransform(temperature=0.7), False),
    "scale": (LogitTransform(scale=0.5), False),
    "all": (LogitTransform(temperature=0.7, softcap=3.0, scale=0.5), True),
}


def make(dtype=DTYPE, bias=False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden = (2 * torch.randn(TOKENS, HIDDEN)).to(DEVICE, dtype)
    weight = (torch.randn(VOCAB, HIDDEN) / math.sqrt(HIDDEN)).to(DEVICE, dtype)
    biases = torch.randn(VOCAB).to(DEVICE, dtype) if bias else None
    return hidden, weight, biases, torch.randint(VOCAB, (TOKENS,)).to(DEVICE)


def aimed(hidden: Tensor, weight: Tensor, targets: Tensor, odds: Tensor) -> Tensor:
    """The hidden states moved along the target's row of the weight until log(p / (1 - p)) is `odds` (n,)."""
    rows, words = hidden.double(), weight.double()
    own = words[targets]
    low, high = (torch.full_like(odds, side, dtype=torch.float64) for side in (-1e3, 1e3))
    for _ in range(60):
        middle = (low + high) / 2
        log_p = ((rows + middle[:, None] * own) @ words.T).log_softmax(-1)
        target = targets[:, None]
        rest = log_p.scatter(1, target, -math.inf).logsumexp(-1)
        below = log_p.gather(1, target).squeeze(1) - rest < odds
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (rows + low[:, None] * own).to(hidden.dtype)


def truth_of(hidden, weight, bias, targets, transform, g) -> tuple[Tensor, Tensor, TokenGradients]:
    """-> dL/dhidden and dL/dlogits in float64, and what is exact of the tokens, rounded once."""
    leaf = hidden.double().requires_grad_()
    logits = oracles.linear_logits(leaf, weight, bias)
    z = oracles.transformed(logits, temperature=transform.temperature, softcap=transform.softcap, scale=transform.scale)
    logps = z.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    grads = torch.autograd.grad((logps * g.double()).sum(), (leaf, logits))
    with torch.no_grad():
        tokens = TokenGradients(z.logsumexp(-1).float(), g, (-torch.expm1(logps) * g).float(), None, None)
    return *grads, tokens


def folded(hidden, weight, bias, targets, transform, limit=LIMIT) -> tuple[TokenStatistics, Kept]:
    kept = Kept.empty(hidden.shape[0], weight.shape[0], DEVICE, hidden.dtype, 256)._replace(limit=limit)
    kept.values.fill_(math.nan)
    kept.peaks.fill_(math.nan)
    kept = scaled_triton.relative(kept, hidden, weight, bias, targets, transform)
    statistics, _ = epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=False, kept=kept)
    return statistics, kept


def grad_hidden(kept, weight, targets, transform, tokens) -> Tensor:
    out = torch.full((targets.numel(), weight.shape[1]), math.nan, device=DEVICE)
    scaled_triton.grad_hidden(kept, weight, targets, transform, tokens, None, out)
    return out


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    return torch.linalg.norm(found.double() - expected, dim=1) / torch.linalg.norm(expected, dim=1)


@pytest.mark.parametrize(("transform", "bias"), CASES.values(), ids=CASES)
def test_references_are_the_logits_of_the_targets(transform, bias, monkeypatch):
    monkeypatch.setattr(scaled_triton, "BLOCK", 32)
    hidden, weight, biases, targets = make(bias=bias)
    options = {name: getattr(transform, name) for name in ("temperature", "softcap", "scale")}
    z = oracles.linear_logits(hidden, weight, biases, **options)
    kept = Kept.empty(TOKENS, VOCAB, DEVICE, DTYPE, 256)
    found = scaled_triton.relative(kept, hidden, weight, biases, targets, transform).references
    torch.testing.assert_close(found.double(), z.gather(1, targets[:, None]).squeeze(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(("transform", "bias"), CASES.values(), ids=CASES)
def test_gradient_of_every_row(transform, bias, share):
    """None and half of the rows beyond the limit."""
    given = make(bias=bias)
    g = torch.randn(TOKENS).to(DEVICE)
    expected, _, tokens = truth_of(*given, transform, g)
    plain, _ = folded(*given, transform)
    limit = LIMIT if share == 0.0 else (-plain.logps).quantile(1.0 - share).item()
    statistics, kept = folded(*given, transform, limit)
    beyond = statistics.logps < -limit
    assert beyond.float().mean().item() == pytest.approx(share, abs=0.01)
    found = grad_hidden(kept, given[1], given[3], transform, tokens)
    assert row_errors(found, expected).max() < TOLERANCE


@pytest.mark.parametrize("parts", range(1, gemm.MAX_PARTS + 1))
def test_products_in_parts(parts, monkeypatch):
    """Of a vocabulary that they do not divide."""
    monkeypatch.setattr(gemm, "parts_for", lambda rows, columns, device: parts)
    monkeypatch.setattr(scaled_triton, "BLOCK", 32)
    given = make()
    g = torch.randn(TOKENS).to(DEVICE)
    expected, _, tokens = truth_of(*given, LogitTransform(), g)
    _, kept = folded(*given, LogitTransform())
    found = grad_hidden(kept, given[1], given[3], LogitTransform(), tokens)
    assert row_errors(found, expected).max() < TOLERANCE


def test_parts_add_up_to_a_product(device):
    """Of rows that are a slice of longer ones, in widths from less than a part's alignment."""
    for columns, parts in itertools.product((1, 7, 64, 301), (1, 2, 5)):
        a, b = torch.randn(20, columns + 3, device=device)[:, :columns], torch.randn(columns, 24, device=device)
        found = gemm.write_parts(a, b, parts)
        assert found.shape == (parts, 20, 24)
        torch.testing.assert_close(found.double().sum(0), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("processors", [1, 66, 108, 132])
def test_parts_fill_the_multiprocessors(processors, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=processors)
    )
    cuda = torch.device("cuda", 0)
    assert gemm.parts_for(1024, 2304, torch.device("cpu")) == 1
    assert gemm.parts_for(128 * processors, 128, cuda) == 1, "nothing is idle"
    if processors == 132:
        assert [gemm.parts_for(*shape, cuda) for shape in ((1664, 2048), (1024, 2304), (2048, 4096))] == [3, 4, 1]


@pytest.mark.parametrize("programs", [None, 1, 2])
def test_tokens_from_certain_to_impossible(programs, monkeypatch):
    """p up to 1 - 1e-7 and down to exp(-200), the limit between them; also in many blocks where one would do."""
    if programs is not None:
        monkeypatch.setattr(epilogue, "STATISTICS_BYTES", 1)
        blocks = {"BLOCK": 32, "SETTLED_WORDS": 256, "SETTLE_PROGRAMS": programs}
        for name, value in blocks.items():
            monkeypatch.setattr(scaled_triton, name, value)
    hidden, weight, _, targets = make()
    odds = torch.tensor([16.0, 5.0, 0.0, -5.0, -39.0, -40.5, -60.0, -80.0, -200.0], device=DEVICE)
    odds = odds.repeat(TOKENS)[:TOKENS]
    hidden = aimed(hidden, weight, targets, odds)
    g = torch.randn(TOKENS).to(DEVICE)
    expected, _, tokens = truth_of(hidden, weight, None, targets, LogitTransform(), g)
    statistics, kept = folded(hidden, weight, None, targets, LogitTransform())
    logps = statistics.logps
    assert (logps < -LIMIT - 19).any()
    assert (logps > -2e-7).any() or CUDA  # bfloat16 hidden states are not so finely aimed
    found = grad_hidden(kept, weight, targets, LogitTransform(), tokens)
    assert row_errors(found, expected).max() < (TOLERANCE if CUDA else 1e-4)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(softcap=3.0)], ids=["plain", "softcap"])
def test_banned_words(transform):
    """Words of -inf, a whole tile of them, targets among them; capped they are the least likely words instead."""
    hidden, weight, bias, targets = make(bias=True)
    bias[10:60] = -math.inf
    bias[256:] = -math.inf
    targets[:3] = torch.tensor([20, 59, 280], device=DEVICE)
    targets[3:] = targets[3:] % 190 + 60
    g = torch.randn(TOKENS).to(DEVICE)
    expected, _, tokens = truth_of(hidden, weight, bias, targets, transform, g)
    statistics, kept = folded(hidden, weight, bias, targets, transform)
    assert torch.equal(statistics.logps.isfinite(), torch.arange(TOKENS, device=DEVICE) >= 3) or transform.softcap
    found = grad_hidden(kept, weight, targets, transform, tokens)
    assert row_errors(found, expected).max() < TOLERANCE


def test_references_that_rounding_puts_above_lse():
    """By more nats than float32 has exponentials of."""
    hidden, weight, _, _ = make()
    targets = (hidden.double() @ weight.double().T).argmax(1)
    transform = LogitTransform(temperature=1e-9)
    g = torch.randn(TOKENS).to(DEVICE)
    expected, _, _ = truth_of(hidden, weight, None, targets, transform, g)
    statistics, kept = folded(hidden, weight, None, targets, transform)
    assert (kept.references - statistics.lse).max() > 100
    found = grad_hidden(kept, weight, targets, transform, TokenGradients.of(statistics, g, None))
    torch.testing.assert_close(found.double(), expected)


@pytest.mark.parametrize("limit", [8.0, 2.0])
@pytest.mark.parametrize(("transform", "bias"), CASES.values(), ids=CASES)
def test_as_exact_as_rounding_the_gradient_of_the_logits(transform, bias, limit):
    """In float16 of few exponents, where the interpreter rounds; beyond the limit values are rounded twice."""
    dtype = DTYPE if CUDA else torch.float16
    given = make(dtype, bias)
    g = torch.randn(TOKENS).to(DEVICE)
    expected, grad_logits, tokens = truth_of(*given, transform, g)
    rounded = oracles.norm_error(grad_logits.to(dtype).double() @ given[1].double(), expected)
    _, kept = folded(*given, transform, limit)
    found = grad_hidden(kept, given[1], given[3], transform, tokens)
    assert oracles.norm_error(found, expected) < (1.1 if limit == 8.0 else 1.5) * rounded


@pytest.mark.parametrize(("transform", "bias"), CASES.values(), ids=CASES)
def test_statistics_are_what_they_are_without(transform, bias):
    hidden, weight, bias, targets = make(torch.bfloat16 if CUDA else torch.float16, bias)
    statistics, kept = folded(hidden, weight, bias, targets, transform, 8.0)
    plain = Kept.empty(TOKENS, VOCAB, DEVICE, torch.bfloat16, 256)
    for other in (None, plain):
        without, _ = epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=False, kept=other)
        for mine, expected in zip(statistics, without, strict=True):
            assert mine is expected is None or torch.equal(mine, expected)
    assert torch.equal(kept.peaks, plain.peaks)


def test_rows_go_where_they_belong():
    hidden, weight, bias, targets = make(bias=True)
    tokens = truth_of(hidden, weight, bias, targets, LogitTransform(), torch.randn(TOKENS).to(DEVICE))[2]
    _, kept = folded(hidden, weight, bias, targets, LogitTransform())
    index = torch.randperm(2 * TOKENS)[:TOKENS].to(DEVICE)
    out = torch.full((2 * TOKENS, HIDDEN), 7.0, dtype=torch.float16, device=DEVICE)
    scaled_triton.grad_hidden(kept, weight, targets, LogitTransform(), tokens, index, out)
    expected = torch.full_like(out, 7.0)
    expected[index] = grad_hidden(kept, weight, targets, LogitTransform(), tokens).to(out.dtype)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("at_target", [False, True])
def test_nan_stays_in_its_row(at_target):
    hidden, weight, _, targets = make()
    hidden[5] = math.nan
    bias = torch.zeros(VOCAB, dtype=DTYPE, device=DEVICE)
    if at_target:
        hidden[5] = 0.0
        targets[5], targets[targets == 9] = 9, 10
        bias[9] = math.nan
    statistics, kept = folded(hidden, weight, bias, targets, LogitTransform())
    tokens = TokenGradients.of(statistics, torch.ones(TOKENS, device=DEVICE), None)
    found = grad_hidden(kept, weight, targets, LogitTransform(), tokens)
    rows = found.isnan().any(1)
    assert rows[5]
    assert rows.all() if at_target else rows.sum() == 1  # a word's bias is part of every row's sum


# --- the whole path ---------------------------------------------------------------------------------------------------

ROWS, LENGTH = 4, 40 if not CUDA else 300


@pytest.fixture
def scaled_chunks(monkeypatch):
    """Tokens of each chunk that was made so; on CPU in float32, with the kernels that a GPU would be given."""
    taken = []

    def counted(kept, weight, targets, *others):
        taken.append(targets.numel())
        scaled_triton.grad_hidden(kept, weight, targets, *others)

    found = SimpleNamespace(relative=scaled_triton.relative, grad_hidden=counted)
    if CUDA:
        applies = one_pass.scaled_for
        monkeypatch.setattr(one_pass, "scaled_for", lambda *factors: applies(*factors) and found)
        return taken
    rule = one_pass.scales_rows

    def ruled(options, needs):
        return rule(replace(options, compute_dtype=torch.bfloat16), needs)

    def gemm_fold_for(hidden, weight):
        return epilogue.gemm_fold if hidden.shape[0] >= 20 else None

    monkeypatch.setattr(one_pass, "scales_rows", ruled)
    monkeypatch.setattr(one_pass, "scaled_for", lambda *factors: gemm_fold_for(*factors) and found)
    for module in (one_pass, projection):
        monkeypatch.setattr(module, "gemm_fold_for", gemm_fold_for)
    return taken


def step(passes, frozen=("weight",), columns=(), **options) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(1)
    hidden, weight = torch.randn(ROWS, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN) / math.sqrt(HIDDEN)
    named = {"hidden": hidden, "weight": weight, "bias": torch.randn(VOCAB)}
    leaves = [t.to(DEVICE, DTYPE).requires_grad_(name not in frozen) for name, t in named.items()]
    if "no bias" in frozen:
        leaves[2] = None
    ids, advantages = torch.randint(VOCAB, (ROWS, LENGTH)).to(DEVICE), torch.randn(ROWS).to(DEVICE)
    if "idle" in columns:
        advantages[0] = 0.0
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool, device=DEVICE)
    if "mask" in columns:
        mask[1, 7:] = mask[3, :9] = False
        leaves[0].data[1, 7:], leaves[0].data[3, :9] = math.nan, math.inf
        ids[1, 7:], ids[3, :9] = -100, VOCAB + 5
    # Metrics that read all log-probabilities, or else idle tokens would not be projected.
    module = FusedLinearGRPOLoss("grpo", passes=passes, **{"metrics": "basic", **options})
    loss = module(leaves[0], leaves[1], ids, advantages, mask, bias=leaves[2]).loss
    loss.backward()
    return loss.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("frozen", "columns", "options"),
    [
        (("weight", "no bias"), (), {}),
        (("weight", "no bias"), ("mask",), {"scale": 2.0}),
        (("weight", "bias"), ("mask",), {"softcap": 3.0, "temperature": 0.7}),
    ],
    ids=["plain", "scale", "softcap"],
)
def test_as_two_passes(frozen, columns, options, scaled_chunks):
    loss, grads = step("one", frozen, columns, **options)
    assert len(scaled_chunks) == 1
    expected_loss, expected = step("two", frozen, columns, **options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-7)
    assert grads[1:] == expected[1:] == [None, None]
    assert grads[0].dtype == DTYPE
    error = oracles.norm_error(grads[0], expected[0]) / expected[0].double().norm()
    assert error < (5e-3 if CUDA else 1e-6)


@pytest.mark.skipif(CUDA, reason="the last chunk would be one that the epilogue does not take, too")
def test_chunks_that_the_epilogue_does_not_take_go_the_other_way(scaled_chunks, monkeypatch):
    from liger_rl import one_pass_loss

    plan = one_pass_loss.plan_one_pass
    monkeypatch.setattr(one_pass_loss, "plan_one_pass", lambda *a, **k: replace(plan(*a, **k), chunk_tokens=70))
    _, grads = step("one", ("weight", "bias"))
    assert scaled_chunks == [70, 70, 20]
    scaled_chunks.clear()
    monkeypatch.setattr(one_pass_loss, "plan_one_pass", lambda *a, **k: replace(plan(*a, **k), chunk_tokens=71))
    _, others = step("one", ("weight", "bias"))
    assert scaled_chunks == [71, 71]
    _, expected = step("two", ("weight", "bias"))
    for found in (grads[0], others[0]):
        assert oracles.norm_error(found, expected[0]) < 1e-6 * expected[0].double().norm()


@pytest.mark.parametrize(
    ("frozen", "columns", "options"),
    [
        ((), (), {}),
        (("weight",), (), {}),
        (("bias",), (), {}),
        (("weight", "bias"), ("idle",), {}),
        (("weight", "bias"), (), {"metrics": "with_entropy"}),
        (("weight", "bias"), (), {"chunk_vocab": 256}),
    ],
    ids=["nothing frozen", "bias wanted", "weight wanted", "rows selected", "entropy", "named tiles"],
)
def test_what_goes_the_other_way(frozen, columns, options, scaled_chunks):
    step("one", frozen, columns, **options)
    assert not scaled_chunks
