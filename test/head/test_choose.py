"""Which engine a call takes and why; peaks bound what is measured, and what does not fit a budget is refused."""

import pytest
import torch

from head_calls import Products
from liger_rl import FusedLinearGRPOLoss, LogitTransform, LowRank, linear_logprobs, plan_linear_logprobs
from liger_rl.kernels import devices
from liger_rl.kernels.statistics import BLOCK_VOCAB
from peaks import tensor_peak

BF16, F32 = torch.bfloat16, torch.float32
MIB = 1 << 20


SIZES = {"cpu": (9, 70, 3003, 64), "cuda": (8, 512, 32000, 2048)}
TRANSFORM = {"softcap": 5.0, "temperature": 0.7, "scale": 2.0}
# Of the loss, but for `frozen`, `bias`, `rank`, `in_place`, and a `layout` that names an input and its strides.
CASES = {
    "plain": {},
    "entropy": {"entropy_coef": 0.1},
    "everything": {"bias": True, "entropy_coef": 0.1, "metrics": "with_entropy"} | TRANSFORM,
    "frozen weight": {"frozen": "weight"},
    "frozen hidden": {"frozen": "hidden"},
    "in place": {"in_place": True},
    "transposed hidden": {"layout": ("hidden", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))},
    "transposed weight": {"layout": ("weight", lambda t: t.T.contiguous().T)},
    "every other row": {"layout": ("weight", lambda t: t.repeat_interleave(2, 0)[::2])},
}
TWO_PASSES = CASES | {
    "fixed shape": {"fixed_shape": True},
    "batch invariant": {"batch_invariant": True},
    "chunks": {"chunk_tokens": 200, "chunk_vocab": 700},
    "low rank": {"rank": 3},
    "tolerance": {"grad_tolerance": 0.05},
    "small tolerance": {"grad_tolerance": 0.013, "entropy_coef": 0.1} | TRANSFORM,  # keeps many blocks
}
ONE_PASS = CASES | {"by sequence": {"loss_type": "gspo"}}


class Case:
    """A batch and a loss, in which some tokens are masked and one sequence has no advantage."""

    def __init__(self, options, dtype=BF16, *, device="cpu", sizes=None):
        self.options, self.device = dict(options), torch.device(device)
        frozen, layout = (self.options.pop(name, None) for name in ("frozen", "layout"))
        bias, self.in_place = (self.options.pop(name, False) for name in ("bias", "in_place"))
        rank = self.options.pop("rank", 0)
        rows, length, vocab, size = sizes or SIZES[self.device.type]
        generator = torch.Generator().manual_seed(0)

        def made(*shape):
            return torch.randn(*shape, generator=generator)

        leaves = {"hidden": made(rows, length, size), "weight": made(vocab, size) / size**0.5}
        leaves |= {"bias": made(vocab)} if bias else {}
        leaves |= {"a": made(rank, size), "b": made(vocab, rank)} if rank else {}
        self.leaves = {name: t.to(self.device, dtype) for name, t in leaves.items()}
        if layout is not None:
            self.leaves[layout[0]] = layout[1](self.leaves[layout[0]])
        self.leaves = {name: t.requires_grad_(name != frozen) for name, t in self.leaves.items()}
        self.ids = torch.randint(vocab, (rows, length), generator=generator).to(self.device)
        self.advantages = made(rows).to(self.device)
        self.advantages[0] = 0.0
        self.mask = (torch.arange(rows * length) % 9 != 0).view(rows, length).to(self.device)
        self.sizes = rows * length, vocab, size
        options = ("grad_tolerance", "chunk_tokens", "chunk_vocab", "fixed_shape", "batch_invariant")
        self.known = {name: self.options[name] for name in options if name in self.options} | {
            "dtype": dtype,
            "device": self.device,
            "needs": (frozen != "hidden", frozen != "weight"),
            "contiguous": tuple(self.leaves[name].is_contiguous() for name in ("hidden", "weight")),
            "aligned": devices.aligned(self.leaves["weight"]),
            "bias": bias,
            "rank": rank,
            "weight_grad": self.in_place,
            "transform": LogitTransform(**{name: self.options[name] for name in TRANSFORM if name in self.options}),
            "entropy": "entropy_coef" in self.options,
            "together": length if self.options.get("loss_type") == "gspo" else 1,
        }

    def plan(self, **more):
        return plan_linear_logprobs(*self.sizes, **(self.known | more))

    def run(self, **more):
        """-> peak beside results and gradients, loss and gradients."""
        head = self.leaves
        total = torch.zeros(head["weight"].shape, device=self.device) if self.in_place else None
        for leaf in head.values():
            leaf.grad = None
        # Metrics that read all log-probabilities, or else tokens without an advantage would not be projected.
        loss_fn = FusedLinearGRPOLoss(**({"metrics": "basic"} | self.options | more))
        with tensor_peak(self.device) as first:
            loss = loss_fn(
                head["hidden"], head["weight"], self.ids, self.advantages, self.mask, bias=head.get("bias"),
                low_rank=[LowRank(a=head["a"], b=head["b"])] if "a" in head else (), weight_grad=total,
            ).loss  # fmt: skip
        with tensor_peak(self.device) as second:
            loss.backward()
        grads = [leaf.grad for leaf in head.values() if leaf.grad is not None]
        results = sum(grad.nbytes for grad in grads)
        # One pass has made its gradients in the forward.
        of_forward = first.bytes - (results if loss_fn.passes == "one" else 0)
        extra = max(of_forward, first.held + second.bytes - results)
        return extra, [loss.detach(), *grads, *([] if total is None else [total])]

    def settled_run(self, **more):
        """As `run`, once kernels are compiled and libraries have taken the memory that they keep."""
        if self.device.type == "cuda":
            self.run(**more)
        return self.run(**more)


