"""How large the pool of KV blocks on a GPU may be: what is free now, less what a step and its graphs will need.

Three rules. Memory that other processes hold is not ours: it counts neither as used by us nor as free for us, whatever
they take or give back while we start; so torch's allocator is asked what we hold, and the card only what is free, and
what the driver keeps for a graph, which nobody else knows. What a step needs is measured by running the largest one,
logits and sampler included, and by capturing two graphs. And what we allocate stays within `gpu_memory_utilization` of
the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from nanoinfer.attention.base import ForwardBatch
from nanoinfer.config import EngineConfig
from nanoinfer.layers.device_sampler import DeviceSampling, sample_on_device
from nanoinfer.worker.cuda_graph import DecodeGraphs, Graph, graph_sizes
from nanoinfer.worker.device_runner import DeviceRunner

# Kept free beside all that was measured: fragments, and what libraries allocate late.
_RESERVE = 256 * 2**20
_ADVICE = "lower max_num_batched_tokens or max_num_seqs, pass enforce_eager=True, or use more GPUs"
# What there is to do where a part of the start has run out of memory.
_ADVICE_ON = {
    "the weights": "use more GPUs",
    "the largest step": _ADVICE,
    "the KV cache and the CUDA graphs": f"lower gpu_memory_utilization or num_kvcache_blocks, {_ADVICE}",
}


@dataclass(frozen=True)
class GPUMemory:
    """In bytes. total: of the card; loaded: what the engine has allocated, weights above all; free: now, with that, and
    with the allocator's cache given back; activations: of the largest step, beyond `loaded`; graphs: of all."""

    total: int
    loaded: int
    free: int
    activations: int
    graphs: int


def num_gpu_blocks(config: EngineConfig, bytes_per_block: int, memory: GPUMemory) -> int:
    """Blocks for this rank. Raises ValueError, with bytes and advice, if what is asked has no room."""
    needed = memory.activations + memory.graphs + _RESERVE
    within_budget = int(config.gpu_memory_utilization * memory.total) - memory.loaded - needed
    physically = memory.free - needed
    room = min(within_budget, physically)
    others = max(0, memory.total - memory.free - memory.loaded)
    figures = (
        f"the card has {memory.total} bytes, of which {memory.free} are free, {memory.loaded} hold weights, and "
        f"{others} are taken by others and by CUDA itself; the largest step {memory.activations}, "
        f"CUDA graphs {memory.graphs}, the reserve {_RESERVE}; gpu_memory_utilization={config.gpu_memory_utilization:g}"
    )
    advice = "free memory on the card" if physically < within_budget else "raise gpu_memory_utilization"
    advice += f", {_ADVICE}"
    if config.num_kvcache_blocks is not None:
        # The user's word goes over the budget, not over the card.
        wanted = config.num_kvcache_blocks * bytes_per_block
        if wanted > physically:
            raise ValueError(
                f"num_kvcache_blocks={config.num_kvcache_blocks} needs {wanted} bytes, and {max(0, physically)} are "
                f"left ({figures}); lower it, or {advice}"
            )
        return config.num_kvcache_blocks
    if room < bytes_per_block:
        raise ValueError(
            f"no memory is left for the KV cache: one block needs {bytes_per_block} bytes, and there are "
            f"{max(0, room)} ({figures}); {advice}"
        )
    return room // bytes_per_block


@contextmanager
def told_when_out_of_memory(what: str) -> Iterator[None]:
    """Start-up on a card that has too little for it: the user's to mend, so a ValueError, with torch's figures.

    what: one of those of which it is known what to do.
    """
    advice = _ADVICE_ON[what]
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"no memory is left for {what} ({error}); free memory on the card, or {advice}") from error


@torch.inference_mode()
def run_largest_step(runner: DeviceRunner) -> None:
    """A step of the whole token budget and as many sequences as may run; stores nothing.

    It is sampled with every filter, then once more with penalties, for which logits are copied in float32 and counts
    are sent; decodes of each size follow, since kernels differ by the number of splits. So what a later step may launch
    is compiled as well, with graphs and without.
    """
    from nanoinfer.kernels.triton import inputs, sampler

    limits = runner.limits
    num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    share, rest = divmod(limits.max_num_batched_tokens, num_seqs)
    lens = np.array([share + (i < rest) for i in range(num_seqs)], np.int32).clip(max=limits.max_model_len)
    starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    num_tokens, columns = int(starts[-1]), -(-int(lens.max()) // limits.block_size)
    batch = ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device="cpu"),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device="cpu"),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.zeros(num_seqs, columns, dtype=torch.int32, device="cpu"),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device="cpu"),
        logits_indices=torch.from_numpy(starts[1:].astype(np.int64) - 1),
        max_query_len=int(lens.max()),
        max_seq_len=int(lens.max()),
    )
    sent = runner.send(batch)
    logits = runner.compute_logits(runner.forward(sent), sent.logits_indices)

    def of_all(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_seqs,), value, dtype=dtype, device=logits.device)

    uniforms, top_k = of_all(0.5, torch.float64), of_all(50, torch.int32)
    sampling = DeviceSampling(of_all(1.0), of_all(0.01), top_k, of_all(0.9), uniforms)
    sample_on_device(logits, sampling, runner.shard)
    wide, rows = logits.to(torch.float32, copy=True), torch.arange(num_seqs, dtype=torch.int32, device=logits.device)
    sampler.penalize(wide, rows, torch.zeros_like(wide, dtype=torch.int32), of_all(1.0), of_all(0.0), of_all(0.0))
    inputs.store_tokens(runner.rows.last_token, rows.fill_(-1), sample_on_device(wide, sampling, runner.shard))
    for size in graph_sizes(limits.max_num_seqs):
        runner.decode(torch.full((2, size), -1, dtype=torch.int32, device=logits.device))


def graph_bytes(
    runner: DeviceRunner,
    make_graph: Callable[[], Graph],
    free_and_reserved: Callable[[], tuple[int, int]],
    max_num_seqs: int,
) -> int:
    """What all graphs will take, from capturing the two largest: the others share their pool and are no larger.

    free_and_reserved: bytes that the card has free now, and that torch's allocator has of it.
    """
    sizes = graph_sizes(max_num_seqs)
    graphs = DecodeGraphs(runner.decode, sizes, runner.device, make_graph)
    ours, beside = [], []
    for size in sizes[:-3:-1]:
        free, reserved = free_and_reserved()
        graphs.capture_size(size)
        free_after, reserved_after = free_and_reserved()
        ours.append(reserved_after - reserved)
        beside.append(free - free_after - ours[-1])
    # Beside the allocator's there is the driver's share, a few MiB, in which all that others took meanwhile is counted,
    # gigabytes where they load weights: of the two, the smaller is the driver's.
    return ours[0] + (len(sizes) - 1) * ours[-1] + len(sizes) * max(0, min(beside))
