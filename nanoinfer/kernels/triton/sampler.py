"""The sampler's kernels, straight from the logits in whatever dtype they are; used by layers/device_sampler.py.

Filters are thresholds on the logit, found without sorting: the order-preserving integer form of a float is built bit by
bit from the top, each bit by counting (top_k) or weighing (top_p) what lies above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

# Tokens per segment, as in layers/sampler.py: the distribution is summed by segments.
SEGMENT = 512
SEGMENTS_PER_PROGRAM = 8
ARGMAX_BLOCK = 4096
THRESHOLD_BLOCK = 8192
PENALTY_BLOCK = 1024
# In the table of counts: this bit says that the token is in the prompt; the bits below count it in the output.
IN_PROMPT = 1 << 30
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit
def weight_of(logits: tl.tensor, best: tl.tensor, inverse: tl.tensor, least: tl.tensor) -> tl.tensor:
    """exp((logit - best) / temperature), float32; zero below `least` and where float32 has no normal number."""
    scaled = (logits - best) * inverse
    return tl.where((scaled >= -87.0) & (logits >= least), tl.exp(scaled), 0.0)


@triton.jit
def partial_argmax_kernel(
    logits: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    num_parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN, to be found out by whoever looks for infinity
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(values + row * num_parts + part, value)
    tl.store(indices + row * num_parts + part, part * BLOCK + index)


@triton.jit
def merge_argmax_kernel(
    values: tl.tensor,
    indices: tl.tensor,
    best: tl.tensor,
    winners: tl.tensor,
    num_parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    x = tl.load(values + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(best + row, value)
    tl.store(winners + row, tl.load(indices + row * num_parts + index).to(tl.int64))


@triton.jit
def segment_sums_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    sums: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    num_segments: tl.tensor,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1) * SEGMENTS + tl.arange(0, SEGMENTS)
    column = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    weights = weight_of(x, tl.load(best + row), tl.load(inverse + row), tl.load(least + row))
    # Added in float64: the boundaries of tokens must not depend on the order of additions.
    tl.store(sums + row * num_segments + segment, tl.sum(weights.to(tl.float64), axis=1), mask=segment < num_segments)


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    sums: tl.tensor,
    targets: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    num_segments: tl.tensor,
    SEGMENT: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
) -> None:
    """The column at which the cumulative weight passes the target: its segment first, then the token within."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    index = tl.arange(0, BLOCK_SEGMENTS)
    part = tl.load(sums + row * num_segments + index, mask=index < num_segments, other=0.0)
    ends = tl.cumsum(part, axis=0)
    # Sums in another order may differ in the last bit: stay on the last segment and token that can be drawn.
    segment = tl.sum(((ends <= target) & (index < num_segments)).to(tl.int32), axis=0)
    segment = tl.minimum(segment, tl.max(tl.where(part > 0, index, 0), axis=0))
    before = tl.sum(tl.where(index == segment - 1, ends, 0.0), axis=0)
    offset = tl.arange(0, SEGMENT)
    column = segment * SEGMENT + offset
    x = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    weights = weight_of(x, tl.load(best + row), tl.load(inverse + row), tl.load(least + row))
    inner = tl.cumsum(weights.to(tl.float64), axis=0)
    chosen = tl.sum((inner <= target - before).to(tl.int32), axis=0)
    last = tl.max(tl.where(weights > 0, offset, 0), axis=0)
    tl.store(tokens + row, (segment * SEGMENT + tl.minimum(chosen, last)).to(tl.int64))


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
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGH: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that it and all above it come to `goal`, as the float that its key stands for."""
    key = tl.zeros([], tl.uint32)
    for step in range(32 - SHIFT):
        candidate = key | (tl.full([], 1, tl.uint32) << (31 - SHIFT - step))
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
    """SHIFT: low bits of the keys that tell no logits apart, 16 for bf16."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    top, factor = tl.load(best + row), tl.load(inverse + row)
    min_weight, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    lowest = tl.full([], float("-inf"), tl.float32)
    if min_weight > 0:
        # The best token weighs 1, so that a weight of min_p is a logit.
        lowest = top + tl.log(min_weight) / factor
    if k > 0 and k < columns:
        kth = _highest_reaching(source, k.to(tl.float64), top, factor, lowest, columns, BLOCK, SHIFT, False)
        lowest = tl.maximum(lowest, kth)
    if p < 1:
        kept = _amount_from(source, tl.zeros([], tl.uint32), top, factor, lowest, columns, BLOCK, SHIFT, True)
        goal = kept * p.to(tl.float64)
        pth = _highest_reaching(source, goal, top, factor, lowest, columns, BLOCK, SHIFT, True)
        lowest = tl.maximum(lowest, pth)
    tl.store(least + row, lowest)


