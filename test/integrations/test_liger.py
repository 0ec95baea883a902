"""The drop-in for liger-kernel's GRPO losses against liger-kernel itself, and the places where that is wrong."""

import inspect

import pytest
import torch

pytest.importorskip("liger_kernel.chunked_loss", reason="the integration needs liger-kernel")

from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss as THEIRS

import oracles
from liger_rl.integrations.liger import LigerFusedLinearGRPOLoss

BATCH, LENGTH, HIDDEN, VOCAB = 6, 7, 12, 61
LENGTHS = torch.tensor([7, 3, 5, 1, 0, 6])
CLIPPING = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
FAMILIES = [*((name, "token") for name in (*CLIPPING, "cispo", "sapo", "vespo")), ("grpo", "sequence")]
# epsilon_low, epsilon_high, delta: a mean over a sequence moves less
BOUNDS = {"token": (0.2, 0.28, 1.5), "sequence": (0.04, 0.06, 1.1)}
OTHER_OPTIONS = {
    "cispo": {"epsilon_high": 1.3},
    "sapo": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6},
    "vespo": {"vespo_k_pos": 1.7, "vespo_lambda_pos": 2.2, "vespo_k_neg": 2.6, "vespo_lambda_neg": 1.4},
}


def options_of(loss_type, level="token", *, beta=0.13, delta=False, **options):
    """Every loss gets options of others too, as TRL 1.10 to 1.13 give them."""
    low, high, bound = BOUNDS[level]
    common = {
        "loss_type": loss_type, "beta": beta, "use_ref_model": beta != 0.0, "temperature": 0.8, "compiled": False,
        "epsilon_low": low, "epsilon_high": high, "importance_sampling_level": level,
        "delta": bound if delta and loss_type in CLIPPING else None, "max_completion_length": 11,
    }  # fmt: skip
    return common | OTHER_OPTIONS.get(loss_type, {}) | options


def problem(device="cpu", *, full=False, dtype=torch.float32):
    """-> the keywords of a call: uneven lengths, one sequence without tokens, ratios on either side of the bounds."""
    hidden, weight = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    bias, ids = torch.randn(VOCAB), torch.randint(VOCAB, (BATCH, LENGTH))
    logps = oracles.logprobs(hidden, weight, ids, bias, temperature=0.8)[0].float()
    mask = torch.arange(LENGTH) < (torch.full_like(LENGTHS, LENGTH) if full else LENGTHS)[:, None]
    call = {
        "_input": hidden.to(dtype),
        "lin_weight": weight.to(dtype),
        "selected_token_ids": ids,
        "attention_mask": mask.float(),
        "advantages": torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.3]),
        "bias": bias.to(dtype),
        "old_per_token_logps": logps + 0.4 * torch.randn(BATCH, LENGTH),
        "ref_per_token_logps": logps + 0.4 * torch.randn(BATCH, LENGTH),
        "num_items_in_batch": 37.0,
    }
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def ratios(call):
    mask = call["attention_mask"] != 0
    ratio = 0.3 + 1.7 * torch.rand(BATCH, LENGTH, device=mask.device)
    # 1 under the mask, as TRL makes them: VESPO of Liger sums over padding too
    return {"none": None, "(B, T)": torch.where(mask, ratio, 1.0), "(B, 1)": ratio[:, :1], "(B,)": ratio[:, 0]}


LEAVES = ("_input", "lin_weight", "bias")


def run(loss_class, options, call):
    """-> loss, gradients of hidden, weight and bias, and metrics."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in LEAVES if call.get(name) is not None}
    loss, metrics = loss_class(**{"compiled": False, **options})(**{**call, **leaves})
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), grads, tuple(value.detach() for value in metrics)


def both(options, call):
    """-> ours, liger-kernel's."""
    return run(LigerFusedLinearGRPOLoss, options, call), run(THEIRS, options, call)


