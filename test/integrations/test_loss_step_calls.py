"""One call for a step: how it is called, what wraps its model, and what is refused. The numbers: test_fuzz_steps.py."""

import copy
import re

import pytest
import torch
from torch import nn

from head_calls import Products
from hf_models import assert_same_gradients, build, gradients, transformers
from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, loss_steps, swap_lm_head
from liger_rl.losses import GlobalTokenMean, SamplerCorrection, Segments, TokenLoss
from liger_rl.models.swap import is_swapped
from liger_rl.step.loss_step import LossStep
from step_calls import (
    BATCH,
    LENGTH,
    VOCAB,
    assert_as_padded,
    assert_same_metrics,
    make_batch,
    packed,
    rows_of,
    run,
    small_llama,
)
from threads import in_threads


def gemma(**options) -> transformers.PreTrainedModel:
    return build("Gemma2", num_hidden_layers=1, **options)


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    """Gradients of a step of the plain model."""
    model = gemma()
    step = loss_step(model, make_batch(), FusedLinearGRPOLoss("grpo"))
    assert is_swapped(model)
    assert isinstance(step, LossStep)
    return gradients(model, step.loss)


def test_the_losss_options_of_the_head_reach_it():
    model, whole = gemma(), []
    for options in ({}, {"chunk_vocab": 8}):
        with Products() as products:
            loss_step(model, make_batch(), FusedLinearGRPOLoss("grpo", **options))
        whole.append(VOCAB in [vocab for _, vocab in products.logits(model.config.hidden_size)])
    assert whole == [True, False]


def test_the_first_token_is_never_counted():
    """Nothing predicts it: with it in the mask, the result is the same."""
    model, batch, loss = gemma(), make_batch(), FusedLinearGRPOLoss("grpo")
    first = loss_step(model, batch, loss).loss
    batch["mask"][0, 0] = True
    assert torch.equal(loss_step(model, batch, loss).loss, first)


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.usefixtures("lone_rank")
def test_distributed_data_parallel(expected):
    """DDP's own forward around the swapped model, its reducer on every gradient."""
    model = swap_lm_head(gemma())
    parallel = nn.parallel.DistributedDataParallel(model)
    step = loss_step(parallel, make_batch(), FusedLinearGRPOLoss("grpo"))
    assert_same_gradients(gradients(model, step.loss), expected)


@pytest.mark.parametrize("compiled", ["body", "whole"])
def test_compiled_models(compiled, expected):
    """Graphs of the body, or of the whole model but its head, made once and used."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = swap_lm_head(gemma())
    if compiled == "body":
        model.model.compile(backend=backend)
    called = torch.compile(model, backend=backend) if compiled == "whole" else model
    counts = []
    for _ in range(2):
        step = loss_step(called, make_batch(), FusedLinearGRPOLoss("grpo"))
        assert_same_gradients(gradients(model, step.loss), expected)
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0


def test_lora_on_the_head():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"])
    model = peft.get_peft_model(gemma(tie_word_embeddings=False), config)
    with torch.no_grad():
        model.get_base_model().lm_head.lora_B["default"].weight.normal_(std=0.1)
    assert_as_padded(model, make_batch(), FusedLinearGRPOLoss("grpo"))
    assert sum(p.grad is not None for p in model.parameters()) == 2


def test_prompt_tuning_has_tokens_of_its_own_before_the_batchs():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, batch = peft.get_peft_model(build("Llama"), config), make_batch()
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 3:-1].log_softmax(-1)
    logps = logits.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    step = loss_step(model, batch, FusedLinearGRPOLoss("grpo"))
    assert step.per_token_logps.shape == batch["input_ids"].shape
    mask = batch["mask"][:, 1:]
    torch.testing.assert_close(step.per_token_logps[:, 1:], torch.where(mask, logps, 0.0), rtol=1e-5, atol=1e-5)
    assert len(gradients(model, step.loss)) == 1
    assert step.layout == "the batch as it is: prompt learning of PEFT puts tokens of its own before each sequence"


@pytest.mark.parametrize(("max_tokens", "metrics"), [(None, "loss"), (26, "basic")])
def test_an_on_policy_batch_with_a_samplers_log_probabilities(max_tokens, metrics):
    """Without old log-probabilities, those of the step itself are compared with the sampler's."""
    model, batch = small_llama(), make_batch()
    loss = FusedLinearGRPOLoss("grpo", sampler_correction=SamplerCorrection(mode="truncate"), metrics=metrics)
    current = completion_logps(model, batch, loss)
    batch["sampling_per_token_logps"] = current + 0.1 * torch.randn(BATCH, LENGTH)
    steps, found = run(model, batch, loss, max_tokens=max_tokens)
    expected_steps, expected = run(model, batch | {"old_per_token_logps": current}, loss)
    assert len(steps) == (1 if max_tokens is None else 2)
    assert_same_gradients(found, expected)
    torch.testing.assert_close(steps.total.loss, expected_steps.total.loss, rtol=1e-5, atol=1e-6)
    assert_same_metrics(steps.total.metrics, expected_steps.total.metrics)


