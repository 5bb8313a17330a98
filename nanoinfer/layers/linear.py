"""Linear layers, split over the ranks of a `TensorParallelGroup` (Shoeybi et al., Megatron-LM, 2019).

    ColumnParallelLinear        each rank computes some of the outputs
    MergedColumnParallelLinear  several of those with one input in one matrix (gate and up)
    QKVParallelLinear           the same for q, k and v, split by head
    RowParallelLinear           each rank takes some of the inputs; an all-reduce sums the partial outputs

A column-parallel layer followed by a row-parallel one needs that single all-reduce. How a weight is stored and
multiplied is the business of a `LinearMethod`; sharding and merging are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanoinfer.config import heads_of_rank
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.kernels.cpu.ops import CPUKernels, Int8Weight, PackedWeight, kernels_for
from nanoinfer.kernels.reference import linear_int8, quantize_rows
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.shard import ShardSpec, split

_ROWS_QUANTIZED_AT_ONCE = 4096


def divide(what: str, size: int, parts: int) -> int:
    """size / parts. Raises ValueError if it has a remainder."""
    if size % parts:
        raise ValueError(f"{what} is {size}, which does not divide by the tensor parallel size {parts}")
    return size // parts


class LinearLayer(Protocol):
    """What a `LinearMethod` works on: any layer that multiplies by one matrix."""

    weight: nn.Parameter
    # Whether the outputs are a gate and what it is multiplied with: y = silu(first half) * second half.
    gated: bool


class LinearMethod:
    """Weights as the checkpoint has them, multiplied by torch. Other formats override these three."""

    def create(self, layer: LinearLayer, out_features: int, in_features: int, options: dict) -> None:
        """Gives the layer the tensors that `ShardSpec`s will fill."""
        layer.weight = nn.Parameter(torch.empty(out_features, in_features, **options), requires_grad=False)

    def pack(self, layer: LinearLayer) -> None:
        """Called once when the weights are loaded."""

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = F.linear(x, layer.weight, bias)
        return silu_and_mul(y) if layer.gated else y


class PackedLinearMethod(LinearMethod):
    """bf16 on a CPU with AMX: weights in the kernel's order, once they are loaded; SiLU-and-mul in the same pass."""

    def __init__(self, kernels: CPUKernels) -> None:
        self._kernels = kernels
        self._packed: PackedWeight | None = None

    def pack(self, layer: LinearLayer) -> None:
        self._packed = self._kernels.pack(layer.weight, layer.gated)
        del layer.weight

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return super().apply(layer, x, bias)
        return self._kernels.linear(x, self._packed, bias)


class Int8LinearMethod(LinearMethod):
    """The weights, once they are loaded, in symmetric int8 with a scale per output; activations with one per token.

    As W8A8 in vLLM, but quantized here and not in the checkpoint. A rank quantizes its own part: in a row-parallel
    layer, whose ranks share out the inputs, an output or a token has a scale per rank, and the ranks' sums, in full
    precision, are added. So the results of different tensor parallel sizes differ by quantization's own error.
    """

    def __init__(self) -> None:
        self._quantized: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack(self, layer: LinearLayer) -> None:
        # In pieces, so that there is no float32 copy of a whole matrix, such as the head.
        pieces = [quantize_rows(piece) for piece in layer.weight.split(_ROWS_QUANTIZED_AT_ONCE)]
        self._quantized = torch.cat([q for q, _ in pieces]), torch.cat([scales for _, scales in pieces]).flatten()
        del layer.weight

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._quantized is None:
            return super().apply(layer, x, bias)
        return linear_int8(x, *self._quantized, bias, layer.gated)


class PackedInt8LinearMethod(LinearMethod):
    """The same on a CPU with AMX, from bf16, in the kernel's order: half the bytes of `PackedLinearMethod`."""

    def __init__(self, kernels: CPUKernels) -> None:
        self._kernels = kernels
        self._packed: Int8Weight | None = None

    def pack(self, layer: LinearLayer) -> None:
        self._packed = self._kernels.pack_int8(layer.weight, layer.gated)
        del layer.weight

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return super().apply(layer, x, bias)
        return self._kernels.linear_int8(x, self._packed, bias)


def int8_kernels(dtype: torch.dtype, device: str) -> CPUKernels | None:
    """The kernels, if they multiply int8 weights with activations of that dtype there."""
    kernels = kernels_for(dtype, device)
    return kernels if kernels is not None and kernels.has_amx_int8 and dtype == torch.bfloat16 else None


def select_linear_method(dtype: torch.dtype, device: str, quantization: str | None = None) -> LinearMethod:
    """quantization: of `EngineConfig`; what a checkpoint's weights become when they are packed."""
    if quantization == "int8":
        kernels = int8_kernels(dtype, device)
        return Int8LinearMethod() if kernels is None else PackedInt8LinearMethod(kernels)
    kernels = kernels_for(dtype, device)
    if kernels is not None and kernels.has_amx and dtype == torch.bfloat16:
        return PackedLinearMethod(kernels)
    return LinearMethod()