def assert_close(found, expected, dtype):
    tolerance = 1e-5 if dtype == F32 else 6e-3
    for mine, other in zip(found, expected, strict=True):
        assert torch.linalg.norm((mine - other).float()) <= tolerance * torch.linalg.norm(other.float()) + 1e-6


# --- peaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("passes", "options"),
    [pytest.param("two", case, id=f"two, {name}") for name, case in TWO_PASSES.items()]
    + [pytest.param("one", case, id=f"one, {name}") for name, case in ONE_PASS.items()],
)
def test_peaks_bound_what_is_measured(passes, options, dtype, device):
    """Without a budget, and with the least that there is; under it the call raises, and says what it needs."""
    case = Case(options, dtype, device=device)
    plan = case.plan(passes=passes)
    extra, expected = case.settled_run(passes=passes)
    assert extra <= plan.extra_bytes
    if device.type == "cpu":  # or the bound would say nothing
        assert extra >= plan.extra_bytes / 4
    if "chunk_vocab" in options:
        return
    least = plan.least_bytes
    assert passes == "two" or least == plan.one_pass_bytes
    extra, found = case.settled_run(passes=passes, max_extra_bytes=least)
    assert extra <= case.plan(passes=passes, max_extra_bytes=least).extra_bytes <= least
    if "grad_tolerance" not in options:
        assert_close(found, expected, dtype)
    refused = rf'(passes="one" needs max_extra_bytes of|max_extra_bytes must be) at least {least} .* got {least - 1}$'
    for call in (case.plan, case.run):
        with pytest.raises(ValueError, match=refused):
            call(passes=passes, max_extra_bytes=least - 1)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_tolerance_with_many_tokens_of_few_vocabulary_entries(entropy):
    options = {"grad_tolerance": 0.005, "bias": True} | TRANSFORM | ({"entropy_coef": 0.1} if entropy else {})
    case = Case(options, F32, sizes=(50, 100, 1030, 16))
    least = case.plan().least_bytes
    assert case.run(passes="two", max_extra_bytes=least)[0] <= least


