"""Compile the Triton kernels for GPUs that need not be there: `python test/compile_kernels.py --all`, or with targets.

Without --all, one variant of most kernels for each target, and more for Hopper. What is compiled for a target is what
`liger_rl.kernels.devices` lets its GPUs run. It has to fit their shared memory, and to spill few registers. The
interpreter accepts what the compiler refuses (a variable that changes its type in a loop, say). So the functions that
launch kernels are called as they are, on CPU tensors, with a driver that only knows its target and launches that
compile and run nothing. What the kernels would have written stays as it was, which matters to none of these calls.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from liger_rl.distill import pair_triton
from liger_rl.distill.pair_reference import (
    FORWARD,
    MIXTURE,
    REVERSE,
    Measure,
    MixtureSums,
    PairFold,
    PairGradients,
    PairTile,
    Tile,
)
from liger_rl.head import LogitTransform
from liger_rl.kernels import compiled, devices, epilogue, softmax_triton
from liger_rl.kernels.statistics import EXTRAS, TokenGradients, TokenStatistics
from liger_rl.losses import KLPenalty, PolicyBatch, PPOClip, TokenSum
from liger_rl.losses import fused_triton as policy_terms_triton
from liger_rl.losses.loss import PolicyTerms
from liger_rl.step import flash
from liger_rl.step.attention_merge_triton import merge_attention
from liger_rl.support import segment_sums_triton, slots_triton
from liger_rl.support.segment_sums import Entries, Factors, Segments
from liger_rl.support.slots import SlotGradients

CPU = torch.device("cpu")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Bytes a thread, once a tile of 128 x 256 logits. The most is a fold with every statistic and a softcap.
MOST_SPILLED = 1536
TRANSFORMS = (LogitTransform(), LogitTransform(softcap=30.0, scale=0.5, temperature=0.7))
N, H, V = 600, 64, 1000


class Target(NamedTuple):
    compiler: GPUTarget
    shared_bytes: int  # of a program, at most: `shared_memory_per_block_optin`

    @property
    def gpu(self) -> devices.Gpu:
        arch = str(self.compiler.arch).removeprefix("gfx")
        capability = (9, int(arch[1])) if self.amd else divmod(self.compiler.arch, 10)
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        return devices.Gpu(capability, self.shared_bytes, self.amd, version)

    @property
    def amd(self) -> bool:
        return self.compiler.backend == "hip"


def nvidia(capability: int, kibibytes: int) -> Target:
    return Target(GPUTarget("cuda", capability, 32), kibibytes << 10)


TARGETS = {
    "sm80": nvidia(80, 163),
    "sm86": nvidia(86, 99),
    "sm89": nvidia(89, 99),
    "sm90": nvidia(90, 227),
    "sm100": nvidia(100, 227),
    "sm120": nvidia(120, 99),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 160 << 10),
}


class NoDriver:
    """Of no device, for one target after the other."""

    def __init__(self) -> None:
        self.name = "sm90"
        devices.gpu_of = lambda _device: TARGETS[self.name].gpu  # which family a launch on CPU tensors takes

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name].compiler

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.name)  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def token_gradients(entropy: bool) -> TokenGradients:
    more = (ones(N), ones(N), None, ones(N)) if entropy else (None, None)
    return TokenGradients(*(ones(N) for _ in range(3)), *more)


def statistics(entropy: bool) -> TokenStatistics:
    return TokenStatistics(-ones(N), ones(N).double(), ones(N) if entropy else None)


def tile_by_tile(transform: LogitTransform, entropy: bool) -> None:
    logits, targets = ones(N, V), torch.zeros(N, dtype=torch.long)
    extras = EXTRAS if entropy else ()
    bias = ones(V) if entropy else None
    compiled.fold(logits, targets, 0, bias, transform, None, entropy=entropy, extras=extras)
    compiled.grad(logits, targets, 0, None, transform, token_gradients(entropy), logits.bfloat16())


def whole_rows(transform: LogitTransform, entropy: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits, targets = ones(3, 5, V, dtype=dtype), torch.zeros(3, 4, dtype=torch.long)
        mask = None if entropy else torch.ones(3, 4, dtype=torch.bool)
        found = compiled.fold_rows(logits, targets, mask, transform, entropy=entropy)
        upstream = (ones(12), ones(12) if entropy else None)
        compiled.grad_rows(logits, targets, mask, transform, found, upstream, torch.empty_like(logits))
        compiled.select_tokens(targets, mask, V, None if mask is None else ones(3, 1))


def in_the_epilogue(transform: LogitTransform, entropy: bool) -> None:
    hidden, weight = ones(N, H, dtype=torch.bfloat16), ones(V, H, dtype=torch.bfloat16)
    targets = torch.zeros(N, dtype=torch.long)
    bias = ones(V, dtype=torch.bfloat16) if entropy else None
    extras = EXTRAS if entropy else ()
    epilogue.gemm_fold(hidden, weight, bias, targets, transform, entropy=entropy, extras=extras)
    epilogue.gemm_grad(hidden, weight, bias, targets, 0, transform, token_gradients(entropy))


def listed_ids(transform: LogitTransform, entropy: bool) -> None:
    ids = torch.int32 if entropy else torch.int64
    targets, mask = torch.zeros(N, dtype=torch.long), ones(N) if entropy else torch.ones(N, dtype=torch.bool)
    token_ids, offsets = torch.zeros(2 * N, dtype=ids), torch.arange(0, 2 * N + 1, 2, dtype=ids)
    slots = slots_triton.make_slots(token_ids, offsets, targets, mask, vocab=V, distinct=entropy)
    hidden, weight = (ones(rows, H, dtype=torch.bfloat16) for rows in (N, V))
    factors = (ones(V),) if entropy else ()
    factors = Factors(hidden, weight, *factors)
    logits = segment_sums_triton.dots(factors, slots, transform)
    slots_triton.fold_slots(logits, slots, entropy=entropy)
    tokens = SlotGradients(ones(N), ones(N).double(), ones(N), *(ones(N) if entropy else None for _ in range(2)))
    coefficients = slots_triton.grad_slots(logits, slots, tokens, transform)
    segment_sums_triton.order_by_id(Entries(slots.ids, coefficients, slots.tokens), V)
    by_id = Segments(torch.zeros(9 * N, dtype=torch.int64), slots.ids, by_id=True)
    for segments in (slots.by_token, by_id):
        out = torch.empty(segments.number, H, dtype=torch.bfloat16)
        segment_sums_triton.segment_sums(segments, coefficients, slots.tokens, hidden, out)


def pairs_of_tiles(transform: LogitTransform, entropy: bool) -> None:
    student = Tile(ones(N, V), ones(V) if entropy else None, transform)
    teacher = Tile(ones(N, V), None, LogitTransform())
    pair_triton.scale_(ones(N, H, dtype=torch.bfloat16), ones())
    for measure in (Measure(FORWARD), Measure(REVERSE), Measure(MIXTURE, 0.5)):
        tile = PairTile(student, teacher, measure)
        pair_triton.fold_pair(tile, PairFold.start(N, CPU, measure))
        tokens = PairGradients(*(ones(N) for _ in range(4)))
        pair_triton.grad_pair(tile, tokens, ones(N, V, dtype=torch.bfloat16))
        if measure.needs_second_step:
            pair_triton.mix_pair(tile, ones(N), ones(N), MixtureSums(ones(N), ones(N)))


def policy_terms(_transform: LogitTransform, entropy: bool) -> None:
    batch = PolicyBatch(
        advantages=ones(N),
        old_per_token_logps=ones(N) if entropy else None,
        ref_per_token_logps=ones(N),
        importance_ratio=ones(N) if entropy else None,
    )
    penalties = itertools.cycle((KLPenalty(), *(KLPenalty(beta=0.1, kl_estimator=name) for name in ("k1", "k2", "k3"))))
    for objective, kl in zip((*policy_terms_triton.FORMULAS, PPOClip, PPOClip), penalties, strict=False):
        kl = replace(kl, importance_weighted=entropy)
        terms = PolicyTerms(objective=objective(), reduction=TokenSum(), kl=kl)
        prepared = terms.prepare(terms.check(batch, torch.Size([N]), CPU), torch.float32)
        policy_terms_triton.launch(prepared, ones(N), outputs=("slopes", "sums") if entropy else ("sums",))
        policy_terms_triton.launch(prepared, ones(N), outputs=("slopes",))
        outputs = ("losses", "slopes", "kls", "clipped")
        policy_terms_triton.launch(prepared._replace(weights=None), ones(N), outputs=outputs)


def trees(_transform: LogitTransform, entropy: bool) -> None:
    width = flash.WIDTHS[int(entropy)]
    output, other = (ones(N, 4, width, dtype=torch.bfloat16) for _ in range(2))
    merge_attention(output, ones(4, N), other, ones(4, N))


CALLS = (
    tile_by_tile, whole_rows, in_the_epilogue, listed_ids, pairs_of_tiles,
    policy_terms, trees,
)  # fmt: skip
OFF_AND_ON = tuple(zip(TRANSFORMS, (False, True), strict=True))


def spilled_bytes(kernel: object) -> int:
    """Of registers, a thread: what the compiler of either vendor says of the machine code."""
    if "amdgcn" in kernel.asm:
        return 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", said.stdout)[1])


class Compiler:
    """Takes the place of Triton's launches."""

    def __init__(self, everything: bool) -> None:
        self.everything, self.driver = everything, NoDriver()
        self.compiled: Counter[tuple[str, str]] = Counter()  # variants by target and kernel
        self.too_large: set[str] = set()  # what asks for more shared memory than there is, or spills
        triton.runtime.driver.set_active(self.driver)
        self.run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **options: self.launch(kernel, *args, **options)

    def launch(self, function: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        # Shared memory is short in the product of our own alone, and differs from variant to variant.
        varies = "epilogue." in name or name.endswith("._sums_kernel")
        once = not self.everything and self.driver.name != "sm90" and not varies
        if once and self.compiled[self.driver.name, name]:
            return None
        kernel = self.run(function, *args, grid=grid, warmup=True, **options)
        self.compiled[self.driver.name, name] += 1
        shared, most = kernel.metadata.shared, TARGETS[self.driver.name].shared_bytes
        if shared > most:
            self.too_large.add(
                f"{name} asks for {shared} bytes of shared memory on {self.driver.name}, which has {most}"
            )
        spilled = spilled_bytes(kernel)
        if spilled > MOST_SPILLED:
            self.too_large.add(f"{name} spills {spilled} bytes a thread on {self.driver.name}, {MOST_SPILLED} at most")
        return kernel

    def compile_for(self, name: str) -> None:
        self.driver.name, target = name, TARGETS[name]
        cases = tuple(itertools.product(TRANSFORMS, (False, True))) if self.everything else OFF_AND_ON[::-1]
        if devices.reason_against_gpu(target.gpu) is not None:
            raise SystemExit(f"the products of our own are kept from {name}")
        for part, case in itertools.product(CALLS, cases):
            part(*case)
        if self.too_large:
            raise SystemExit("\n".join(sorted(self.too_large)))


def main() -> None:
    names, everything = [name for name in sys.argv[1:] if name != "--all"], "--all" in sys.argv
    if not names:
        for name in TARGETS:
            subprocess.run([sys.executable, __file__, name, *sys.argv[1:]], check=True)
        return
    (softmax_triton.PORTABLE.value,) = {TARGETS[name].amd for name in names}  # one vendor at a time
    compiler = Compiler(everything)
    for name in names:
        compiler.compile_for(name)
    print(*(f"{target} {kernel}" for target, kernel in sorted(compiler.compiled)), sep="\n")


if __name__ == "__main__":
    main()
