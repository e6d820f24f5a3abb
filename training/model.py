"""The trainable model: Minuet's own weight tree and formulas, with gradients.

The parameters are the tensors of :class:`minuet.models.m3.weights.M3Weights` themselves, so what
is trained is what is exported. The formulas are those of ``minuet.ops`` and
``minuet.attention.reference``, over whole sequences; ``tests/training`` compares the two.

B rows, T tokens of a row, Q query heads, K KV heads, D head dim, E experts, W hidden width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.attention.contract import LayerKind
from minuet.dtypes import DType
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import (
    LayerWeights,
    MLPWeights,
    MoEWeights,
    empty_weights,
    packed_rows,
)
from minuet.ops.rope import cos_sin, inverse_frequencies
from training import attention


@dataclass(frozen=True)
class Pass:
    """How one forward pass runs.

    Attributes:
        top_blocks: blocks per token and KV head in sparse layers; 0: full attention.
        shuffle_keys: permute the index keys of each row: selection by chance, to see it matter.
        selected: implementation of selected attention, a key of ``attention.SELECTED``.
        watched: [B, M] positions whose attention the indexer learns from; None: it does not learn.
    """

    top_blocks: int = 0
    shuffle_keys: bool = False
    selected: str = "masked"
    watched: Tensor | None = None


@dataclass
class Report:
    """What a forward pass tells beside the hidden states; a list has one value per layer.

    Attributes:
        index_losses: of the sparse layers, see :func:`attention.index_loss`.
        recalls: of the sparse layers, the same.
        loads: of the MoE layers, [E]: share of all choices that fell on each expert.
    """

    index_losses: list[Tensor] = field(default_factory=list)
    recalls: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)


# --- element by element: fused by torch.compile on a GPU ----------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma RMSNorm in FP32; the gain is ``1 + w``."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalise heads, then rotate their leading channels.

    Args:
        x: [B, T, heads, D].
        weight: [D].
        cos: [T, half].
        sin: [T, half].
        eps: of the norm.

    Returns:
        [B, T, heads, D] in the type of ``x``.
    """
    y = norm(x, weight, eps)
    half = cos.shape[-1]
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).to(x.dtype)


def swiglu_oai(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of ``[..., 2 * width]``, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)).to(gate_up.dtype)


