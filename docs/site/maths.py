"""mkdocs hook: a fenced block of maths becomes MathML, which browsers typeset without a script."""

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": typeset}]
    return config


def typeset(source: str, *arguments, **keywords) -> str:
    """MathML of one formula in TeX. The arguments of the fence are not used."""
    return convert(source, display="block")
