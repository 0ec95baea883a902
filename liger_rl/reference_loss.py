"""A policy loss with the exact KL to a reference policy, from tiles of both heads' logits."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from liger_rl.call.checks import Passes
from liger_rl.call.dtensors import low_rank_tensors
from liger_rl.call.head_call import HeadCall, shared_errors
from liger_rl.call.tokens import TokenSelection
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
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses import fused
from liger_rl.losses.batch import PolicyBatch
from liger_rl.losses.loss import PolicyLoss, PolicyTerms, PreparedLoss
from liger_rl.one_pass_loss import prepared_loss, terms_obstacle


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """A reference policy's last hidden states and lm_head, for `FusedLinearGRPOLoss` with kl_estimator="exact".

    H' and the dtype may differ from the policy's. No tensor of the reference may require a gradient. If the reference
    is the policy without its adapters, `weight` is the policy's detached weight. With a sharded policy head, weight and
    bias are this rank's rows of the same token ids, and the weight should be the same object in each call.
    """

    hidden: Tensor  # (B, T, H') or (N, H'), for the policy's tokens
    weight: Tensor  # (V', H'), in hidden's dtype, or in any dtype under autocast
    bias: Tensor | None = None  # (V',)
    transform: LogitTransform | None = None  # of the reference's logits; None takes the loss's transform
    vocab: int | None = None  # vocabulary entries of both heads, if their weights are padded; V' may then differ from V


def one_pass_lacks(call: DivergenceCall, terms: PolicyTerms, dtype: torch.dtype) -> str | None:
    """The first thing that one pass needs and the loss or the call lacks. `dtype`: of the policy's products."""
    if terms.locality != "token":
        return "an objective and corrections whose gradient of a token depends on that token alone"
    return call.one_pass_lacks(dtype) or terms_obstacle(terms)


def loss_with_reference(
    head_call: HeadCall, reference: ReferenceHead | None, batch: PolicyBatch, terms: PolicyTerms, passes: Passes
) -> PolicyLoss:
    """The loss of a batch. `head_call` is the policy's, unchecked. No graph of torch.compile holds the call."""
    options, weight, ids = head_call.options, head_call.weight, head_call.targets
    tensors = head_call.hidden, ids, head_call.mask, *low_rank_tensors(head_call.low_rank)
    with shared_errors(head_call.vocab_parallel, weight, *tensors):
        for name, value, why in (
            ("support", head_call.support, "the KL is over the whole vocabulary"),
            ("weight_grad", head_call.weight_grad, "the weight's gradient is returned to autograd"),
            ("ref_per_token_logps", batch.ref_per_token_logps, "the reference's head gives them"),
        ):
            if value is not None:
                raise ValueError(f'{name} must be None with kl_estimator="exact": {why}')
        if options.fixed_shape and head_call.vocab_parallel is not None:
            raise ValueError("fixed_shape must be False with vocab_parallel in a loss; linear_divergence takes both")
        if not isinstance(reference, ReferenceHead):
            raise ValueError(
                'reference must be a ReferenceHead with kl_estimator="exact", whose KL is over the whole vocabulary; '
                f"got {type(reference).__name__}"
            )
        local_call = DivergenceCall(
            hidden=head_call.hidden,
            weight=weight,
            bias=head_call.bias,
            low_rank=head_call.low_rank,
            targets=ids,
            mask=head_call.mask,
            vocab_parallel=head_call.vocab_parallel,
            teacher_hidden=reference.hidden,
            teacher_weight=reference.weight,
            teacher_bias=reference.bias,
            teacher_transform=options.transform if reference.transform is None else reference.transform,
            measure=measure_of("reverse_kl", BETA),
            vocab=reference.vocab,
            options=options,
            # With an entropy bonus the gradient is exact, so the forward need not keep sums of tiles.
            auto_tolerance=terms.entropy_bonus.entropy_coef == 0.0,
            teacher_name="reference.",
            targets_name=head_call.targets_name,
        )
        local_call.check_before_gather()
        lacking = one_pass_lacks(local_call, terms, local_call.check_tensors())
        if passes == "one" and lacking is not None:
            raise ValueError(f'passes="one" needs {lacking}')
        columns = terms.check(batch, ids.shape, ids.device)

    def prepare(ref_per_token_logps: Tensor) -> PreparedLoss:
        return prepared_loss(
            terms, replace(columns, ref_per_token_logps=ref_per_token_logps), head_call, reference.vocab
        )

    prepared, gradients = None, None
    with paired(local_call) as (call, pair):
        one_pass = lacking is None and passes != "two"
        if one_pass and (passes == "one" or one_pass_is_free(call, pair)):
            # The zeros are a placeholder. Each chunk brings the reference's log-probabilities of its tokens.
            prepared = prepare(torch.zeros(call.hidden.shape[:-1], device=call.hidden.device))
            gradients_of = partial(_chunk_gradients, prepared, pair.student.live)
            divergence, gradients = in_one_pass(call, pair, gradients_of)
        else:
            divergence = in_two_passes(call, pair)
    assert divergence.logps is not None
    assert divergence.teacher_logps is not None
    # Every rank runs `prepare` once, whichever passes it takes, because `prepare` adds up sequence lengths over ranks.
    if prepared is None:
        prepared = prepare(divergence.teacher_logps)
    else:
        prepared = _with_reference(prepared, divergence.teacher_logps)
    loss, metrics = fused.evaluate(prepared, divergence.logps, divergence.entropy, divergence.divergence)
    return PolicyLoss(with_gradients(call, loss, gradients), metrics)


def _with_reference(prepared: PreparedLoss, ref_per_token_logps: Tensor) -> PreparedLoss:
    """The log-probabilities are 0 at tokens that do not count."""
    return prepared._replace(batch=replace(prepared.batch, ref_per_token_logps=ref_per_token_logps))


def _chunk_gradients(
    prepared: PreparedLoss, live: TokenSelection, chunk: slice, statistics: PairStatistics
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d loss / d KL, d logp and d entropy, (m,) each, of m live tokens. The loss must be a sum over tokens."""
    assert statistics.logps is not None
    assert statistics.teacher_logps is not None
    tokens = prepared.take(chunk if live.index is None else live.index[chunk])
    tokens = _with_reference(tokens, statistics.teacher_logps)
    assert tokens.weights is not None
    _, grads = fused.with_gradients(tokens, statistics.logps, statistics.entropy, statistics.divergence)
    return tokens.terms.kl.beta * tokens.weights, grads["logps"], grads.get("entropy")
