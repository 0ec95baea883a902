"""Per-token log-probabilities from an lm_head, or from logits: the public functions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.given_logits.function import check_logits, row_logprobs
from liger_rl.given_logits.rows import LogitRowsOptions
from liger_rl.given_logits.support import check_support, support_logprobs
from liger_rl.head.call import HeadCall, LogProbs, shared_errors
from liger_rl.head.dtensors import low_rank_tensors
from liger_rl.head.low_rank import LowRank
from liger_rl.head.options import IDENTITY, HeadKeywords, options_of
from liger_rl.head.run import log_probs
from liger_rl.head.support import Support
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
            there, and a token of negative ids alone is masked. Not with a support, grad_tolerance, max_extra_bytes or
            is_top1. See docs/targets.md.
        mask: (B, T) or (N,), bool or 0/1; tokens at 0 get 0, and whatever they hold changes nothing. Other values
            raise, but count as 1 with fixed_shape and under torch.compile, where nothing reads them.
        bias: (V,), added to the head's output before the transform; of the dtype of `hidden`, or float32.
        low_rank: terms scaling * (hidden @ a.T) @ b.T that are added like the bias: adapters on the head, several at
            once if need be, tile by tile. Neither they nor their gradients ever take the shape (V, H).
        support: the ids that each token's sampler could have drawn. Everything is then over these ids alone, at a cost
            that follows their number: the product with the whole vocabulary is not made. Not with a grad_tolerance,
            batch_invariant or max_extra_bytes. See docs/support.md.
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
            with fixed_shape. Not with grad_tolerance, batch_invariant or max_extra_bytes, nor under torch.compile. The
            mesh of a DTensor says all this by itself: `liger_rl.head.dtensors` has the rules.
        options: the fields of `HeadOptions`: transform, entropy, lse, topk, extras, grad_tolerance, compute_dtype,
            gather, chunk_tokens, chunk_vocab, max_extra_bytes, fixed_shape and batch_invariant.

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


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    support: Support | None = None,
    in_place: bool = False,
    grad_buffer: Tensor | None = None,
    fixed_shape: bool = False,
) -> LogProbs:
    """log_softmax(transform(logits)) at the targets, in float32, without a float32 copy of the logits.

    For callers who already hold logits; the gradient comes back in the logits' dtype, exactly 0 at masked tokens.

    Args:
        logits: (B, T, V) or (N, V), float32, bfloat16 or float16; leading dimensions may have any strides, so a
            slice such as `logits[:, :-1]` is not copied.
        targets: (B, T) or (N,) integer token ids in [0, V); a negative one masks its token.
        mask: shaped like targets, bool or 0/1. Other values raise, but count as 1 with fixed_shape.
        transform, entropy: as in `linear_logprobs`.
        support: as in `linear_logprobs`. The logits are read, and get a gradient, at the listed ids alone. It does not
            go together with in_place or grad_buffer, nor with torch.compile.
        in_place: write the gradient over the logits, which saves a tensor of their size; nothing may need them after
            the backward, which then runs only once.
        grad_buffer: shaped like logits, of memory apart from theirs, any of the dtypes above: the gradient is added to
            it, in float32 arithmetic, and the logits themselves get none.
        fixed_shape: as in `linear_logprobs`.

    Returns, raises: as `linear_logprobs`.
    """
    options = LogitRowsOptions(
        transform=transform, entropy=entropy, in_place=in_place, grad_buffer=grad_buffer, fixed_shape=fixed_shape
    )
    check_logits(logits, targets, mask, options)
    if support is not None:
        check_support(support, targets, options)
        return support_logprobs(logits, targets, mask, support, options)
    return row_logprobs(logits, targets, mask, options)
