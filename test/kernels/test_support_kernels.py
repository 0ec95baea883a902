"""Sums over segments, in launches of any shape: Triton's against those in PyTorch. Lists of ids are the fuzzer's."""

import pytest
import torch

from devices import on_gpu
from liger_rl.kernels.limits import LIMITS, Launch
from liger_rl.support import segment_sums as listed
from liger_rl.support import segment_sums_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H = 70


@pytest.mark.parametrize("shape", [(4, 2048, 4, 16, 1), *on_gpu(((2, 16, 2, 8, 4),), ((4, 32, 1, 1, 4),))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_segments(shape, dtype):
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
    listed.segment_sums(segments, coefficients, indices, table, outs[0])
    for out in outs[1:]:
        launch = Launch(*shape)
        segment_sums_triton.segment_sums(segments, coefficients, indices, table, out, launch=launch)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)
    assert torch.equal(outs[1], outs[2])
    ordered = torch.ones_like(outs[0])
    by_id = segments._replace(by_id=True)
    segment_sums_triton.segment_sums(by_id, coefficients, indices, table, ordered, launch=launch)
    assert torch.equal(ordered, outs[1])
    assert (ordered[sizes == 0] == 0).all()


def test_sums_of_pieces_fit_their_memory():
    for positions, columns in ((1, 1), (71_000, 4096), (4_200_000, 4096), (10**9, 16384), (100, 2**24)):
        piece = segment_sums_triton.piece_of(positions, columns, LIMITS.by_token)
        pieces = -(-positions // piece)
        assert pieces == 1 or pieces * columns * 4 <= segment_sums_triton.PARTIAL_BYTES
