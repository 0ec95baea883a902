"""The kernels of the block-sparse backward: bounds that hold, the choice, the shares and the products.

In Triton's interpreter where there is no GPU; each is also compared with its oracle in plain PyTorch.
"""

import math

import pytest
import torch

import block_oracles
import oracles
from devices import NEEDS_GPU, skip_where_misread
from liger_rl import LogitTransform, linear_logprobs
from liger_rl.head.engines import block_sparse
from liger_rl.head.engines import two_pass as projection
from liger_rl.head.engines.block_sparse import choose_blocks, plan_blocks
from liger_rl.head.engines.interface import Head
from liger_rl.head.options import EngineOptions
from liger_rl.head.tokens import TokenSelection
from liger_rl.kernels import eager
from liger_rl.kernels.statistics import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    SAMPLES,
    BlockPlan,
    Fold,
    LeftOut,
    TileBounds,
    TileShares,
    TileStatistics,
    TokenGradients,
    TokenStatistics,
)

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl

from liger_rl.kernels import blocks_triton, bounds_triton, left_out_blocks_triton
from liger_rl.kernels.block_lists import BlockLists

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
PLAIN, COOL, CAPPED = LogitTransform(), LogitTransform(temperature=0.7), LogitTransform(softcap=4.0, scale=1.5)
BOTH = pytest.mark.parametrize("kernels", [block_oracles, left_out_blocks_triton], ids=["oracle", "triton"])


def options(transform=PLAIN, *, dtype=torch.float32, **more):
    return EngineOptions(transform=transform, compute_dtype=dtype, **more)


# --- the bound --------------------------------------------------------------------------------------------------------


def gradient_of_logits(logits, targets, grad_logps, grad_entropy, transform):
    """dL/dlogits in float64."""
    x = logits.double().requires_grad_()
    logps, entropy = oracles.logits_logprobs(x, targets, **vars(transform))
    loss = (logps * grad_logps.double()).sum()
    if grad_entropy is not None:
        loss = loss + (entropy * grad_entropy.double()).sum()
    return torch.autograd.grad(loss, x)[0]


