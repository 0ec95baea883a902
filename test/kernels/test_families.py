"""Products with their work in the epilogue, family by family: the same results however memory is read."""

import pytest
import torch

import oracles
from devices import HOPPER, NEEDS_GPU, on_gpu, skip_where_misread
from head_calls import run_triton
from liger_rl import linear_logprobs, support_logprobs
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.kernels import devices
from liger_rl.kernels.devices import PORTABLE, PORTABLE_AMD, TMA, Gpu, family_of_gpu, reason_against_gpu
from liger_rl.kernels.statistics import BLOCK_VOCAB, TokenGradients
from liger_rl.support import Support

pytest.importorskip("triton", reason="Triton is not installed")
from liger_rl.kernels import epilogue

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
A100 = Gpu((8, 0), 163 << 10, amd=False, triton=(3, 6))
PORTABLE_HOPPER = HOPPER._replace(capability=(8, 0))  # no such GPU, but one with more memory than A100
BLACKWELL = HOPPER._replace(capability=(10, 0), triton=(3, 6))
ADA = Gpu((8, 9), 99 << 10, amd=False, triton=(3, 6))
MI300 = Gpu((9, 4), 64 << 10, amd=True, triton=(3, 6))
MI350 = Gpu((9, 5), 160 << 10, amd=True, triton=(3, 6))


def use(gpu, monkeypatch):
    monkeypatch.setitem(devices.GPUS, DEVICE, gpu)


@pytest.mark.parametrize(
    ("gpu", "family"),
    [
        (HOPPER, TMA),
        (HOPPER._replace(triton=(3, 8)), TMA),
        (BLACKWELL, TMA._replace(halves=False)),
        (BLACKWELL._replace(triton=(3, 8)), TMA._replace(fold_warps=16, halves=False)),
        (PORTABLE_HOPPER, PORTABLE[0]),
        (A100, PORTABLE[1]),
        (ADA, PORTABLE[2]),
        (ADA._replace(capability=(12, 0), triton=(3, 9)), PORTABLE[2]),
        (MI300, PORTABLE_AMD),
        (MI300._replace(triton=(3, 8)), PORTABLE_AMD),
        (MI350._replace(triton=(3, 8)), PORTABLE_AMD._replace(fold_warps=16)),
        (MI350._replace(triton=(3, 9)), PORTABLE_AMD),
    ],
)
def test_which_family(gpu, family):
    assert reason_against_gpu(gpu) is None
    assert family_of_gpu(gpu) == family
    assert family.shared_bytes <= gpu.shared_bytes


def test_tiles_can_be_forced(monkeypatch):
    monkeypatch.setattr(devices, "FORCED_KERNELS", "tiles")
    assert reason_against_gpu(HOPPER) == "LIGER_RL_KERNELS not to be tiles"
    monkeypatch.setattr(devices, "FORCED_KERNELS", "cuda")
    with pytest.raises(ValueError, match="LIGER_RL_KERNELS must be tiles, or not set; got 'cuda'"):
        reason_against_gpu(HOPPER)


