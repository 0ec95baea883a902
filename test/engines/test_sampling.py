"""`sample_tokens`: its distribution, its sets, and its log-probabilities to the bit, on every path.

On CPU the paths with an epilogue run in Triton's interpreter, in float16.
"""

import math

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from head_calls import run_triton
from liger_rl import LogitTransform, Support, linear_logprobs, sample_tokens
from liger_rl.kernels import reference
from tolerances import DEVICE, LOW

CUDA = DEVICE.type == "cuda"
TOKENS, VOCAB, SIZE = (700, 9000, 64) if CUDA else (8, 1100, 64)
PATHS = ["tiles", "epilogue"]
LIMITS = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
TRANSFORMS = [{}, {"temperature": 0.3}, {"transform": LogitTransform(softcap=40.0, scale=1.5), "temperature": 1.3}]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> str:
    if request.param == "epilogue":
        pytest.importorskip("triton", reason="Triton is not installed")
        if not CUDA:
            from liger_rl.kernels import sampling_triton

            run_triton(monkeypatch, epilogue=True)
            monkeypatch.setattr("liger_rl.engines.sampling.MULTIPLE", 1)
            monkeypatch.setattr(sampling_triton, "CANDIDATES", 512)
            monkeypatch.setattr(sampling_triton, "SHARES", 4)
            monkeypatch.setattr(sampling_triton, "ROOM", 512)
    elif CUDA:
        monkeypatch.setattr("liger_rl.kernels.devices.FORCED", "tiles")
    return request.param


