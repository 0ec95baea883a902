"""torch.compile: the head is one operator of the graph, with the numbers of eager mode."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from devices import NEEDS_GPU
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LogitTransform,
    LowRank,
    linear_logprobs,
    logits_logprobs,
    plan_linear_logprobs,
)

VOCAB, HIDDEN, SHAPE = 133, 16, (3, 7)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy and extras": {"entropy": True, "extras": ("is_top1", "log_sum_sq_probs", "mean_logits")},
    "transform": {"transform": LogitTransform(temperature=0.7, softcap=4.0, scale=1.5)},
    "chunks": {"chunk_tokens": 4, "chunk_vocab": 32},
    "fixed shape": {"fixed_shape": True, "entropy": True},
    "batch invariant": {"batch_invariant": True, "entropy": True},
    "tolerance": {"grad_tolerance": 0.2, "entropy": True},
    "compute dtype": {"compute_dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps what it was given and runs it as it is, its backward too."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        self.graphs.append(graph)
        return graph.forward

    def names(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


def tensors(device: torch.device, shape=SHAPE, dtype=torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "hidden": (*shape, HIDDEN),
        "weight": (VOCAB, HIDDEN),
        "bias": (VOCAB,),
        "a": (2, HIDDEN),
        "b": (VOCAB, 2),
        "logits": (*shape, VOCAB),
    }
    floats = {name: torch.randn(size, generator=generator).to(device, dtype) for name, size in sizes.items()}
    targets = torch.randint(VOCAB, shape, generator=generator).to(device)
    mask = (torch.rand(shape, generator=generator) < 0.6).to(device)
    targets.view(-1)[1] = -100
    return {**{name: t.requires_grad_() for name, t in floats.items()}, "targets": targets, "mask": mask}


def total(outputs) -> Tensor:
    value = 0.0
    for place, values in enumerate(outputs):
        if values is not None:
            steps = torch.arange(values.numel(), device=values.device).view(values.shape)
            value = value + (values * torch.cos(steps + place)).sum()
    return value


def solve(function: Callable, *leaves: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    outputs = [values for values in function(*leaves) if values is not None]
    differentiable = [values for values in outputs if values.requires_grad]
    return [*(values.detach() for values in outputs), *torch.autograd.grad(total(differentiable), leaves)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_linear_logprobs(options, device):
    check_linear_logprobs(options, device)


def test_linear_logprobs_within_a_budget(device):
    least = plan_linear_logprobs(math.prod(SHAPE), VOCAB, HIDDEN, dtype=torch.float32, device=device, bias=True)
    check_linear_logprobs({"max_extra_bytes": least.least_bytes}, device)


def check_linear_logprobs(options: dict[str, Any], device: torch.device) -> None:
    x = tensors(device)

    def head(hidden, weight, bias):
        return linear_logprobs(hidden, weight, x["targets"], mask=x["mask"], bias=bias, **options)

    leaves = x["hidden"], x["weight"], x["bias"]
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    expected, first, second = (solve(function, *leaves) for function in (head, compiled, compiled))
    assert_same(second, first)
    if "grad_tolerance" not in options:
        assert_same(first, expected)
    for mine, other in zip(first, expected, strict=True):  # blocks of tokens may be sorted in another order
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
def test_low_rank_terms(fixed, device):
    x = tensors(device)

    def head(hidden, weight, a, b):
        terms = [LowRank(a=a, b=b, scaling=0.5), LowRank(a=a, b=b, hidden=hidden * 2)]
        return linear_logprobs(hidden, weight, x["targets"], mask=x["mask"], low_rank=terms, fixed_shape=fixed)

    leaves = x["hidden"], x["weight"], x["a"], x["b"]
    found = solve(torch.compile(head, fullgraph=True, backend="aot_eager"), *leaves)
    # The rows of the term's small products are not gathered here, so their rounding may differ.
    for mine, other in zip(found, solve(head, *leaves), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("why", ["a named chunk", "a low-rank term", "no epilogue"])
def test_a_backward_without_bounds_is_exact(why, device, monkeypatch):
    """As in eager mode: where blocks cannot be told apart, none is left out, however little it matters."""
    from liger_rl.head import operator as linear_op

    x = tensors(device, shape=(600,))
    weights = torch.where(torch.arange(600, device=device) % 10 == 0, 1.0, 1e-6)
    options: dict[str, Any] = {"chunk_vocab": 64} if why == "a named chunk" else {}
    if why == "no epilogue":  # as on CUDA for fewer live tokens than it takes
        fold = linear_op.fold_tokens
        monkeypatch.setattr(
            linear_op, "fold_tokens", lambda head, options, *, bounded: fold(head, options, bounded=False)
        )

    def head(tolerance):
        def solved(hidden, weight, a, b):
            terms = [LowRank(a=a, b=b)] if why == "a low-rank term" else []
            given = {"mask": x["mask"], "low_rank": terms, "grad_tolerance": tolerance, **options}
            return linear_logprobs(hidden, weight, x["targets"], **given).logps * weights

        return torch.compile(solved, fullgraph=True, backend="aot_eager")

    leaves = [x[name] for name in ("hidden", "weight", "a", "b")[: 4 if why == "a low-rank term" else 2]]
    found, expected = (
        torch.autograd.grad(head(tolerance)(*leaves, *[None] * (4 - len(leaves))).sum(), leaves)
        for tolerance in (0.2, 0.0)
    )
    assert_same(list(found), list(expected))


@pytest.mark.parametrize("options", [{}, {"entropy": True}, {"entropy": True, "fixed_shape": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_logprobs(options, dtype, device):
    x = tensors(device, dtype=dtype)

    def head(logits):
        return logits_logprobs(logits, x["targets"], mask=x["mask"], **options)

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    assert_same(solve(compiled, x["logits"]), solve(head, x["logits"]))


def test_inductor(device):
    """With a real compiler around the operator; it fuses what is around it, so rounding may differ."""
    x = tensors(device)

    def step(hidden, weight):
        return linear_logprobs(hidden * 2, weight, x["targets"], mask=x["mask"], entropy=True)

    leaves = x["hidden"], x["weight"]
    found = solve(torch.compile(step, fullgraph=True), *leaves)
    for mine, other in zip(found, solve(step, *leaves), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", PRESETS)
def test_losses(name):
    x = tensors(torch.device("cpu"))
    options = {"dr_grpo": {"max_completion_length": 7}, "dro": {"dro_beta": 0.3}}.get(name, {})
    # A graph takes two passes, whatever eager mode takes.
    loss = FusedLinearGRPOLoss(name, beta=0.1, metrics="basic", passes="two", **options)
    advantages, old = torch.tensor([1.0, -0.5, 0.3]), torch.full(SHAPE, -4.0)

    def step(hidden, weight):
        columns = {"old_per_token_logps": old, "ref_per_token_logps": old}
        result = loss(hidden, weight, x["targets"], advantages, x["mask"], **columns)
        return result.loss, *(metric.total.detach().float() for metric in result.metrics.values())

    graphs = Graphs()
    leaves = x["hidden"], x["weight"]
    assert_same(solve(torch.compile(step, fullgraph=True, backend=graphs), *leaves), solve(step, *leaves))
    assert graphs.names().count("liger_rl.linear_logprobs.default") == 1
    assert not {"matmul", "mm", "addmm", "linear"} & {name.split(".")[-1] for name in graphs.names()}


def test_any_number_of_tokens_takes_one_graph():
    x = tensors(torch.device("cpu"), shape=(4, 40))
    graphs = Graphs()

    def head(hidden, weight, targets):
        return linear_logprobs(hidden, weight, targets, entropy=True)

    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (40, 11, 23):
        batch = x["hidden"][:, :tokens].clone(), x["weight"], x["targets"][:, :tokens].clone()
        assert torch.equal(compiled(*batch).logps, head(*batch).logps)
    assert len(graphs.graphs) == 1


def test_garbage_under_the_mask(device):
    x = tensors(device)
    hidden = x["hidden"].detach().masked_fill(~x["mask"][..., None], math.nan).requires_grad_()
    targets = x["targets"].masked_fill(~x["mask"], VOCAB)

    def head(hidden, weight):
        return linear_logprobs(hidden, weight, targets, mask=x["mask"], entropy=True)

    found = solve(torch.compile(head, fullgraph=True, backend="aot_eager"), hidden, x["weight"])
    assert_same(found, solve(head, hidden, x["weight"]))
    assert all(values.isfinite().all() for values in found)


def test_a_target_outside_the_vocabulary_raises_when_it_runs():
    x = tensors(torch.device("cpu"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def head(targets):
        return linear_logprobs(x["hidden"], x["weight"], targets).logps

    assert head(x["targets"]).isfinite().all()
    with pytest.raises(ValueError, match="targets must be token ids in"):
        head(x["targets"].masked_fill(x["mask"], VOCAB))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    x = tensors(torch.device("cpu"))
    x[frozen].requires_grad_(False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def head(hidden, weight):
        return linear_logprobs(hidden, weight, x["targets"]).logps.sum()

    head(x["hidden"], x["weight"]).backward()
    assert x[frozen].grad is None
    assert x["weight" if frozen == "hidden" else "hidden"].grad is not None


def test_backward_twice_and_not_through_itself():
    """As in eager mode: the same gradients again, and none of the gradients."""
    x = tensors(torch.device("cpu"))
    compiled = torch.compile(
        lambda hidden: linear_logprobs(hidden, x["weight"], x["targets"]).logps, fullgraph=True, backend=Graphs()
    )
    value = compiled(x["hidden"]).sum()
    first, second = (torch.autograd.grad(value, x["hidden"], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (grad,) = torch.autograd.grad(compiled(x["hidden"]).square().sum(), x["hidden"], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def test_autocast(device):
    x = tensors(device)

    def head(hidden, weight):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return linear_logprobs(hidden, weight, x["targets"], entropy=True)

    leaves = x["hidden"], x["weight"]
    assert_same(solve(torch.compile(head, fullgraph=True, backend="aot_eager"), *leaves), solve(head, *leaves))


# Torch 2.8 names the exception, and not its message.
REFUSAL = r"under torch\.compile|raised exception ExceptionVariable\(<class 'ValueError'>\)"


def test_what_a_graph_cannot_hold():
    """It runs outside of the graph, or where there may be no outside it is refused."""
    x = tensors(torch.device("cpu"))

    def gathered(hidden):
        return linear_logprobs(hidden, x["weight"], x["targets"], gather=lambda *_: nullcontext()).logps

    def added(hidden):
        total = torch.zeros_like(x["weight"])
        return linear_logprobs(hidden, x["weight"], x["targets"], weight_grad=total).logps

    def in_place(logits):
        return logits_logprobs(logits, x["targets"], grad_buffer=torch.zeros_like(logits)).logps

    for function, leaf in ((gathered, x["hidden"]), (added, x["hidden"]), (in_place, x["logits"])):
        assert torch.equal(torch.compile(function, backend="eager")(leaf), function(leaf))
        torch._dynamo.reset()
        with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException), match=REFUSAL):
            torch.compile(function, backend="eager", fullgraph=True)(leaf)


CHECKED = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
def test_operators_keep_torchs_rules(fixed):
    from liger_rl.given_logits import operator as logit_op
    from liger_rl.head import operator as linear_op

    x = tensors(torch.device("cpu"))
    hidden, targets, live = x["hidden"].detach().flatten(0, 1), x["targets"].flatten(), x["mask"].flatten()
    live = live & (targets >= 0)
    options = linear_op.OpOptions(
        temperature=1.0,
        softcap=None,
        scale=1.0,
        entropy=True,
        extras="is_top1",
        compute_dtype=torch.float32,
        chunk_tokens=None,
        chunk_vocab=None,
        tolerance=0.0 if fixed else 0.1,
        fixed_shape=fixed,
        batch_invariant=False,
        kernels_fit=False,
        bounded=not fixed,
        targets_name="targets",
    )
    head = (hidden.requires_grad_(), x["weight"], x["bias"], targets, live, None, None)
    operator = linear_op.never_waiting if fixed else linear_op.waiting
    torch.library.opcheck(operator, (*head, *options), test_utils=CHECKED)
    rows = (x["logits"].detach(), x["targets"], x["mask"])
    operator = logit_op.never_waiting if fixed else logit_op.waiting
    torch.library.opcheck(operator, (*rows, [1.0, 1.0], True, fixed, "targets"), test_utils=CHECKED)
    low_rank = (hidden, x["a"], live, torch.float32)
    torch.library.opcheck(linear_op._inputs, low_rank, test_utils=CHECKED)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.8 has no such tag")
@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
def test_operators_that_wait_for_the_device_say_so(fixed):
    """And no other, which CUDA graphs are to hold."""
    x = tensors(torch.device("cpu"))
    operators: dict[str, Any] = {}

    def recorded(graph: torch.fx.GraphModule, inputs) -> Callable:
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", None) == "liger_rl":
                operators[node.target._schema.name] = node.target
        return make_boxed_func(graph.forward)

    def both(hidden, weight, a, b, logits):
        given = {"mask": x["mask"], "fixed_shape": fixed}
        terms = [LowRank(a=a, b=b)]
        return (
            linear_logprobs(hidden, weight, x["targets"], low_rank=terms, **given).logps.sum()
            + logits_logprobs(logits, x["targets"], **given).logps.sum()
        )

    leaves = [x[name] for name in ("hidden", "weight", "a", "b", "logits")]
    torch.compile(both, fullgraph=True, backend=aot_autograd(fw_compiler=recorded))(*leaves).backward()
    suffix = "_fixed_shape" if fixed else ""
    waiting = {f"liger_rl::{name}" for name in ("linear_logprobs", "linear_logprobs_backward", "logits_logprobs")}
    marked = {name for name, operator in operators.items() if torch.Tag.cudagraph_unsafe in operator.tags}
    assert marked == (set() if fixed else waiting)
    names = {f"linear_logprobs{suffix}", f"linear_logprobs{suffix}_backward", f"logits_logprobs{suffix}"}
    names |= {"logits_logprobs_backward", "low_rank_inputs", "low_rank_inputs_backward"}
    assert set(operators) == {f"liger_rl::{name}" for name in names}


@NEEDS_GPU
@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.8 has no such tag")
@pytest.mark.parametrize("tokens", [700, 64], ids=["epilogue", "tiles"])
@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
@pytest.mark.parametrize("kind", ["linear", "low rank", "logits"])
def test_cuda_graphs_of_the_compiler(kind, fixed, tokens):
    """What waits for the device stays outside of them, and the rest is captured with the numbers of eager mode."""
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to("cuda", torch.bfloat16).requires_grad_()

    hidden, weight, a, b = made(tokens, 64), made(512, 64), made(4, 64), made(512, 4)
    targets = torch.randint(512, (tokens,), generator=generator).cuda()
    mask = (torch.rand(tokens, generator=generator) < 0.6).cuda()

    def step(hidden, weight, a, b):
        given = {"mask": mask, "entropy": True, "fixed_shape": fixed}
        if kind == "logits":
            found = logits_logprobs((hidden * 2) @ weight.T, targets, **given)
        else:
            terms = [LowRank(a=a, b=b)] if kind == "low rank" else []
            found = linear_logprobs(hidden * 2, weight, targets, low_rank=terms, **given)
        return (found.logps * 3).sum() + found.entropy.square().sum()

    def solved(function) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        value = function(hidden, weight, a, b)
        found = torch.autograd.grad(value, (hidden, weight, a, b), allow_unused=True)
        return [value.detach().clone(), *(grad.clone() for grad in found if grad is not None)]

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    expected = solved(step)
    for _ in range(4):  # one to warm up, one to capture, two of replays
        found = solved(compiled)
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def qwen(**options):
    transformers = pytest.importorskip("transformers", reason="the model is HuggingFace's")
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 16}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, **options)
    return transformers.Qwen3ForCausalLM(config)


def gemma():
    transformers = pytest.importorskip("transformers", reason="the model is HuggingFace's")
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 16}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return transformers.Gemma2ForCausalLM(config)


@pytest.mark.parametrize("make", [qwen, gemma])
def test_a_swapped_model(make, device):
    from liger_rl.integrations.transformers import swap_lm_head

    model = swap_lm_head(make().to(device))
    ids = torch.randint(160, (2, 9), device=device)
    labels = ids.masked_fill(torch.arange(9, device=device) < 3, -100)
    before = {name: type(value) for name, value in vars(model.lm_head).items()}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for call in (model, compiled, compiled):
        model.zero_grad()
        out = call(input_ids=ids, labels=labels, fused=True, entropy=True, temperature=0.8)
        (out.loss + out.entropy.sum()).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        results.append([out.loss.detach(), out.per_token_logps.detach(), out.entropy.detach(), *grads])
    assert_same(results[2], results[1])
    # The fused head changes no number, but old compilers round some of the body's otherwise.
    if torch.equal(compiled(input_ids=ids).logits, model(input_ids=ids).logits):
        assert_same(results[1], results[0])
    for mine, other in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, other)
    # The head answers for itself again.
    assert model(input_ids=ids).logits.shape == (2, 9, 160)
    assert {name: type(value) for name, value in vars(model.lm_head).items()} == before
    seen = []
    for register in (model.lm_head.register_forward_hook, model.lm_head.register_forward_pre_hook):
        register(lambda *_: seen.append(1), prepend=True)
    model(input_ids=ids)
    assert len(seen) == 2


def test_a_swapped_model_whose_body_breaks_the_graph():
    from liger_rl.integrations.transformers import swap_lm_head

    model = swap_lm_head(qwen())
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    ids = torch.randint(160, (2, 9))
    expected = model(input_ids=ids, labels=ids, fused=True).loss
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(input_ids=ids, labels=ids, fused=True).loss, expected)
    assert "forward" not in vars(model.lm_head)


def test_a_swapped_model_with_lora_on_its_head():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    from liger_rl.integrations.transformers import swap_lm_head

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], init_lora_weights=False)
    model = swap_lm_head(peft.get_peft_model(qwen(tie_word_embeddings=False), config))
    ids = torch.randint(160, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for call in (model, compiled):
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, fused=True).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
