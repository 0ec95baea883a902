"""Trainers of tiny models in less time, with the same results: without what large ones need, or what is done again."""

import functools
import itertools


def hasten() -> None:
    try:
        import accelerate.utils.imports
        import accelerate.utils.memory
        import datasets.arrow_dataset
        import datasets.fingerprint
    except ImportError:
        return
    # Each backward parses the metadata of PEFT again.
    imports = accelerate.utils.imports
    imports._is_package_available = functools.cache(imports._is_package_available)
    # Each run begins with a collection of garbage that walks through all of torch.
    accelerate.utils.memory.clear_device_cache = lambda garbage_collection=False: None
    # Each step of a data set's preparation hashes the code of its function, for a cache on disk that none has here.
    numbers = itertools.count()
    for module in (datasets.arrow_dataset, datasets.fingerprint):
        module.update_fingerprint = lambda *args: f"{next(numbers):016x}"
