"""A policy loss with the exact KL to a reference policy: both heads' distributions, from one pass over their tiles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.call import shared_errors
from liger_rl.head.divergence import (
    BETA,
    DivergenceCall,
    in_one_pass,
    in_two_passes,
    measure_of,
    one_pass_is_free,
    paired,
    with_gradients,
)
from liger_rl.head.dtensors import is_dtensor, low_rank_tensors
from liger_rl.head.engines.divergence import Pair
from liger_rl.head.graphs import break_graph
from liger_rl.head.options import HeadOptions
from liger_rl.head.rules import lacks
from liger_rl.head.tokens import counted_tokens
from liger_rl.kernels.divergence import PairStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.one_pass_loss import gradients_by_autograd, parts_obstacle
from liger_rl.policy.batch import PolicyBatch
from liger_rl.policy.fused import evaluate
from liger_rl.policy.loss import PolicyLoss, PolicyTerms, PreparedLoss


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """A reference policy's last hidden states and lm_head, for `FusedLinearGRPOLoss` with kl_estimator="exact".

    Attributes:
        hidden: (B, T, H') or (N, H'), for the same tokens as the policy's; H' need not be H, and its dtype may be
            another. No tensor here may require a gradient, which it would not get.
        weight: (V', H'), in hidden's dtype or under autocast any. The policy's own, detached, where adapters off make
            the reference.
        bias: (V',). With a sharded policy head, weight and bias are this rank's rows of the same token ids; the weight
            should be the same object from call to call, because ranks compare notes at the first call with one.
        transform: temperature, softcap and scale of its logits; None is the loss's own.
        vocab: entries of the vocabulary that count, of both heads, where their weights are padded. Then V' need not be
            V, and padding has no probability.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    vocab: int | None = None


# What does not go with an exact KL, and why.
NOT_EXACT = {
    "support": "the KL is over the whole vocabulary",
    "weight_grad": "the weight's gradient is returned to autograd",
    "ref_per_token_logps": "the reference's head gives them",
}


def one_pass_lacks(call: DivergenceCall, terms: PolicyTerms, dtype: torch.dtype) -> str | None:
    """What one pass would need and does not have; None if nothing."""
    options, made = call.options, [dtype]
    made += [part.dtype for part in (call.hidden, call.weight) if part.requires_grad]
    if terms.locality != "token":
        return "an objective and corrections whose gradient of a token depends on that token alone"
    lacking = lacks(options, "with token_weights")
    if lacking is not None:
        return lacking
    if torch.float16 in made:
        return "bfloat16 or float32 products and gradients: what is made before the loss is scaled vanishes in float16"
    if call.low_rank:
        return "a head without low_rank terms"
    if call.vocab_parallel is not None or any(map(is_dtensor, call.tensors)):
        return "tensors that are whole on this rank, got a shard or a DTensor"
    return parts_obstacle(terms)


def loss_with_reference(
    reference: ReferenceHead | None,
    own: dict[str, Any],  # fields of a `DivergenceCall`: the policy's head and its tokens
    beside: dict[str, Any],  # arguments that must be None
    batch: PolicyBatch,
    terms: PolicyTerms,
    options: HeadOptions,
    passes: str,
) -> PolicyLoss:
    break_graph('A loss with kl_estimator="exact"')
    tensors = own["hidden"], own["targets"], own["mask"], *low_rank_tensors(own["low_rank"])
    with shared_errors(own["vocab_parallel"], own["weight"], *tensors):
        for name, value in (beside | {"ref_per_token_logps": batch.ref_per_token_logps}).items():
            if value is not None:
                raise ValueError(f'{name} must be None with kl_estimator="exact": {NOT_EXACT[name]}')
        if options.fixed_shape and own["vocab_parallel"] is not None:
            raise ValueError("fixed_shape must be False with vocab_parallel in a loss; linear_divergence takes both")
        # With a bonus the gradient is exact, and needs no sums of tiles.
        given = _call(reference, own, options, auto_tolerance=terms.entropy_bonus.entropy_coef == 0.0)
        given.check_before_gather()
        lacks = one_pass_lacks(given, terms, given.check()[0])
        if passes == "one" and lacks is not None:
            raise ValueError(f'passes="one" needs {lacks}')
        columns = terms.check(batch, own["targets"].shape, own["targets"].device)

    def prepare(ref_per_token_logps: Tensor) -> PreparedLoss:
        ids = own["targets"].long()  # a narrow dtype would wrap the vocabulary's size
        counted = counted_tokens(ids, given.mask)
        if options.fixed_shape:
            counted = counted & (ids < (given.vocab or given.weight.shape[0]))
        return terms.prepared(replace(columns, mask=counted, ref_per_token_logps=ref_per_token_logps), torch.float32)

    chunks, made, one = None, None, lacks is None and passes != "two"
    with paired(given) as (call, pair, pair_options):
        if one and (passes == "one" or one_pass_is_free(call, pair, pair_options)):
            chunks = _Chunks(prepare, pair, call)
            found, made = in_one_pass(call, pair, pair_options, chunks)
        else:
            found = in_two_passes(call, pair, pair_options)
    assert found.logps is not None
    assert found.teacher_logps is not None
    # Once in either case: ranks with parts of the same sequences may take different ones, and add their lengths up.
    prepared = prepare(found.teacher_logps) if chunks is None else chunks.with_reference(found.teacher_logps)
    loss, metrics = evaluate(prepared, found.logps, found.entropy, found.divergence)
    return PolicyLoss(with_gradients(call, loss, made), metrics)


def _call(
    reference: ReferenceHead | None, own: dict[str, Any], options: HeadOptions, *, auto_tolerance: bool
) -> DivergenceCall:
    if not isinstance(reference, ReferenceHead):
        raise ValueError(
            'reference must be a ReferenceHead with kl_estimator="exact", whose KL is of the whole distributions; '
            f"got {type(reference).__name__}"
        )
    return DivergenceCall(
        **own,
        teacher_hidden=reference.hidden,
        teacher_weight=reference.weight,
        teacher_bias=reference.bias,
        teacher_transform=options.transform if reference.transform is None else reference.transform,
        measure=measure_of("reverse_kl", BETA),
        vocab=reference.vocab,
        options=options,
        auto_tolerance=auto_tolerance,
        teacher_name="reference.",
        targets_name="selected_token_ids",
    )


class _Chunks:
    """d loss / d (KL, log-probability, entropy) of a chunk's tokens: a loss that is the sum of its tokens' parts."""

    def __init__(self, prepare: Callable[[Tensor], PreparedLoss], pair: Pair, call: DivergenceCall) -> None:
        self.live = pair.student.live
        self.shape = call.hidden.shape[:-1]
        # Of no reference's log-probabilities: each chunk brings its own.
        self.prepared = prepare(torch.zeros(self.shape, device=call.hidden.device))

    def with_reference(self, ref_per_token_logps: Tensor) -> PreparedLoss:
        """Of all tokens, with these log-probabilities, 0 where a token does not count."""
        return self.prepared._replace(batch=replace(self.prepared.batch, ref_per_token_logps=ref_per_token_logps))

    def __call__(
        self, chunk: slice, exact_kl: Tensor, known: PairStatistics
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        positions = chunk if self.live.index is None else self.live.index[chunk]
        part = self.prepared.take(positions)
        part = part._replace(batch=replace(part.batch, ref_per_token_logps=known.teacher_logps))
        assert known.logps is not None
        assert part.weights is not None
        slopes = gradients_by_autograd(
            lambda logps, entropy: part.evaluate(logps, entropy, exact_kl).loss, known.logps, known.entropy
        )
        return part.terms.kl.beta * part.weights, *slopes