@pytest.mark.parametrize("needs", [(False, False), (True, True)])
def test_extras_within_a_budget(needs, device):
    options = {"extras": ("is_top1", "mean_logits", "log_sum_sq_probs"), "entropy": True}
    hidden, weight = torch.randn(1200, 64, device=device), torch.randn(1899, 64, device=device)
    targets = torch.arange(1200, device=device)
    plan = plan_linear_logprobs(1200, 1899, 64, dtype=F32, device=device, needs=needs, **options)
    leaves = [t.requires_grad_(need) for t, need in zip((hidden, weight), needs, strict=True)]
    linear_logprobs(*leaves, targets, **options)
    for budget in (None, plan.least_bytes):
        with tensor_peak(device) as peak:
            linear_logprobs(*leaves, targets, **options, max_extra_bytes=budget)
        assert peak.bytes <= (budget or plan.extra_bytes)


def test_tiles_are_the_calls_own():
    """On CPU, where every product passes the dispatcher."""
    given = {"dtype": F32, "device": "cpu", "needs": (False, False)}
    hidden, weight, targets = torch.randn(600, 64), torch.randn(40000, 64), torch.zeros(600, dtype=torch.long)
    for budget in (None, 8 * MIB, 200 * MIB):
        tiles = plan_linear_logprobs(600, 40000, 64, **given, max_extra_bytes=budget).tiles
        with Products() as products:
            linear_logprobs(hidden, weight, targets, max_extra_bytes=budget)
        assert max(products.logits(64)) == tiles
        assert tiles.vocab in (40000, tiles.vocab // BLOCK_VOCAB * BLOCK_VOCAB)


def test_a_chunk_follows_the_budget():
    case, chunks = Case({}, F32, sizes=(20, 70, 3003, 64)), []
    for factor in (1, 2, 3, 8):
        budget = case.plan(passes="one").one_pass_bytes * factor
        plan = case.plan(passes="one", max_extra_bytes=budget)
        assert case.run(passes="one", max_extra_bytes=budget)[0] <= plan.extra_bytes <= budget
        chunks.append(plan.tiles.tokens)
    assert 256 <= chunks[0] < chunks[1] < chunks[2] < chunks[3] == 1400


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_tokens_that_count_decide_within_a_budget(loss_type):
    """A budget too small for all tokens in one pass may have room for those that are not masked."""
    case = Case({"loss_type": loss_type, "metrics": "loss"}, sizes=(20, 70, 3003, 64))
    budget = case.plan(passes="one").one_pass_bytes - 1
    assert case.plan(passes="auto", max_extra_bytes=budget).path == "two passes"
    for masked in (True, False):
        case.mask[10:], case.advantages[:] = not masked, 1.0
        expected = case.run(passes="two", max_extra_bytes=budget)[1]
        loss_fn = FusedLinearGRPOLoss(**case.options, passes="auto", max_extra_bytes=budget)
        with Products() as products:
            loss_fn(case.leaves["hidden"], case.leaves["weight"], case.ids, case.advantages, case.mask)
        # One pass makes gradients, too.
        assert (len(products.factors) > len(products.logits(case.sizes[2]))) == masked
        extra, found = case.run(passes="auto", max_extra_bytes=budget)
        # Where one pass was taken, its gradients are in this.
        assert extra - (sum(g.nbytes for g in found[1:]) if masked else 0) <= budget
        assert_close(found, expected, BF16)


@pytest.mark.parametrize("options", [{}, {"bias": True, "frozen": "weight"}], ids=["plain", "bias alone"])
def test_a_budget_too_small_for_two_passes_does_not_wait_for_few_tokens(options):
    """Whether a call is possible depends on shapes alone, or a run would end at its first full batch."""
    case = Case({"metrics": "loss"} | options, sizes=(30, 70, 20000, 64))
    case.mask[1:] = False
    least = case.plan(passes="two", needs=(True, True)).least_bytes  # a bias's gradient needs what the weight's needs
    assert case.plan(passes="one").one_pass_bytes > least
    case.run(passes="auto", max_extra_bytes=least)
    with pytest.raises(ValueError, match=f"max_extra_bytes must be at least {least} "):
        case.run(passes="auto", max_extra_bytes=least - 1)


def test_a_sum_without_room_is_rounded_after_each_of_four_chunks_at_most():
    seen = {}
    for budget in range(MIB, 64 * MIB, 1 << 17):
        try:
            plan = plan_linear_logprobs(1250, 4000, 512, device="cpu", max_extra_bytes=budget, passes="one")
        except ValueError:
            assert not seen  # a larger budget never has less room
            continue
        assert plan.extra_bytes <= budget
        seen.setdefault(plan.reason.rsplit(" ", 1)[1], []).append(-(-1250 // plan.tiles.tokens))
    assert set(seen["bfloat16"]) == {1, 2, 3, 4}
    assert seen["bfloat16"] == sorted(seen["bfloat16"], reverse=True)


# --- the rule ---------------------------------------------------------------------------------------------------------

EXACT, AUTO = "the exact gradient", {"passes": "auto"}
AUTO_TOLERANCE, LEFT_OUT = {"grad_tolerance": "auto"}, "grad_tolerance 0.0003 lets ids be left out"
CAST = {"weight_dtype": F32, "compute_dtype": BF16}  # a float32 head under autocast
QWEN = {"vocab": 151936, "hidden_size": 2048}
GEMMA = {"vocab": 256000, "hidden_size": 2304, "transform": LogitTransform(softcap=30.0)}
GIB = 1 << 30
TIGHT = {"max_extra_bytes": 120 * MIB, "hidden_size": 1024}  # under what the epilogue's statistics need
NEEDS_BUDGET = "one pass needs max_extra_bytes of at least"


@pytest.mark.parametrize(
    ("options", "path", "epilogue", "why"),
    [
        ({}, "two passes", True, EXACT),
        ({"transform": LogitTransform(softcap=30.0), "entropy": True}, "two passes", True, EXACT),
        ({"chunk_vocab": 8192}, "two passes", False, "no epilogue, which needs no chunk to be named"),
        ({"dtype": F32}, "two passes", False, "no epilogue, which needs hidden states and weight in one 16-bit"),
        ({"max_extra_bytes": 300 * MIB}, "two passes", True, EXACT),
        (
            {"max_extra_bytes": 120 * MIB, "hidden_size": 1024},
            "two passes",
            False,
            "no epilogue, which needs a larger max_extra_bytes",
        ),
        ({"grad_tolerance": 1e-3}, "sparse", True, "grad_tolerance 0.001 lets ids be left out"),
        ({"grad_tolerance": 1e-3, "dtype": F32}, "two passes", False, "lists of ids need the product with an epilogue"),
        ({"grad_tolerance": 1e-3, "rank": 8}, "two passes", False, "low-rank terms keep the backward exact"),
        ({"grad_tolerance": 1e-3} | TIGHT, "two passes", False, "lists of ids do not fit"),
        ({"device": "cpu", "dtype": F32}, "two passes", False, EXACT),
        (
            {"device": "cpu", "grad_tolerance": 1e-3},
            "two passes",
            False,
            "lists of ids need the product with an epilogue",
        ),
        (AUTO, "two passes", True, "needs memory of the weight's size for the sum of its gradient, which max_extra"),
        (AUTO | {"tokens": 2048}, "one pass", True, ""),
        (AUTO | {"weight_dtype": F32}, "one pass", False, "summed in float32; no epilogue"),
        (AUTO | {"needs": (True, False)}, "one pass", True, "chunk by chunk"),
        (AUTO | {"needs": (False, False)}, "two passes", True, EXACT),
        ({"passes": "one"}, "one pass", True, "summed in bfloat16"),
        (AUTO | {"max_extra_bytes": GIB // 2}, "two passes", True, NEEDS_BUDGET),
        (AUTO | {"max_extra_bytes": 3 * GIB // 4}, "one pass", True, "summed in bfloat16"),
        # The benchmark's row "at most 400 MiB": the tokens that count of 8192.
        (AUTO | {"max_extra_bytes": 400 * MIB, "tokens": 3563}, "one pass", True, "summed in bfloat16"),
        (AUTO | QWEN | {"max_extra_bytes": 400 * MIB, "tokens": 3563}, "one pass", True, "summed in bfloat16"),
        (AUTO | GEMMA | {"max_extra_bytes": 400 * MIB, "tokens": 3563}, "two passes", True, NEEDS_BUDGET),
        (AUTO | {"tokens": 32768, "max_extra_bytes": 3 * GIB // 2}, "two passes", True, NEEDS_BUDGET),
        (AUTO | {"tokens": 32768, "max_extra_bytes": 3 * GIB}, "one pass", True, "summed in float32"),
        (AUTO | {"together": 4096, "max_extra_bytes": 3 * GIB // 2}, "two passes", True, NEEDS_BUDGET),
        (AUTO | {"together": 4096, "max_extra_bytes": 5 * GIB // 2}, "one pass", True, "summed in bfloat16"),
        (AUTO | {"together": 32768, "tokens": 32768}, "two passes", True, "needs room in one chunk for 32768 tokens"),
        (AUTO | {"weight_grad": True}, "two passes", True, "room in one chunk for 8192 tokens with weight_grad"),
        (AUTO | {"weight_grad": True, "max_extra_bytes": 3 * GIB}, "one pass", True, "chunk by chunk"),
        (AUTO | {"chunk_tokens": 512}, "two passes", False, "one pass needs no chunk to be named"),
        (AUTO | {"grad_tolerance": 1e-3}, "sparse", True, "one pass needs grad_tolerance = 0.0"),
        (AUTO | {"fixed_shape": True}, "two passes", True, "one pass needs fixed_shape = False"),
        (AUTO | {"batch_invariant": True}, "two passes", True, "one pass needs batch_invariant = False"),
        (AUTO | {"rank": 8}, "two passes", False, "one pass needs a head without low_rank terms"),
        (AUTO | {"compute_dtype": torch.float16}, "two passes", True, "one pass needs bfloat16 or float32 products"),
        (CAST, "two passes", True, "gradient, whatever the loss; products read a copy of the weight in bfloat16"),
        (CAST | {"max_extra_bytes": GIB}, "two passes", False, "no epilogue, which needs a larger max_extra_bytes"),
        (CAST | {"max_extra_bytes": 3 * GIB // 2}, "two passes", True, "products read a copy of the weight"),
        (CAST | AUTO_TOLERANCE, "sparse", True, LEFT_OUT),
        (CAST | AUTO_TOLERANCE | {"max_extra_bytes": GIB}, "two passes", False, EXACT),
        (CAST | AUTO_TOLERANCE | {"max_extra_bytes": 2 * GIB}, "sparse", True, LEFT_OUT),
        (CAST | {"passes": "one"}, "one pass", False, "needs a weight in the products' dtype in one pass"),
        (AUTO_TOLERANCE, "sparse", True, LEFT_OUT),
        (AUTO_TOLERANCE | AUTO | {"tokens": 2048}, "sparse", True, LEFT_OUT),
        (AUTO_TOLERANCE | AUTO | {"tokens": 2048, "max_extra_bytes": GIB}, "sparse", True, LEFT_OUT),
        (AUTO_TOLERANCE | {"tokens": 511}, "two passes", False, EXACT),
        (AUTO_TOLERANCE | {"dtype": F32}, "two passes", False, EXACT),
        (AUTO_TOLERANCE | {"device": "cpu"}, "two passes", False, EXACT),
        (AUTO_TOLERANCE | {"rank": 8}, "two passes", False, EXACT),
        (AUTO_TOLERANCE | {"weight_grad": True}, "two passes", True, EXACT),
        (AUTO_TOLERANCE | {"fixed_shape": True}, "two passes", True, EXACT),
        (AUTO_TOLERANCE | {"batch_invariant": True}, "two passes", True, EXACT),
        (AUTO_TOLERANCE | {"chunk_vocab": 8192}, "two passes", False, EXACT),
        (AUTO_TOLERANCE | TIGHT, "two passes", False, "no epilogue, which needs a larger max_extra_bytes"),
        (AUTO_TOLERANCE | {"max_extra_bytes": 288 * MIB}, "two passes", True, EXACT),  # room for an epilogue alone
        (AUTO_TOLERANCE | {"passes": "one"}, "one pass", True, "summed in bfloat16"),
        (AUTO_TOLERANCE | AUTO | {"rank": 8}, "two passes", False, "one pass needs a head without low_rank terms"),
    ],
)
def test_the_rule(options, path, epilogue, why, monkeypatch):
    monkeypatch.setattr(devices, "_KNOWN", {None: devices.HOPPER, 0: devices.HOPPER})
    shape = {"tokens": 8192, "vocab": 128256, "hidden_size": 4096, "device": "cuda:0"}
    options = shape | {"grad_tolerance": 0.0} | options
    plan = plan_linear_logprobs(**options)
    assert (plan.path, plan.epilogue) == (path, epilogue)
    assert why in plan.reason
    assert plan.extra_bytes <= options.get("max_extra_bytes", 4 * GIB)
    assert path in str(plan)
    assert str(plan.least_bytes) in str(plan)
    assert plan.kernels_fit == ("a larger max_extra_bytes" not in plan.reason)
    if path != "one pass" and "max_extra_bytes of at least" in plan.reason:
        assert plan_linear_logprobs(**options | {"max_extra_bytes": plan.one_pass_bytes}).path == "one pass"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("tokens", ValueError, -1), ("tokens", TypeError, 8.0), ("vocab", ValueError, 0),
        ("hidden_size", ValueError, 0), ("hidden_size", TypeError, True), ("dtype", TypeError, torch.int64),
        ("dtype", TypeError, "bfloat16"), ("dtype", TypeError, None), ("weight_dtype", TypeError, torch.float64),
        ("compute_dtype", TypeError, 16), ("device", ValueError, "gpu"), ("device", TypeError, 1.5),
        ("needs", TypeError, True), ("needs", TypeError, (True, True, True)), ("needs", TypeError, (1, 0)),
        ("contiguous", TypeError, False), ("aligned", TypeError, 1), ("bias", TypeError, torch.zeros(3)),
        ("rank", ValueError, -1), ("rank", TypeError, None), ("weight_grad", TypeError, torch.zeros(3)),
        ("transform", TypeError, LogitTransform), ("entropy", TypeError, "yes"), ("extras", TypeError, "is_top1"),
        ("extras", ValueError, ("perplexity",)), ("grad_tolerance", ValueError, -1.0),
        ("grad_tolerance", TypeError, None), ("chunk_tokens", ValueError, 0), ("chunk_vocab", TypeError, 1.0),
        ("fixed_shape", TypeError, 1), ("batch_invariant", TypeError, 1), ("passes", ValueError, ["two"]),
        ("passes", ValueError, "three"), ("together", ValueError, 0), ("together", TypeError, 1.5),
        ("max_extra_bytes", TypeError, 1e9),
    ],
)  # fmt: skip
def test_nonsense_is_named(name, error, value):
    with pytest.raises(error, match=rf"^{name}\b"):
        plan_linear_logprobs(**{"tokens": 8, "vocab": 40, "hidden_size": 16, "device": "cpu", name: value})


@pytest.mark.parametrize("call", [FusedLinearGRPOLoss, lambda **o: plan_linear_logprobs(64, 1000, 32, **o)])
def test_a_budget_beside_a_chunk(call):
    with pytest.raises(ValueError, match="give it or chunk_tokens and chunk_vocab, not both"):
        call(max_extra_bytes=1 << 30, chunk_vocab=512)


def test_no_token_takes_no_chunk():
    least = plan_linear_logprobs(0, 1000, 64, device="cpu", passes="one").least_bytes
    assert plan_linear_logprobs(0, 1000, 64, device="cpu", passes="one", max_extra_bytes=least).extra_bytes <= least
