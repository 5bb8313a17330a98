"""`DeviceRunner`: a rank's steps on a GPU.

A step in which every sequence computes its last sampled token is a decode step: the host sends which rows and how far
they are, everything else is on the device, and a CUDA graph holds it where there is one. Any other step is built by the
host, as on a CPU, and sent; last sampled tokens are filled in on the device.

A step is launched, and nothing waits for the device: sampled tokens stay there for the next step, and reach the host by
a copy that is read when their step's result is asked for. Only steps with penalties, bad words or log-probabilities
wait, since the host has to see tokens before it goes on, for the rows that have them; what masks, bans and biases need
is sent like all else.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache
from nanoinfer.attention.upload import upload
from nanoinfer.config import SchedulerConfig
from nanoinfer.layers.device_sampler import DeviceSampling, adjusted, sample_on_device
from nanoinfer.layers.sampler import SamplingBatch, VocabShard, row_logprobs
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.step import SchedulerOutput, TokenLogprobs
from nanoinfer.worker.cuda_graph import DecodeGraphs
from nanoinfer.worker.device_rows import DeviceRows
from nanoinfer.worker.download import Download
from nanoinfer.worker.input_batch import InputBatch, StepRows

_NONE = np.zeros(0, np.int64)


class DeviceRunner:
    """graphs: set by the owner when they are captured; None runs every step eagerly."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        backend: AttentionBackend,
        kv_cache: KVCache,
        limits: SchedulerConfig,
        shard: VocabShard,
        device: torch.device,
    ) -> None:
        self.model, self.backend, self.kv_cache = model, backend, kv_cache
        self.limits, self.shard, self.device = limits, shard, device
        self.rows = DeviceRows(limits.max_num_seqs, limits.max_model_len, limits.block_size, device)
        self.graphs: DecodeGraphs | None = None

    def launch(
        self, plan: SchedulerOutput, batch: InputBatch
    ) -> tuple[StepRows, Download, dict[int, TokenLogprobs], torch.Tensor | None]:
        """`batch` has taken the plan in.

        Returns the ids of the rows that sample (to be `checked`; where there are none, what tells the step's end),
        log-probabilities by sampled row, and the hidden states of all tokens, which a decode step does not keep.
        """
        self.rows.apply(plan, batch)
        # Programs start in the batch's order: none with a long context should start late.
        step, hidden = batch.decodes(plan, longest_first=True), None
        if step is not None:
            computed = batch.num_computed(step.rows)
            if self.graphs is not None:
                tokens, logits = self.graphs.run(step.rows, computed)
            else:
                (inputs,) = upload([np.stack((step.rows, computed)).astype(np.int32)], self.device)
                tokens, logits = self.decode(inputs.view(2, -1))
            # Under tensor parallelism a filter needs whole rows, which the captured step does not put together.
            is_done = self.shard.tp.size == 1 or not batch.has_filters(step.rows)
        else:
            step, host_batch = batch.build(plan)
            sent = self.send(host_batch, *batch.sampled_inputs(step))
            hidden = self.forward(sent)
            logits, tokens, is_done = self.compute_logits(hidden, sent.logits_indices), None, False
        if not len(step.sampled):
            # Or the host would run ahead by all the chunks of a long prompt, which others then wait for.
            return step, Download(self.rows.last_token[:0]), {}, hidden
        logprobs = {}
        if tokens is None or not is_done or batch.has_special(step):
            sampling = batch.sampling(step)
            if tokens is None or not is_done or sampling.adjusts_logits:
                tokens = self._sample(step, batch, logits, sampling)
            if wanted := list(sampling.logprobs):
                logprobs = row_logprobs(logits[wanted], tokens[wanted], wanted, sampling.logprobs, self.shard)
        return step, Download(tokens), logprobs, hidden

    def decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [n], logits [n, columns]) of a decode step; stores keys, values and the rows' last tokens.

        inputs: [2, n] int32, rows (-1: padding) and how many of their tokens are computed. Can be captured.
        """
        from nanoinfer.kernels.triton import inputs as kernels

        kept, n = self.rows, inputs.shape[1]
        rows = (kept.last_token, kept.num_prompt, kept.seeds, *kept.settings, kept.block_tables)
        input_ids, positions, slots, seq_lens, uniforms, table_rows, inverse, min_p, top_k, top_p = (
            kernels.prepare_decode(inputs[0], inputs[1], *rows, kept.block_size)
        )
        tables = kept.block_tables.index_select(0, table_rows)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=torch.arange(n + 1, dtype=torch.int32, device="cpu"),
            seq_lens=seq_lens,
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=kept.all_rows[:n],
            max_query_len=1,
            max_seq_len=self.limits.max_model_len,
            plan=self.backend.plan_decode(tables, seq_lens, self.limits.max_model_len),
        )
        logits = self.compute_logits(self.forward(batch), None)
        sampling = DeviceSampling(inverse, min_p, top_k, top_p, uniforms, has_filters=self.shard.tp.size == 1)
        tokens = sample_on_device(logits, sampling, self.shard)
        kernels.store_tokens(kept.last_token, inputs[0], tokens)
        return tokens, logits

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of all of the step's tokens, whose keys and values are stored."""
        return self.model(batch, self.kv_cache)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """This rank's logits of some of the tokens, or of all."""
        return self.model.compute_logits(hidden, indices)

    def send(self, batch: ForwardBatch, where: np.ndarray = _NONE, rows: np.ndarray = _NONE) -> ForwardBatch:
        """The batch with its tensors on the device, planned; query_start_loc and seq_lens stay, for the plan.

        where, rows: [n] int64, the tokens that are some row's last sampled one, which only the device knows.
        """
        tensors = [batch.input_ids, batch.positions, batch.block_tables, batch.slot_mapping, batch.logits_indices]
        arrays = [*(tensor.numpy() for tensor in tensors), where, rows]
        ids, positions, tables, slots, indices, places, owners = upload(arrays, self.device)
        if len(where):
            ids.index_copy_(0, places, self.rows.last_token.index_select(0, owners))
        sent = replace(
            batch, input_ids=ids, positions=positions, block_tables=tables.view(batch.block_tables.shape),
            slot_mapping=slots, logits_indices=indices,
        )  # fmt: skip
        # The bound of all steps, so that what is launched is what the graphs have compiled.
        sent.max_seq_len = self.limits.max_model_len
        sent.plan = self.backend.plan(sent, self.limits.block_size)
        return sent

    def _sample(self, step: StepRows, batch: InputBatch, logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        """Token ids of the sampling rows, [n] on the device; they become the rows' last tokens."""
        from nanoinfer.kernels.triton import inputs as kernels

        sampled = step.rows[step.sampled]
        rows, uniforms = upload([sampled.astype(np.int32), sampling.uniforms], self.device)
        logits = adjusted(logits, sampling, self.shard)
        settings = self.rows.sampling(rows, uniforms, batch.has_filters(sampled))
        tokens = sample_on_device(logits, settings, self.shard)
        kernels.store_tokens(self.rows.last_token, rows, tokens)
        return tokens
