"""A policy loss with the exact KL to a reference policy, from tiles of both heads' logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.call.dtensors import is_dtensor, low_rank_tensors
from liger_rl.call.head_call import shared_errors
from liger_rl.call.options import HeadOptions
from liger_rl.call.rules import lacks
from liger_rl.call.tokens import counted_tokens
from liger_rl.engines.graphs import break_graph, outside_of_graphs
from liger_rl.engines.pair.reference import PairStatistics
from liger_rl.engines.pair.run import (
    BETA,
    DivergenceCall,
    in_one_pass,
    in_two_passes,
    measure_of,
    one_pass_is_free,
    paired,
    with_gradients,
)
from liger_rl.engines.pair.two_heads import Pair
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses.batch import PolicyBatch
from liger_rl.losses.fused import evaluate
from liger_rl.losses.loss import PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.one_pass_loss import gradients_by_autograd, parts_obstacle


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """A reference policy's last hidden states and lm_head, for `FusedLinearGRPOLoss` with kl_estimator="exact".

    Attributes:
        hidden: (B, T, H') or (N, H'), for the policy's tokens. H' and the dtype may differ from the policy's. No tensor
            of the reference may require a gradient, because it would get none.
        weight: (V', H'), in hidden's dtype, or in any dtype under autocast. If the reference is the policy without its
            adapters, this is the policy's detached weight.
        bias: (V',). With a sharded policy head, weight and bias are this rank's rows of the same token ids. The weight
            should be the same object in each call, because ranks compare their arguments at the first call with it.
        transform: temperature, softcap and scale of the reference's logits; None takes the loss's transform.
        vocab: number of vocabulary entries of both heads, if their weights are padded. V' may then differ from V, and
            padding has no probability.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform | None = None
    vocab: int | None = None


# Argument that an exact KL does not take -> why.
NOT_EXACT = {
    "support": "the KL is over the whole vocabulary",
    "weight_grad": "the weight's gradient is returned to autograd",
    "ref_per_token_logps": "the reference's head gives them",
}


def one_pass_lacks(call: DivergenceCall, terms: PolicyTerms, dtype: torch.dtype) -> str | None:
    """A need of one pass that the call does not meet; None if it meets all. `dtype`: of the policy's products."""
    options = call.options
    dtypes = [dtype, *(tensor.dtype for tensor in (call.hidden, call.weight) if tensor.requires_grad)]
    if terms.locality != "token":
        return "an objective and corrections whose gradient of a token depends on that token alone"
    lacking = lacks(options, "with token_weights")
    if lacking is not None:
        return lacking
    if torch.float16 in dtypes:
        return "bfloat16 or float32 products and gradients: float16 gradients vanish before the loss is scaled"
    if call.low_rank:
        return "a head without low_rank terms"
    if call.vocab_parallel is not None or any(map(is_dtensor, call.tensors)):
        return "tensors that are whole on this rank, got a shard or a DTensor"
    return parts_obstacle(terms)


def loss_with_reference(
    reference: ReferenceHead | None,
    policy: dict[str, Any],  # the policy's head and its tokens, by fields of a `DivergenceCall`
    refused: dict[str, Any],  # arguments that must be None
    batch: PolicyBatch,
    terms: PolicyTerms,
    options: HeadOptions,
    passes: str,
) -> PolicyLoss:
    """The loss of a batch; a graph of torch.compile breaks around it."""
    break_graph('A loss with kl_estimator="exact"')
    return outside_of_graphs(_loss_with_reference)(reference, policy, refused, batch, terms, options, passes)


def _loss_with_reference(
    reference: ReferenceHead | None,
    policy: dict[str, Any],
    refused: dict[str, Any],
    batch: PolicyBatch,
    terms: PolicyTerms,
    options: HeadOptions,
    passes: str,
) -> PolicyLoss:
    tensors = policy["hidden"], policy["targets"], policy["mask"], *low_rank_tensors(policy["low_rank"])
    with shared_errors(policy["vocab_parallel"], policy["weight"], *tensors):
        for name, value in (refused | {"ref_per_token_logps": batch.ref_per_token_logps}).items():
            if value is not None:
                raise ValueError(f'{name} must be None with kl_estimator="exact": {NOT_EXACT[name]}')
        if options.fixed_shape and policy["vocab_parallel"] is not None:
            raise ValueError("fixed_shape must be False with vocab_parallel in a loss; linear_divergence takes both")
        # With an entropy bonus the gradient is exact, so the forward need not keep sums of tiles.
        local_call = _call(reference, policy, options, auto_tolerance=terms.entropy_bonus.entropy_coef == 0.0)
        local_call.check_before_gather()
        lacking = one_pass_lacks(local_call, terms, local_call.check()[0])
        if passes == "one" and lacking is not None:
            raise ValueError(f'passes="one" needs {lacking}')
        columns = terms.check(batch, policy["targets"].shape, policy["targets"].device)

    def prepare(ref_per_token_logps: Tensor) -> PreparedLoss:
        ids = policy["targets"].long()  # int64, because in int8 the vocabulary's size would wrap around
        counted = counted_tokens(ids, local_call.mask)
        if options.fixed_shape:
            counted = counted & (ids < (local_call.vocab or local_call.weight.shape[0]))
        return terms.prepared(replace(columns, mask=counted, ref_per_token_logps=ref_per_token_logps), torch.float32)

    chunks, gradients = None, None
    with paired(local_call) as (call, pair, pair_options):
        one_pass = lacking is None and passes != "two"
        if one_pass and (passes == "one" or one_pass_is_free(call, pair, pair_options)):
            chunks = _Chunks(prepare, pair, call)
            divergence, gradients = in_one_pass(call, pair, pair_options, chunks)
        else:
            divergence = in_two_passes(call, pair, pair_options)
    assert divergence.logps is not None
    assert divergence.teacher_logps is not None
    # Every rank runs `prepare` once, whichever passes it takes, because `prepare` adds up sequence lengths over ranks.
    ref_logps = divergence.teacher_logps
    prepared = prepare(ref_logps) if chunks is None else chunks.with_reference(ref_logps)
    loss, metrics = evaluate(prepared, divergence.logps, divergence.entropy, divergence.divergence)
    return PolicyLoss(with_gradients(call, loss, gradients), metrics)


def _call(
    reference: ReferenceHead | None, policy: dict[str, Any], options: HeadOptions, *, auto_tolerance: bool
) -> DivergenceCall:
    if not isinstance(reference, ReferenceHead):
        raise ValueError(
            'reference must be a ReferenceHead with kl_estimator="exact", whose KL is over the whole vocabulary; '
            f"got {type(reference).__name__}"
        )
    return DivergenceCall(
        **policy,
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
    """d loss / d KL, d logp and d entropy, (m,) each, of a chunk of m tokens. The loss must be a sum over tokens."""

    def __init__(self, prepare: Callable[[Tensor], PreparedLoss], pair: Pair, call: DivergenceCall) -> None:
        self.live = pair.student.live
        self.shape = call.hidden.shape[:-1]
        # The zeros are a placeholder. Each chunk brings the reference's log-probabilities of its tokens.
        self.prepared = prepare(torch.zeros(self.shape, device=call.hidden.device))

    def with_reference(self, ref_per_token_logps: Tensor) -> PreparedLoss:
        """The loss of all tokens. `ref_per_token_logps` (B, T) or (N,) is 0 at tokens that do not count."""
        return self.prepared._replace(batch=replace(self.prepared.batch, ref_per_token_logps=ref_per_token_logps))

    def __call__(
        self, chunk: slice, exact_kl: Tensor, statistics: PairStatistics
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        positions = chunk if self.live.index is None else self.live.index[chunk]
        tokens = self.prepared.take(positions)
        tokens = tokens._replace(batch=replace(tokens.batch, ref_per_token_logps=statistics.teacher_logps))
        assert statistics.logps is not None
        assert tokens.weights is not None
        slopes = gradients_by_autograd(
            lambda logps, entropy: tokens.evaluate(logps, entropy, exact_kl).loss, statistics.logps, statistics.entropy
        )
        return tokens.terms.kl.beta * tokens.weights, *slopes
