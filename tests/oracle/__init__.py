"""transformers' MiniMax-M3 as an oracle: our folders loaded there, its folders for our loader.

    model = oracle.load(folder)
    oracle.logits(model, ids)          [T, V] FP32
    oracle.selections(model, ids)      {layer: [Hkv, T, width]}
    oracle.generate(model, ids, n)     greedy continuation

transformers is imported on first use: it takes seconds, and most tests do without.
"""

from tests.oracle.hf import (
    HFModel,
    generate,
    golden_model,
    load,
    logits,
    save_complete,
    save_text_only,
    selections,
)

__all__ = [
    "HFModel",
    "generate",
    "golden_model",
    "load",
    "logits",
    "save_complete",
    "save_text_only",
    "selections",
]
