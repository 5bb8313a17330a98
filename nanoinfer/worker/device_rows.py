"""`DeviceRows`: what a decode step needs of each sequence, kept on the device from step to step.

The host's `InputBatch` stays the authority; this is changed by the same deltas, right after it. Only the last sampled
token comes into being on the device and is not sent.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer.attention.upload import upload
from nanoinfer.layers.device_sampler import DeviceSampling
from nanoinfer.step import SchedulerOutput
from nanoinfer.worker.input_batch import InputBatch


class DeviceRows:
    """One entry per row. last_token: int64; num_prompt: int32; seeds: int64 (the bits of uint64); block_tables:
    [max_num_seqs, columns] int32; settings: the first four of `DeviceSampling`. all_rows: 0, 1, 2, ... int64."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.device = device
        self.block_size = block_size
        self.last_token, self.seeds = zeros(torch.int64), zeros(torch.int64)
        self.num_prompt = zeros(torch.int32)
        f32, i32 = torch.float32, torch.int32
        self.settings = (zeros(f32), zeros(f32), zeros(i32), zeros(f32))
        self.all_rows = torch.arange(max_num_seqs, device=device)
        columns = -(-max_model_len // block_size)
        self.block_tables = torch.zeros(max_num_seqs, columns, dtype=torch.int32, device=device)

    def apply(self, plan: SchedulerOutput, batch: InputBatch) -> None:
        """Takes in what the plan says; `batch` has taken it in already. One transfer, or none if nothing changes."""
        added = np.array([batch.row_of(new.seq_id) for new in plan.new], np.int64)
        tables = [(batch.row_of(new.seq_id), 0, new.block_ids) for new in plan.new]
        for seq_id, block_ids in plan.new_block_ids.items():
            row = batch.row_of(seq_id)
            tables.append((row, batch.num_blocks(row) - len(block_ids), block_ids))
        if not tables:
            return
        columns = self.block_tables.shape[1]
        index = np.concatenate([row * columns + first + np.arange(len(ids)) for row, first, ids in tables])
        new_blocks = np.concatenate([np.array(ids, np.int32) for _, _, ids in tables])
        arrays: list[np.ndarray] = [index.astype(np.int64), new_blocks, added, *batch.row_settings(added)]
        where, what, rows, *settings = upload(arrays, self.device)
        self.block_tables.view(-1).index_copy_(0, where, what)
        if len(added):
            for ours, values in zip((self.num_prompt, self.seeds, *self.settings), settings, strict=True):
                ours.index_copy_(0, rows, values)

    def sampling(self, rows: torch.Tensor, uniforms: torch.Tensor, has_filters: bool) -> DeviceSampling:
        """rows: [n] int32 or int64, on the device, none below zero."""
        inverse, min_p, top_k, top_p = (kept.index_select(0, rows) for kept in self.settings)
        return DeviceSampling(inverse, min_p, top_k, top_p, uniforms, has_filters)