def test_a_packed_row_is_the_padded_batch():
    """Sequences one after the other, told apart by position_ids, per-sequence ratios included."""
    model, batch = build("Llama", attention="eager"), make_batch()
    loss = FusedLinearGRPOLoss("gspo", metrics="basic")
    batch["old_per_token_logps"] = completion_logps(model, batch, loss) + 0.1 * torch.randn(BATCH, LENGTH)
    row, sequence = packed(batch)
    row["segments"] = Segments(index=sequence, count=BATCH)
    expected = loss_step(model, batch, loss)
    expected_gradients = gradients(model, expected.loss)
    step = loss_step(model, row, loss)
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert step.layout == "the batch as it is: its segments are one packed row"
    logps = expected.per_token_logps[batch["attention_mask"].bool()]
    torch.testing.assert_close(step.per_token_logps[0], logps, rtol=1e-5, atol=1e-5)
    assert_same_metrics(step.metrics, expected.metrics)
    assert_same_gradients(gradients(model, step.loss), expected_gradients)
    for changed, message in (
        ({"attention_mask": torch.ones_like(row["input_ids"])}, "attention_mask must be left out of packed rows"),
        ({"attention_mask": torch.zeros_like(row["input_ids"])}, "mask .* must be 0 where attention_mask is 0"),
        ({"input_ids": row["input_ids"] + VOCAB}, r"input_ids must be token ids in \[0, "),
    ):
        with pytest.raises(ValueError, match=message):
            completion_logps(model, row | changed, loss)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input_ids": None}, TypeError, "input_ids must be a tensor in the batch, got NoneType"),
        ({"mask": None}, TypeError, "mask must be a tensor in the batch, got NoneType"),
        (
            {"completion_mask": torch.ones(1)},
            ValueError,
            r"no column 'completion_mask' \(did you mean mask\?\); it has .*",
        ),
        ({"mask": torch.ones(BATCH, LENGTH - 1)}, ValueError, r"mask must be .* = \(6, 13\)"),
        ({"input_ids": torch.ones(LENGTH, dtype=torch.long)}, ValueError, r"input_ids must be \(B, T\) with"),
        ({"advantages": None}, TypeError, "advantages must be a real tensor, got NoneType"),
        ({"advantages": torch.ones(BATCH + 1)}, ValueError, r"advantages must be .*got \(7,\)"),
        ({"old_per_token_logps": torch.ones(BATCH, 3)}, ValueError, "old_per_token_logps must be"),
        ({"old_per_token_logp": torch.ones(BATCH, LENGTH)}, ValueError, "batch has no column 'old_per_token_logp'"),
        ({"labels": torch.ones(BATCH, LENGTH)}, ValueError, r"no column 'labels' \(mask says which of the input_ids"),
        (
            {"temperature": 0.5},
            ValueError,
            r"no column 'temperature' \(temperature is an option of FusedLinearGRPOLoss",
        ),
        (
            {"options": {"epsilon_low": 2}},
            TypeError,
            r"epsilon_low .*\(epsilon_low is an option of FusedLinearGRPOLoss",
        ),
        ({"options": {"epsilon": 0.2}}, TypeError, r"epsilon .*\(did you mean epsilon_low and epsilon_high of Fused"),
        (
            {"options": {"max_token": 64}},
            TypeError,
            r"max_token .*\(did you mean max_tokens\?\); a step takes max_tokens",
        ),
        # Names of options that are no more.
        (
            {"options": {"packing": True}},
            TypeError,
            "takes no packing .*; a step takes max_tokens, ",
        ),
        (
            {"options": {"idle": "forward"}},
            TypeError,
            "takes no idle .*; a step takes max_tokens, ",
        ),
        ({"logits_to_keep": 3}, ValueError, "batch has no column 'logits_to_keep'"),
        ({"segments": Segments(index=torch.zeros(13).long(), count=1)}, ValueError, r"one packed row, \(1, T\)"),
        ({"loss": FusedLinearGRPOLoss("grpo", beta=0.1)}, ValueError, "ref_per_token_logps"),
        ({"loss": FusedLinearGRPOLoss("grpo", softcap=30.0)}, ValueError, "softcap must be left out of the loss"),
        ({"loss": FusedLinearGRPOLoss("grpo", scale=0.5)}, ValueError, "scale must be left out of the loss"),
        ({"loss": "grpo"}, TypeError, "loss must be a fused loss, such as FusedLinearGRPOLoss, got str"),
        ({"batch": [1]}, TypeError, "batch must be a mapping"),
        ({"model": "model"}, TypeError, "model must be a causal LM"),
        ({"options": {"max_lenght_q": 3}}, TypeError, "Gemma2ForCausalLM takes no max_lenght_q with fused=True"),
    ],
)
def test_bad_calls_are_refused_before_the_model_runs(changed, error, message):
    """`changed` has columns of the batch, and arguments by their names."""
    model = swap_lm_head(gemma())
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    columns = {**make_batch(), **changed}
    call = {"model": model, "loss": FusedLinearGRPOLoss("grpo")}
    call |= {name: columns.pop(name) for name in ("model", "batch", "loss") if name in columns}
    call |= columns.pop("options", {})
    call.setdefault("batch", {name: value for name, value in columns.items() if value is not None})
    with pytest.raises(error, match=message):
        loss_step(**call)
    if "options" in changed:
        with pytest.raises(error, match=message):
            completion_logps(**call)