@triton.jit
def penalize_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    counts_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0)
    seen = tl.load(counts + index * counts_stride + column, mask=inside, other=0)
    output = seen & (_IN_PROMPT - 1)
    factor = tl.load(repetition + index)
    x = tl.where(seen > 0, tl.where(x > 0, x / factor, x * factor), x)
    x -= tl.load(frequency + index) * output.to(tl.float32)
    x -= tl.where(output > 0, tl.load(presence + index), 0.0)
    tl.store(logits + row * stride + column, x, mask=inside)


def _fake_row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.int64)


@operator("row_argmax(Tensor logits) -> (Tensor, Tensor)", _fake_row_argmax)
def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value, float32, and first column that has it, per row of [n, columns]; NaN counts as infinity.

    Twin: reference.row_argmax.
    """
    best, winners = _fake_row_argmax(logits)
    rows, columns = logits.shape
    parts = triton.cdiv(columns, ARGMAX_BLOCK)
    values = logits.new_empty(rows, parts, dtype=torch.float32)
    indices = logits.new_empty(rows, parts, dtype=torch.int32)
    if rows:
        partial_argmax_kernel[(rows, parts)](
            logits, values, indices, columns, logits.stride(0), parts, BLOCK=ARGMAX_BLOCK, num_warps=4
        )
        merge_argmax_kernel[(rows,)](
            values, indices, best, winners, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
        )
    return best, winners


def _fake_segment_sums(
    logits: torch.Tensor, best: torch.Tensor, inverse: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    return logits.new_empty(len(logits), -(-logits.shape[1] // SEGMENT), dtype=torch.float64)


@operator("segment_sums(Tensor logits, Tensor best, Tensor inverse, Tensor least) -> Tensor", _fake_segment_sums)
def segment_sums(logits: torch.Tensor, best: torch.Tensor, inverse: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """[n, segments] float64: the weights of the logits that are at least `least`, by segments of SEGMENT columns.

    best, inverse (of the temperature), least: [n] float32. Twin: reference.segment_sums.
    """
    sums = _fake_segment_sums(logits, best, inverse, least)
    rows, columns = logits.shape
    if rows:
        segment_sums_kernel[(rows, triton.cdiv(sums.shape[1], SEGMENTS_PER_PROGRAM))](
            logits, best, inverse, least, sums, columns, logits.stride(0), sums.shape[1], SEGMENT=SEGMENT,
            SEGMENTS=SEGMENTS_PER_PROGRAM, num_warps=8,
        )  # fmt: skip
    return sums


def _fake_draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse: torch.Tensor,
    least: torch.Tensor,
    sums: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    return logits.new_empty(len(logits), dtype=torch.int64)


@operator(
    "draw(Tensor logits, Tensor best, Tensor inverse, Tensor least, Tensor sums, Tensor targets) -> Tensor", _fake_draw
)
def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse: torch.Tensor,
    least: torch.Tensor,
    sums: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """[n] int64: the column at which the cumulative weight passes `targets` [n] float64. sums: from `segment_sums`.

    Twin: reference.draw.
    """
    tokens = _fake_draw(logits, best, inverse, least, sums, targets)
    rows, columns = logits.shape
    if rows:
        draw_kernel[(rows,)](
            logits, best, inverse, least, sums, targets, tokens, columns, logits.stride(0), sums.shape[1],
            SEGMENT=SEGMENT, BLOCK_SEGMENTS=triton.next_power_of_2(sums.shape[1]), num_warps=4,
        )  # fmt: skip
    return tokens


def _fake_threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
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

    min_p, top_p: [n] float32 (0 and 1: off); top_k: [n] int32 (0: off). Rows without filter cost a few loads.
    Twin: reference.sampling_threshold.
    """
    least = _fake_threshold(logits, best, inverse, min_p, top_k, top_p)
    if len(logits):
        threshold_kernel[(len(logits),)](
            logits, best, inverse, min_p, top_k, top_p, least, logits.shape[1], logits.stride(0),
            BLOCK=THRESHOLD_BLOCK, SHIFT=16 if logits.dtype == torch.bfloat16 else 0, num_warps=16,
        )  # fmt: skip
    return least


def _fake_penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    return None


@operator(
    "penalize(Tensor(a!) logits, Tensor rows, Tensor counts, Tensor repetition, Tensor presence, Tensor frequency) "
    "-> ()",
    _fake_penalize,
)
def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """In place, on the rows `rows` [p] int32 of logits [n, columns] float32.

    counts: [p, at least columns' tokens] int32, output counts with IN_PROMPT; repetition, ...: [p] float32. Columns
    beyond counts are left alone. Twin: reference.penalize.
    """
    columns = min(logits.shape[1], counts.shape[1])
    if len(rows):
        penalize_kernel[(len(rows), triton.cdiv(columns, PENALTY_BLOCK))](
            logits, rows, counts, repetition, presence, frequency, columns, logits.stride(0), counts.stride(0),
            BLOCK=PENALTY_BLOCK, num_warps=4,
        )  # fmt: skip
