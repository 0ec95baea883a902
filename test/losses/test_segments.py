"""Segments of packed tokens. The losses, packed and padded, are the fuzzer's.

Over ranks that share sequences: test/distributed/test_sequences.py.
"""

import math
import re

import pytest
import torch

from liger_rl import ppo_loss_fn
from liger_rl.losses import KLPenalty, PolicyBatch, PPOClip, Segments, SequenceMean, SequenceSum
from liger_rl.losses.segments import segment_sum


@pytest.mark.parametrize(
    ("index", "got"),
    [(torch.zeros(3), "(3,) torch.float32"), (torch.zeros(3, 2).long(), "(3, 2) torch.int64"), ([0], "list")],
)
def test_other_indices_are_refused(index, got):
    with pytest.raises(
        TypeError, match=re.escape(f"segments.index must be a dense tensor of integers, (N,), got {got}")
    ):
        Segments(index=index, count=1)


def test_twice_differentiable():
    """Ratios of sequences in any order, some of their tokens masked; means that leave no bound."""
    segments = Segments(index=torch.randint(5, (24,)), count=5)
    logps, advantages, change = torch.randn(3, 24, dtype=torch.float64)
    columns = {"advantages": advantages, "old_per_token_logps": logps + 0.1 * change, "segments": segments}
    batch = PolicyBatch(**columns, mask=torch.rand(24) < 0.8)
    wide = PPOClip(importance_sampling_level="sequence", mean_advantages=True, epsilon_low=0.9, epsilon_high=9.0)

    def loss(logps):
        return ppo_loss_fn(logps, batch, wide, SequenceMean()).loss

    leaf = logps.requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf)
    assert torch.autograd.gradgradcheck(loss, leaf)


@pytest.mark.parametrize("written", ["advantages", "old_per_token_logps", "ref_per_token_logps", "segments"])
def test_a_write_to_a_column_before_the_backward_changes_no_gradient(written):
    """The sums over segments read their index again, and raise PyTorch's error."""
    logps = -torch.rand(24)

    def loss():
        index = torch.arange(24) // 6
        columns = {name: torch.linspace(-2, -1, 24) for name in ("old_per_token_logps", "ref_per_token_logps")}
        columns |= {"advantages": torch.linspace(-1, 1, 24), "segments": Segments(index=index, count=4)}
        leaf, ratio = logps.clone().requires_grad_(), PPOClip(importance_sampling_level="sequence", epsilon_high=9.0)
        total = ppo_loss_fn(leaf, PolicyBatch(**columns), ratio, SequenceMean(), kl=KLPenalty(beta=0.1)).loss
        return total, leaf, index if written == "segments" else columns[written]

    expected, leaf, _ = loss()
    (grad,) = torch.autograd.grad(expected, leaf)
    again, leaf, column = loss()
    column.fill_(1)
    if written == "segments":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()
    else:
        assert torch.equal(torch.autograd.grad(again, leaf)[0], grad)


# --- sums over segments -----------------------------------------------------------------------------------------------


def test_segment_sum_is_exact_and_repeats():
    """Thousands of tokens in one sum, in float32: to one rounding, and the same to the last bit each time."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=g) * 10 ** torch.empty(20_000).uniform_(-3, 3, generator=g)
    segments = Segments(index=torch.randint(5, (20_000,), generator=g), count=5)
    found = segment_sum(values, segments)
    for s in range(5):
        mine = segments.index == s
        assert found[mine].unique().numel() == 1
        assert found[mine][0].item() == pytest.approx(math.fsum(values[mine].tolist()), rel=1.2e-7)
    assert all(torch.equal(found, segment_sum(values, segments)) for _ in range(3))


# --- bad input --------------------------------------------------------------------------------------------------------


def of(index, **more):
    return lambda: Segments(index=index, **{"count": 1} | more)


ZEROS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "error", "make"),
    [
        *(
            ("index", TypeError, of(x))
            for x in (ZEROS.double(), ZEROS[:, None], [0, 1], ZEROS.bool(), ZEROS.cfloat(), ZEROS.to_sparse())
        ),
        *(("count", ValueError, of(ZEROS, count=x)) for x in (-1, 1.0, True)),
        ("all_reduce", TypeError, of(ZEROS, all_reduce=1)),
    ],
)
def test_bad_segments_are_named(name, error, make):
    with pytest.raises(error, match=name):
        make()


@pytest.mark.parametrize(
    ("shape", "segments", "error"),
    [
        ((4, 2), Segments(index=torch.zeros(8, dtype=torch.long), count=1), ValueError),
        ((8,), Segments(index=torch.zeros(7, dtype=torch.long), count=1), ValueError),
        ((8,), torch.zeros(8, dtype=torch.long), TypeError),
        ((8,), None, ValueError),
    ],
)
def test_segments_that_do_not_fit(shape, segments, error):
    parts = {"advantages": torch.ones(shape), "segments": segments, "num_sequences": 1}
    logps = torch.zeros(shape, requires_grad=True)
    with pytest.raises(error, match="segments"):
        ppo_loss_fn(logps, PolicyBatch(**parts), PPOClip(), SequenceSum(), metrics="basic")