class Model(torch.nn.Module):
    """MiniMax-M3 for training.

    Args:
        spec: the model.
        device: where; matrices are multiplied in BF16 on a GPU, in FP32 on a CPU.
        seed: of the initial weights.
        fuse: compile the element-wise parts.
    """

    def __init__(self, spec: M3Spec, device: torch.device, seed: int = 0, *, fuse: bool = False):
        super().__init__()
        self.spec, self._device = spec, device
        self._compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.weights = empty_weights(spec, DType.FP32, device)
        generator = torch.Generator().manual_seed(seed)
        self.named: dict[str, Tensor] = {}
        for path, tensor in self.weights.tensors():
            tensor.copy_(_initial(path, tensor.shape, spec, generator))
            tensor.requires_grad_(not path.endswith(".bias"))
            self.named[path] = tensor
        self._frequencies = inverse_frequencies(spec.rotary_dim, spec.rope_theta, device)
        parts: list[Any] = [norm, norm_and_rotate, swiglu_oai]
        if fuse:
            # few graphs for many shapes; the limit is for the kinds of call, which are few as well
            torch._dynamo.config.recompile_limit = 64
            parts = [torch.compile(part, dynamic=True) for part in parts]
        self._norm, self._rotate, self._act = parts

    def forward(self, tokens: Tensor, how: Pass) -> tuple[Tensor, Report]:
        """Hidden states after the final norm.

        Args:
            tokens: [B, T]; rows begin at position 0.
            how: attention of this pass.

        Returns:
            [B, T, W] in the compute type, and the report.
        """
        spec, report = self.spec, Report()
        cos, sin = cos_sin(torch.arange(tokens.shape[1], device=tokens.device), self._frequencies)
        hidden = F.embedding(tokens, self.weights.embed)
        for idx, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.input_norm, spec.rms_norm_eps).to(self._compute)
            hidden = hidden + self._attend(idx, layer, normed, (cos, sin), how, report)
            normed = self._norm(hidden, layer.post_norm, spec.rms_norm_eps)
            if layer.mlp is not None:
                hidden = hidden + self._mlp(layer.mlp, normed.to(self._compute))
            if layer.moe is not None:
                hidden = hidden + self._moe(layer.moe, normed, report)
        final = self._norm(hidden, self.weights.norm, spec.rms_norm_eps)
        return final.to(self._compute), report

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] FP32 of hidden states [..., W]."""
        return self._linear(hidden, self.weights.lm_head).float()

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(self._compute))

    def _attend(
        self,
        idx: int,
        layer: LayerWeights,
        normed: Tensor,
        turn: tuple[Tensor, Tensor],
        how: Pass,
        report: Report,
    ) -> Tensor:
        spec, eps = self.spec, self.spec.rms_norm_eps
        rows = dict(packed_rows(spec, idx)[:3])  # without the indexer's
        packed = self._linear(normed, layer.qkv[: sum(rows.values())])
        parts = dict(zip(rows, packed.split(list(rows.values()), -1), strict=True))
        heads = {name: part.unflatten(-1, (-1, spec.head_dim)) for name, part in parts.items()}
        q = self._rotate(heads["q"], layer.q_norm, *turn, eps)
        k, v = self._rotate(heads["k"], layer.k_norm, *turn, eps), heads["v"]
        chosen = None
        if spec.layer_kinds[idx] is LayerKind.SPARSE:
            chosen = self._index(layer, normed, (q, k), turn, how, report)
        if chosen is None:
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            out = attention.SELECTED[how.selected](q, k, v, chosen, spec.block)
        return self._linear(out.flatten(2), layer.o)

    def _index(
        self,
        layer: LayerWeights,
        normed: Tensor,
        main: tuple[Tensor, Tensor],
        turn: tuple[Tensor, Tensor],
        how: Pass,
        report: Report,
    ) -> Tensor | None:
        """The chosen blocks, None for full attention; the indexer's loss goes to the report.

        The indexer sees the trunk detached: it learns to follow the attention, and the attention
        does not learn to be easy to follow.
        """
        spec = self.spec
        B, T, _ = normed.shape
        dense = not how.top_blocks or how.top_blocks * spec.block >= T
        if dense and how.watched is None:
            return None
        assert layer.index_q_norm is not None
        assert layer.index_k_norm is not None
        start = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
        packed = self._linear(normed.detach(), layer.qkv[start:])
        split = packed.unflatten(-1, (-1, spec.index_dim)).split([spec.index_heads, 1], dim=2)
        index_q = self._rotate(split[0], layer.index_q_norm, *turn, spec.rms_norm_eps)
        index_k = self._rotate(split[1], layer.index_k_norm, *turn, spec.rms_norm_eps)[:, :, 0]
        if how.watched is not None:
            at = torch.arange(B, device=normed.device)[:, None], how.watched
            scores = attention.block_scores(index_q[at], index_k, how.watched, spec.block)
            mass = attention.block_mass(main[0][at], main[1], how.watched, spec.block)
            loss, recall = attention.index_loss(
                scores, mass, how.watched, spec.block, spec.top_blocks
            )
            report.index_losses.append(loss)
            report.recalls.append(recall)
        if dense:
            return None
        if how.shuffle_keys:
            index_k = index_k[:, torch.randperm(T, device=normed.device)]
        return attention.select(index_q, index_k, spec.block, how.top_blocks)

    def _mlp(self, weights: MLPWeights, normed: Tensor) -> Tensor:
        inner = self._act(
            self._linear(normed, weights.gate_up), self.spec.swiglu_alpha, self.spec.swiglu_limit
        )
        return self._linear(inner, weights.down)

    def _moe(self, weights: MoEWeights, normed: Tensor, report: Report) -> Tensor:
        """All experts for all tokens, most of them times zero: they are too small to sort for."""
        spec = self.spec
        scores = torch.sigmoid(F.linear(normed.float(), weights.router))
        chosen = (scores + weights.bias).topk(spec.experts_per_token, dim=-1).indices
        picked = scores.gather(-1, chosen)
        shares = torch.zeros_like(scores).scatter(
            -1, chosen, spec.routed_scale * picked / picked.sum(-1, keepdim=True)
        )
        report.loads.append((shares.detach() > 0).flatten(0, -2).float().mean(0))
        normed = normed.to(self._compute)
        inner = self._linear(normed, weights.gate_up.flatten(0, 1)).unflatten(
            -1, (spec.num_experts, -1)
        )
        inner = self._act(inner, spec.swiglu_alpha, spec.swiglu_limit)
        inner = inner * shares[..., None].to(inner.dtype)
        routed = self._linear(inner.flatten(-2), weights.down.transpose(0, 1).flatten(1))
        return routed + self._mlp(weights.shared, normed)

    @torch.no_grad()
    def balance(self, report: Report, rate: float) -> None:
        """Move the routers' biases towards equal loads: up for experts below the mean, else down.

        The auxiliary-loss-free rule of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
        """
        layers = [layer.moe for layer in self.weights.layers if layer.moe is not None]
        for moe, load in zip(layers, report.loads, strict=True):
            moe.bias += rate * torch.sign(load.mean() - load)


def _initial(path: str, shape: torch.Size, spec: M3Spec, generator: torch.Generator) -> Tensor:
    """Initial weights: zero for norms (gain 1) and biases, ``1/sqrt(columns)`` else.

    Matrices that write to the residual stream are smaller by ``sqrt(2 * layers)``. Normed queries
    and keys begin with a gain that lets attention be sharp: scores up to ``sqrt(128) * 1.25 ** 2``.
    """
    name = path.rpartition(".")[2]
    if name.endswith(("q_norm", "k_norm")):
        return torch.full(shape, 0.25)
    if name.endswith("norm") or name == "bias":
        return torch.zeros(shape)
    std = shape[-1] ** -0.5
    if name in ("o", "down"):
        std /= math.sqrt(2 * spec.num_layers)
    if name == "embed":
        std = 0.5
    return torch.randn(shape, generator=generator) * std
