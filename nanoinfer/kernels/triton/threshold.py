"""top_k, top_p and min_p as thresholds on the logit, found without sorting.

The order-preserving integer form of a float is built bit by bit from the top, each bit by counting (top_k) or weighing
(top_p) what lies above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator
from nanoinfer.kernels.triton.sampler import weight_of

THRESHOLD_BLOCK = 8192


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """float32 to uint32 so that the order stays: negative numbers turned over, positive ones above them."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _amount_from(
    logits: tl.tensor,
    candidate: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGH: tl.constexpr,
) -> tl.tensor:
    """How many columns have at least the key `candidate` (shifted by SHIFT), or what those from `least` on weigh."""
    amount = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        is_above = inside & ((_key(x) >> SHIFT) >= candidate)
        one = weight_of(x, best, inverse, least) if WEIGH else 1.0
        amount += tl.where(is_above, one, 0.0)
    return tl.sum(amount.to(tl.float64), axis=0)


@triton.jit
def _highest_reaching(
    logits: tl.tensor,
    goal: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGH: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that it and all above it come to `goal`, as the float that its key stands for.

    floor: a logit of which that is known. Nothing is above `best`. Between them lie few bits: each that they settle
    saves a pass over the row.
    """
    key, lower, upper = tl.zeros([], tl.uint32), _key(floor) >> SHIFT, _key(best) >> SHIFT
    for step in range(32 - SHIFT):
        candidate = key | (tl.full([], 1, tl.uint32) << (31 - SHIFT - step))
        if candidate <= lower:
            key = candidate
        elif candidate <= upper:
            amount = _amount_from(logits, candidate, best, inverse, least, columns, BLOCK, SHIFT, WEIGH)
            key = tl.where(amount >= goal, candidate, key)
    # Of a negative number the bits that were shifted out are ones in the key.
    low: tl.constexpr = (1 << SHIFT) - 1
    bits = key << SHIFT
    bits = tl.where((bits >> 31) == 1, bits & 0x7FFFFFFF, (bits | low) ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def threshold_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    least: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """SHIFT: low bits of the keys that tell no logits apart, 16 for bf16. A greedy row has no filter."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    top, factor = tl.load(best + row), tl.load(inverse + row)
    min_weight, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    lowest = tl.full([], float("-inf"), tl.float32)
    is_random = factor > 0
    if is_random and min_weight > 0:
        # The best token weighs 1, so that a weight of min_p is a logit.
        lowest = top + tl.log(min_weight) / factor
    if is_random and k > 0 and k < columns:
        none = tl.full([], float("-inf"), tl.float32)
        kth = _highest_reaching(source, k.to(tl.float64), none, top, factor, lowest, columns, BLOCK, SHIFT, False)
        lowest = tl.maximum(lowest, kth)
    if is_random and p < 1:
        kept = _amount_from(source, tl.zeros([], tl.uint32), top, factor, lowest, columns, BLOCK, SHIFT, True)
        goal = kept * p.to(tl.float64)
        # What `weight_of` takes for nothing lies below.
        floor = tl.maximum(lowest, top - 88.0 / factor)
        pth = _highest_reaching(source, goal, floor, top, factor, lowest, columns, BLOCK, SHIFT, True)
        lowest = tl.maximum(lowest, pth)
    tl.store(least + row, lowest)


def _fake_threshold(logits: torch.Tensor, best: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(best)


@operator(
    "sampling_threshold(Tensor logits, Tensor best, Tensor inverse, Tensor min_p, Tensor top_k, Tensor top_p) "
    "-> Tensor",
    _fake_threshold,
)
def sampling_threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """[n] float32: the least logit that min_p, then top_k, then top_p leave in; -inf for rows that have no filter.

    min_p, top_p: [n] float32 (0 and 1: off); top_k: [n] int32 (0: off). Where inverse is 0, a greedy row, all are off.
    Rows without filter cost a few loads.
    Twin: reference.sampling_threshold.
    """
    least = _fake_threshold(logits, best, inverse, min_p, top_k, top_p)
    if len(logits):
        threshold_kernel[(len(logits),)](
            logits, best, inverse, min_p, top_k, top_p, least, logits.shape[1], logits.stride(0),
            BLOCK=THRESHOLD_BLOCK, SHIFT=16 if logits.dtype == torch.bfloat16 else 0, num_warps=16,
        )  # fmt: skip
    return least
