"""TRL's chunked log-probabilities (1.15 and later), called as its trainers call them."""

from importlib import import_module
from types import ModuleType

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, import_reason, over_live_rows

CHUNK_VOCAB = 32768  # what its trainers pass where a TRL does not name it


class Head(Base):
    entropy = True

    def missing(self) -> str | None:
        return import_reason("trl", lambda: _utils()._ChunkedLogProbFunction)

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        utils = _utils()
        outputs = ("entropy",) if entropy else ()
        chunk = getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", CHUNK_VOCAB)

        def operator(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            logps, entropies, *_unasked = utils._ChunkedLogProbFunction.apply(
                hidden, inputs.weight, None, ids, 1.0, chunk, case.softcap, 1.0, outputs
            )
            return (logps, entropies) if entropy else (logps,)

        return Values(*over_live_rows(inputs, operator))


def _utils() -> ModuleType:
    # The module that its trainers take the operator from, and that the operator's backward imports again.
    return import_module("trl.trainer.utils")