def logits_like(kind, tokens, vocab):
    """-> logits (tokens, vocab), targets: the distributions a bound could stumble over."""
    logits, targets = torch.randn(tokens, vocab), torch.randint(vocab, (tokens,))
    rows = torch.arange(tokens)
    if kind == "flat":
        logits *= 0.01
    elif kind == "peaked":  # from unexpected to certain to the last bit
        logits[rows, targets] += torch.linspace(0.0, 40.0, tokens)
    elif kind == "peaked elsewhere":
        logits[rows, (targets + 300) % vocab] += torch.linspace(0.0, 30.0, tokens)
    elif kind == "two ids":  # in one tile with the target, and in others
        logits[rows, targets] += 12.0
        logits[rows, (targets // 2 * 2 + 1) % vocab] += torch.linspace(0.0, 14.0, tokens)
        logits[rows, (targets + vocab // 2) % vocab] += torch.linspace(14.0, 0.0, tokens)
    elif kind == "even tiles":  # every id of a tile alike: mass times peak is all there is
        logits = torch.randn(tokens, math.ceil(vocab / BLOCK_VOCAB)).repeat_interleave(BLOCK_VOCAB, 1)[:, :vocab] * 3
    elif kind == "large":
        logits = logits * 20.0 + 500.0
    elif kind == "banned":
        logits[:, 100:] = -torch.inf
        targets %= 100
    else:
        assert kind == "random"
    return logits.to(DEVICE), targets.to(DEVICE)


def bounds_of(logits, targets, transform, *, entropy):
    """-> statistics and bounds, as a forward makes them of these logits."""
    logits = logits.clamp(min=-3e4)  # a head makes no -inf
    state = Fold.start(len(targets), DEVICE, entropy=entropy)
    eager.fold(logits, targets, 0, None, transform, state)
    statistics = state.finish()
    known = TileBounds.empty(*logits.shape, DEVICE, entropy=entropy)
    tiles = block_oracles.tile_statistics(logits, transform, entropy=entropy)
    bounds_triton.tile_bounds(tiles, statistics, targets, transform, known)
    return statistics, known


KINDS = ["random", "flat", "peaked", "peaked elsewhere", "two ids", "even tiles", "large", "banned"]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("transform", [PLAIN, COOL, CAPPED])
@pytest.mark.parametrize("kind", KINDS)
def test_bound_holds(kind, transform, with_entropy):
    """What is left out of dL/dlogits is at most the tolerance of it, and bounds are above what they bound."""
    tokens, vocab = (300 if DEVICE.type == "cuda" else 150), 1100  # whole blocks of tokens, and a part of one
    logits, targets = logits_like(kind, tokens, vocab)
    grad_logps = (torch.randn(tokens) * torch.logspace(0, -3, tokens)).to(DEVICE)
    grad_entropy = torch.randn(tokens).to(DEVICE) if with_entropy else None
    statistics, known = bounds_of(logits, targets, transform, entropy=with_entropy)
    weight = torch.randn(vocab, 8).to(DEVICE)
    shares = shares_like(vocab, weight)
    known = known._replace(share_squares=shares.squares)
    gradients = TokenGradients.of(statistics, grad_logps, grad_entropy)
    # The constant factor of the derivative is left out of the bounds.
    exact = gradient_of_logits(logits.clamp(min=-3e4), targets, grad_logps, grad_entropy, transform)
    exact = exact * transform.temperature / transform.scale

    own = bounds_triton.rank_tokens(known, statistics, gradients, targets, transform, 1.0).own
    each = bounds_triton.block_bounds(known, gradients, own, targets, torch.arange(tokens, device=DEVICE))
    assert (each >= blocks_of(exact.square()).float() * (1 - 1e-5) - 1e-14 * each.max()).all()
    for relative in (1e-4, 1e-3, 1e-2, 1e-1) if DEVICE.type == "cuda" else (1e-3, 1e-1):
        asked = options(transform, grad_tolerance=relative)
        chosen = choose_blocks(known, statistics, gradients, targets, shares, asked, needs_hidden=True)
        plan, order, left = plan_blocks(chosen), chosen.order, chosen.left_out
        assert order.sort().values.tolist() == list(range(tokens))
        assert plan.wanted == tokens
        keep = block_oracles.keep_of(chosen.lists)
        kept = keep.repeat_interleave(BLOCK_TOKENS, 0)[:tokens].repeat_interleave(BLOCK_VOCAB, 1)[:, :vocab]
        left_out = exact[order] * (kept == 0)
        assert left_out.norm() <= relative * exact.norm()
        by_entry = left.sums.repeat_interleave(BLOCK_VOCAB, 1)[:, :vocab] * shares.entries
        torch.testing.assert_close(left.hidden, by_entry @ weight, rtol=1e-4, atol=1e-5 * by_entry.abs().max())
        sums = left.sums.double() * (transform.temperature / transform.scale)
        by_entry = sums.repeat_interleave(BLOCK_VOCAB, 1)[:, :vocab] * shares.entries
        assert not by_entry[kept != 0].any()
        assert (left_out - by_entry).norm() <= relative * exact.norm()
        if transform.softcap is None:
            # What is kept and the shares add up to what the gradient adds up to: nothing. Float32 knows no less than
            # a millionth of a token's dL/dlogp.
            sums = (exact[order] * kept + by_entry).sum(1)
            size = grad_logps[order].abs() + (grad_entropy[order].abs() if with_entropy else 0.0)
            assert (sums.abs() <= 2e-3 * exact[order].abs().sum(1) + 1e-6 * size).all()
        assert plan.counts.tolist() == keep.sum(0).tolist()
        assert plan.kept == keep.sum()
        assert 0 < plan.share <= 1


def shares_like(vocab, weight, sure=3.0):
    """Shares that have nothing to do with the logits, most of a tile's to a few ids."""
    tiles = math.ceil(vocab / BLOCK_VOCAB)
    z = torch.nn.functional.pad(sure * torch.randn(vocab), (0, -vocab % BLOCK_VOCAB), value=-torch.inf)
    shares = z.view(tiles, BLOCK_VOCAB).softmax(1)
    rows = torch.nn.functional.pad(weight, (0, 0, 0, -vocab % BLOCK_VOCAB)).view(tiles, BLOCK_VOCAB, -1)
    rows = (shares[..., None].to(rows) * rows).sum(1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, left_out_blocks_triton.padded_tiles(vocab) - tiles))
    shares = shares.to(weight.device)
    return TileShares(shares.flatten()[:vocab], shares.square().sum(1), rows)


def blocks_of(energies):
    """(n, V) -> (row blocks, tiles) sums."""
    n, vocab = energies.shape
    padded = torch.nn.functional.pad(energies, (0, -vocab % BLOCK_VOCAB, 0, -n % BLOCK_TOKENS))
    return padded.view(-(-n // BLOCK_TOKENS), BLOCK_TOKENS, -1, BLOCK_VOCAB).sum((1, 3))


def test_bounds_are_not_far_above():
    """Or nothing would ever be left out: on single ids that tower over their tiles they are within 2^(1/4)."""
    tokens, vocab = 256, 2048
    logits = torch.full((tokens, vocab), -60.0)
    rows = torch.arange(tokens)
    targets = torch.randint(vocab, (tokens,))
    rivals = (targets + BLOCK_VOCAB * torch.randint(1, 7, (tokens,))) % vocab
    logits[rows, targets], logits[rows, rivals] = 0.0, torch.randn(tokens)
    logits, targets, ones = logits.to(DEVICE), targets.to(DEVICE), torch.ones(tokens, device=DEVICE)
    statistics, known = bounds_of(logits, targets, PLAIN, entropy=False)
    gradients = TokenGradients.of(statistics, ones, None)
    known = known._replace(share_squares=torch.full((vocab // BLOCK_VOCAB,), 1 / BLOCK_VOCAB, device=DEVICE))  # even
    own = bounds_triton.rank_tokens(known, statistics, gradients, targets, PLAIN, 1.0).own
    each = bounds_triton.block_bounds(known, gradients, own, targets, rows.to(DEVICE))
    exact = blocks_of(gradient_of_logits(logits, targets, ones, None, PLAIN).square()).float()
    assert (each <= exact * 2**0.25 * 1.01 + 1e-5).all()


@pytest.mark.parametrize("top", [256.0, 4096.0])
def test_bound_of_the_target_tile_where_lse_is_rounded(top):
    """The ids beside a target of nearly all the mass, where lse is just above a power of two, the target under it."""
    tokens, vocab = 1024, 512
    rest = torch.logspace(-5, -2, tokens)
    logits = torch.full((tokens, vocab), top - 40.0)
    logits[:, 0] = top - (torch.rand(tokens) * 3).floor() * top * torch.finfo(torch.float32).eps / 2
    logits[:, 1] = top + rest.log()
    logits, targets = logits.to(DEVICE), torch.zeros(tokens, dtype=torch.long, device=DEVICE)
    _, known = bounds_of(logits, targets, PLAIN, entropy=False)
    p = logits.double().softmax(-1)
    assert (known.beside_target >= p[:, 1:BLOCK_VOCAB].square().sum(1)).all()


@BOTH
@pytest.mark.parametrize(
    ("energies", "budget", "kept"),
    [
        ([4.0, 1.0, 2.0, 3.0], 6.001, [1, 0, 0, 0]),
        ([4.0, 1.0, 2.0, 3.0], 5.999, [1, 0, 0, 1]),
        ([4e-30, 1e-30, 2e-30, 3e-30], 6.01e-30, [1, 0, 0, 0]),
        ([4e30, 1e-30, 0.0, math.inf], 1e60, [0, 0, 0, 1]),
        ([4.0, 0.0, math.nan, 3.0], 100.0, [0, 0, 1, 0]),
        ([4.0, 0.0, 2.0, 3.0], math.nan, [1, 1, 1, 1]),
        ([4.0, 0.0, 2.0, 3.0], -1e-30, [1, 1, 1, 1]),
        ([4.0, 0.0, 2.0, math.inf], math.inf, [1, 1, 1, 1]),
    ],
)
def test_choice_of_blocks(energies, budget, kept, kernels):
    """The smallest bounds that the budget has room for are left out, with deterministic operations alone."""
    bounds_, room = torch.tensor([energies], device=DEVICE), torch.tensor(budget, dtype=torch.float64, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        keep = kernels.choose(bounds_, room)
    finally:
        torch.use_deterministic_algorithms(False)
    assert keep.tolist() == [list(map(bool, kept))]


@BOTH
def test_bounds_far_below_the_budget_add_up(kernels):
    """Each is rounded up to a unit of it, never down to nothing."""
    count = 2**20
    each = torch.full((1, count), 1.0, device=DEVICE)
    room = torch.tensor(count / 2, dtype=torch.float64, device=DEVICE)
    keep = kernels.choose(each, room)
    assert keep.sum() == count / 2


# --- against the oracle -----------------------------------------------------------------------------------------------

KERNEL_CASES = [
    (300, 72, 1000, PLAIN, False, False),
    (257, 64, 770, COOL, True, True),
    (200, 40, 2100, PLAIN, True, False),  # rows with more blocks than are listed at a time, before a span and in it
    (128, 136, 512, CAPPED, True, False),
    (5, 8, 300, CAPPED, False, True),
]


@pytest.mark.parametrize("late", [False, True], ids=["begun", "late"])
@pytest.mark.parametrize("workspace", [3 * BLOCK_TOKENS * BLOCK_VOCAB * 2, 1 << 30], ids=["spans", "whole"])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize(("tokens", "hidden_size", "vocab", "transform", "bias", "entropy"), KERNEL_CASES)
def test_products_of_chosen_blocks(
    tokens, hidden_size, vocab, transform, bias, entropy, needs, workspace, late, monkeypatch
):
    """Triton's against plain PyTorch's, in several spans of tiles and in one, the first begun before or not."""
    skip_where_misread(hidden_size)
    if DEVICE.type == "cpu":  # elsewhere it is compiled already
        monkeypatch.setattr(blocks_triton, "LISTED", tl.constexpr(2))
    hidden = torch.randn(tokens, hidden_size).to(DEVICE, LOW)
    weight = (torch.randn(vocab, hidden_size) * hidden_size**-0.5).to(DEVICE, LOW)
    biases = torch.randn(vocab).to(DEVICE, LOW) if bias else None
    targets = torch.randint(vocab, (tokens,)).to(DEVICE)
    head = Head(hidden, weight, biases, None, None, targets, TokenSelection(tokens))
    statistics, _ = projection.forward(head, options(transform, entropy=entropy, dtype=LOW))
    grad_entropy = torch.randn(tokens).to(DEVICE) if entropy else None
    per_token = TokenGradients.of(statistics, torch.randn(tokens).to(DEVICE), grad_entropy)
    rows, tiles = math.ceil(tokens / BLOCK_TOKENS), math.ceil(vocab / BLOCK_VOCAB)
    keep = (torch.arange(rows)[:, None] + torch.arange(tiles)) % 5 != 1
    keep[:, tiles // 2] = False  # a tile without a block
    keep = keep.to(DEVICE)
    wanted = tokens - tokens // 5  # the others hold what must not get into a sum
    keep[math.ceil(wanted / BLOCK_TOKENS) :] = False
    hidden[wanted:] = torch.nan
    left_out, shares = torch.randn(tokens, tiles).to(DEVICE, LOW), shares_like(vocab, weight.cpu())[0].to(DEVICE)
    start = torch.randn(tokens, hidden_size, device=DEVICE) if needs[0] else None
    counts = keep.sum(0).cpu()
    plan = BlockPlan(counts, int(counts.sum()), wanted)
    inputs = blocks_triton.BlockInputs(hidden, weight, biases, targets, per_token, transform)
    lists = BlockLists.of(keep, torch.arange(tokens, device=DEVICE) < wanted)
    begun = blocks_triton.begin(inputs, lists, workspace, 0 if late else tiles)
    spans = blocks_triton._spans(plan, begun.buffer.shape[0] // BLOCK_TOKENS)
    assert (len(spans) > 1) == (workspace < 1 << 30 and tokens > BLOCK_TOKENS)
    found, expected = (
        kernels.grad_blocks(
            begun, inputs, plan, LeftOut(left_out, shares, None if start is None else start.clone()), needs[1:]
        )
        for kernels in (blocks_triton, block_oracles)
    )
    needs = (*needs[:2], needs[2] and bias)
    for mine, other, needed in zip(found, expected, needs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert needed
            assert mine.dtype == other.dtype
            assert other.abs().max() > 0.01
            torch.testing.assert_close(mine.float(), other.float(), rtol=4e-3, atol=4e-3 * other.abs().max().item())


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("transform", [PLAIN, CAPPED])
@pytest.mark.parametrize(("tokens", "vocab"), [(300, 1000), (33, 9000), (1, 5)])
def test_bounds_and_choices_as_kernels(tokens, vocab, transform, entropy, monkeypatch):
    """Triton's against plain PyTorch's: a code apart at most, and so are the sums."""
    monkeypatch.setattr(bounds_triton, "ADDED", 2)
    shape = math.ceil(vocab / BLOCK_VOCAB), tokens
    peaks, sums = 3 * torch.randn(shape), 1 + torch.rand(shape)
    peaks[1:, 0], sums[1:, 0] = torch.finfo(torch.float32).min, 0.0  # tiles of banned ids
    moments = (-torch.rand(shape) * sums).to(DEVICE) if entropy else None
    parts = TileStatistics(peaks.to(DEVICE), sums.to(DEVICE), moments)
    lse = (parts.peaks + parts.sums.log()).logsumexp(0)
    targets = torch.randint(min(vocab, BLOCK_VOCAB), (tokens,)).to(DEVICE)
    statistics = TokenStatistics(parts.peaks[0] - lse, lse, torch.rand(tokens, device=DEVICE) * 3 if entropy else None)
    one, other = (TileBounds.empty(tokens, vocab, DEVICE, entropy=entropy) for _ in range(2))
    bounds_triton.tile_bounds(parts, statistics, targets, transform, one)
    block_oracles.tile_bounds(parts, statistics, targets, transform, other)
    for name, mine, same in zip(TileBounds._fields, one, other, strict=True):
        if name.endswith("codes") and same is not None:
            assert ((mine.int() - same.int()).abs() <= 1).all(), name
            assert (mine == same).float().mean() > 0.97
        elif same is not None:
            close = {"rtol": 1e-4, "atol": 1e-7} if mine.dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-2}
            torch.testing.assert_close(mine, same, **close, msg=lambda m, name=name: f"{name}: {m}")

    other = other._replace(share_squares=shares_like(vocab, torch.zeros(vocab, 1, device=DEVICE)).squares)
    grad_entropy = torch.randn(tokens, device=DEVICE) if entropy else None
    per_token = TokenGradients.of(statistics, torch.randn(tokens, device=DEVICE), grad_entropy)
    per_token.grad_logps[1:2] = 0.0
    if not entropy:
        per_token.at_target[1:2] = torch.nan  # as of a token whose hidden state is NaN
    ranked, expected = (
        room.rank_tokens(other, statistics, per_token, targets, transform, 0.1)
        for room in (bounds_triton, block_oracles)
    )
    torch.testing.assert_close(ranked.budget, expected.budget, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ranked.own, expected.own, rtol=1e-4, atol=1e-7)
    assert ranked.key.dtype == expected.key.dtype == torch.int32
    assert torch.equal(ranked.wanted, expected.wanted)
    assert torch.equal(ranked.wanted, ranked.key != block_oracles.NOT_WANTED)
    # A bound may be just above the threshold here and just under it there.
    assert (ranked.key == expected.key).float().mean() >= 0.95
    assert (ranked.key != expected.key).sum() <= 0.05 * tokens
    if tokens > 1 and not entropy:
        assert ranked.key[1] == block_oracles.NOT_WANTED
    own = expected.own
    order = torch.randperm(tokens).to(DEVICE)
    found = bounds_triton.block_bounds(other, per_token, own, targets, order)
    torch.testing.assert_close(
        found, block_oracles.block_bounds(other, per_token, own, targets, order), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("kernels", [block_oracles, bounds_triton], ids=["oracle", "triton"])
@pytest.mark.parametrize("banned", ["target", "tile"])
def test_bounds_of_a_banned_target(banned, kernels):
    """A target without a probability, alone or with all of its tile, has finite bounds; others have theirs."""
    logits, targets = logits_like("random", 5, 1100)
    exact = logits.clone()
    targets[:] = torch.tensor([3, 300, 600, 900, 1050])
    first = 512 if banned == "tile" else 600
    logits[2, first : 768 if banned == "tile" else 601] = -math.inf
    found = []
    for given in (logits, exact):
        state = Fold.start(5, DEVICE, entropy=True)
        eager.fold(given, targets, 0, None, PLAIN, state)
        statistics = state.finish()
        by_tile = block_oracles.tile_statistics(given, PLAIN, entropy=True)
        found.append(TileBounds.empty(5, 1100, DEVICE, entropy=True))
        kernels.tile_bounds(by_tile, statistics, targets, PLAIN, found[-1])
        if given is logits:
            log_p = logits.double().log_softmax(1)
            terms = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p + statistics.entropy.double()[:, None]))
            terms[torch.arange(5), targets] = 0.0
            moments = torch.nn.functional.pad(terms, (0, -1100 % BLOCK_VOCAB)).view(5, -1, BLOCK_VOCAB).sum(-1).T
            sums = block_oracles.sums_beside_target(
                found[0], TokenGradients.of(statistics, torch.zeros(5, device=DEVICE), -torch.ones(5, device=DEVICE))
            )
            torch.testing.assert_close(sums.double(), moments, rtol=2e-3, atol=1e-5)
    others = [0, 1, 3, 4]
    for name, mine, same in zip(TileBounds._fields, *found, strict=True):
        if mine is not None:
            assert mine.isfinite().all(), name
            assert torch.equal(mine[..., others], same[..., others]), name


def test_targets_past_the_last_of_a_key():
    """They stay in the class of their token: those with more large tiles come first, whatever the target."""
    vocab = block_oracles.TARGETS + 1000
    known = TileBounds.empty(3, vocab, DEVICE, entropy=False)
    for part in known[:4]:
        part.zero_()
    known.codes.fill_(block_oracles.LARGEST_CODE)
    known.codes[:4, :2] = 0  # four large tiles of two tokens
    known = known._replace(share_squares=torch.zeros(known.codes.shape[0], device=DEVICE))
    targets = torch.tensor([vocab - 1, block_oracles.TARGETS - 1, 0], device=DEVICE)
    statistics = TokenStatistics(torch.full((3,), -1.0, device=DEVICE), torch.ones(3, device=DEVICE), None)
    gradients = TokenGradients.of(statistics, torch.ones(3, device=DEVICE), None)
    for kernels in (bounds_triton, block_oracles):
        keys = kernels.rank_tokens(known, statistics, gradients, targets, PLAIN, 0.1).key.tolist()
        assert 0 <= keys[0] == keys[1] < keys[2] < block_oracles.NOT_WANTED


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 130)])
@pytest.mark.parametrize("room", [math.nan, -1.0, 0.0, 1e-3, 0.5, 10.0])
def test_choices_as_kernels(shape, room):
    """Triton's blocks are plain PyTorch's."""
    energies = torch.rand(shape) ** 8
    energies.flatten()[:: energies.numel() // 5 + 1] = torch.nan
    energies[:, 0] = energies[0, 0]
    energies, budget = energies.to(DEVICE), torch.tensor(room, dtype=torch.float64, device=DEVICE)
    keep = left_out_blocks_triton.choose(energies, budget * energies.nansum().double())
    assert torch.equal(keep, block_oracles.choose(energies, budget * energies.nansum().double()))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("transform", [PLAIN, COOL, CAPPED])
@pytest.mark.parametrize(("tokens", "vocab"), [(300, 1000), (33, 9000), (1, 5), (130, 2048)])
def test_sums_of_what_is_left_out_as_kernels(tokens, vocab, transform, entropy):
    """Triton's sums of what is left out are plain PyTorch's, and 0 in the columns that fill up."""
    tiles = math.ceil(vocab / BLOCK_VOCAB)
    statistics = TokenStatistics(-5 * torch.rand(tokens), 2 + torch.rand(tokens), 3 * torch.rand(tokens))
    statistics = TokenStatistics(*(None if part is None else part.to(DEVICE) for part in statistics))
    grad_entropy = torch.randn(tokens, device=DEVICE) if entropy else None
    per_token = TokenGradients.of(statistics, torch.randn(tokens, device=DEVICE), grad_entropy)
    known = TileBounds.empty(tokens, vocab, DEVICE, entropy=entropy)
    known.masses.copy_(1000 * torch.rand(tiles, tokens))
    if known.moments is not None:
        known.moments.copy_(1000 * torch.randn(tiles, tokens))
    targets, order = torch.randint(vocab, (tokens,)).to(DEVICE), torch.randperm(tokens).to(DEVICE)
    keep = torch.randint(4, (math.ceil(tokens / BLOCK_TOKENS), tiles), device=DEVICE) > 1
    keep[0, 0] = False
    given = (known, statistics, per_token, targets, order, keep, transform)
    found, expected = (
        kernels.left_out_sums(*given, torch.float32) for kernels in (left_out_blocks_triton, block_oracles)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found.shape == (tokens, block_oracles.padded_tiles(vocab))
    assert not found[:, tiles:].any()
    assert found[:, :tiles].any()


def counting(hidden, weight, bias=None, transform=PLAIN, *, entropy=False):
    """-> targets, statistics and gradients of very different sizes, some of them 0."""
    tokens = hidden.shape[0]
    targets = torch.randint(weight.shape[0], (tokens,)).to(DEVICE)
    grad_logps = torch.randn(tokens) * torch.logspace(0, -3, tokens)
    grad_logps[::5] = 0.0
    z = oracles.linear_logits(hidden.double(), weight.double(), bias, **vars(transform))
    log_p = z.log_softmax(-1)
    terms = (log_p.gather(1, targets[:, None])[:, 0], z.logsumexp(-1), -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1))
    statistics = TokenStatistics(*(term.float() for term in terms))
    grad_entropy = torch.randn(tokens).to(DEVICE) if entropy else None
    return targets, statistics, TokenGradients.of(statistics, grad_logps.to(DEVICE), grad_entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transform", [PLAIN, COOL, CAPPED])
@pytest.mark.parametrize(("tokens", "vocab", "hidden_size"), [(50, 1000, 72), (300, 512, 64), (600, 5, 3)])
def test_shares_as_kernels(tokens, vocab, hidden_size, transform, with_bias, dtype):
    """Triton's are plain PyTorch's: probabilities beside the targets of some tokens, of those with more of a gradient
    there more, over each tile."""
    hidden = (torch.randn(tokens, hidden_size) / math.sqrt(hidden_size)).to(DEVICE, dtype)
    weight = torch.randn(vocab, hidden_size).to(DEVICE, dtype)
    bias = torch.randn(vocab).to(DEVICE) if with_bias else None
    if bias is not None:
        bias[256:512] = -torch.inf  # a tile of banned ids, if there are so many
        bias[3] = -torch.inf
    index = torch.randperm(tokens)[: tokens - 7].to(DEVICE) if with_bias else None
    rows = hidden if index is None else hidden[index]
    known = counting(rows, weight, bias, transform, entropy=with_bias)
    rest = weight, bias, transform, dtype
    expected = block_oracles.tile_shares(hidden, index, *known, *rest)
    found = left_out_blocks_triton.tile_shares(left_out_blocks_triton.draw(index, *known), hidden, *rest)

    targets, _, gradients = known
    drawn = block_oracles.drawn_tokens(gradients)
    assert drawn.numel() == SAMPLES
    p = oracles.linear_logits(rows[drawn].double(), weight.double(), bias, **vars(transform)).softmax(-1)
    p.scatter_(1, targets[drawn, None], 0.0)
    mixed = (p / p.sum(1, keepdim=True)).nan_to_num(0.0).sum(0)
    shares = torch.cat([(part / part.sum()).nan_to_num(0.0) for part in mixed.split(BLOCK_VOCAB)])
    close = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-3}
    torch.testing.assert_close(expected.entries.double(), shares, **close)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, **close)
    assert found.rows.dtype == dtype
    assert not found.rows[math.ceil(vocab / BLOCK_VOCAB) :].any()


def test_tokens_are_drawn_by_their_gradient_beside_the_target():
    """Each as often as its part of all of it says, up to one; what is not finite never."""
    at_target = torch.rand(500, device=DEVICE) ** 4
    at_target[::3] = 0.0
    at_target[40] = 100.0
    at_target[41:44] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE)
    nothing = torch.zeros_like(at_target)
    drawn = block_oracles.drawn_tokens(TokenGradients(nothing, nothing, at_target, None, None))
    times = torch.bincount(drawn, minlength=500)
    finite = at_target.nan_to_num(0.0, 0.0, 0.0).double()
    assert ((times - SAMPLES * finite / finite.sum()).abs() < 1).all()
    assert not times[finite == 0].any()


def test_tokens_are_drawn_by_gradients_that_are_apart():
    """A loss may give the entropies' as a view, such as one number for all tokens, which entropy.sum() gives."""
    hidden, weight = torch.randn(300, 8, device=DEVICE), torch.randn(300, 8, device=DEVICE)
    targets, statistics, gradients = counting(hidden, weight, entropy=True)
    gradients.at_target.zero_()
    apart = torch.stack([gradients.grad_entropy, torch.zeros_like(gradients.grad_entropy)], 1)[:, 0]
    for kernels in (block_oracles, left_out_blocks_triton):
        expected = shares_by(kernels, hidden, (targets, statistics, gradients), weight)
        found = shares_by(kernels, hidden, (targets, statistics, gradients._replace(grad_entropy=apart)), weight)
        for mine, same in zip(found, expected, strict=True):
            assert torch.equal(mine, same)


def shares_by(kernels, hidden, known, weight) -> TileShares:
    rest = weight, None, PLAIN, hidden.dtype
    if kernels is block_oracles:
        return kernels.tile_shares(hidden, None, *known, *rest)
    return kernels.tile_shares(kernels.draw(None, *known), hidden, *rest)


def test_shares_beside_tokens_that_are_not_finite():
    """One token's NaN must not reach the gradients of others: it has no say."""
    hidden, weight = torch.randn(20, 8, device=DEVICE), torch.randn(300, 8, device=DEVICE)
    targets, statistics, gradients = counting(hidden, weight)
    gradients.at_target[6:9] = 0.0
    bad = gradients._replace(at_target=gradients.at_target.clone())
    bad.at_target[7], bad.at_target[8] = torch.nan, -torch.inf
    for kernels in (block_oracles, left_out_blocks_triton):
        expected = shares_by(kernels, hidden, (targets, statistics, gradients), weight)
        found = shares_by(kernels, hidden, (targets, statistics, bad), weight)
        for mine, same in zip(found, expected, strict=True):
            assert torch.equal(mine, same)
        # Nor where it is drawn all the same.
        rows = hidden.clone()
        rows[1, ::2], rows[2, 1::2] = torch.nan, torch.inf
        for part in shares_by(kernels, rows, (targets, statistics, gradients), weight):
            assert part.isfinite().all()
        # Nor where its numbers are finite, and their sum is not.
        sure = statistics._replace(lse=statistics.lse - 88.0), gradients._replace(lse=gradients.lse - 88.0)
        for part in shares_by(kernels, hidden, (targets, *sure), weight):
            assert part.isfinite().all()


@pytest.mark.parametrize("why", ["no probability", "no gradient"])
def test_shares_of_which_nothing_is_known(why):
    """Tiles without an id that has any probability have no shares, not NaN, which would reach all gradients."""
    hidden, weight = torch.rand(20, 8, device=DEVICE), torch.randn(700, 8, device=DEVICE)
    weight[:BLOCK_VOCAB] = -500.0
    targets, statistics, gradients = counting(hidden, weight)
    if why == "no gradient":
        gradients.at_target.zero_()
    for kernels in (block_oracles, left_out_blocks_triton):
        shares = shares_by(kernels, hidden, (targets, statistics, gradients), weight)
        assert not shares.entries[:BLOCK_VOCAB].any()
        assert shares.squares[0] == 0
        assert not shares.rows[0].any()
        assert all(part.isfinite().all() for part in shares)


def test_shares_of_rows_that_are_apart():
    """Rows of hidden states and of the weight may be parts of longer ones, or columns."""
    hidden, weight = torch.randn(20, 24, device=DEVICE)[:, :16], torch.randn(300, 32, device=DEVICE)[:, 8:24]
    known = counting(hidden, weight)
    expected = shares_by(block_oracles, hidden, known, weight)
    for rows in (hidden, hidden.T.contiguous().T):
        for mine, other in zip(shares_by(left_out_blocks_triton, rows, known, weight), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


@NEEDS_GPU
@pytest.mark.parametrize("entropy", [False, True])
def test_more_than_two_to_the_31_logits(entropy, monkeypatch):
    """8448 tokens x 262144 ids: offsets pass 2^31 in every matrix of theirs, and the last tokens are as right.

    Against plain PyTorch's products of the same blocks: rows of 64 random numbers for 262144 ids are far from
    orthogonal, so that the exact gradient of hidden is further off than any tolerance of dL/dlogits says.
    """
    tokens, hidden_size, vocab = 8448, 64, 262144
    weight = torch.randn(vocab, hidden_size, device="cuda").bfloat16()
    targets = torch.randint(vocab - 5000, vocab, (tokens,), device="cuda")
    hidden = (0.05 + 0.45 * torch.rand(tokens, 1, device="cuda")) * weight[targets].float()
    leaves = [hidden.bfloat16().requires_grad_(), weight.requires_grad_()]
    bias = torch.zeros(vocab, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(tokens, device="cuda")
    plans = []

    def plan(chosen):
        plans.append(plan_blocks(chosen))
        return plans[-1]

    def gradients():
        found = linear_logprobs(*leaves, targets, bias=bias, entropy=entropy, grad_tolerance=3e-2)
        loss = (found.logps * grad).sum()
        if entropy:
            loss = loss + 0.1 * (found.entropy * grad.roll(1)).sum()
        return torch.autograd.grad(loss, leaves)

    monkeypatch.setattr(block_sparse, "plan_blocks", plan)
    found = gradients()
    monkeypatch.setattr(blocks_triton, "grad_blocks", block_oracles.grad_blocks)
    expected = gradients()
    assert plans[0].share == plans[1].share
    assert 0 < plans[0].share < block_sparse.DENSE_SHARE
    for mine, other in zip(found, expected, strict=True):
        for part in (slice(None), slice(-512, None)):
            error = (mine[part].double() - other[part].double()).norm() / other[part].double().norm()
            assert error <= torch.finfo(mine.dtype).eps  # not for NaN
