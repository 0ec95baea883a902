"""Gradients as sums over each token's list of ids, from the selected parts of dL/dlogits.

The Triton kernels are imported only when a backward has bounds, that is, if the forward's product has an epilogue.
"""

import torch
from torch import Tensor

from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.record import Gradients, Needs
from liger_rl.head.sparse.parts import EntryShares, PartCounts, SelectedParts
from liger_rl.kernels import gemm
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.segment_sums import Base, Entries, Segments, ones_of
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.kernels.transform import HeadFactors

BYTES_PER_ENTRY = 3  # of a selected part


def max_selected_share(hidden_size: int) -> float:
    """Mean share of selected parts from which on the exact backward is no slower than lists: 0.55 H / (H + 768).

    One H200, N = 8192, V = 128256, between 0.6 and 1.2 nats: lists take 1.3 ms and 23 ms times the share at H = 1024,
    where the exact backward takes 9.6 ms; 1 ms and 70 ms times the share at H = 4096, where it takes 38 ms.
    """
    return LIMITS.selected_share * hidden_size / (hidden_size + 768)


def wait_for_counts(parts: SelectedParts, counts: HostAnswer, max_share: float) -> PartCounts:
    """The numbers of selected parts: the backward's first host sync."""
    gradient_tokens, *block_ends = counts.wait()
    tiles, n = parts.rank.shape
    return PartCounts(gradient_tokens, block_ends, n, tiles, max_share)


def sum_over_lists(
    factors: HeadFactors,  # of n tokens and the whole vocabulary, in the dtype of products
    # (n,) index into `factors.hidden`. Tokens without a gradient point to the row of a token that has one, because
    # their own row may hold NaN. None if `factors.hidden` has been gathered that way.
    hidden_rows: Tensor | None,
    targets: tuple[Tensor, Tensor],  # (n,) ids and dL/dx, always listed
    gradients: TokenGradients,  # (n,) each
    parts: SelectedParts,
    part_counts: HostAnswer,
    entry_shares: EntryShares,
    dtypes: tuple[torch.dtype, torch.dtype],  # of the gradients of hidden and weight
    needs: Needs,
) -> tuple[Gradients | None, PartCounts]:
    """Gradients of hidden (n, H), weight and bias, or None if the exact backward is faster; and the numbers of parts.

    The lists are written before the host knows their length. Entries past the end of their memory are not written, and
    then the exact backward runs. Two host syncs.
    """
    from liger_rl.head.sparse import bounds_triton, listing_triton, tile_lists_triton
    from liger_rl.kernels import segment_sums_triton

    hidden, weight, bias, transform = factors
    device, vocab, width = weight.device, weight.shape[0], entry_shares.width
    tiles, n = parts.rank.shape
    max_ids = n * max(vocab // 128, LIMITS.mean_ids)
    starts = torch.empty(n + 1, dtype=torch.int64, device=device)

    def write_lists(spans: list[tuple[int, int, int, int]], number: int) -> tuple[Entries, HostAnswer]:
        entries = Entries.empty(min(int(LIMITS.listed_share * width * number), max_ids) + n, device)
        part_entries = listing_triton.PartEntries.empty(max(span[-1] for span in spans), width, device)
        before = torch.zeros(number + 1, dtype=torch.int64, device=device)
        for span in (tile_lists_triton.Span(*span) for span in spans):
            tile_lists = tile_lists_triton.list_tiles(parts, span)
            listing_triton.compute_parts(factors, targets[0], gradients, parts, tile_lists, span, part_entries)
            listing_triton.write_lists(
                part_entries, parts, tile_lists, entry_shares, targets, span, transform, before, entries, starts
            )
        return entries, HostAnswer(before[-1:])

    max_share = max_selected_share(weight.shape[1])
    max_parts = LIMITS.parts_bytes // (BYTES_PER_ENTRY * width)
    room = max(min(max_parts, int(max_share * n * tiles)), 1)
    entries, length = write_lists([(0, n, 0, room)], room)
    counts = wait_for_counts(parts, part_counts, max_share)
    if not counts.lists_are_faster:
        return None, counts
    if counts.block_ends[-1] > room:
        del entries
        entries, length = write_lists(counts.split(max_parts), counts.block_ends[-1])
    # The device runs these products while the host waits for the length of the lists.
    hidden_base = weight_base = None
    if needs[0]:
        tile_rows = bounds_triton.sum_tile_rows(entry_shares, weight, hidden.dtype)
        hidden_base = Base(gemm.matmul(parts.dropped_sums, tile_rows))
        del tile_rows
    if needs[1]:
        finite_hidden = hidden if hidden_rows is None or counts.gradient_tokens == n else hidden[hidden_rows]
        weight_base = Base(gemm.matmul(parts.dropped_sums.T, finite_hidden), entry_shares.shares, width)
        del finite_hidden
    listed = length.wait()[0] + n
    if listed > entries.ids.numel():
        return None, counts
    entries = Entries._make(values[:listed] for values in entries)

    grad_hidden = grad_weight = grad_bias = None
    if needs[0]:
        grad_hidden = torch.empty(hidden.shape, dtype=dtypes[0], device=device)
        by_token = Segments(starts, entries.tokens)
        segment_sums_triton.segment_sums(
            by_token, entries.coefficients, entries.ids, weight, grad_hidden, base=hidden_base
        )
        del hidden_base  # before dW is allocated
    if needs[1] or (bias is not None and needs[2]):
        by_id = segment_sums_triton.order_by_id(entries, vocab)
        if needs[1]:
            grad_weight = torch.empty(weight.shape, dtype=dtypes[1], device=device)
            segment_sums_triton.segment_sums(*by_id, hidden, grad_weight, base=weight_base)
        if bias is not None and needs[2]:
            grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=device)
            base = Base(gemm.column_sums(parts.dropped_sums)[:, None], entry_shares.shares, width)
            segment_sums_triton.segment_sums(*by_id, ones_of(hidden), grad_bias[:, None], base=base)
    return Gradients(grad_hidden, grad_weight, grad_bias), counts
