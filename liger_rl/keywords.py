"""The known name that is nearest to one that is not known."""

from collections.abc import Sequence
from difflib import get_close_matches


def hint(name: str, known: Sequence[str]) -> str:
    """ " (did you mean mask?)" for "completion_mask"; "" if no known name is near."""
    nearest = [*(other for other in known if other in name), *get_close_matches(name, known, n=1)]
    return f" (did you mean {nearest[0]}?)" if nearest else ""
