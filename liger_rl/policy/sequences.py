"""Sums over the tokens of each sequence, handed back to every token of it; padded or packed, one rank or many."""

from torch import Tensor

from liger_rl.policy.batch import AlignedBatch
from liger_rl.policy.segments import segment_sum


def check_sequences(batch: AlignedBatch) -> None:
    """Raises ValueError where nothing says which packed tokens are of one sequence."""
    if batch.mask.dim() == 1 and batch.segments is None:
        raise ValueError(
            "segments must say which sequence each packed token belongs to, because something here is per sequence; "
            "got None (or give (B, T) tensors, one sequence a row)"
        )


def sequence_sum(values: Tensor, batch: AlignedBatch) -> Tensor:
    """Values, 0 at masked tokens -> the sum over each token's sequence: (B, T) -> (B, 1), packed (N,) -> (N,)."""
    if values.dim() == 2:
        return values.sum(-1, keepdim=True)
    check_sequences(batch)
    assert batch.segments is not None
    return segment_sum(values, batch.segments)


def sequence_length(batch: AlignedBatch) -> Tensor:
    """Tokens that count in each token's sequence, at least 1."""
    return sequence_sum(batch.mask.to(batch.advantages.dtype), batch).clamp(min=1)


def sequence_mean(values: Tensor, batch: AlignedBatch) -> Tensor:
    """Values, 0 at masked tokens -> the mean over the counted tokens of each token's sequence."""
    return sequence_sum(values, batch) / sequence_length(batch)