def head(tokens: int = TOKENS, vocab: int = VOCAB, *, seed: int = 0, spread: float = 6.0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(tokens, SIZE, generator=g), torch.randn(vocab, SIZE, generator=g)
    weight, bias = weight * spread / SIZE**0.5, torch.randn(vocab, generator=g)
    return hidden.to(DEVICE, LOW), weight.to(DEVICE, LOW), bias.to(DEVICE)


def logits(hidden, weight, bias, *, transform=None, temperature=1.0) -> Tensor:
    """In float64."""
    transform = transform or LogitTransform()
    x = (hidden.double() @ weight.double().T + bias.double()) * transform.scale
    return (x if transform.softcap is None else transform.softcap * torch.tanh(x / transform.softcap)) / temperature


def full_transform(options: dict) -> LogitTransform:
    given = options.get("transform", LogitTransform())
    return LogitTransform(temperature=options.get("temperature", 1.0), softcap=given.softcap, scale=given.scale)


@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_plain_log_probabilities_to_the_bit(path, options):
    hidden, weight, bias = head()
    found = sample_tokens(hidden, weight, seed=3, bias=bias, **options)
    again = linear_logprobs(
        hidden, weight, found.ids, bias=bias, transform=full_transform(options), batch_invariant=True
    )
    assert torch.equal(found.logps, again.logps)
    exact = logits(hidden, weight, bias, **options).log_softmax(-1).gather(1, found.ids[:, None]).squeeze(1)
    torch.testing.assert_close(found.logps.double(), exact, rtol=1e-4, atol=1e-4)
    assert found.support is None
    assert found.fallbacks == 0


def test_greedy(path):
    hidden, weight, bias = head()
    weight[VOCAB - 20 :] = weight[:20]  # rows and biases that are equal
    bias[VOCAB - 20 :] = bias[:20]
    found = sample_tokens(hidden, weight, seed=3, bias=bias, temperature=0, transform=LogitTransform(softcap=5.0))
    again = linear_logprobs(
        hidden, weight, found.ids, bias=bias, transform=LogitTransform(softcap=5.0), batch_invariant=True,
        extras=["is_top1"],
    )  # fmt: skip
    assert again.is_top1.all()
    assert torch.equal(found.logps, again.logps)


def test_the_first_of_logits_that_a_softcap_makes_equal(path):
    hidden, weight = torch.zeros(1, SIZE, dtype=LOW, device=DEVICE), torch.zeros(300, SIZE, dtype=LOW, device=DEVICE)
    hidden[0, 0], weight[3, 0], weight[7, 0] = 1.0, 44.0, 45.0
    assert sample_tokens(hidden, weight, seed=0, temperature=0, transform=LogitTransform(softcap=5.0)).ids.item() == 3


def test_the_smallest_number_draws_no_improbable_id(path):
    """The first word of Philox at this position is under 2^8."""
    hidden, weight = torch.ones(1, SIZE, dtype=LOW, device=DEVICE), torch.zeros(300, SIZE, dtype=LOW, device=DEVICE)
    bias, position = torch.zeros(300, device=DEVICE), torch.tensor([14883995], device=DEVICE)
    bias[:256] = -60.0
    for limits in ({}, {"top_k": 299}):
        found = sample_tokens(hidden, weight, seed=0, positions=position, bias=bias, **limits)
        assert found.ids.item() >= 256, limits


def test_a_nucleus_of_the_likeliest_beside_a_min_p(path):
    """The many ids under 2^-28 are among the K likeliest, so the first id has less than 0.9 of their mass."""
    vocab, least = 6000, 0.9 * 2**-28
    hidden, weight = torch.zeros(1, SIZE, dtype=LOW, device=DEVICE), torch.zeros(vocab, SIZE, dtype=LOW, device=DEVICE)
    p = torch.full((vocab,), least, dtype=torch.float64)
    p[0] = 0.9 * (1 - 1e-5)
    p[1] = 1 - least * (vocab - 2) - p[0]
    found = sample_tokens(
        hidden, weight, seed=0, bias=p.log().float().to(DEVICE), top_k=5990, top_p=0.9, min_p=1e-7, support=True
    )
    assert found.support.token_ids.tolist() == [0, 1]


@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_limits(path, limits, options):
    """What could be drawn is what a sort of float64 logits says, and the log-probabilities are those of the trainer."""
    hidden, weight, bias = head()
    found = sample_tokens(hidden, weight, seed=3, bias=bias, support=True, **limits, **options)
    assert found.fallbacks == 0
    z = logits(hidden, weight, bias, **options)
    for token, ids in enumerate(found.support.token_ids.tensor_split(found.support.offsets[1:-1].cpu())):
        # Rounding may decide about an id at the edge: of a mass or share, or of two that are nearly as likely.
        expected = [
            frozenset(Support.from_logits(z[token].float()[None], **changed(limits, by)).token_ids.tolist())
            for by in (-1e-4, 0.0, 1e-4)
        ]
        if frozenset(ids.tolist()) not in expected:
            edge = z[token, list(expected[1])].min()
            assert (z[token, list(expected[1] ^ frozenset(ids.tolist()))] - edge).abs().max() < 1e-3
        assert (ids.diff() > 0).all()
        assert found.ids[token] in ids
    again = linear_logprobs(
        hidden, weight, found.ids, bias=bias, transform=full_transform(options), support=found.support,
        batch_invariant=True,
    )  # fmt: skip
    assert not again.missing_target.any()
    assert torch.equal(found.logps, again.logps)
    alone = sample_tokens(hidden, weight, seed=3, bias=bias, **limits, **options)
    assert torch.equal(alone.ids, found.ids)
    assert torch.equal(alone.logps, found.logps)
    assert alone.support is None


def changed(limits: dict, by: float) -> dict:
    return {name: value if name == "top_k" else value * (1 + by) for name, value in limits.items()}


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_a_draw_depends_on_its_token_alone(path, limits):
    hidden, weight, bias = head()
    positions = torch.arange(TOKENS, device=DEVICE) * 3 + (1 << 40)
    whole = sample_tokens(hidden, weight, seed=9, positions=positions, bias=bias, **limits)
    order = torch.randperm(TOKENS, device=DEVICE)
    pieces = [
        sample_tokens(hidden[rows], weight, seed=9, positions=positions[rows], bias=bias, **limits)
        for rows in order.tensor_split([1, 4, TOKENS // 2])
    ]
    for name in ("ids", "logps"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(whole, name)[order])
    other = sample_tokens(hidden, weight, seed=9 + (1 << 33), positions=positions, bias=bias, **limits)
    assert (other.ids != whole.ids).float().mean() > 0.3


@pytest.mark.parametrize("limits", [{}, {"top_k": 50, "top_p": 0.95}], ids=str)
def test_distribution(path, limits):
    """A chi-square of many draws of one token, beside the softmax in float64."""
    if path == "epilogue" and not CUDA:
        draws, vocab = 100 if limits else 1000, 300
    else:
        draws, vocab = 1_000_000 if CUDA else 40_000, 1100
    hidden, weight, bias = head(1, vocab)
    kept = torch.ones(vocab, dtype=torch.bool, device=DEVICE)
    z = logits(hidden, weight, bias)[0]
    if limits:
        kept = torch.zeros_like(kept).index_fill(0, Support.from_logits(z[None].float(), **limits).token_ids, True)
    p = z.masked_fill(~kept, -math.inf).softmax(0)
    counts = torch.zeros(vocab, dtype=torch.int64, device=DEVICE)
    for start in range(0, draws, 50_000):
        rows = min(50_000, draws - start)
        positions = torch.arange(start, start + rows, device=DEVICE)
        found = sample_tokens(hidden.expand(rows, -1), weight, seed=5, positions=positions, bias=bias, **limits)
        counts += found.ids.bincount(minlength=vocab)
    assert counts[~kept].sum() == 0
    # Ids that are rarer than five draws count as one.
    rare = p * draws < 5
    expected = torch.cat([p[~rare], p[rare].sum()[None]]) * draws
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    chi_square = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    freedom = expected.numel() - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 8
    assert chi_square > freedom - 4.5 * math.sqrt(2 * freedom) - 8


def test_too_many_candidates(path):
    """A flat token takes tiles of logits, and the others stay as they were."""
    hidden, weight, bias = head(6, 5000, spread=6.0)
    hidden[2] = 0
    bias.zero_()
    found = sample_tokens(hidden, weight, seed=1, bias=bias, top_p=0.9, support=True)
    assert found.fallbacks == (path == "epilogue")
    sizes = found.support.offsets.diff()
    assert 4490 <= sizes[2] <= 4510
    others = torch.tensor([0, 1, 3, 4, 5], device=DEVICE)
    alone = sample_tokens(hidden[others], weight, seed=1, positions=others, bias=bias, top_p=0.9, support=True)
    assert alone.fallbacks == 0
    assert torch.equal(found.ids[others], alone.ids)
    assert torch.equal(found.logps[others], alone.logps)
    rows = list(found.support.token_ids.tensor_split(found.support.offsets[1:-1].cpu()))
    assert torch.equal(torch.cat([rows[i] for i in others.tolist()]), alone.support.token_ids)
    again = linear_logprobs(hidden, weight, found.ids, bias=bias, support=found.support, batch_invariant=True)
    assert torch.equal(found.logps, again.logps)


def test_philox():
    """The known answers of Random123, and the kernel beside the formula."""
    uniforms = pytest.importorskip("liger_rl.kernels.sampling_triton").uniforms
    zero = reference.uniforms(0, torch.zeros(1, dtype=torch.int64))
    assert [value.item() * 2**23 - 0.5 for value in zero] == [0x6627E8D5 >> 9, 0xE169C58D >> 9]
    positions = torch.randint(1 << 62, (200,), device=DEVICE)
    for seed in (0, 7, (1 << 63) - 1):
        found, expected = uniforms(seed, positions), reference.uniforms(seed, positions)
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
        assert 0.3 < found.of_tile.mean() < 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 1 << 63}, "seed must be below"),
        ({"seed": 1.0}, "seed must be an int"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be above 0"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"temperature": torch.tensor([1.0, 0.0, -1.0])}, "temperature must be positive and finite at each token; 2"),
        ({"temperature": torch.ones(4)}, "temperature must be"),
        ({"transform": 0.7}, "transform must be a LogitTransform"),
        ({"temperature": 0, "top_p": 0.9}, "must be None with temperature=0"),
        ({"support": True}, "support must be False without"),
        ({"transform": LogitTransform(temperature=2.0)}, "transform.temperature must be 1"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions must be int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, r"positions must be \(3,\)"),
        ({"top_q": 3}, "top_q"),
    ],
)
def test_refusals(options, message):
    hidden, weight = torch.zeros(3, 8), torch.zeros(11, 8)
    with pytest.raises((ValueError, TypeError), match=message):
        sample_tokens(hidden, weight, **({"seed": 0} | options))


