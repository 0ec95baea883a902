"""One call for a step against the same step spelt out with full logits."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from head_calls import Products  # noqa: E402
from hf_models import VOCAB, assert_same_gradients, build, full, gradients  # noqa: E402
from liger_rl import FusedLinearGRPOLoss, PolicyBatch, Segments, ppo_loss_fn  # noqa: E402
from liger_rl.integrations.transformers import is_swapped, swap_lm_head  # noqa: E402
from liger_rl.step.policy_step import PolicyStep, completion_logps, policy_step  # noqa: E402

BATCH, LENGTH, PROMPT = 4, 13, 5


def gemma(**options) -> transformers.PreTrainedModel:
    return build("Gemma2", num_hidden_layers=1, **options)


def make_batch(device="cpu") -> dict[str, Tensor]:
    """Prompts padded on the left, completions on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    column = torch.arange(LENGTH)
    attention = (column >= torch.tensor([0, 2, 1, 3])[:, None]) & (column < torch.tensor([13, 9, 12, 7])[:, None])
    mask = attention & (column >= PROMPT)
    batch = {
        "input_ids": torch.where(attention, ids, 0),
        "attention_mask": attention.long(),
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.5]),
    }
    return {name: value.to(device) for name, value in batch.items()}


def full_step(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the tokens themselves, from full logits; column 0 is 0."""
    inputs = {n: batch[n] for n in ("input_ids", "attention_mask", "position_ids") if n in batch}
    return full(model, {**inputs, "labels": batch["input_ids"]}, temperature)


def expected_step(model, batch, loss: FusedLinearGRPOLoss):
    logps, entropy = full_step(model, batch, loss.transform.temperature)
    names = set(PolicyBatch.__dataclass_fields__) & set(batch)
    columns = PolicyBatch(**{name: batch[name] for name in names})
    terms = loss.terms
    return ppo_loss_fn(
        logps, columns, terms.objective, terms.reduction, entropy=entropy, kl=terms.kl,
        entropy_bonus=terms.entropy_bonus, corrections=terms.corrections, metrics=terms.metrics,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("grpo", {}),
        ("dapo", {"beta": 0.1, "epsilon_high": 0.28, "temperature": 0.7}),
        ("gspo", {"metrics": "with_entropy"}),
        ("dr_grpo", {"max_completion_length": 10, "entropy_coef": 0.02}),
        ("cispo", {"epsilon_high": 2.0, "chunk_tokens": 7, "chunk_vocab": 50}),
    ],
)
def test_a_step_is_that_of_the_full_logits(loss_type, options, device):
    model, batch, loss = gemma().to(device), make_batch(device), FusedLinearGRPOLoss(loss_type, **options)
    batch |= {"num_items_in_batch": 19, "importance_ratio": torch.rand(BATCH, 1, device=device) + 0.5}
    old = full_step(model, batch, loss.transform.temperature)[0].detach()
    batch["old_per_token_logps"] = old + 0.3 * torch.randn(BATCH, LENGTH, device=device)
    batch["ref_per_token_logps"] = old + 0.3 * torch.randn(BATCH, LENGTH, device=device)
    expected = expected_step(model, batch, loss)
    expected_gradients, given = gradients(model, expected.loss), copy.deepcopy(batch)
    step = policy_step(model, batch, loss)
    assert is_swapped(model)
    assert isinstance(step, PolicyStep)
    assert batch.keys() == given.keys()
    assert all(torch.equal(torch.as_tensor(batch[n]), torch.as_tensor(given[n])) for n in given), "inputs left alone"
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert step.metrics.keys() == expected.metrics.keys() != set()
    for name, metric in expected.metrics.items():
        torch.testing.assert_close(step.metrics[name].value, metric.value, rtol=1e-5, atol=1e-5)
    mask = batch["completion_mask"]
    torch.testing.assert_close(step.per_token_logps, torch.where(mask, old, 0.0), rtol=1e-5, atol=1e-5)
    assert not step.per_token_logps.requires_grad
    assert (step.entropy is not None) == loss.terms.needs_entropy
    assert_same_gradients(gradients(model, step.loss), expected_gradients)


def test_completion_logps_are_the_old_ones_of_the_same_policy():
    model, batch, loss = gemma(), make_batch(), FusedLinearGRPOLoss("grpo", temperature=0.7, beta=0.1)
    old = completion_logps(model, batch, loss)
    assert not old.requires_grad
    mask = batch["completion_mask"]
    torch.testing.assert_close(old, torch.where(mask, full_step(model, batch, 0.7)[0], 0.0), rtol=1e-5, atol=1e-5)
    step = policy_step(model, {**batch, "old_per_token_logps": old, "ref_per_token_logps": old}, loss)
    assert torch.equal(step.per_token_logps, old)
    assert step.metrics["kl_ref"].item() == 0.0


def test_the_losss_options_of_the_head_reach_it():
    model, whole = gemma(), []
    for options in ({}, {"chunk_vocab": 8}):
        with Products() as products:
            policy_step(model, make_batch(), FusedLinearGRPOLoss("grpo", **options))
        whole.append(VOCAB in [vocab for _, vocab in products.logits(model.config.hidden_size)])
    assert whole == [True, False]


def test_the_first_token_is_never_counted():
    """Nothing predicts it: with it in the mask, the result is the same."""
    model, batch, loss = gemma(), make_batch(), FusedLinearGRPOLoss("grpo")
    expected = policy_step(model, batch, loss).loss
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][0, 0] = True
    assert torch.equal(policy_step(model, batch, loss).loss, expected)


def test_micro_batches_sum_to_the_whole():
    model, batch, loss = gemma(), make_batch(), FusedLinearGRPOLoss("dapo")
    batch["num_items_in_batch"] = int(batch["completion_mask"].sum())
    whole = gradients(model, policy_step(model, batch, loss).loss)
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
        policy_step(model, part, loss).loss.backward()
    assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, whole)


def test_a_packed_row_is_the_padded_batch():
    """Sequences one after the other, told apart by position_ids, per-sequence ratios included."""
    model, loss = build("Llama", attention="eager"), FusedLinearGRPOLoss("gspo", metrics="basic")
    batch = make_batch()
    batch["old_per_token_logps"] = completion_logps(model, batch, loss) + 0.1 * torch.randn(BATCH, LENGTH)
    expected = policy_step(model, batch, loss)
    expected_gradients = gradients(model, expected.loss)
    real = batch["attention_mask"].bool()
    rows = torch.arange(BATCH)[:, None].expand_as(real)[real]
    packed = {
        "input_ids": batch["input_ids"][real][None],
        "position_ids": batch["position_ids"][real][None],
        "completion_mask": batch["completion_mask"][real][None],
        "old_per_token_logps": batch["old_per_token_logps"][real][None],
        "advantages": batch["advantages"][rows][None],
        "segments": Segments(index=rows, count=BATCH),
    }
    step = policy_step(model, packed, loss)
    torch.testing.assert_close(step.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert step.per_token_logps.shape == packed["input_ids"].shape
    torch.testing.assert_close(step.per_token_logps[0], expected.per_token_logps[real], rtol=1e-5, atol=1e-5)
    for name, metric in expected.metrics.items():
        torch.testing.assert_close(step.metrics[name].value, metric.value, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(model, step.loss), expected_gradients)


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# With its wrapper the process group outlives its test. A group of gloo that ends right behind a collective waits for
# its thread, which may wait for the interpreter (torch 2.13).
KEPT = []


def test_distributed_data_parallel():
    """One rank of gloo: DDP's own forward around the swapped model, its reducer on every gradient."""
    dist = torch.distributed
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs torch.distributed to itself")
    batch, loss, plain = make_batch(), FusedLinearGRPOLoss("grpo"), gemma()
    expected = gradients(plain, policy_step(plain, batch, loss).loss)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = swap_lm_head(gemma())
        parallel = nn.parallel.DistributedDataParallel(model)
        KEPT.append(parallel)
        policy_step(parallel, batch, loss).loss.backward()
        assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)
    finally:
        dist.destroy_process_group()


