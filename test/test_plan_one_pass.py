"""Plans of one pass: what is predicted bounds what a loss takes, a budget is kept, and it decides how many passes."""

import pytest
import torch
from test_logprobs import Products
from test_plan import tensor_peak

from devices import NEEDS_GPU
from liger_rl import FusedLinearGRPOLoss, LogitTransform, logprobs, one_pass_loss, plan_linear_logprobs
from liger_rl.head.engines import one_pass

CASES = {
    "plain": {},
    "entropy": {"entropy_coef": 0.1},
    "bias, transform": {"bias": True, "softcap": 5.0, "temperature": 0.7, "scale": 2.0},
    "everything": {"bias": True, "entropy_coef": 0.1, "softcap": 5.0, "temperature": 0.7, "metrics": "with_entropy"},
    "frozen weight": {"frozen": "weight"},
    "frozen weight, no row left out": {"frozen": "weight", "advantages": "all"},
    "frozen hidden": {"frozen": "hidden"},
    "in place": {"in_place": True},
    "by sequence": {"loss_type": "gspo"},
    "no row left out": {"advantages": "all"},
}


class Case:
    """A batch with padding and a loss, in which a third of the sequences have no advantage."""

    def __init__(self, options, dtype, *, device="cpu", rows=9, length=70, vocab=3003, hidden_size=64, **more):
        self.options, self.device = dict(options), torch.device(device)
        frozen, bias = self.options.pop("frozen", None), self.options.pop("bias", False)
        self.in_place, everyone = self.options.pop("in_place", False), self.options.pop("advantages", "") == "all"
        generator = torch.Generator().manual_seed(0)

        def made(*shape):
            return torch.randn(*shape, generator=generator)

        leaves = {"hidden": made(rows, length, hidden_size), "weight": made(vocab, hidden_size) / 8}
        if bias:
            leaves["bias"] = made(vocab)
        self.leaves = {name: t.to(self.device, dtype).requires_grad_(name != frozen) for name, t in leaves.items()}
        self.ids = torch.randint(vocab, (rows, length), generator=generator).to(self.device)
        advantages = made(rows)
        if not everyone:
            advantages[::3] = 0.0
        self.advantages = advantages.to(self.device)
        lengths = length - torch.arange(rows) * 7 % length
        self.mask = (torch.arange(length) < lengths[:, None]).to(self.device)
        transform = {k: v for k, v in self.options.items() if k in ("softcap", "temperature", "scale")}
        self.known = {
            "dtype": dtype,
            "device": self.device,
            "needs": (frozen != "hidden", frozen != "weight"),
            "bias": bias,
            "weight_grad": self.in_place,
            "transform": LogitTransform(**transform),
            "entropy": "entropy_coef" in self.options,
            "together": length if self.options.get("loss_type") == "gspo" else 1,
        }
        self.sizes = rows * length, vocab, hidden_size

    def plan(self, **more):
        return plan_linear_logprobs(*self.sizes, **(self.known | more))

    def run(self, **more):
        """-> peak beside results and gradients, loss, gradients."""
        weight = self.leaves["weight"]
        total = torch.zeros(weight.shape, device=self.device) if self.in_place else None
        for leaf in self.leaves.values():
            leaf.grad = None
        # Metrics that read all log-probabilities, or else idle tokens would not be projected.
        loss_fn = FusedLinearGRPOLoss(**({"metrics": "basic"} | self.options), **more)
        with tensor_peak(self.device) as peak:
            loss = loss_fn(
                self.leaves["hidden"], weight, self.ids, self.advantages, self.mask, bias=self.leaves.get("bias"),
                weight_grad=total,
            ).loss  # fmt: skip
            loss.backward()
        grads = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        extra = peak.bytes - sum(grad.nbytes for grad in grads)
        return extra, loss.detach(), grads if total is None else [*grads, total]