def test_shapes_and_no_tokens(path):
    hidden, weight, _ = head(6, 300)
    found = sample_tokens(hidden.view(2, 3, -1).requires_grad_(), weight, seed=1, top_k=3, support=True)
    assert found.ids.shape == found.logps.shape == (2, 3)
    assert found.support.tokens == 6
    assert not found.logps.requires_grad
    none = sample_tokens(hidden[:0], weight, seed=1, top_k=3, support=True)
    assert none.ids.shape == (0,)
    assert none.support.tokens == 0
    assert sample_tokens(hidden, weight, seed=1, top_k=1000).ids.shape == (6,)  # more than there are ids


def test_a_temperature_for_each_token(path):
    hidden, weight, bias = head()
    heat = torch.rand(TOKENS, device=DEVICE) + 0.5
    for limits in ({}, {"top_p": 0.9}):
        found = sample_tokens(hidden, weight, seed=2, bias=bias, temperature=heat, support=bool(limits), **limits)
        again = linear_logprobs(
            hidden, weight, found.ids, bias=bias, transform=LogitTransform(temperature=heat), support=found.support,
            batch_invariant=True,
        )  # fmt: skip
        assert torch.equal(found.logps, again.logps)


def test_banned_and_undefined_logits(path):
    """A banned id is never drawn; NaN in a token stays in its log-probability."""
    hidden, weight, bias = head(8, 600)
    bias[::2] = -math.inf
    hidden[3] = math.nan
    for limits in ({}, {"top_k": 400}, {"top_p": 0.9}):
        found = sample_tokens(hidden, weight, seed=2, bias=bias, **limits)
        live = torch.arange(8, device=DEVICE) != 3
        assert (found.ids[live] % 2 == 1).all()
        assert found.logps[live].isfinite().all()
        assert 0 <= found.ids[3] < 600


