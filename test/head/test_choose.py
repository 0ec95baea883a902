"""Which engine a call takes and why; its memory is that of tiles."""

import pytest
import torch

from head_calls import Products
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.head import LogitTransform, plan_linear_logprobs
from liger_rl.kernels import devices
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.statistics import BLOCK_VOCAB
from peaks import tensor_peak

BF16, F32 = torch.bfloat16, torch.float32

SIZES = {"cpu": (9, 70, 12003, 16), "cuda": (8, 512, 32000, 2048)}
TILES = {"cpu": 1 << 20, "cuda": 32 << 20}  # bytes
CAST = {"weight_dtype": F32, "compute_dtype": BF16}  # a float32 head under autocast
TRANSFORM = {"softcap": 5.0, "temperature": 0.7, "scale": 2.0}
# Of the loss, but for `frozen`, `bias`, `cast`, and a `layout` that names an input and its strides.
CASES = {
    "plain": {},
    "entropy": {"entropy_coef": 0.1},
    "everything": {"bias": True, "entropy_coef": 0.1, "metrics": "with_entropy"} | TRANSFORM,
    "frozen weight": {"frozen": "weight"},
    "frozen hidden": {"frozen": "hidden"},
    "transposed hidden": {"layout": ("hidden", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))},
    "transposed weight": {"layout": ("weight", lambda t: t.T.contiguous().T)},
    "every other row": {"layout": ("weight", lambda t: t.repeat_interleave(2, 0)[::2])},
}
CASES |= {
    "chunks": {"chunk_tokens": 200, "chunk_vocab": 700},
    "float32 head under autocast": {"cast": True},
    "transposed float32 head under autocast": {"cast": True, "layout": ("weight", lambda t: t.T.contiguous().T)},
}


class Case:
    """A batch and a loss, in which some tokens are masked and one sequence has no advantage."""

    def __init__(self, options, dtype=BF16, *, device="cpu"):
        self.options, self.device = dict(options), torch.device(device)
        frozen, layout = (self.options.pop(name, None) for name in ("frozen", "layout"))
        bias = self.options.pop("bias", False)
        self.cast = self.options.pop("cast", False)
        rows, length, vocab, size = SIZES[self.device.type]
        generator = torch.Generator().manual_seed(0)

        def made(*shape):
            return torch.randn(*shape, generator=generator)

        leaves = {"hidden": made(rows, length, size), "weight": made(vocab, size) / size**0.5}
        leaves |= {"bias": made(vocab)} if bias else {}
        self.leaves = {name: t.to(self.device, F32 if self.cast else dtype) for name, t in leaves.items()}
        self.leaves["hidden"] = self.leaves["hidden"].to(dtype)
        if layout is not None:
            self.leaves[layout[0]] = layout[1](self.leaves[layout[0]])
        self.leaves = {name: t.requires_grad_(name != frozen) for name, t in self.leaves.items()}
        self.ids = torch.randint(vocab, (rows, length), generator=generator).to(self.device)
        self.advantages = made(rows).to(self.device)
        self.advantages[0] = 0.0
        self.mask = (torch.arange(rows * length) % 9 != 0).view(rows, length).to(self.device)
        # Copies and a float32 sum of the weight, copies of hidden states and their gradient, and tiles.
        self.most = 4 * size * (3 * vocab + 4 * rows * length) + 4 * TILES[self.device.type]

    def run(self):
        """-> peak apart from results and gradients."""
        head = self.leaves
        for leaf in head.values():
            leaf.grad = None
        # Metrics that read all log-probabilities, or else tokens without an advantage would not be projected.
        loss_fn = FusedLinearGRPOLoss(**({"metrics": "basic"} | self.options))
        autocast = torch.autocast(self.device.type, BF16, enabled=self.cast)
        with tensor_peak(self.device) as first, autocast:
            loss = loss_fn(
                head["hidden"], head["weight"], self.ids, self.advantages, self.mask, bias=head.get("bias"),
            ).loss  # fmt: skip
        with tensor_peak(self.device) as second:
            loss.backward()
        grads = [leaf.grad for leaf in head.values() if leaf.grad is not None]
        results = sum(grad.nbytes for grad in grads)
        return max(first.bytes, first.held + second.bytes - results)


# --- peaks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(LIMITS, "workspace_bytes", TILES)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [pytest.param(case, BF16, id=name) for name, case in CASES.items()]
    + [pytest.param(CASES["everything"], F32, id="everything, in float32")],
)
def test_memory_is_that_of_tiles(options, dtype, device, small_tiles):
    case = Case(options, dtype, device=device)
    if device.type == "cuda":
        case.run()  # compiles kernels, and libraries take the memory that they keep
    assert case.run() <= case.most


@pytest.mark.parametrize("options", [{"extras": ("is_top1", "mean_logits", "log_sum_sq_probs")}, {"topk": 30}], ids=str)
def test_memory_of_what_no_loss_asks_for(options, device, small_tiles):
    options = {"entropy": True} | options
    hidden, weight = torch.randn(1200, 16, device=device), torch.randn(19990, 16, device=device)
    targets = torch.arange(1200, device=device)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    if device.type == "cuda":
        linear_logprobs(*leaves, targets, **options)  # compiles kernels
    with tensor_peak(device) as peak:
        linear_logprobs(*leaves, targets, **options)
    assert peak.bytes <= 8 * TILES[device.type]


