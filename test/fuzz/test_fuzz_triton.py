"""The other files' calls with Triton's kernels, in its interpreter where there is no GPU."""

import pytest
import test_fuzz_head as heads
import test_fuzz_losses as losses
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from cases import LogitsCase, PolicyCase, fused_cases, fuzz, given_logits_cases, head_cases, logits_cases, several_cases
from head_calls import run_triton
from liger_rl.losses import fused


def is_for_the_interpreter(case) -> bool:
    """It runs one program after the other, and truncates to bfloat16 where the compiler rounds."""
    of_head = case
    if isinstance(case, PolicyCase):
        of_head = case.logits if case.head is None else case.head
    tokens, columns = of_head.options.get("chunk_tokens"), of_head.options.get("chunk_vocab")
    small = of_head.targets.numel() <= 24 and (tokens is None or tokens >= 7) and (columns is None or columns >= 64)
    dtype = of_head.logits.dtype if isinstance(of_head, LogitsCase) else of_head.compute
    return small and dtype != torch.bfloat16


def check_of(case):
    if isinstance(case, LogitsCase):
        return heads.test_logits_logprobs
    if isinstance(case, PolicyCase):
        return losses.test_grpo_loss_from_logits if case.head is None else losses.test_fused_loss
    return heads.test_linear_logprobs if case.ids is None else heads.test_several_targets


KINDS = {"head": head_cases, "several": several_cases, "logits": logits_cases, "loss": fused_cases}
KINDS["loss of logits"] = given_logits_cases


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
@fuzz(0.2)
@given(case=st.one_of(*(cases() for cases in KINDS.values())).filter(is_for_the_interpreter))
def test_kernels_in_triton(case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_triton(patch)
        patch.setattr(oracle, "TRITON", True)
        patch.setattr(fused, "DEVICES", ("cpu",))
        check_of(case).hypothesis.inner_test(case)