@pytest.mark.parametrize("shape", [(), (BATCH, 1)])
def test_an_objective_has_one_loss_for_each_token(shape):
    loss = FusedLinearGRPOLoss(lambda logps, batch: TokenLoss(-logps.sum_to_size(shape)), reduction=GlobalTokenMean())
    message = re.escape(f"the loss of objective must be {(BATCH, LENGTH)}, one for each token, got {shape}")
    with pytest.raises(ValueError, match=message):
        loss_step(gemma(), make_batch(), loss)


NOT_SWAPPED = "must be a transformers PreTrainedModel, got {}; {}"
INSIDE = "swap the model inside of it"
WRAPPERS = [
    (_Wrapper, NOT_SWAPPED.format("_Wrapper", INSIDE)),
    (torch.compile, NOT_SWAPPED.format("OptimizedModule", INSIDE)),
    (
        lambda model: nn.Linear(2, 2),
        NOT_SWAPPED.format("Linear", "give its hidden states to linear_logprobs"),
    ),
    (nn.DataParallel, "model must not be in a DataParallel, .*; use DistributedDataParallel"),
    (lambda model: nn.DataParallel(swap_lm_head(model)), "model must not be in a DataParallel"),
]


@pytest.mark.parametrize(("wrap", "message"), WRAPPERS)
def test_a_wrapper_needs_a_swapped_model(wrap, message):
    for call in (loss_step, loss_steps, completion_logps):
        with pytest.raises(TypeError, match=message):
            call(wrap(small_llama()), make_batch(), FusedLinearGRPOLoss("grpo"))


@pytest.mark.parametrize("wrap", [_Wrapper, torch.compile, nn.DataParallel])
def test_the_swap_is_of_the_model_inside_of_a_wrapper(wrap):
    with pytest.raises(TypeError, match=INSIDE):
        swap_lm_head(wrap(small_llama()))


def test_micro_batches_say_where_their_loss_is():
    steps = loss_steps(small_llama(), make_batch(), FusedLinearGRPOLoss("grpo"))
    for name in ("loss", "metrics", "per_token_logps", "backward"):
        with pytest.raises(AttributeError, match=f"LossSteps has no {name}; iterate over its steps, or read total"):
            getattr(steps, name)
    assert not hasattr(steps, "losses")


def test_the_models_softcap_and_an_input_that_it_takes():
    model, batch = gemma(), make_batch()
    plain = loss_step(model, batch, FusedLinearGRPOLoss("grpo"), cu_seq_lens_q=None).loss
    assert torch.equal(loss_step(model, batch, FusedLinearGRPOLoss("grpo", softcap=3.0)).loss, plain)


def test_threads_take_steps_of_one_model_that_none_has_swapped_yet():
    model, loss = gemma(), FusedLinearGRPOLoss("dapo")
    batches = [make_batch(), rows_of(make_batch(), slice(3))]
    alone = [loss_step(copy.deepcopy(model), batch, loss).loss for batch in batches]
    calls = [lambda batch=batch: loss_step(model, batch, loss).loss for batch in batches]
    for losses, value in zip(in_threads(*calls, times=10), alone, strict=True):
        assert all(torch.equal(loss, value) for loss in losses)


@pytest.mark.parametrize(
    ("name", "why"),
    [("ref_per_token_logps", ", because beta is 0"), ("sampling_per_token_logps", " without a sampler_")],
)
def test_log_probabilities_that_nothing_reads(name, why):
    model, batch = gemma(), make_batch() | {name: torch.zeros(BATCH, LENGTH)}
    del batch["num_items_in_batch"]
    with pytest.warns(UserWarning, match=f"{name} are given, but nothing reads them{why}") as caught:
        loss_step(model, batch, FusedLinearGRPOLoss("grpo"))
    assert caught[0].filename == __file__
