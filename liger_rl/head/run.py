"""From a call to its log-probabilities: which tokens count, which engine and tiles, and the way into autograd."""

import torch
from torch import Tensor

from liger_rl.head.call import HeadCall, LogProbs, shared_errors
from liger_rl.head.dtensors import localized
from liger_rl.head.engines.choose import plan_linear_logprobs
from liger_rl.head.engines.two_pass import ProjectionOptions, whole_head
from liger_rl.head.function import HeadInputs, linear_values
from liger_rl.head.operator import linear_op, low_rank_inputs_op
from liger_rl.head.tokens import LiveTokens, TokenSelection, counted_tokens, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import aligned


def log_probs(given: HeadCall, *, dtype: torch.dtype | None = None, counted: LiveTokens | None = None) -> LogProbs:
    """Log-probabilities of the needed tokens: the others get 0 as masked ones do, but their ids are looked at.

    Args:
        dtype: what `given.check_tensors` returned, where these tensors have been checked before.
        counted: what `live_tokens` returned, where it has been asked before.
    """
    original = given.weight
    with shared_errors(given.vocab_parallel, original, *given.tensors):
        call = localized(given)
    with shared_errors(call.vocab_parallel, original):
        call.check_together()
    options, shard = call.options, None

    def facts() -> dict[str, object]:
        call.check_weight_grad(original)
        return call.facts()

    with whole_head(options.gather, call.weight, call.bias):
        if call.vocab_parallel is not None:
            shard = call.vocab_parallel.shard_of(call.weight, facts, known_by=original)
        if dtype is None or call is not given:
            dtype = call.check_tensors()
        call.check_weight_grad(original)
        ids = call.targets.long().contiguous()  # a narrow dtype would wrap the vocabulary's size in comparisons
        vocab = call.weight.shape[0] if shard is None else shard.vocab
        engine = _engine_options(call, dtype, shard)
        selected = None
        if counted is None and not options.fixed_shape and not torch.compiler.is_compiling():
            selected = live_tokens(
                ids, call.mask, vocab, "weight", wanted=call.needed_mask, targets_name=call.targets_name
            )
        flat_targets = ids.view(-1) if shard is None else shard.local(ids.view(-1))
        if counted is not None:
            live = counted.selection
        elif selected is not None:
            # As late as possible: from this sync on the device waits for the host to launch the product.
            live = selected().selection
        else:
            live = _masked(call, ids, vocab)
        hidden = call.hidden.reshape(-1, call.hidden.shape[-1])
        head = HeadInputs(hidden, call.weight, call.bias, flat_targets, live, *_low_rank_factors(call, live))
        if torch.compiler.is_compiling():
            values = linear_op(head, engine, fixed_shape=options.fixed_shape, targets_name=call.targets_name)
            live = live if options.fixed_shape else TokenSelection(live.total)  # the operator puts 0 elsewhere
        else:
            values = linear_values(head, engine)
    logps, *others = values
    shape = call.targets.shape
    return LogProbs(live.spread(logps, shape), *(None if part is None else live.spread(part, shape) for part in others))


def _engine_options(call: HeadCall, dtype: torch.dtype, shard) -> ProjectionOptions:
    options = call.options
    chunks, kernels_fit = (options.chunk_tokens, options.chunk_vocab), False
    if options.max_extra_bytes is not None:
        plan = plan_linear_logprobs(
            call.targets.numel(),
            *call.weight.shape,
            dtype=call.hidden.dtype,
            weight_dtype=call.weight.dtype,
            compute_dtype=dtype,
            device=call.hidden.device,
            needs=(call.needs[0], call.head_needs),
            contiguous=(call.hidden.is_contiguous(), call.weight.is_contiguous()),
            bias=call.bias is not None,
            rank=call.rank,
            weight_grad=call.weight_grad is not None,
            transform=options.transform,
            entropy=options.entropy,
            extras=options.extras,
            grad_tolerance=options.grad_tolerance,
            fixed_shape=options.fixed_shape,
            batch_invariant=options.batch_invariant,
            aligned=aligned(call.weight),
            max_extra_bytes=options.max_extra_bytes,
        )
        chunks, kernels_fit = plan.tiles, plan.kernels_fit
    return ProjectionOptions(
        transform=options.transform,
        entropy=options.entropy,
        extras=frozenset(options.extras),
        compute_dtype=dtype,
        gather=options.gather,
        chunk_tokens=chunks[0],
        chunk_vocab=chunks[1],
        # Bounds are not free, and only a backward needs them.
        tolerance=float(options.grad_tolerance) if torch.is_grad_enabled() else 0.0,
        weight_grad=call.weight_grad,
        batch_invariant=options.batch_invariant,
        kernels_fit=kernels_fit,
        shard=shard,
    )


def _masked(call: HeadCall, ids: Tensor, vocab: int) -> TokenSelection:
    """The tokens that count, each in its place."""
    needed = call.needed_mask
    if not call.options.fixed_shape and needed is not None:
        # The operator raises for an id outside of the vocabulary, so those are needed too.
        needed = torch.logical_or(ids >= vocab, needed)
    mask = counted_tokens(ids, call.mask, needed)
    if call.options.fixed_shape:
        mask = mask & (ids < vocab)
    return TokenSelection(ids.numel(), mask=mask.reshape(-1))


def _low_rank_factors(call: HeadCall, live: TokenSelection) -> tuple[Tensor | None, Tensor | None]:
    """(N, r) and (V, r): what all low-rank terms add up to is the product of the two."""
    if not call.low_rank:
        return None, None
    function = low_rank_inputs_op if torch.compiler.is_compiling() else None
    inputs = [term.inputs(call.hidden, live, function=function) for term in call.low_rank]
    # Autocast would refuse to join factors of two 16-bit dtypes, which become float32 here.
    with gemm.without_autocast(call.hidden.device):
        return _joined(inputs), _joined([term.b for term in call.low_rank])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
