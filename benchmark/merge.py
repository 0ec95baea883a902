"""Results of one environment from several runs, in one file."""

from typing import Any

from benchmark.variants import BASELINE, LABELS, TRL

# Of an environment, what may change while its numbers stay comparable.
PASSING = ("date", "load_average")
# Field of a row -> which of its numbers it is, over that of which variant on the same case.
COMPARISONS = {
    "peak_extra_of_eager": ("peak_extra_mib", BASELINE),
    "forward_x_trl": ("forward_ms", TRL),
    "step_x_trl": ("step_ms", TRL),
}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what makes two environments' numbers incomparable."""
    return [key for key in {**one, **other} if key not in PASSING and one.get(key) != other.get(key)]


def merged(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier rows and new ones, which win; variants in their usual order within a case, compared with each other."""
    both = {(row["case"], row["variant"]): row for row in before + rows}
    for (case, _variant), row in both.items():
        for field, (of, variant) in COMPARISONS.items():
            other = both.get((case, variant), {}).get(of)
            if other and row.get(of) is not None:
                row[field] = row[of] / other
    cases = list(dict.fromkeys(case for case, _variant in both))
    return sorted(both.values(), key=lambda row: (cases.index(row["case"]), list(LABELS).index(row["variant"])))