def test_tiles_are_the_calls_own():
    """On CPU, where every product passes the dispatcher."""
    hidden, weight, targets = torch.randn(600, 64), torch.randn(40000, 64), torch.zeros(600, dtype=torch.long)
    most = plan_linear_logprobs(600, 40000, 64, dtype=F32, device="cpu", needs=(False, False)).tiles
    with Products() as products:
        linear_logprobs(hidden, weight, targets)
    assert max(products.logits(64)) == most
    assert most.vocab == most.vocab // BLOCK_VOCAB * BLOCK_VOCAB < 40000


# --- the rule ---------------------------------------------------------------------------------------------------------

NO_LISTS = "several targets: needs several targets for each token, or topk"


@pytest.mark.parametrize(
    ("options", "path", "epilogue", "why"),
    [
        ({}, "two passes", True, NO_LISTS),
        ({"transform": LogitTransform(softcap=30.0), "entropy": True}, "two passes", True, NO_LISTS),
        ({"chunk_vocab": 8192}, "two passes", False, "no epilogue, which needs no chunk to be named"),
        ({"dtype": F32}, "two passes", False, "no epilogue, which needs hidden states and weight in one 16-bit"),
        ({"topk": 3}, "several targets", False, "no epilogue, which needs topk = None"),
        ({"needs": (False, False)}, "two passes", True, NO_LISTS),
        ({"device": "cpu", "dtype": F32}, "two passes", False, NO_LISTS),
        ({"device": "cpu"}, "two passes", False, NO_LISTS),
        (CAST, "two passes", True, "products read a copy of the weight in bfloat16"),
        ({"tokens": 511}, "two passes", True, "no epilogue in the backward, which needs 512 tokens or more, got 511"),
        ({"tokens": 0}, "two passes", False, "no epilogue, which needs a token"),
        ({"hidden_size": 4100}, "two passes", False, "which needs a hidden size that is a multiple of 8, got 4100"),
        ({"aligned": False}, "two passes", False, "which needs rows of the weight that start at multiples of 16 bytes"),
        (CAST | {"aligned": False}, "two passes", True, "products read a copy of the weight"),  # whose rows are aligned
    ],
)
def test_the_rule(options, path, epilogue, why, monkeypatch):
    for device in ("cuda", "cuda:0"):
        monkeypatch.setitem(devices.GPUS, torch.device(device), devices.HOPPER)
    shape = {"tokens": 8192, "vocab": 128256, "hidden_size": 4096, "device": "cuda:0"}
    plan = plan_linear_logprobs(**shape | options)
    assert (plan.path, plan.epilogue) == (path, epilogue)
    assert why in plan.reason
    assert ("no epilogue, which needs" in plan.reason) == (not epilogue and options.get("device") != "cpu")
    assert plan.path in str(plan)
    assert plan.reason in str(plan)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("tokens", ValueError, -1), ("tokens", TypeError, 8.0), ("vocab", ValueError, 0),
        ("hidden_size", ValueError, 0), ("hidden_size", TypeError, True), ("dtype", TypeError, torch.int64),
        ("dtype", TypeError, "bfloat16"), ("dtype", TypeError, None), ("weight_dtype", TypeError, torch.float64),
        ("compute_dtype", TypeError, 16), ("device", ValueError, "gpu"), ("device", TypeError, 1.5),
        ("needs", TypeError, True), ("needs", TypeError, (True, True, True)), ("needs", TypeError, (1, 0)),
        ("aligned", TypeError, 1),
        ("transform", TypeError, LogitTransform), ("entropy", TypeError, "yes"), ("extras", TypeError, "is_top1"),
        ("extras", ValueError, ("perplexity",)), ("chunk_tokens", ValueError, 0), ("chunk_vocab", TypeError, 1.0),
    ],
)  # fmt: skip
def test_nonsense_is_named(name, error, value):
    with pytest.raises(error, match=rf"^{name}\b"):
        plan_linear_logprobs(**{"tokens": 8, "vocab": 40, "hidden_size": 16, "device": "cpu", name: value})


def test_a_plan_names_its_device_and_its_tokens(monkeypatch):
    """Without a GPU it is the CPU's, unless another is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "GPUS", {})
    assert str(plan_linear_logprobs(8192, 1000, 64)).splitlines()[1] == "for 8192 tokens that all count, on cpu"
    assert (
        str(plan_linear_logprobs(8192, 1000, 64, device="cuda"))
        .splitlines()[1]
        .endswith("on cuda, compute capability 9.0")
    )
    gpu = devices.HOPPER._replace(capability=(9, 4), amd=True)
    monkeypatch.setitem(devices.GPUS, torch.device("cuda"), gpu)
    assert plan_linear_logprobs(8192, 1000, 64, device="cuda").device == "cuda, gfx94"
