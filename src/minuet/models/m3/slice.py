"""A rank slice of M3: the config of what one of N tensor-parallel GPUs holds and computes.

Attention heads, FFN widths and the vocabulary are divided as tensor parallelism divides them; the
residual stream, the router and the index key are whole on every rank and stay so. The result is a
``config.json`` like any other: a smaller model whose layers cost one GPU what M3's layers cost each
of N, without the collectives between them. Its answers mean nothing. No torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minuet.attention.contract import LayerKind
from minuet.errors import ConfigError
from minuet.models.m3.spec import M3Spec, parse

# config keys of sizes that tensor parallelism divides -> what they count
_SPLIT: Mapping[str, str] = {
    "num_attention_heads": "query heads",
    "intermediate_size": "expert width",
    "shared_intermediate_size": "shared expert width",
    "dense_intermediate_size": "dense FFN width",
    "vocab_size": "vocabulary",
}
# divided as far as they go; with more ranks than heads, several ranks hold copies of one
_KV_SPLIT = ("num_key_value_heads", "index_n_heads")
_SPARSE_KV_SPLIT = "sparse_num_index_heads"
_PER_LAYER = ("moe_layer_freq", "mlp_layer_types", "layer_types")
_SPARSE_PER_LAYER = ("sparse_attention_freq", "sparse_disable_index_value")


def rank_slice(
    config: Mapping[str, Any],
    *,
    rank_of: int = 1,
    layers: int | None = None,
    dense_layers: int | None = None,
) -> dict[str, Any]:
    """The config of one rank's share of the first layers.

    Args:
        config: a ``config.json`` object of the whole model.
        rank_of: tensor-parallel size that is imitated.
        layers: how many layers to keep; None keeps all.
        dense_layers: how many of them have dense attention; None takes the model's first
            ``layers`` layers as they come. Dense ones stay in front of sparse ones, as in M3.

    Returns:
        A text config in the spelling of ``config``. If no end-of-sequence id is inside the smaller
        vocabulary, its last id becomes one: an engine does not start without.

    Raises:
        ConfigError: a size that does not divide, or more layers than there are.
    """
    spec = parse(config)
    text = dict(config.get("text_config") or config)
    text["architectures"] = list(config["architectures"])
    text["torch_dtype"] = spec.dtype
    text.pop("dtype", None)
    kept = _kept_layers(spec, layers, dense_layers)
    _divide(text, spec, rank_of)
    text["num_hidden_layers"] = len(kept)
    _take(text, _PER_LAYER, kept)
    if isinstance(text.get("sparse_attention_config"), Mapping):
        sparse = dict(text["sparse_attention_config"])
        _take(sparse, _SPARSE_PER_LAYER, kept)
        if sparse.get(_SPARSE_KV_SPLIT) is not None:
            sparse[_SPARSE_KV_SPLIT] = _kv_share(spec.index_heads, rank_of)
        text["sparse_attention_config"] = sparse
    last = text["vocab_size"] - 1
    text["eos_token_id"] = [t for t in spec.eos_token_ids if t <= last] or [last]
    parse(text)
    return text


def _kept_layers(spec: M3Spec, layers: int | None, dense_layers: int | None) -> list[int]:
    """Indices of the layers to keep, ascending."""
    wanted = spec.num_layers if layers is None else layers
    if not 1 <= wanted <= spec.num_layers:
        raise ConfigError("--layers", got=wanted, expected=f"1 to {spec.num_layers}")
    if dense_layers is None:
        return list(range(wanted))
    of_kind = {kind: [i for i, k in enumerate(spec.layer_kinds) if k is kind] for kind in LayerKind}
    dense, sparse = of_kind[LayerKind.DENSE], of_kind[LayerKind.SPARSE]
    fewest, most = max(0, wanted - len(sparse)), min(wanted, len(dense))
    if not fewest <= dense_layers <= most:
        raise ConfigError(
            "--dense-layers",
            got=dense_layers,
            expected=f"{fewest} to {most}: the model has {len(dense)} dense and {len(sparse)} "
            f"sparse layers, {wanted} are kept",
        )
    return sorted(dense[:dense_layers] + sparse[: wanted - dense_layers])


def _divide(text: dict[str, Any], spec: M3Spec, ranks: int) -> None:
    if ranks < 1:
        raise ConfigError("--rank-of", got=ranks, expected="at least 1")
    stuck = [f"{what} {text[key]}" for key, what in _SPLIT.items() if int(text[key]) % ranks]
    heads = spec.num_kv_heads
    if heads % ranks and ranks % heads:
        stuck.append(f"KV heads {heads} (neither divided by {ranks} nor copied evenly)")
    if stuck:
        raise ConfigError(
            "the model cannot be divided over so many ranks",
            got=f"--rank-of {ranks}",
            expected="a divisor of all of these: " + ", ".join(stuck),
        )
    for key in _SPLIT:
        text[key] = int(text[key]) // ranks
    for key in _KV_SPLIT:
        if text.get(key) is not None:
            text[key] = _kv_share(int(text[key]), ranks)


def _kv_share(heads: int, ranks: int) -> int:
    return max(1, heads // ranks)


def _take(values: dict[str, Any], keys: Sequence[str], kept: Sequence[int]) -> None:
    for key in keys:
        if values.get(key) is not None:
            values[key] = [values[key][i] for i in kept]
