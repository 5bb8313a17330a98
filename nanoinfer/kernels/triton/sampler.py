"""The sampler's kernels, straight from the logits in whatever dtype they are; used by layers/device_sampler.py.

What top_k, top_p and min_p leave in is told by a least logit, from threshold.py.
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
def _weights_at(
    logits: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """`weight_of` some columns of a row, zero beyond the last one."""
    x = tl.load(logits + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return weight_of(x, tl.load(best + row), tl.load(inverse + row), tl.load(least + row))


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
    weights = _weights_at(logits, best, inverse, least, row, column, columns, stride)
    # Added in float64: the boundaries of tokens must not depend on the order of additions.
    tl.store(sums + row * num_segments + segment, tl.sum(weights.to(tl.float64), axis=1), mask=segment < num_segments)


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    winners: tl.tensor,
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
    CHOOSE: tl.constexpr,
) -> None:
    """The column at which the cumulative weight passes the target: its segment first, then the token within.

    CHOOSE: targets are shares of the row's sum; greedy rows and those that are not finite are seen to as well.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    index = tl.arange(0, BLOCK_SEGMENTS)
    part = tl.load(sums + row * num_segments + index, mask=index < num_segments, other=0.0)
    if CHOOSE:
        target *= tl.sum(part, axis=0)
    ends = tl.cumsum(part, axis=0)
    # Cumulative sums made in parallel add in another order at every place: in the last bit, the end of what weighs
    # nothing may lie above the end before it, and the last one below the target. Only what weighs something is drawn.
    last_segment = tl.max(tl.where(part > 0, index, 0), axis=0)
    segment = tl.min(tl.where((ends > target) & (part > 0), index, last_segment), axis=0)
    before = tl.sum(tl.where(index == segment - 1, ends, 0.0), axis=0)
    offset = tl.arange(0, SEGMENT)
    weights = _weights_at(logits, best, inverse, least, row, segment * SEGMENT + offset, columns, stride)
    inner = tl.cumsum(weights.to(tl.float64), axis=0)
    last = tl.max(tl.where(weights > 0, offset, 0), axis=0)
    chosen = tl.min(tl.where((inner > target - before) & (weights > 0), offset, last), axis=0)
    token = (segment * SEGMENT + chosen).to(tl.int64)
    if CHOOSE:
        token = tl.where(tl.load(inverse + row) > 0, token, tl.load(winners + row))
        token = tl.where(tl.abs(tl.load(best + row)) < float("inf"), token, -1)
    tl.store(tokens + row, token)


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


def _fake_segment_sums(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
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


def _fake_tokens(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(len(logits), dtype=torch.int64)


def _launch_draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    winners: torch.Tensor,
    inverse: torch.Tensor,
    least: torch.Tensor,
    sums: torch.Tensor,
    targets: torch.Tensor,
    choose: bool,
) -> torch.Tensor:
    tokens = _fake_tokens(logits)
    rows, columns = logits.shape
    if rows:
        draw_kernel[(rows,)](
            logits, best, winners, inverse, least, sums, targets, tokens, columns, logits.stride(0), sums.shape[1],
            SEGMENT=SEGMENT, BLOCK_SEGMENTS=triton.next_power_of_2(sums.shape[1]), CHOOSE=choose, num_warps=4,
        )  # fmt: skip
    return tokens


@operator(
    "draw(Tensor logits, Tensor best, Tensor inverse, Tensor least, Tensor sums, Tensor targets) -> Tensor",
    _fake_tokens,
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
    return _launch_draw(logits, best, best, inverse, least, sums, targets, choose=False)


@operator(
    "choose(Tensor logits, Tensor best, Tensor winners, Tensor inverse, Tensor least, Tensor sums, Tensor uniforms) "
    "-> Tensor",
    _fake_tokens,
)
def choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    winners: torch.Tensor,
    inverse: torch.Tensor,
    least: torch.Tensor,
    sums: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """[n] int64: `draw` at `uniforms` [n] float64 of the row's sum; the winner where inverse is 0, -1 where best is not
    finite. best, winners: from `row_argmax`. Twin: reference.choose.
    """
    return _launch_draw(logits, best, winners, inverse, least, sums, uniforms, choose=True)


def _fake_penalize(*tensors: torch.Tensor) -> None:
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