class ParallelLinear(nn.Module):
    """A rank's part of one matrix, [out_features, in_features] here being the part's own size."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    gated: bool = False

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, groups: ParallelGroups, options: dict
    ) -> None:
        super().__init__()
        self.tp = groups.tp
        self.method = select_linear_method(**options)
        self.method.create(self, out_features, in_features, options)
        self.bias = nn.Parameter(torch.empty(out_features, **options), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)

    def pack(self, quantization: str | None = None) -> None:
        """Once, when the weights are loaded as the checkpoint has them, whatever they become."""
        if quantization is not None:
            self.method = select_linear_method(self.weight.dtype, self.weight.device.type, quantization)
        self.method.pack(self)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias


class MergedColumnParallelLinear(ParallelLinear):
    """y = x W^T + b for several W of `out_sizes` outputs with the same input; a rank's y is its part of each in turn.

    x: [T, in_features]; returns [T, sum(out_sizes) / size]. gated: there are two W of one size and no bias, and what is
    returned is silu(first) * second, [T, out_size / size].
    """

    def __init__(
        self,
        in_features: int,
        out_sizes: list[int],
        *,
        bias: bool = False,
        gated: bool = False,
        groups: ParallelGroups,
        options: dict,
    ) -> None:
        assert not gated or (len(set(out_sizes)) == 1 and len(out_sizes) == 2 and not bias)
        self.gated = gated
        self.out_sizes = out_sizes
        self.parts = [divide("output size", size, groups.tp.size) for size in out_sizes]
        super().__init__(in_features, sum(self.parts), bias=bias, groups=groups, options=options)

    def shards(self, names: list[str]) -> Iterator[ShardSpec]:
        """`names`: the checkpoint's name of each matrix, without ".weight"."""
        offsets = [0, *accumulate(self.parts)]
        for name, size, part, offset in zip(names, self.out_sizes, self.parts, offsets[:-1], strict=True):
            for kind, tensor in self._tensors():
                dest = tensor[offset : offset + part]
                yield split(f"{name}.{kind}", dest, 0, size, self.tp.rank * part)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, split by output. x: [T, in_features]; returns [T, out_features / size]."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, groups: ParallelGroups, options: dict
    ) -> None:
        super().__init__(in_features, [out_features], bias=bias, groups=groups, options=options)


class QKVParallelLinear(ParallelLinear):
    """The projections to queries, keys and values, split by head.

    Where there are fewer KV heads than ranks, neighbouring ranks hold the same KV head. x: [T, hidden_size]; returns
    [T, (num_heads + 2 * num_kv_heads) * head_dim] for the rank's own heads: queries, then keys, then values.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        *,
        bias: bool = False,
        groups: ParallelGroups,
        options: dict,
    ) -> None:
        size, rank = groups.tp.size, groups.tp.rank
        self.head_dim = head_dim
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads
        self.num_heads, self.num_kv_heads = heads_of_rank(total_num_heads, total_num_kv_heads, size)
        self.first_head = rank * self.num_heads
        # With fewer KV heads than ranks, size / total_num_kv_heads neighbours share one.
        self.first_kv_head = rank * total_num_kv_heads // size
        out_features = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        super().__init__(hidden_size, out_features, bias=bias, groups=groups, options=options)

    def shards(self, names: list[str]) -> Iterator[ShardSpec]:
        """`names`: the checkpoint's names of the q, k and v projections, without ".weight"."""
        kv = (self.total_num_kv_heads, self.num_kv_heads, self.first_kv_head)
        heads = [(self.total_num_heads, self.num_heads, self.first_head), kv, kv]
        offset = 0
        for name, (total, own, first) in zip(names, heads, strict=True):
            for kind, tensor in self._tensors():
                dest = tensor[offset : offset + own * self.head_dim]
                yield split(f"{name}.{kind}", dest, 0, total * self.head_dim, first * self.head_dim)
            offset += own * self.head_dim


class RowParallelLinear(ParallelLinear):
    """One matrix, split by input. x: [T, in_features / size]; returns [T, out_features], summed over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, groups: ParallelGroups, options: dict
    ) -> None:
        self.in_features = in_features
        self.part = divide("input size", in_features, groups.tp.size)
        self.has_bias = bias
        # The sum over the ranks must contain the bias once.
        own_bias = bias and groups.tp.rank == 0
        super().__init__(self.part, out_features, bias=own_bias, groups=groups, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(super().forward(x))

    def shards(self, name: str) -> Iterator[ShardSpec]:
        yield split(f"{name}.weight", self.weight, 1, self.in_features, self.tp.rank * self.part)
        if self.has_bias:
            # Stated by every rank, so that all of them know the name; of no elements where it isn't held.
            dest = self.weight.new_empty(0) if self.bias is None else self.bias
            yield split(f"{name}.bias", dest, 0, len(self.weight), 0)