def made(tokens, vocab, hidden_size, transform, entropy, bias):
    """Everything that the kernels of a family leave of one call, in their order."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size).to(DEVICE, torch.float16)
    weight = (torch.randn(vocab, hidden_size) / hidden_size**0.5).to(DEVICE, torch.float16)
    biases = torch.randn(vocab).to(DEVICE, torch.float16) if bias else None
    targets = torch.randint(vocab, (tokens,)).to(DEVICE)
    inputs = hidden, weight, biases, targets
    statistics = epilogue.gemm_fold(*inputs, transform, entropy=entropy)
    g, e = torch.randn(2, tokens).to(DEVICE)
    gradients = TokenGradients.of(statistics, g, e if entropy else None).with_float32_lse()
    tile = epilogue.gemm_grad(hidden, weight[:-3], biases, targets, 0, transform, gradients)
    values = (*statistics[:3], tile)
    return inputs, statistics, [part for part in values if part is not None]


CASES = (
    ((150, 700, 72), LogitTransform(), True, True),  # neither rows nor columns fill their tiles
    ((128, 512, 128), LogitTransform(temperature=0.7, softcap=5.0, scale=2.0), False, False),
)


@pytest.fixture(scope="module")
def made_with_tma():
    skip_where_misread(CASES[0][0][-1])
    with pytest.MonkeyPatch.context() as patch:
        use(HOPPER, patch)
        return [made(*sizes, *options)[-1] for sizes, *options in CASES]


@pytest.mark.parametrize("gpu", [BLACKWELL, PORTABLE_HOPPER, A100, ADA, MI300], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("case", [0, *on_gpu(1)])
def test_families_agree(gpu, case, made_with_tma, monkeypatch):
    (sizes, transform, entropy, bias), expected = CASES[case], made_with_tma[case]
    use(gpu, monkeypatch)
    family = family_of_gpu(gpu)
    inputs, statistics, found = made(*sizes, transform, entropy, bias)
    # The interpreter adds up a tile's columns in an order of its own for each number of pieces in registers.
    same = family.slices == 1 and family.step == TMA.step and family.halves
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        if same:
            assert torch.equal(mine, other)
        else:
            difference = (mine.double() - other.double()).norm()
            assert difference <= 2e-3 * other.double().norm()
    hidden, weight, biases, targets = inputs
    doubles = hidden.double(), weight.double(), targets
    logps, _ = oracles.logprobs(*doubles, bias=None if biases is None else biases.double(), **vars(transform))
    torch.testing.assert_close(statistics.logps.double(), logps, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("gpu", [A100, ADA], ids=lambda gpu: gpu.name)
def test_a_gradient_whose_last_tile_is_half_a_tile(gpu, monkeypatch):
    """The part of it that the vocabulary does not have, 151936 for one, must not be written onto the next row."""
    use(gpu, monkeypatch)
    allocated = torch.empty  # a row more, which is written instead of what lies behind
    monkeypatch.setattr(torch, "empty", lambda n, *rest, **options: allocated(n + 1, *rest, **options)[:n])
    torch.manual_seed(0)
    tokens, vocab = 130, BLOCK_VOCAB + BLOCK_VOCAB // 2
    hidden, weight = (torch.randn(rows, 16).to(DEVICE, torch.float16) for rows in (tokens, vocab))
    logits = hidden.double() @ weight.double().T
    lse = logits.logsumexp(1)
    gradients = TokenGradients(lse.float(), torch.ones_like(lse).float(), torch.zeros_like(lse).float(), None, None)
    targets = torch.full((tokens,), -1, device=DEVICE)  # in no tile
    tile = epilogue.gemm_grad(hidden, weight, None, targets, 0, LogitTransform(), gradients)
    expected = -torch.exp(logits - lse[:, None])
    torch.testing.assert_close(tile.double(), expected, rtol=0.0, atol=torch.finfo(torch.float16).eps)


@NEEDS_GPU
def test_a_step_is_that_of_tma(monkeypatch):
    """Bit for bit, where a tile goes through the epilogue as a whole."""
    hidden = (8 * torch.randn(3000, 512, device="cuda")).bfloat16()
    weight = (torch.randn(40000, 512, device="cuda") / 22).bfloat16()
    targets, upstream = (hidden @ weight.T).argmax(1), torch.randn(3000, device="cuda")

    def step():
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logps = linear_logprobs(*leaves, targets).logps
        (logps * upstream).sum().backward()
        return logps.detach(), *(leaf.grad for leaf in leaves)

    expected = step()
    use(PORTABLE_HOPPER, monkeypatch)
    assert all(torch.equal(mine, other) for mine, other in zip(step(), expected, strict=True))


def far_apart(values):
    """The values (rows, columns), the last of whose rows begins 2^31 elements after the first or later."""
    stride = 8 * -(-(2**28) // (len(values) - 1))
    memory = torch.empty(stride * (len(values) - 1) + values.shape[1], dtype=values.dtype, device=values.device)
    return memory.as_strided(values.shape, (stride, 1)).copy_(values)  # a CPU keeps no more than what is written


@pytest.mark.parametrize("way", ["logits", "support", "TMA", "pointers"])
def test_rows_that_are_far_apart(way, monkeypatch):
    """Offsets are 64 bit: the numbers are those of rows side by side."""
    if DEVICE.type == "cpu":
        # After a kernel the interpreter copies the memory of each tensor to itself.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    if way in ("logits", "support"):
        run_triton(monkeypatch)
    else:
        run_triton(monkeypatch, epilogue=True)
    if way == "pointers":
        use(A100, monkeypatch)
    hidden = torch.randn(3, 64).to(DEVICE, torch.float16)
    weight, logits = (torch.randn(300, 64) / 8).to(DEVICE, torch.float16), torch.randn(3, 300).to(DEVICE, torch.float16)
    targets = torch.tensor([299, 0, 7], device=DEVICE)
    support = Support.from_padded(torch.tensor([[298, 5, 299], [0, 1, -1], [7, 250, 290]], device=DEVICE))

    def solved(hidden, weight, logits):
        leaves = [part.detach().requires_grad_() for part in ([logits] if way == "logits" else [hidden, weight])]
        if way == "logits":
            values = logits_logprobs(leaves[0], targets).logps
        elif way == "support":
            values = support_logprobs(*leaves, targets, support).logps
        else:
            values = linear_logprobs(*leaves, targets).logps
        return values, *torch.autograd.grad(values.sum(), leaves)

    for far, near in zip(
        solved(*map(far_apart, (hidden, weight, logits))), solved(hidden, weight, logits), strict=True
    ):
        assert near.any()
        torch.testing.assert_close(far, near)
