"""Computes the log-probabilities of a call: checks it, selects tokens, picks the engine and runs it under autograd."""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.autograd import linear_values
from liger_rl.head.head_call import HeadCall, LogProbs, check_topk
from liger_rl.head.head_options import EngineOptions, resolved
from liger_rl.head.head_shape import HeadShape
from liger_rl.head.host_answer import HostAnswer
from liger_rl.head.interface import Head, whole_head
from liger_rl.head.live_tokens import TokenSelection, live_tokens
from liger_rl.head.plan import ENGINES, path_for
from liger_rl.head.sparse import listed as support_engine
from liger_rl.head.support import ListedIds, Support
from liger_rl.kernels.segment_sums import BAD_MASKS, BAD_TARGETS


def log_probs(call: HeadCall, *, dtype: torch.dtype | None = None) -> LogProbs:
    """Log-probabilities where `needed_mask` is set. Other tokens get 0 like masked ones; their ids are still checked.

    Args:
        dtype: the result of `call.check_tensors()`, if the caller has already checked these tensors.
    """
    call.check_together()
    options, shard = call.options, None

    with whole_head(options.gather, call.weight, call.bias):
        if dtype is None:
            dtype = call.check_tensors()
        if call.vocab_parallel is not None:
            shard = call.vocab_parallel.shard_of(call.weight)
        targets = call.targets.long().contiguous()  # a narrow dtype would wrap the vocabulary's size in comparisons
        vocab = call.weight.shape[0] if shard is None else shard.vocab
        check_topk(options.topk, vocab)
        # The largest of K targets: negative if all K are negative, outside the vocabulary if any is too large.
        ids = targets.amax(-1) if call.several else targets
        engine_options = resolved(call.options, dtype, grad_tolerance=0.0 if call.exact else None)
        if call.support is not None:
            return _over_support(call, call.support, ids, engine_options)
        wait_for_selection = start_selection(call, ids, vocab)
        engine = ENGINES[path_for(HeadShape.of(call, engine_options))[0]]
        flat_targets = ids.view(-1) if shard is None else shard.local(ids.view(-1))
        if call.several:
            flat_targets = targets.view(-1, targets.shape[-1])
        # We wait as late as possible: after this sync the device is idle until the host launches the product.
        live, _ = wait_for_selection()
        head = head_of(call, flat_targets, live, shard)
        values = linear_values(head, engine_options, engine)
    return _log_probs(values._asdict(), live, ids.shape)


def _log_probs(values: dict[str, Tensor | None], live: TokenSelection, shape: torch.Size) -> LogProbs:
    """Values of the live tokens, by name -> of all tokens, 0 (topk_ids: -1) at tokens that do not count."""
    columns = {name: None if value is None else live.spread(value, shape) for name, value in values.items()}
    topk_ids = values.get("topk_ids")
    if topk_ids is not None:
        columns["topk_ids"] = live.spread(topk_ids + 1, shape) - 1  # -1 at tokens that do not count
    return LogProbs(**columns)  # type: ignore[arg-type]


def _over_support(call: HeadCall, support: Support, ids: Tensor, options: EngineOptions) -> LogProbs:
    """Log-probabilities over the ids that each token lists. A token that lists none has the whole vocabulary."""
    # `flatten` returns a flat tensor itself. A view costs as much host time as a launch.
    flat, vocab, shape = ids.flatten(), call.weight.shape[0], call.targets.shape
    mask, needed = (None if tensor is None else tensor.flatten() for tensor in (call.mask, call.needed_mask))
    make_slots = support_engine.kernels_for(flat.device).make_slots
    lists = support.token_ids, support.offsets
    # Bad values raise no error here and do no harm. The check reads `numbers` of the slots.
    slots = make_slots(*lists, flat, mask, needed, vocab=vocab, distinct=support.distinct)
    listed = ListedIds(slots, _start_check(call, ids, vocab, support, slots.numbers))
    head = head_of(call, flat, TokenSelection(flat.numel()), None)._replace(listed=listed)
    named = linear_values(head, options, support_engine)._asdict() | {"missing_target": slots.missing}
    if flat.shape != shape:
        named = {name: None if tensor is None else tensor.view(shape) for name, tensor in named.items()}
    return LogProbs(**named)


def _start_check(call: HeadCall, ids: Tensor, vocab: int, support: Support, counts: Tensor) -> Callable[[], list[int]]:
    """Ask the device for `counts`, which are `Slots.numbers`. The result is the check of a `ListedIds`, and waits."""
    answer = HostAnswer(counts)

    def check() -> list[int]:
        numbers = answer.wait().tolist()
        if numbers[BAD_TARGETS] or numbers[BAD_MASKS]:
            start_selection(call, ids, vocab)()  # raises the error with the wrong values
        support.check_values(numbers, vocab=vocab)
        return numbers

    return check


def start_selection(
    call: HeadCall, ids: Tensor, vocab: int, source: str = "weight"
) -> Callable[[], tuple[TokenSelection, list[int]]]:
    """`live_tokens` of the call."""
    return live_tokens(ids, call.mask, vocab, source, wanted=call.needed_mask, targets_name=call.targets_name)


def head_of(call: HeadCall, targets: Tensor, live: TokenSelection, shard: VocabShard | None) -> Head:
    """The Head of a call, with tokens flattened to N. `targets` (N,) or (N, K) are flat already."""
    hidden = call.hidden.flatten(0, -2)
    return Head(hidden, call.weight, call.bias, targets, live, shard)