def assert_same(result, expected):
    assert expected[0].abs() > 1e-3
    torch.testing.assert_close(result[0], expected[0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(result[1], expected[1], strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    torch.testing.assert_close(result[2], expected[2], rtol=1e-5, atol=0)


def test_the_signature_is_theirs():
    for name in ("__init__", "forward"):
        parameters = [
            [(p.name, p.default, p.kind) for p in inspect.signature(getattr(loss, name)).parameters.values()]
            for loss in (LigerFusedLinearGRPOLoss, THEIRS)
        ]
        assert parameters[0] == parameters[1]
    theirs = {name: value for name, value in vars(THEIRS()).items() if not name.startswith("_")}
    assert theirs.items() <= vars(LigerFusedLinearGRPOLoss()).items()


# KL, importance ratios, the argument that is left out.
CALLS = {
    "neither KL nor ratios": ("none", "none", None),
    "a KL and ratios of tokens": ("plain", "(B, T)", None),
    "a weighted KL and ratios of tokens": ("importance_weighted", "(B, T)", None),
    "a weighted KL and ratios of sequences": ("importance_weighted", "(B, 1)", None),
    "ratios of tokens": ("none", "(B, T)", None),
    "ratios of sequences": ("none", "(B,)", None),
    "no old log-probabilities": ("plain", "none", "old_per_token_logps"),
    "no count": ("plain", "none", "num_items_in_batch"),
    "no bias": ("plain", "none", "bias"),
}
CASES = [
    *((("dapo", "token"), name) for name in CALLS),
    *((family, "a KL and ratios of tokens") for family in FAMILIES if family != ("dapo", "token")),
    (("luspo", "sequence"), "ratios of sequences"),
    (("vespo", "token"), "ratios of sequences"),
    (("bnpo", "token"), "no count"),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_same_numbers(family, name, device):
    (loss_type, level), (kl, ratio, left_out) = family, CALLS[name]
    per_token = level == "token" or kl != "none" or ratio == "(B, T)"
    call = problem(device, full=loss_type == "luspo" and per_token)
    call["vllm_is_ratio"] = ratios(call)[ratio]
    call.pop(left_out, None)
    chosen = {"beta": 0.0 if kl == "none" else 0.13, "use_bias_correction_kl": kl == "importance_weighted"}
    for delta in (False, True) if loss_type in CLIPPING else (False,):
        mine, theirs = both(options_of(loss_type, level, delta=delta, **chosen), call)
        assert_same(mine, theirs)
        *divergence, clipped = mine[2]
        assert len(divergence) == (kl != "none")
        assert all(value > 0.01 for value in divergence)
        clips = loss_type in (*CLIPPING, "cispo") and left_out != "old_per_token_logps"
        assert 0.05 < clipped < 0.95 if clips else clipped == 0


@pytest.mark.parametrize("with_bias", [True, False])
def test_reference_from_hidden_states(with_bias, device):
    call, options = problem(device), options_of("grpo")
    before = run(LigerFusedLinearGRPOLoss, options, call)
    ref_logps = call.pop("ref_per_token_logps")
    for name, source, scale in (
        ("ref_input", "_input", 0.3),
        ("ref_weight", "lin_weight", 0.1),
        ("ref_bias", "bias", 0.1),
    ):
        if with_bias or name != "ref_bias":
            call[name] = call[source] + scale * torch.randn_like(call[source])
    mine, theirs = both(options, call)
    assert_same(mine, theirs)
    assert not torch.allclose(mine[2][0], before[2][0])
    for loss_class in (THEIRS, LigerFusedLinearGRPOLoss):  # at beta 0, too, where neither has an effect
        with pytest.warns(UserWarning, match=r"are provided\. Using ref_per_token_logps") as warned:
            run(loss_class, options | {"beta": 0.0}, call | {"ref_per_token_logps": ref_logps})
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        again = run(LigerFusedLinearGRPOLoss, options, call | {"ref_per_token_logps": ref_logps})
    assert torch.equal(again[0], before[0])


# Every option of Liger's constructor -> a loss type that has it and another value of it. As the last part, whether the
# loss must change; else it must raise, or for None stay.
OPTION_CHANGES = {
    "beta": ("grpo", 0.5, True),
    "compiled": ("grpo", True, None),
    "use_ref_model": ("grpo", False, False),
    "chunk_size": ("grpo", 3, None),
    "epsilon_low": ("grpo", 0.05, True),
    "epsilon_high": ("grpo", 0.05, True),
    "loss_type": ("grpo", "bnpo", True),
    "max_completion_length": ("dr_grpo", 5, True),
    "importance_sampling_level": ("grpo", "sequence", True),
    "sapo_temperature_pos": ("sapo", 2.0, True),
    "sapo_temperature_neg": ("sapo", 2.0, True),
    "temperature": ("grpo", 1.3, True),
    "delta": ("grpo", 1.05, True),
    "use_bias_correction_kl": ("grpo", True, True),
    "vespo_k_pos": ("vespo", 3.0, True),
    "vespo_lambda_pos": ("vespo", 2.5, True),
    "vespo_k_neg": ("vespo", 2.0, True),
    "vespo_lambda_neg": ("vespo", 3.0, True),
}


def test_no_option_is_dropped():
    """Each changes the loss as it changes Liger's, or is refused, or is documented to have no effect."""
    assert OPTION_CHANGES.keys() == inspect.signature(THEIRS).parameters.keys()
    call = problem()
    for name, (loss_type, value, changes) in OPTION_CHANGES.items():
        options = options_of(loss_type)
        before, changed = run(LigerFusedLinearGRPOLoss, options, call), options | {name: value}
        if changes is False:
            with pytest.raises(ValueError, match=name):
                run(LigerFusedLinearGRPOLoss, changed, call)
            continue
        mine = run(LigerFusedLinearGRPOLoss, changed, call)
        assert torch.equal(mine[0], before[0]) == (changes is None), name
        if changes:
            assert_same(mine, run(THEIRS, changed, call))


def test_no_argument_is_dropped():
    """Likewise, each argument of Liger's call."""
    plain = problem() | {"vllm_is_ratio": 0.3 + torch.rand(BATCH, LENGTH)}
    heads = {
        "ref_per_token_logps": None,
        "ref_input": torch.randn(BATCH, LENGTH, HIDDEN),
        "ref_weight": torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5,
        "ref_bias": torch.randn(VOCAB),
    }
    changes = {
        "selected_token_ids": torch.randint(VOCAB, (BATCH, LENGTH)),
        "num_items_in_batch": 20.0,
        "vllm_is_ratio": torch.ones(BATCH, LENGTH),
    }
    names = inspect.signature(THEIRS.forward).parameters.keys() - {"self"}
    assert names == (plain | heads).keys()
    options = options_of("dapo")
    for name in names:
        call = plain | heads if name in heads and name != "ref_per_token_logps" else plain
        changed = call | {name: changes[name] if name in changes else call[name].flip(0)}
        call, changed = ({n: v for n, v in c.items() if v is not None} for c in (call, changed))
        mine, theirs = both(options, changed)
        assert not torch.allclose(mine[0], run(LigerFusedLinearGRPOLoss, options, call)[0]), name
        assert_same(mine, theirs)


def test_options_are_read_at_every_call():
    call = problem()
    ours, theirs = (c(**options_of("grpo")) for c in (LigerFusedLinearGRPOLoss, THEIRS))
    before = ours(**call)[0]
    for module in (ours, theirs):
        module.beta, module.loss_type = 0.5, "bnpo"
    assert not torch.allclose(ours(**call)[0], before)
    torch.testing.assert_close(ours(**call)[0], theirs(**call)[0].detach(), rtol=1e-5, atol=1e-6)
    ours.use_ref_model = False
    with pytest.raises(ValueError, match="use_ref_model"):
        ours(**call)


def test_the_loss_is_built_once(monkeypatch):
    built, build = [], LigerFusedLinearGRPOLoss._build_loss
    monkeypatch.setattr(LigerFusedLinearGRPOLoss, "_build_loss", lambda *args: built.append(1) or build(*args))
    call, loss = problem(), LigerFusedLinearGRPOLoss(**options_of("grpo"))
    for _ in range(3):
        loss(**call)
    assert built == [1]


@pytest.fixture
def two_ranks(monkeypatch):
    """-> the values that were all-reduced, as if another rank had the same."""
    calls = []

    def all_reduce(value, op=None):
        calls.append(value.item())
        value.mul_(2)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return calls


@pytest.mark.parametrize("count", [0, 1, 1.0, torch.tensor(0), torch.tensor(1)])
def test_ranks_divide_by_one_at_least(count, two_ranks):
    call, options = problem() | {"num_items_in_batch": count}, options_of("dapo")
    assert_same(*both(options, call))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo"])
def test_ranks_share_the_count_that_is_given(loss_type, two_ranks):
    assert_same(*both(options_of(loss_type), problem()))
    assert not two_ranks


def test_ranks_count_once_a_call(two_ranks):
    """Liger counts once a chunk, inside the loop: ranks with different numbers of sequences wait for each other."""
    call, options = problem(), options_of("dapo")
    del call["num_items_in_batch"]
    expected = run(THEIRS, options, call)
    assert len(two_ranks) == BATCH
    two_ranks.clear()
    assert_same(run(LigerFusedLinearGRPOLoss, options, call), expected)
    assert two_ranks == [LENGTHS.sum().item()]
    two_ranks.clear()
    run(LigerFusedLinearGRPOLoss, options_of("bnpo"), call)  # divides by this batch's own tokens
    assert not two_ranks


# --- where liger-kernel is wrong --------------------------------------------------------------------------------------


def ratios_of_padding(call):
    call["vllm_is_ratio"] = ratios(call)["(B, T)"]
    return call | {"vllm_is_ratio": torch.where(call["attention_mask"] != 0, call["vllm_is_ratio"], 0.5)}


def a_negative_id(call):
    wrong = call | {"selected_token_ids": call["selected_token_ids"].clone()}
    wrong["selected_token_ids"][0, 2] = -100
    call["attention_mask"] = call["attention_mask"].clone()
    call["attention_mask"][0, 2] = 0
    return wrong


def advantages_per_token(call):
    call["advantages"] = torch.randn(BATCH, LENGTH)
    return call


# Loss type, other options, and a change of the call: it is put right, and the wrong one is returned.
WRONG = {
    "ratios of padding": ("vespo", {"beta": 0.0}, ratios_of_padding),
    "a negative id": ("bnpo", {}, a_negative_id),
    # A chunk of C sequences makes (C, 1, T) x (C, T): every advantage meets every row.
    "advantages per token in chunks": ("bnpo", {"chunk_size": BATCH}, advantages_per_token),
    "advantages per token in some chunks": ("bnpo", {"chunk_size": 3}, advantages_per_token),
}


@pytest.mark.parametrize(("loss_type", "options", "change"), WRONG.values(), ids=WRONG)
def test_where_theirs_are_wrong(loss_type, options, change):
    call, options = problem(), options_of(loss_type, **options)
    changed = change(call)
    right = run(THEIRS, options | {"chunk_size": 1}, call)
    mine, wrong = both(options, changed)
    # Their share of clipped tokens is wrong in chunks of one sequence too, which have (1, 1, T) masks.
    metrics = slice(0, 1) if call["advantages"].dim() == 2 else slice(None)
    assert_same((*mine[:2], mine[2][metrics]), (*right[:2], right[2][metrics]))
    assert abs(wrong[0] - right[0]) > 1e-2 * abs(right[0])


def test_a_reference_without_a_kl():
    """Liger asserts. It takes a KL without a reference model, and makes it 0: ours refuses that by name."""
    call, options = problem(), options_of("dapo", beta=0.0)
    del call["ref_per_token_logps"]
    with pytest.raises(AssertionError):
        run(THEIRS, options | {"use_ref_model": True}, call)
    expected = run(THEIRS, options, call)
    assert_same(run(LigerFusedLinearGRPOLoss, options | {"use_ref_model": True}, call), expected)
    assert run(THEIRS, options_of("dapo", beta=0.5) | {"use_ref_model": False}, call)[2][0] == 0


def test_a_float32_head_computes_in_float32():
    call, options = problem(), options_of("dapo", beta=0.0)
    call["_input"] = call["_input"].bfloat16()
    truth = run(LigerFusedLinearGRPOLoss, options, call | {"_input": call["_input"].float()})
    mine, wrong = both(options, call)
    assert torch.equal(mine[0], truth[0])
    assert torch.equal(mine[1][1], truth[1][1])
    assert mine[1][0].dtype == torch.bfloat16
    assert (wrong[1][1] - truth[1][1]).norm() > 1e-3 * truth[1][1].norm()


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ("loss_type", ValueError, {"loss_type": "gspo"}),
    ("loss_type", ValueError, {"loss_type": ["dapo"]}),
    ("use_ref_model", ValueError, {"use_ref_model": False}),
    ("chunk_size", ValueError, {"chunk_size": 0}),
    ("max_completion_length", ValueError, {"loss_type": "dr_grpo"}),
    ("importance_sampling_level", ValueError, {"importance_sampling_level": "tokens"}),
    ("importance_sampling_level", ValueError, {"loss_type": "cispo", "importance_sampling_level": "sequence"}),
    ("sapo_temperature_neg", ValueError, {"loss_type": "dapo", "sapo_temperature_neg": 0.0}),
    ("delta", ValueError, {"loss_type": "sapo", "delta": 1.5}),
]


BAD_ARGUMENTS = [
    ("_input", ValueError, {"_input": torch.zeros(BATCH * LENGTH, HIDDEN)}),
    ("_input", TypeError, {"_input": [0.0]}),
    ("lin_weight", TypeError, {"lin_weight": None}),
    ("attention_mask", ValueError, {"attention_mask": torch.ones(BATCH)}),
    ("attention_mask", TypeError, {"attention_mask": None}),
    ("ref_per_token_logps", ValueError, {"ref_per_token_logps": None}),
    ("ref_weight", ValueError, {"ref_per_token_logps": None, "ref_input": torch.zeros(BATCH, LENGTH, HIDDEN)}),
    ("ref_input", TypeError, {"ref_per_token_logps": None, "ref_input": 0.0, "ref_weight": 0.0}),
    ("vllm_is_ratio", ValueError, {"vllm_is_ratio": torch.ones(LENGTH)}),
    ("vllm_is_ratio", TypeError, {"vllm_is_ratio": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "options"), BAD_OPTIONS)
def test_bad_options(name, error, options):
    with pytest.raises(error, match=name):
        LigerFusedLinearGRPOLoss(**options)


@pytest.mark.parametrize(("name", "error", "arguments"), BAD_ARGUMENTS)
def test_bad_arguments(name, error, arguments):
    with pytest.raises(error, match=name):
        LigerFusedLinearGRPOLoss(**options_of("dapo"))(**{**problem(), **arguments})


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_zero3_empties_the_heads_after_the_forward(level):
    """DeepSpeed gathers a parameter for the forward alone, marks it with an id, and gathers another where it was."""
    call, options = problem(), options_of("dapo", level)
    expected = run(LigerFusedLinearGRPOLoss, options, call)
    leaves = {name: torch.nn.Parameter(call[name].clone()) for name in LEAVES}
    for name in ("lin_weight", "bias"):
        leaves[name].ds_id = 1
    loss, _ = LigerFusedLinearGRPOLoss(**options)(**{**call, **leaves})
    for name in ("lin_weight", "bias"):
        leaves[name].data.fill_(torch.nan)
        leaves[name].data = torch.empty(0)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    torch.testing.assert_close(grads, expected[1], rtol=0, atol=0)
