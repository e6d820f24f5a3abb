"""Minuet: paged-decode attention and a serving engine for block-sparse MoE models.

The public names load lazily, so that the decision half (``minuet explain``, the planner, the
layout arithmetic) never pays for importing torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from minuet.engine.llm import LLM
    from minuet.engine.types import SamplingParams

_LAZY = {"LLM": "minuet.engine.llm", "SamplingParams": "minuet.engine.types"}


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'minuet' has no attribute {name!r}; it exports {__all__}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