@pytest.fixture
def passes_taken(monkeypatch):
    """The number of chunks of each one pass."""
    taken = []

    def counted(*args, **options):
        taken.append(len(args[5]))
        return one_pass.one_pass(*args, **options)

    monkeypatch.setattr(one_pass_loss, "one_pass", counted)
    return taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_budget_is_kept_and_decides(options, dtype, passes_taken):
    """Under the least that one pass takes there are two; results are those of two passes in any case."""
    case = Case(options, dtype)
    free, least = case.plan(passes="auto"), case.plan(passes="auto").one_pass_bytes
    tight, under = (case.plan(passes="auto", max_extra_bytes=budget) for budget in (least, least - 1))
    assert (free.path, tight.path, under.path) == ("one pass", "one pass", "two passes")
    assert str(least) in str(under)

    extra, *expected = case.run(passes="auto")
    assert free.extra_bytes / 3 <= extra <= free.extra_bytes  # or the bound would say nothing
    extra, *found = case.run(passes="auto", max_extra_bytes=least)
    assert extra <= tight.extra_bytes <= least
    assert len(passes_taken) == 2
    extra, *others = case.run(passes="auto", max_extra_bytes=least - 1)
    assert extra <= least - 1  # in one pass or two: tokens that do not count may leave room for one
    passes_taken.clear()
    case.mask[:] = True
    case.run(passes="auto", max_extra_bytes=least - 1)
    assert not passes_taken

    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    for loss, grads in (found, others):
        torch.testing.assert_close(loss, expected[0])
        for mine, other in zip(grads, expected[1], strict=True):
            assert torch.linalg.norm((mine - other).float()) <= tolerance * torch.linalg.norm(other.float())


def test_a_chunk_follows_the_budget(passes_taken):
    case, chunks = Case({}, torch.float32, rows=20), []
    budgets = [case.plan(passes="one").one_pass_bytes * factor for factor in (1, 2, 3, 8)]
    for budget in budgets:
        plan = case.plan(passes="one", max_extra_bytes=budget)
        extra, *_ = case.run(passes="one", max_extra_bytes=budget)
        assert extra <= plan.extra_bytes <= budget
        chunks.append(plan.forward.tiles.tokens)
    assert 256 <= chunks[0] < chunks[1] < chunks[2] < chunks[3] == 1400
    assert passes_taken[0] > passes_taken[1] > passes_taken[2] == passes_taken[3] == 1  # the live tokens fit sooner


