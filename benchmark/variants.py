"""The variants: what is measured, by name. `benchmark.peers.peer.load` loads the module of one.

Labels stand here, so that tables and plots need not import the libraries they name.
"""

from typing import Any, NamedTuple


class Variant(NamedTuple):
    label: str
    module: str  # of benchmark.peers, with a class named Head
    options: dict[str, Any]  # of that class


VARIANTS = {
    "eager": Variant("eager PyTorch", "eager", {}),
    "compiled": Variant("torch.compile", "eager", {"compiled": True}),
    "liger_chunked": Variant("Liger chunked", "liger_chunked", {}),
    "liger_triton": Variant("logits + Liger Triton", "liger_triton", {}),
    "liger_sm90": Variant("Liger fused scaled CE", "liger_sm90", {}),
    "trl_chunked": Variant("TRL chunked", "trl_chunked", {}),
    "cce": Variant("cut-cross-entropy", "cce", {}),
    "torch_linear_ce": Variant("torch linear CE", "torch_linear_ce", {}),
    "verl_triton": Variant("verl Triton", "verl_triton", {}),
    "ours": Variant("liger_rl", "ours", {}),
}
LABELS = {name: variant.label for name, variant in VARIANTS.items()}
BASELINE = "eager"
TRL = "trl_chunked"
OURS = "ours"
EVERYWHERE = tuple(VARIANTS)
