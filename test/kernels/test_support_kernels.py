"""Kernels of listed ids: Triton's against those in PyTorch, which `test/engines/test_support.py` holds to float64."""

import math

import pytest
import torch

import oracles
from liger_rl import LogitTransform
from liger_rl.engines.sparse import slots as slots_torch
from liger_rl.engines.sparse import slots_triton
from liger_rl.kernels import segments as listed
from liger_rl.kernels import segments_triton
from liger_rl.kernels.statistics import EXTRAS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V, H = 90, 70


def csr(sizes: list[int], dtype: torch.dtype, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids from a small pool, so that many are repeated."""
    ids = torch.randint(pool, (sum(sizes),), dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=dtype)
    return ids.to(DEVICE), offsets.to(DEVICE)


def slots_of(
    kernels, *, keep_single=True, distinct=False, first=0, rows=V, dtype=torch.int64, mask=None, wanted=None
) -> listed.Slots:
    generator = torch.get_rng_state()
    torch.manual_seed(3)
    ids, offsets = csr([3, 0, 100, 1, 1, 33, 70, 2, 32], dtype, 60)
    targets = torch.tensor([4, 5, 6, int(ids[103]), 0, -100, int(ids[140]), 300, 8], device=DEVICE)
    mask = torch.tensor([True] * 8 + [False] if mask is None else mask, device=DEVICE)
    wanted = None if wanted is None else torch.tensor(wanted, device=DEVICE)
    torch.set_rng_state(generator)
    given = {"part": listed.Rows(rows, first, V), "keep_single": keep_single, "distinct": distinct}
    return kernels.make_slots(ids, offsets, targets, mask, wanted, **given)


@pytest.mark.parametrize(("keep_single", "distinct"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("first", "rows", "dtype"), [(0, V, torch.int64), (20, 30, torch.int32)])
def test_slots(keep_single, distinct, first, rows, dtype, monkeypatch):
    """Rows in one block and in many; where the promise of distinct rows is broken, repeated ids count."""
    given = {"keep_single": keep_single, "distinct": distinct, "first": first, "rows": rows, "dtype": dtype}
    mine, theirs = (slots_of(kernels, **given) for kernels in (slots_triton, slots_torch))
    monkeypatch.setattr(slots_triton, "ROW_BLOCK", 16)
    for one, other in zip(slots_of(slots_triton, **given), mine, strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)
    for name, values in theirs._asdict().items():
        found = getattr(mine, name)
        if isinstance(values, int):
            assert found == values
        else:
            assert found.dtype == values.dtype, name
            assert torch.equal(found, values), name
    kinds = [listed.SEVERAL, listed.FULL, listed.SEVERAL, listed.SINGLE]
    assert mine.kinds.tolist() == [*kinds, listed.SEVERAL, 0, listed.SEVERAL, 0, 0]


@pytest.mark.parametrize("wanted", [None, [0.5, 0.0, math.nan], [1, 0, 1, 0, 1, 1, 1, 1, 1]])
def test_which_tokens_count_and_what_is_wrong(wanted):
    """A mask with other values than 0 and 1, targets outside the vocabulary, a column of sequences or of tokens."""
    for mask in ([1.0] * 6 + [2.0, 1.0, 0.0], [0] * 8 + [3]):
        mine, theirs = (slots_of(kernels, mask=mask, wanted=wanted) for kernels in (slots_triton, slots_torch))
        for name in ("ids", "kinds", "missing", "numbers"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        counts = torch.tensor(mask, dtype=torch.bool) & (torch.arange(9) != 5) & (torch.arange(9) != 7)
        if wanted is not None:
            counts &= torch.tensor(wanted).bool().repeat_interleave(9 // len(wanted))
        assert torch.equal(mine.kinds.cpu() != listed.IGNORED, counts)
        assert mine.numbers[listed.BAD_MASKS] == 1
        assert mine.numbers[listed.BAD_TARGETS] == bool(mask[7])  # wanted or not
        assert mine.numbers[listed.LONG_ROWS] == 0


def test_long_rows_are_counted():
    for kernels in (slots_triton, slots_torch):
        ids, offsets = csr([listed.LONG_ROW - 1, listed.LONG_ROW, 0], torch.int64, 5)
        given = {"part": listed.Rows(V, 0, V), "keep_single": False, "distinct": False}
        slots = kernels.make_slots(ids, offsets, torch.zeros(3, dtype=torch.int64, device=DEVICE), None, **given)
        assert slots.numbers[listed.LONG_ROWS] == 1


TRANSFORMS = [LogitTransform(temperature=0.6), LogitTransform(softcap=3.0, scale=1.4)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [(4, 2048, 32), (2, 16, 4), (8, 32, 7)])
def test_logits_fold_and_gradients(transform, shape):
    """Any shape of a program: several steps over the columns, rows in pieces."""
    slots = slots_of(slots_torch)
    n = slots.kinds.numel()
    hidden, weight = torch.randn(n, H).to(DEVICE, torch.bfloat16), torch.randn(V, H).to(DEVICE) / 4
    factors = listed.Factors(hidden[:, :-3], weight[:, :-3], torch.randn(V).to(DEVICE))
    transform = transform.of_tokens(None if transform.temperature != 1.0 else (0.5 + torch.rand(n)).to(DEVICE))
    launch = segments_triton.Launch(*shape[:2], 4, shape[2])
    z = listed.dots(factors, slots, transform)
    found = segments_triton.dots(factors, slots, transform, launch)
    there = slots.ids < V
    torch.testing.assert_close(found[there], z[there], rtol=1e-5, atol=1e-5)
    targets = slots.ids[slots.starts[:-1]].long()
    for entropy, extras in ((True, EXTRAS), (False, ())):
        given = {"entropy": entropy, "extras": extras}
        for name in ("fold", "statistics"):
            (mine, sizes), (theirs, counts) = (
                getattr(kernels, name)(z, slots, targets, **given) for kernels in (slots_triton, slots_torch)
            )
            for part, truth in zip((*mine, sizes), (*theirs, counts), strict=True):
                assert (part is None) == (truth is None)
                if truth is not None:
                    torch.testing.assert_close(part, truth, rtol=1e-5, atol=1e-5)
        g, e = torch.randn(2, n, device=DEVICE)
        given = (z, slots, theirs, (g, e if entropy else None), transform)
        mine, truth = (kernels.slot_gradients(*given) for kernels in (slots_triton, slots_torch))
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
        assert (mine[~there] == 0).all()
        ordered = torch.sort(slots.ids, stable=True)
        entries = listed.Entries(slots.ids, mine, slots.tokens)
        by_id, others = (kernels.order_by_id(entries, ordered, V) for kernels in (slots_triton, slots_torch))
        assert torch.equal(by_id.coefficients, mine[ordered.indices])
        assert torch.equal(by_id.tokens, others.tokens)
        assert torch.equal(by_id.segments.starts, others.segments.starts)


@pytest.mark.parametrize("transform", TRANSFORMS[1:])
def test_temperatures_of_tokens(transform):
    """The kernels of plain PyTorch beside float64; no caller above them has such temperatures."""
    slots = slots_of(slots_torch)
    n, wanted, token = slots.kinds.numel(), slots.ids < V, slots.tokens.long()
    hidden, weight, bias = torch.randn(n, H, device=DEVICE), torch.randn(V, H, device=DEVICE), torch.randn(V).to(DEVICE)
    temperatures = (0.5 + torch.rand(n)).to(DEVICE)
    transform = transform.of_tokens(temperatures)
    z = listed.dots(listed.Factors(hidden, weight, bias), slots, transform)
    x = oracles.linear_logits(hidden, weight, bias)[token, slots.ids.clamp(max=V - 1).long()].requires_grad_()
    capped = oracles.transformed(x, softcap=transform.softcap, scale=transform.scale) / temperatures.double()[token]
    torch.testing.assert_close(z[wanted].double(), capped[wanted], rtol=1e-5, atol=1e-5)
    targets = slots.ids[slots.starts[:-1]].long()
    statistics, _ = slots_torch.statistics(z, slots, targets, entropy=True, extras=())
    g, e = torch.randn(2, n, device=DEVICE)
    found = slots_torch.slot_gradients(z, slots, statistics, (g, e), transform)
    total = 0.0
    for t in (slots.kinds == listed.SEVERAL).nonzero().flatten().tolist():
        own = slice(int(slots.starts[t]), int(slots.starts[t + 1]))
        log_p = capped[own][wanted[own]].log_softmax(0)
        total = total + g[t] * log_p[0] - e[t] * (log_p.exp() * log_p).sum()
    (expected,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 2048, 4, 16, 1), (2, 16, 2, 8, 4), (4, 32, 1, 1, 4)])
@pytest.mark.parametrize(("dtype", "add"), [(torch.float32, True), (torch.bfloat16, False)])
def test_sums_of_segments(shape, dtype, add):
    """Segments of none to many positions, in pieces that start anywhere; positions after the last belong to none."""
    sizes = torch.tensor([0, 3, 40, 0, 0, 17, 1, 1, 16, 0])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    of_position = torch.cat([torch.repeat_interleave(torch.arange(10), sizes), torch.full((9,), 11)])
    segments = listed.Segments(starts.to(DEVICE), of_position.to(DEVICE))
    coefficients = torch.randn(of_position.numel(), device=DEVICE)
    coefficients[5:9] = 0.0
    indices = torch.randint(6, of_position.shape, device=DEVICE)
    indices[coefficients == 0] = -1  # which nothing may read
    table = torch.randn(6, H, device=DEVICE)
    outs = [torch.ones(10, H, dtype=dtype, device=DEVICE) for _ in range(3)]
    listed.segment_sums(segments, coefficients, indices, table, outs[0], add=add)
    for out in outs[1:]:
        launch = segments_triton.Launch(*shape)
        segments_triton.segment_sums(segments, coefficients, indices, table, out, add=add, launch=launch)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)
    assert torch.equal(outs[1], outs[2])
    untouched = torch.ones_like(outs[0])
    by_id = segments._replace(by_id=True)
    segments_triton.segment_sums(by_id, coefficients, indices, table, untouched, add=add, launch=launch)
    assert torch.equal(untouched, outs[1])
    assert (untouched[sizes == 0] == (1 if add else 0)).all()


def test_sums_of_pieces_fit_their_memory():
    for positions, columns in ((1, 1), (71_000, 4096), (4_200_000, 4096), (10**9, 16384), (100, 2**24)):
        piece = segments_triton.piece_of(positions, columns, segments_triton.BY_TOKEN)
        pieces = -(-positions // piece)
        assert pieces == 1 or pieces * columns * 4 <= segments_triton.PARTIAL_BYTES
