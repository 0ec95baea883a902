"""Kernels of listed ids: Triton's against those in PyTorch, which `test/engines/test_support.py` holds to float64."""

import pytest
import torch

from liger_rl.engines.sparse import slots as slots_torch
from liger_rl.engines.sparse import slots_triton
from liger_rl.kernels import segments as listed
from liger_rl.kernels import segments_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V, H = 90, 70


def csr(sizes: list[int], dtype: torch.dtype, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids from a small pool, so that many are repeated."""
    ids = torch.randint(pool, (sum(sizes),), dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=dtype)
    return ids.to(DEVICE), offsets.to(DEVICE)


def slots_of(kernels, *, keep_single=True, distinct=False, first=0, rows=V, dtype=torch.int64) -> listed.Slots:
    generator = torch.get_rng_state()
    torch.manual_seed(3)
    ids, offsets = csr([3, 0, 100, 1, 1, 33, 70, 2, 32], dtype, 60)
    targets = torch.tensor([4, 5, 6, int(ids[103]), 0, -100, int(ids[140]), 300, 8], device=DEVICE)
    mask = torch.tensor([True] * 8 + [False], device=DEVICE)
    torch.set_rng_state(generator)
    given = {"part": listed.Rows(rows, first, V), "keep_single": keep_single, "distinct": distinct}
    return kernels.make_slots(ids, offsets, targets, mask, None, **given)


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


def test_long_rows_are_counted():
    for kernels in (slots_triton, slots_torch):
        ids, offsets = csr([listed.LONG_ROW - 1, listed.LONG_ROW, 0], torch.int64, 5)
        given = {"part": listed.Rows(V, 0, V), "keep_single": False, "distinct": False}
        slots = kernels.make_slots(ids, offsets, torch.zeros(3, dtype=torch.int64, device=DEVICE), None, **given)
        assert slots.numbers[listed.LONG_ROWS] == 1


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
