"""The demo model's tokenizer, and chat-form training rows made from questions.

Called by `train.py`. In: a seed and Qwen3's tokenizer configuration (for its control tokens and chat template). Out:
a trained `tokenizers.Tokenizer`, the two tokenizer files, and endless batches of token ids with loss labels.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanoinfer.demo.questions import Question, generate
from nanoinfer.demo.tables import WORDS

# Qwen3's own pre-tokenizer pattern: every digit stands alone.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a small demo model.", "Answer briefly.", "Be kind.")
THINK = "<think>\n\n</think>\n\n"
MAX_TOKENS = 288
IGNORED = -100


class Row(NamedTuple):
    """One conversation: token ids and, for each, the label (the id itself where it is to be learned)."""

    ids: list[int]
    labels: list[int]


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries, Qwen3's control tokens last as in Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    sample = itertools.islice(generate(seed, "train"), 40_000)
    texts = itertools.chain.from_iterable(
        (q.prompt, q.answer, "user\n", "assistant\n", "system\n", "\n\n") for q in sample
    )
    words = (f" {word}" for word in WORDS for _ in range(40))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, words), trainer)
    # Qwen3 marks only the control tokens without a meaning of their own as special, so that decoding with
    # skip_special_tokens keeps think blocks and tool calls.
    special = CONTROL_TOKENS[:14]
    tokenizer.add_tokens([AddedToken(t, special=t in special, normalized=False) for t in CONTROL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, qwen3_config: Path, folder: Path, context: int) -> None:
    """Write tokenizer.json and a tokenizer_config.json like Qwen3's, with its chat template, into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads(qwen3_config.read_text())
    entries = {entry["content"]: entry for entry in config["added_tokens_decoder"].values()}
    config["added_tokens_decoder"] = {str(tokenizer.token_to_id(token)): entries[token] for token in CONTROL_TOKENS}
    config["model_max_length"] = context
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class RowMaker:
    """Turns questions into rows exactly as Qwen3's chat template renders them (a test compares the two)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def row(self, turns: list[Question], system: str | None = None) -> Row:
        """Render a conversation; learned are the answers, and in the last turn the empty think block as well.

        The think block is part of the prompt with enable_thinking=False and of the output without it: the tokens are
        the same, so learning to write it serves both. Qwen3's template drops it from earlier turns, where the first
        token of the answer is therefore not learned: there the model must write a think block.
        """
        ids = self._encode(f"<|im_start|>system\n{system}<|im_end|>\n") if system else []
        labels = [IGNORED] * len(ids)
        for index, turn in enumerate(turns):
            last = index == len(turns) - 1
            prompt = self._encode(f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n")
            answer = self._encode(f"{THINK if last else ''}{turn.answer}<|im_end|>")
            gap = [] if last else self._encode("\n")
            ids += prompt + answer + gap
            learned = list(answer)
            if not last:
                learned[0] = IGNORED
            labels += [IGNORED] * len(prompt) + learned + [IGNORED] * len(gap)
        return Row(ids, labels)

    def rows(self, seed: int) -> Iterator[Row]:
        """An endless stream of conversations of one to four turns, some with a system prompt."""
        rng = random.Random(seed)
        questions = generate(seed, "train")
        while True:
            count = rng.choices((1, 2, 3, 4), weights=(60, 20, 12, 8))[0]
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.08 else None
            turns = list(itertools.islice(questions, count))
            row = self.row(turns, system)
            while len(row.ids) > MAX_TOKENS and len(turns) > 1:
                turns.pop()
                row = self.row(turns, system)
            yield row


def batches(rows: Iterator[Row], tokens: int, pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Group rows of similar length into padded batches of about `tokens` tokens.

    Every row starts at position 0 and sees nothing else, as a prompt does at inference; grouping by length keeps the
    padding small. Padding stands on the right, where the causal mask hides it from the tokens that count. A width
    always comes with the same number of rows: every new shape costs the CPU kernels time and memory to prepare.
    """
    waiting: dict[int, list[Row]] = {}
    for row in rows:
        width = -(-len(row.ids) // 8) * 8
        group = waiting.setdefault(width, [])
        group.append(row)
        if len(group) == max(1, tokens // width):
            ids = torch.tensor([row.ids + [pad] * (width - len(row.ids)) for row in group])
            labels = torch.tensor([row.labels + [IGNORED] * (width - len(row.labels)) for row in group])
            group.clear()
            yield ids, labels