def test_fixed_shape(path):
    """The same draws without a host that waits; a token with too many candidates has none."""
    hidden, weight, bias = head(6, 5000, spread=6.0)
    for limits in ({}, {"top_k": 20}):
        found = sample_tokens(hidden, weight, seed=1, bias=bias, **limits)
        if path == "tiles" and limits:
            with pytest.raises(ValueError, match="fixed_shape with a top_k, top_p or min_p needs"):
                sample_tokens(hidden, weight, seed=1, bias=bias, fixed_shape=True, **limits)
            continue
        fixed = sample_tokens(hidden, weight, seed=1, bias=bias, fixed_shape=True, **limits)
        assert torch.equal(found.ids, fixed.ids)
        assert torch.equal(found.logps, fixed.logps)
    with pytest.raises(ValueError, match="support must be False with fixed_shape"):
        sample_tokens(hidden, weight, seed=1, top_k=2, support=True, fixed_shape=True)
    if path == "epilogue":
        hidden[2] = 0
        found = sample_tokens(hidden, weight, seed=1, bias=bias.zero_(), top_p=0.9, fixed_shape=True)
        assert (found.ids == -1).nonzero().tolist() == [[2]]
        assert found.logps[2] == 0
        assert found.fallbacks == 1


@NEEDS_GPU
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_cuda_graph(limits):
    hidden, weight, bias = head(100)
    positions = torch.arange(100, device=DEVICE)
    call = {"seed": 4, "positions": positions, "bias": bias, "fixed_shape": True, **limits}
    sample_tokens(hidden, weight, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample_tokens(hidden, weight, **call)
    for step in range(3):
        positions.copy_(torch.arange(100) + 100 * step)
        hidden.copy_(head(100, seed=step)[0])
        graph.replay()
        again = sample_tokens(hidden, weight, **call)
        assert torch.equal(found.ids, again.ids)
        assert torch.equal(found.logps, again.logps)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}], ids=str)
def test_few_ids_and_pieces_of_tokens(path, limits, monkeypatch):
    hidden, weight, bias = head(20, 5)
    options = {"seed": 1, "bias": bias[:5], **limits}
    whole = sample_tokens(hidden, weight, **options)
    assert whole.ids.max() < 5
    monkeypatch.setattr("liger_rl.engines.sampling.KEPT_BYTES", 1)
    monkeypatch.setattr("liger_rl.engines.sampling.MULTIPLE", 16 if CUDA else 3)
    again = sample_tokens(hidden, weight, **options)
    assert torch.equal(whole.ids, again.ids)
    assert torch.equal(whole.logps, again.logps)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_under_autocast(limits):
    """The dtype of the products is autocast's, in the draw as in the trainer."""
    hidden, weight, bias = (tensor.float() for tensor in head(20, 600))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = sample_tokens(hidden, weight, seed=1, bias=bias, support=bool(limits), **limits)
        again = linear_logprobs(hidden, weight, found.ids, bias=bias, support=found.support, batch_invariant=True)
    assert torch.equal(found.logps, again.logps)
    low = sample_tokens(hidden.bfloat16(), weight.bfloat16(), seed=1, bias=bias, **limits)
    assert torch.equal(found.ids, low.ids)
