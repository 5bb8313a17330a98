"""What the kernel `decode_inputs` (inputs.cpp) reads of the kept rows, and what it makes of them for a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class DecodeColumns(NamedTuple):
    """What is kept of each row: int64 but for block_tables [rows, columns] int32, seeds uint64, temperature float64."""

    last_token: np.ndarray
    num_computed: np.ndarray
    num_tokens: np.ndarray
    num_prompt: np.ndarray
    block_tables: np.ndarray
    seeds: np.ndarray
    temperature: np.ndarray


class DecodeInputs(NamedTuple):
    """Of a step's sequences: input_ids, positions, slots: int64; seq_lens, block_tables [n, columns]: int32;
    inverse_temperature: float32, 0 for greedy ones; uniforms: float64."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    inverse_temperature: torch.Tensor
    uniforms: torch.Tensor

    @classmethod
    def zeros(cls, num_seqs: int, columns: int) -> DecodeInputs:
        ids, positions, slots = torch.zeros(3, num_seqs, dtype=torch.int64)
        seq_lens = torch.zeros(num_seqs, dtype=torch.int32)
        tables = torch.zeros(num_seqs, columns, dtype=torch.int32)
        return cls(ids, positions, slots, seq_lens, tables, torch.zeros(num_seqs), torch.zeros(num_seqs).double())

    def first(self, n: int) -> DecodeInputs:
        return DecodeInputs(*(x[:n] for x in self))
