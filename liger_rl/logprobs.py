"""Per-token log-probabilities from an lm_head, or from logits: the public functions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from liger_rl.call.checks import check_flag
from liger_rl.call.dtensors import low_rank_tensors
from liger_rl.call.head_call import HeadCall, LogProbs, shared_errors
from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import IDENTITY, HeadKeywords, options_of
from liger_rl.call.support import Support
from liger_rl.call.tokens import ask_vocabulary
from liger_rl.distributed import VocabParallel
from liger_rl.engines.given_logits import LogitRows, check_logits
from liger_rl.engines.graphs import never_in_a_graph
from liger_rl.engines.run import log_probs
from liger_rl.kernels.transform import LogitTransform

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LogProbs", "linear_logprobs", "logits_logprobs"]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    support: Support | None = None,
    weight_grad: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    **options: "Unpack[HeadKeywords]",
) -> LogProbs:
    """log_softmax(transform(hidden @ weight.T + bias)) at the targets, without the logits in memory.

    Equal to

        z = transform(hidden @ weight.T + bias)
        logps = torch.log_softmax(z.float(), -1).gather(-1, targets[..., None]).squeeze(-1)

    except that the logits stay float32 from the product's accumulators on, exist one tile at a time, and masked
    tokens are dropped before the first product. The backward recomputes them, for tokens with a non-zero gradient
    only. Under autocast the products run in autocast's dtype. Two host syncs on CUDA: one counts the live tokens
    here, one the tokens with a gradient in the backward.

    Args:
        hidden: (B, T, H) or packed (N, H), float32, bfloat16 or float16; position t predicts targets[t].
        weight: (V, H), the lm_head's; dtype and device of `hidden` (any float dtype under autocast or with a
            compute_dtype).
        targets: (B, T) or (N,) integer token ids in [0, V); a negative one (-100) masks its token. With K ids for each
            token (B, T, K) or (N, K), K at most 1024, repeats allowed: logps then has that shape, a negative id has 0
            there, and a token of negative ids alone is masked. Not with a support, grad_tolerance or
            is_top1. See docs/targets.md.
        mask: (B, T) or (N,), bool or 0/1; tokens at 0 get 0, and whatever they hold changes nothing. Other values
            raise, but count as 1 with fixed_shape and under torch.compile, where nothing reads them.
        bias: (V,), added to the head's output before the transform; of the dtype of `hidden`, or float32.
        low_rank: terms scaling * (hidden @ a.T) @ b.T that are added like the bias: adapters on the head, several at
            once if need be, tile by tile. Neither they nor their gradients ever take the shape (V, H).
        support: the ids that each token's sampler could have drawn. Everything is then over these ids alone, at a cost
            that follows their number: the product with the whole vocabulary is not made. Not with a grad_tolerance
            or batch_invariant. See docs/support.md.
        weight_grad: (V, H) float32, contiguous, on the weight's device, of memory that no input shares: `weight.grad`
            of a float32 weight, or the `main_grad` of a mixed-precision optimiser; with vocab_parallel, of this rank's
            rows. Each backward adds the weight's gradient to it, in float32 and without a (V, H) tensor of its own, and
            the weight itself gets none from this call. Not with a grad_tolerance, nor with a DTensor weight. You reduce
            it over data-parallel ranks; DistributedDataParallel reduces `weight.grad` by itself. In its forward any
            other tensor is refused, unless in `no_sync()`.
        vocab_parallel: where weight, bias and the `b` of low_rank are this rank's rows of a head that is sharded over
            the vocabulary; targets stay ids of the whole of it, and everything else is the same on every rank of the
            group. Two collectives of (N,) statistics in the forward, a third of (N, K) logits with several targets and
            of (N, K) keys with topk, one of the gradient of hidden in the backward.
            Whether the ranks fit together is checked at the first call with a weight, which waits for the device even
            with fixed_shape. Not with grad_tolerance or batch_invariant, nor under torch.compile. The
            mesh of a DTensor says all this by itself: `liger_rl.call.dtensors` has the rules.
        options: the fields of `HeadOptions`: transform, entropy, lse, topk, extras, grad_tolerance, compute_dtype,
            gather, chunk_tokens, chunk_vocab, fixed_shape and batch_invariant.

    Returns:
        LogProbs(logps, entropy, log_sum_sq_probs, mean_logits, is_top1, missing_target, lse, topk_logps, topk_ids),
        None where not asked for.

    Raises:
        TypeError: an argument of a type or dtype that is not listed above, an unknown option.
        ValueError: shapes, devices or values that do not fit, a live target outside [0, V) included.
        NotImplementedError: a tensor with a forward-mode tangent.
        RuntimeError: in the backward of a gradient that `create_graph=True` made: there is no second derivative.
    """
    with shared_errors(vocab_parallel, weight, hidden, targets, mask, bias, *low_rank_tensors(low_rank)):
        asked = options_of("linear_logprobs", options)
    call = HeadCall(
        hidden=hidden, weight=weight, targets=targets, mask=mask, bias=bias, low_rank=low_rank, support=support,
        vocab_parallel=vocab_parallel, weight_grad=weight_grad, options=asked, may_be_several=True,
    )  # fmt: skip
    return log_probs(call)


@never_in_a_graph
def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    fixed_shape: bool = False,
) -> LogProbs:
    """log_softmax(transform(logits)) at the targets, in float32, without a float32 copy of the logits.

    For callers who already hold logits. The gradient has the logits' dtype, and is exactly 0 at masked tokens. Under
    torch.compile the graph breaks around the call, and `fullgraph=True` raises.

    Args:
        logits: (B, T, V) or (N, V), float32, bfloat16 or float16. Leading dimensions may have any strides: a slice
            such as `logits[:, :-1]` is not copied.
        targets: (B, T) or (N,) integer token ids in [0, V). A negative id masks its token.
        mask: shaped like targets, bool or 0/1. Other values raise, but count as 1 with fixed_shape.
        transform, entropy: as in `linear_logprobs`.
        fixed_shape: as in `linear_logprobs`.

    Returns, raises: as `linear_logprobs`.
    """
    check_flag("entropy", entropy)
    check_flag("fixed_shape", fixed_shape)
    check_logits(logits, targets, mask, transform)
    raise_if_outside = ask_vocabulary(
        targets, mask, logits.shape[-1], "logits", fixed_shape=fixed_shape, temperature=transform.temperature
    )
    logps, entropies, _ = LogitRows.apply(logits, targets, mask, transform, entropy)
    raise_if_outside()
    return LogProbs(logps.view(targets.shape), None if entropies is None else entropies.view(targets.shape))
