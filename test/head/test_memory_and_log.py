"""A call's memory is that of tiles; its log says on what it runs."""

import logging

import pytest
import torch

from devices import skip_where_misread, skip_without_interpreter
from head_calls import Products, run_triton
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.kernels import devices
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.statistics import BLOCK_VOCAB
from peaks import tensor_peak

BF16, F32 = torch.bfloat16, torch.float32

SIZES = {"cpu": (9, 70, 12003, 16), "cuda": (8, 512, 32000, 2048)}
TILES = {"cpu": 1 << 20, "cuda": 32 << 20}  # bytes
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


def test_memory_of_what_no_loss_asks_for(device, small_tiles):
    options = {"entropy": True, "extras": ("is_top1", "mean_logits", "log_sum_sq_probs")}
    hidden, weight = torch.randn(1200, 16, device=device), torch.randn(19990, 16, device=device)
    targets = torch.arange(1200, device=device)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    if device.type == "cuda":
        linear_logprobs(*leaves, targets, **options)  # compiles kernels
    with tensor_peak(device) as peak:
        linear_logprobs(*leaves, targets, **options)
    assert peak.bytes <= 8 * TILES[device.type]


def test_a_tile_fits_its_workspace():
    """On CPU, where every product passes the dispatcher."""
    hidden, weight, targets = torch.randn(600, 64), torch.randn(40000, 64), torch.zeros(600, dtype=torch.long)
    with Products() as products:
        linear_logprobs(hidden, weight, targets)
    tokens, vocab = max(products.logits(64))
    assert 0.9 < (12 * tokens * vocab + 4 * vocab * 64) / LIMITS.workspace_bytes["cpu"] <= 1
    assert vocab == vocab // BLOCK_VOCAB * BLOCK_VOCAB < 40000


# --- the line in the log ----------------------------------------------------------------------------------------------

TILES_OF = "%s of a head on cpu: float32 tiles of logits; a fused epilogue needs {}"
EPILOGUE = "%s of a head on cpu: a product with a fused epilogue (tma)"


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, EPILOGUE, EPILOGUE),
        ({"on": "a CPU"}, TILES_OF.format("a GPU"), TILES_OF.format("a GPU")),
        ({"chunk_vocab": 100}, *[TILES_OF.format("no chunk to be named")] * 2),
        ({"compute_dtype": F32}, *[TILES_OF.format("hidden states and weight in one 16-bit dtype")] * 2),
        ({"several": True}, TILES_OF.format("one target for each token"), EPILOGUE),
    ],
    ids=str,
)
def test_the_log_says_once_on_what_a_head_runs(options, forward, backward, monkeypatch, caplog):
    options = dict(options)
    if options.pop("on", None) is None:
        skip_without_interpreter()
        skip_where_misread(16)
        run_triton(monkeypatch, epilogue=True)
    targets = torch.arange(12).view(6, 2) if options.pop("several", False) else torch.arange(6)
    devices._log_once.cache_clear()
    for level, lines in ((logging.WARNING, []), (logging.INFO, [forward % "forward", backward % "backward"])):
        caplog.set_level(level, "liger_rl")
        for _ in range(2):
            leaves = [torch.randn(rows, 16).half().requires_grad_() for rows in (6, 300)]
            linear_logprobs(*leaves, targets, **options).logps.sum().backward()
        assert caplog.messages == lines