def test_a_wrapper_needs_a_swapped_model():
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got _Wrapper"):
        policy_step(_Wrapper(gemma()), make_batch(), FusedLinearGRPOLoss("grpo"))


@pytest.mark.parametrize("part", ["body", "whole"])
def test_compiled_models(part):
    """One graph of the body, or of the whole model with its fused head, made once and used."""
    batch, loss, graphs = make_batch(), FusedLinearGRPOLoss("grpo"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, model = gemma(), swap_lm_head(gemma())
    expected = gradients(plain, policy_step(plain, batch, loss).loss)
    if part == "body":
        model.model.compile(backend=backend)
    compiled = torch.compile(model, backend=backend) if part == "whole" else model
    for _ in range(2):
        assert_same_gradients(gradients(model, policy_step(compiled, batch, loss).loss), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["lora on the head", "a router"])
def test_other_kinds_of_models(kind):
    batch, loss, added = make_batch(), FusedLinearGRPOLoss("grpo"), 0.0
    if kind == "a router":
        model = build("Mixtral", num_hidden_layers=1)
        added = 0.1 * model(batch["input_ids"], attention_mask=batch["attention_mask"]).aux_loss
        assert added > 0.05
    else:
        peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"])
        model = peft.get_peft_model(gemma(tie_word_embeddings=False), config)
        with torch.no_grad():
            model.get_base_model().lm_head.lora_B["default"].weight.normal_(std=0.1)
    expected = expected_step(model, batch, loss).loss + added
    expected_gradients = gradients(model, expected)
    step = policy_step(model, batch, loss)
    torch.testing.assert_close(step.loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model, step.loss), expected_gradients)
    assert kind == "a router" or len(expected_gradients) == 2


