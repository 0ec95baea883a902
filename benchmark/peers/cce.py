"""Apple's cut-cross-entropy with its defaults, which leave small gradients out (arXiv:2411.09009)."""

from importlib import import_module

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, import_reason

IGNORE_INDEX = -100


class Head(Base):
    devices = ("cuda",)

    def missing(self) -> str | None:
        return import_reason("cut-cross-entropy", lambda: import_module("cut_cross_entropy"))

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        from cut_cross_entropy import linear_cross_entropy

        # It drops ignored tokens by itself.
        ids = inputs.ids if inputs.dense else inputs.ids.masked_fill(~inputs.mask, IGNORE_INDEX)
        nll = linear_cross_entropy(inputs.hidden, inputs.weight, ids, softcap=case.softcap, reduction="none")
        return Values(-nll.float())
