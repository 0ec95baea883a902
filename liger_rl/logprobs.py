"""Per-token log-probabilities from an lm_head, or from logits: the public functions."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.given_logits.function import check_logits, row_logprobs
from liger_rl.given_logits.rows import LogitRowsOptions
from liger_rl.head.call import IDENTITY, HeadCall, HeadOptions, LogProbs, shared_errors
from liger_rl.head.dtensors import low_rank_tensors
from liger_rl.head.engines.two_pass import Gather
from liger_rl.head.low_rank import LowRank
from liger_rl.head.run import log_probs
from liger_rl.kernels.transform import LogitTransform

__all__ = ["LogProbs", "linear_logprobs", "logits_logprobs"]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    extras: Collection[str] = (),
    grad_tolerance: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    max_extra_bytes: int | None = None,
    fixed_shape: bool = False,
    batch_invariant: bool = False,
    weight_grad: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
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
        targets: (B, T) or (N,) integer token ids in [0, V); a negative one (-100) masks its token.
        mask: shaped like targets, bool or 0/1; tokens at 0 get 0, and whatever they hold changes nothing. Other values
            raise, but count as 1 with fixed_shape and under torch.compile, where nothing reads them.
        bias: (V,), added to the head's output before the transform; of the dtype of `hidden`, or float32.
        low_rank: terms scaling * (hidden @ a.T) @ b.T that are added like the bias: adapters on the head, several at
            once if need be, tile by tile. Neither they nor their gradients ever take the shape (V, H).
        transform: temperature, softcap and scale of the logits.
        entropy: also return each token's entropy, from the same pass.
        extras: names of further statistics wanted from it, among "log_sum_sq_probs", "mean_logits" and "is_top1".
        grad_tolerance: largest error of dL/dlogits relative to it, both in the Frobenius norm, in [0, 1); 0 is exact.
            Blocks of 128 tokens x 256 words whose bounds are small enough together are left out of the backward's three
            products, each token's sum over a tile in their place, shared among its words as some tokens' own
            probabilities are, whatever the loss; 1e-3 is under half of what rounding the gradient to bfloat16 does to
            it. The gradient of weight follows; that of hidden may be several times further off, see
            docs/choosing.md. The backward stays exact where blocks cannot be told apart: on CPU, on GPUs other than
            NVIDIA's of compute capability 9.0 and 10.x, in float32 or mixed dtypes, with rows of the weight that do not
            start at multiples of 16 bytes, with under 512 live tokens, where a chunk is named, or beside a low-rank
            term; the `reason` of `plan_linear_logprobs` says which.
        compute_dtype: dtype of the products' factors, whatever autocast says: float32 runs a bfloat16 head in float32
            without a float32 copy of it. None takes autocast's, or the inputs' own.
        gather: for a weight that is whole only now and then (DeepSpeed ZeRO-3): `gather(weight)`, or
            `gather(weight, bias)`, returns a context in which they are. Entered once here, and once in the backward.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides; None chooses them.
        max_extra_bytes: what both directions may take beside inputs, results and gradients, from which the chunks and
            kernels follow as `plan_linear_logprobs` says and shows; None takes a default workspace.
        fixed_shape: never wait for the device, so that a CUDA graph can capture forward and backward: every token goes
            through every product, masked ones and those without a gradient as zeros. Values and gradients are the same
            up to rounding, except that a live target outside [0, V) cannot raise: its token is masked.
        batch_invariant: a token's log-probability, entropy and extras are a function of its own row, its target and the
            head alone, bit for bit, however tokens are packed, masked and split over calls, on one device with one
            version of torch. Products are made up to fixed shapes with zeros, to multiples of 512 tokens where the
            product of our own applies and of 128 elsewhere, where it rests on the library treating all rows
            of a product alike (see `liger_rl.head.engines.invariant`). For gradients nothing is promised.
        weight_grad: (V, H) float32, contiguous, on the weight's device, of memory that no input shares: `weight.grad`
            of a float32 weight, or the `main_grad` of a mixed-precision optimiser; with vocab_parallel, of this rank's
            rows. Each backward adds the weight's gradient to it, in float32 and without a (V, H) tensor of its own, and
            the weight itself gets none from this call. Not with a grad_tolerance, nor with a DTensor weight. Its
            reduction over data-parallel ranks is yours, but for `weight.grad` under DistributedDataParallel; within
            that one's forward, unless in `no_sync()`, any other tensor is refused.
        vocab_parallel: where weight, bias and the `b` of low_rank are this rank's rows of a head that is sharded over
            the vocabulary; targets stay ids of the whole of it, and everything else is the same on every rank of the
            group. Two collectives of (N,) statistics in the forward, one of the gradient of hidden in the backward.
            Whether the ranks fit together is checked at the first call with a weight, which waits for the device even
            with fixed_shape. Not with grad_tolerance, batch_invariant or max_extra_bytes, nor under torch.compile. The
            mesh of a DTensor says all this by itself: `liger_rl.head.dtensors` has the rules.

    Returns:
        LogProbs(logps, entropy, log_sum_sq_probs, mean_logits, is_top1), None where not asked for.

    Raises:
        TypeError: an argument of a type or dtype that is not listed above.
        ValueError: shapes, devices or values that do not fit, a live target outside [0, V) included.
        NotImplementedError: a tensor with a forward-mode tangent.
        RuntimeError: in the backward of a gradient that `create_graph=True` made: there is no second derivative.
    """
    with shared_errors(vocab_parallel, weight, hidden, targets, mask, bias, *low_rank_tensors(low_rank)):
        options = HeadOptions(
            transform=transform,
            entropy=entropy,
            extras=extras,
            grad_tolerance=grad_tolerance,
            compute_dtype=compute_dtype,
            gather=gather,
            chunk_tokens=chunk_tokens,
            chunk_vocab=chunk_vocab,
            max_extra_bytes=max_extra_bytes,
            fixed_shape=fixed_shape,
            batch_invariant=batch_invariant,
        )
    call = HeadCall(
        hidden=hidden,
        weight=weight,
        targets=targets,
        mask=mask,
        bias=bias,
        low_rank=low_rank,
        vocab_parallel=vocab_parallel,
        weight_grad=weight_grad,
        options=options,
    )
    return log_probs(call)


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
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
    return row_logprobs(logits, targets, mask, options)
