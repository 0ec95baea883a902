"""Sums over the tokens of each sequence, handed back to every token of it."""

from torch import Tensor

from liger_rl.policy.batch import AlignedBatch


def sequence_sum(values: Tensor, batch: AlignedBatch) -> Tensor:
    """(B, T) values, 0 at masked tokens -> (B, 1) sum over the sequence a row is."""
    if values.dim() != 2:
        raise ValueError(
            f"per_token_logps must be (B, T), one sequence a row, for anything per sequence; got {tuple(values.shape)}"
        )
    return values.sum(-1, keepdim=True)


def sequence_length(batch: AlignedBatch) -> Tensor:
    """(B, 1) number of tokens that count, at least 1."""
    return sequence_sum(batch.mask, batch).clamp(min=1)


def sequence_mean(values: Tensor, batch: AlignedBatch) -> Tensor:
    """(B, T) values, 0 at masked tokens -> (B, 1) mean over the tokens that count."""
    return sequence_sum(values, batch) / sequence_length(batch)