def test_prompt_tuning_has_tokens_of_its_own_before_the_batchs():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, loss = peft.get_peft_model(build("Llama"), config), FusedLinearGRPOLoss("grpo")
    batch = {name: value for name, value in make_batch().items() if name != "position_ids"}
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 3:-1].log_softmax(-1)
    expected = logits.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    step = policy_step(model, batch, loss)
    assert step.per_token_logps.shape == batch["input_ids"].shape
    mask = batch["completion_mask"][:, 1:]
    torch.testing.assert_close(step.per_token_logps[:, 1:], torch.where(mask, expected, 0.0), rtol=1e-5, atol=1e-5)
    assert len(gradients(model, step.loss)) == 1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"input_ids": None}, TypeError, "input_ids must be a tensor in the batch, got NoneType"),
        ({"completion_mask": None}, TypeError, "completion_mask must be a tensor in the batch, got NoneType"),
        ({"completion_mask": torch.ones(BATCH, LENGTH - 1)}, ValueError, r"completion_mask must be .* = \(4, 13\)"),
        ({"input_ids": torch.ones(LENGTH, dtype=torch.long)}, ValueError, r"input_ids must be \(B, T\) integers"),
        ({"advantages": None}, TypeError, "advantages must be a real tensor, got NoneType"),
        ({"advantages": torch.ones(BATCH + 1)}, ValueError, r"advantages must be .*got \(5,\)"),
        ({"old_per_token_logps": torch.ones(BATCH, 3)}, ValueError, "old_per_token_logps must be"),
        ({"old_per_token_logp": torch.ones(BATCH, LENGTH)}, ValueError, "batch has no column 'old_per_token_logp'"),
        ({"labels": torch.ones(BATCH, LENGTH)}, ValueError, "batch has no column 'labels'"),
        ({"logits_to_keep": 3}, ValueError, "batch has no column 'logits_to_keep'"),
        ({"segments": Segments(index=torch.zeros(13).long(), count=1)}, ValueError, r"one packed row, \(1, T\)"),
        ({"loss": FusedLinearGRPOLoss("grpo", beta=0.1)}, ValueError, "ref_per_token_logps"),
        ({"loss": FusedLinearGRPOLoss("dapo", passes="one")}, ValueError, 'passes must be "auto" or "two" here'),
        ({"loss": "grpo"}, TypeError, "loss must be a FusedLinearGRPOLoss, got str"),
        ({"batch": [1]}, TypeError, "batch must be a mapping"),
        ({"model": "model"}, TypeError, "model must be a causal LM"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_before_the_model_runs(changed, error, message):
    """`changed` has columns of the batch, and arguments by their names."""
    model = swap_lm_head(gemma())
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    columns = {**make_batch(), **changed}
    call = {"model": model, "loss": FusedLinearGRPOLoss("grpo")}
    call |= {name: columns.pop(name) for name in ("model", "batch", "loss") if name in columns}
    call.setdefault("batch", {name: value for name, value in columns.items() if value is not None})
    with pytest.raises(error, match=message):
        policy_step(**call)


def test_a_softcap_of_the_loss_must_be_the_models():
    model, batch = swap_lm_head(gemma()), make_batch()
    expected = policy_step(model, batch, FusedLinearGRPOLoss("grpo")).loss
    assert torch.equal(policy_step(model, batch, FusedLinearGRPOLoss("grpo", softcap=3.0)).loss, expected)
    for options in ({"softcap": 30.0}, {"scale": 0.5}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be left out of the loss"):
            policy_step(model, batch, FusedLinearGRPOLoss("grpo", **options))


def test_an_input_that_the_model_does_not_take_is_refused():
    model, batch, loss = gemma(), make_batch(), FusedLinearGRPOLoss("grpo")
    assert policy_step(model, batch, loss, cu_seq_lens_q=None).loss.isfinite()
    for call in (policy_step, completion_logps):
        with pytest.raises(TypeError, match="Gemma2ForCausalLM takes no max_lenght_q with fused=True"):
            call(model, batch, loss, max_lenght_q=3)


def test_threads_take_steps_of_one_model_that_none_has_swapped_yet():
    model, loss = gemma(), FusedLinearGRPOLoss("dapo")
    batches = [make_batch(), {**make_batch(), "advantages": torch.tensor([0.5, 1.0, -2.0, 1.5])}]
    expected = [policy_step(copy.deepcopy(model), batch, loss).loss for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: policy_step(model, batches[i % 2], loss).loss, range(20)))
    assert all(torch.equal(value, expected[i % 2]) for i, value in enumerate(found))