def chunks_planned(tokens, budget):
    plan = plan_linear_logprobs(tokens, 4000, 512, device="cpu", max_extra_bytes=budget, passes="one", masked=False)
    return -(-tokens // plan.forward.tiles.tokens), plan


def test_a_sum_that_has_no_room_is_rounded_after_each_of_four_chunks_at_most():
    sums = 4 * 4000 * 512
    seen = {}
    for budget in range(1 << 20, 64 << 20, 1 << 17):
        try:
            chunks, plan = chunks_planned(1250, budget)
        except ValueError:
            assert not seen  # a larger budget never has less room
            continue
        assert plan.extra_bytes <= budget
        dtype = plan.reason.rsplit(" ", 1)[1]
        seen.setdefault(dtype, []).append(chunks)
        if chunks > 2 and dtype == "bfloat16":
            with pytest.raises(ValueError, match="needs max_extra_bytes"):
                chunks_planned(256, budget - sums)  # of as few tokens, beside the sum
    assert set(seen["bfloat16"]) == {1, 2, 3, 4}
    assert seen["bfloat16"] == sorted(seen["bfloat16"], reverse=True)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_tokens_that_count_decide_within_a_budget(loss_type, passes_taken, monkeypatch):
    """A budget too small for all tokens in one pass may have room for those that are not masked."""
    counted = []
    for module in (one_pass_loss, logprobs):
        of_module = module.live_tokens
        monkeypatch.setattr(module, "live_tokens", lambda *a, f=of_module, **k: counted.append(1) or f(*a, **k))
    case = Case({"loss_type": loss_type, "metrics": "loss"}, torch.bfloat16, rows=20)
    budget = case.plan(passes="one").one_pass_bytes - 1
    assert case.plan(passes="auto", max_extra_bytes=budget).path == "two passes"
    _, *two = case.run(passes="two", max_extra_bytes=budget)
    counted.clear()
    extra, *one = case.run(passes="auto", max_extra_bytes=budget)
    assert extra <= budget
    assert len(passes_taken) == len(counted) == 1
    case.mask[:] = True
    case.advantages[:] = 1.0
    extra, *full = case.run(passes="auto", max_extra_bytes=budget)
    assert extra <= budget
    assert (len(passes_taken), len(counted)) == (1, 2)
    full_of_two = case.run(passes="two", max_extra_bytes=budget)[1:]
    for found, expected in ((one, two), (full, full_of_two)):
        torch.testing.assert_close(found[0], expected[0])
        for mine, other in zip(found[1], expected[1], strict=True):
            assert torch.linalg.norm((mine - other).float()) <= 6e-3 * torch.linalg.norm(other.float())


@pytest.mark.parametrize("options", [{}, {"bias": True, "frozen": "weight"}], ids=["plain", "bias alone"])
def test_a_budget_too_small_for_two_passes_does_not_wait_for_few_tokens(options):
    """Whether a call is possible depends on shapes alone, or a run would end at its first full batch."""
    case = Case({"metrics": "loss"} | options, torch.bfloat16, rows=30, vocab=20000)
    case.mask[1:] = False
    least = case.plan(passes="two", needs=(True, True)).least_bytes  # with a bias's gradient as with the weight's
    assert case.plan(passes="one").one_pass_bytes > least
    case.run(passes="auto", max_extra_bytes=least)
    with pytest.raises(ValueError, match=f"max_extra_bytes must be at least {least} "):
        case.run(passes="auto", max_extra_bytes=least - 1)


def test_insisting_on_one_pass_says_what_is_needed():
    case = Case({}, torch.bfloat16, vocab=300)
    least = case.plan(passes="one").one_pass_bytes
    assert case.plan(passes="one").least_bytes == least
    for call in (case.plan, case.run):
        with pytest.raises(
            ValueError, match=rf'passes="one" needs max_extra_bytes of at least {least} .* got {least - 1}'
        ):
            call(passes="one", max_extra_bytes=least - 1)
        call(passes="one", max_extra_bytes=least)


def test_flops_are_those_of_the_run():
    case = Case({"advantages": "all"}, torch.float32)
    case.mask[:] = True
    with Products() as products:
        case.run(passes="one", max_extra_bytes=case.plan(passes="one").one_pass_bytes)
    plan = case.plan(passes="one")
    assert products.flops == plan.forward.flops
    assert plan.backward is None
    two = case.plan()
    assert 4 * plan.forward.flops == 3 * (two.forward.flops + two.backward.flops)


H200 = {"device": "cuda", "dtype": torch.bfloat16}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "path", "why"),
    [
        ({}, "two passes", "needs memory of the weight's size for the sum of its gradient, which max_extra_bytes of"),
        ({"tokens": 2048}, "one pass", ""),
        ({"weight_dtype": torch.float32}, "one pass", "summed in float32"),
        ({"passes": "one"}, "one pass", "summed in bfloat16"),
        ({"passes": "two"}, "two passes", ""),
        ({"needs": (True, False)}, "one pass", "chunk by chunk"),
        ({"needs": (False, False)}, "two passes", ""),
        ({"max_extra_bytes": GIB // 2}, "two passes", "needs max_extra_bytes of at least"),
        ({"max_extra_bytes": 3 * GIB // 4}, "one pass", "summed in bfloat16"),
        ({"max_extra_bytes": 3 * GIB // 8, "tokens": 3563}, "one pass", "summed in bfloat16"),
        ({"max_extra_bytes": GIB, "needs": (True, False)}, "one pass", "chunk by chunk"),
        ({"max_extra_bytes": 7 * GIB // 4}, "one pass", "summed in bfloat16"),
        ({"tokens": 32768, "max_extra_bytes": 3 * GIB // 2}, "two passes", "needs max_extra_bytes of at least"),
        ({"tokens": 32768, "max_extra_bytes": 3 * GIB}, "one pass", "summed in float32"),
        ({"together": 4096, "max_extra_bytes": 3 * GIB // 2}, "two passes", "needs max_extra_bytes of at least"),
        ({"together": 4096, "max_extra_bytes": 5 * GIB // 2}, "one pass", "summed in bfloat16"),
        ({"together": 8192, "max_extra_bytes": 2 * GIB}, "two passes", "needs max_extra_bytes of at least"),
        ({"together": 32768, "tokens": 32768}, "two passes", "needs room in one chunk for 32768 tokens"),
        ({"weight_grad": True}, "two passes", "needs room in one chunk for 8192 tokens with weight_grad"),
        ({"weight_grad": True, "max_extra_bytes": 3 * GIB}, "one pass", "chunk by chunk"),
        ({"chunk_tokens": 512}, "two passes", "a chunk is named"),
        ({"grad_tolerance": 1e-3}, "block-sparse", "one pass needs grad_tolerance = 0.0"),
        ({"fixed_shape": True}, "two passes", "one pass needs fixed_shape = False"),
        ({"batch_invariant": True}, "two passes", "one pass needs batch_invariant = False"),
        ({"rank": 8}, "two passes", "one pass needs a head without low_rank terms"),
        ({"compute_dtype": torch.float16}, "two passes", "one pass needs bfloat16 or float32 products"),
    ],
)
def test_the_rule(options, path, why):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the plan is of another GPU")
    options = {"tokens": 8192, "vocab": 128256, "hidden_size": 4096, "passes": "auto"} | H200 | options
    plan = plan_linear_logprobs(**options)
    assert plan.path == path
    assert why in plan.reason
    if plan.path == "one pass":
        assert plan.extra_bytes <= options.get("max_extra_bytes", 4 * GIB)
        assert plan.one_pass_bytes is not None
    elif why.startswith("one pass needs"):
        assert plan.one_pass_bytes is None
    elif "max_extra_bytes" in why:
        again = plan_linear_logprobs(**options | {"max_extra_bytes": plan.one_pass_bytes})
        assert again.path == "one pass"


def test_what_is_added_in_place_is_added_in_the_backward():
    plan = Case({"in_place": True}, torch.bfloat16).plan(passes="one")
    assert plan.forward.flops == 2 * plan.backward.flops


def test_no_token_takes_no_chunk():
    def planned(**options):
        return plan_linear_logprobs(0, 1000, 64, device="cpu", masked=False, passes="one", **options)

    least = planned().least_bytes
    assert planned(max_extra_bytes=least).extra_bytes <= least


def test_bad_options():
    with pytest.raises(ValueError, match="together must be at least 1, got 0"):
        plan_linear_logprobs(10, 10, 10, together=0)
    with pytest.raises(ValueError, match=r"passes must be one of \['auto', 'one', 'two'\], got 'three'"):
        plan_linear_logprobs(10, 10, 10, passes="three")


@NEEDS_GPU
@pytest.mark.parametrize("tight", [False, True], ids=["no budget", "least budget"])
@pytest.mark.parametrize("name", ["plain", "everything", "in place", "by sequence", "frozen weight, no row left out"])
def test_prediction_at_the_size_of_a_training_step(name, tight):
    sizes = {"rows": 8, "length": 512, "vocab": 32000, "hidden_size": 2048}
    case = Case(CASES[name], torch.bfloat16, device="cuda", **sizes)
    budget = case.plan(passes="one").one_pass_bytes if tight else None
    plan = case.plan(passes="one", max_extra_bytes=budget)
    case.run(passes="one", max_extra_bytes=budget)  # compiles, and lets libraries take what they keep
    extra, *_ = case.run(passes="one", max_extra_bytes=budget)
    assert extra <= plan.extra_bytes
    assert budget is None or plan.extra_bytes <= budget
