"""Trains the demo model from scratch and exports it; never needed to use the package.

Called by hand: `python -m nanoinfer.demo.train --minutes 91 --qwen3-config .../tokenizer_config.json [--resume]`, and
`--export FOLDER` to write the newest checkpoint as a Hugging Face folder. In: generated questions (`questions.py`).
Out: checkpoints in the work folder, and with `--export` config, tokenizer and bf16 weights. Needs transformers 5.

The shipped weights: 2,470 steps, 15.2 million tokens with padding, 91 minutes on two busy cores at the lowest
priority. On the way the families' shares in `questions.py` were changed three times in favour of those still weak, the
batching once and the average's memory once, so a run with today's values gives a similar model, not the same one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from nanoinfer.demo.conversations import IGNORED, RowMaker, batches, save_tokenizer, train_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
WARMUP_STEPS = 150
STABLE_SHARE = 0.5
EMA = 0.99


def causal_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Plain causal attention with grouped heads, for transformers' attention registry.

    Rows here are short (about 64 tokens), where the backward pass of PyTorch's fused CPU kernel takes half of the
    whole step; four plain products take a tenth.
    """
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    folded = (query * scaling).reshape(rows, groups, heads // groups * length, width)
    scores = torch.matmul(folded, key.transpose(2, 3)).view(rows, groups, heads // groups, length, length)
    future = torch.full((length, length), -1e4, dtype=scores.dtype).triu_(1)
    shares = torch.softmax(scores + future, -1).view(rows, groups, -1, length).to(value.dtype)
    return torch.matmul(shares, value).view(rows, heads, length, width).transpose(1, 2), None


AttentionInterface.register("nanoinfer_demo", causal_attention)
AttentionMaskInterface.register("nanoinfer_demo", lambda *args, **kwargs: None)


def control_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a control token, which every tokenizer made here has."""
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number


def config_entries(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of config.json, with the keys of Qwen3's own and the ids of the trained tokenizer."""
    end, pad = control_id(tokenizer, "<|im_end|>"), control_id(tokenizer, "<|endoftext|>")
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SHAPE, "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": SHAPE["num_hidden_layers"], "bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad,
    }  # fmt: skip


def learning_rate(step: int, share: float) -> float:
    """Factor on the learning rate: warm up, hold, then fall linearly to zero at the end of the time budget."""
    decay = 1.0 if share < STABLE_SHARE else max(0.0, (1 - share) / (1 - STABLE_SHARE))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


class Trainer:
    """The model, its optimizers and their checkpoint."""

    def __init__(self, tokenizer: Tokenizer, optimizer: str, lr: float) -> None:
        self.entries = config_entries(tokenizer)
        config = Qwen3Config(**{**self.entries, "torch_dtype": "float32", "use_cache": False})
        self.model = Qwen3ForCausalLM(config)
        self.model.set_attn_implementation("nanoinfer_demo")
        named = dict(self.model.named_parameters())
        # Muon is for the hidden matrices; the embedding and the norms keep AdamW.
        hidden = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
        if optimizer == "muon":
            self.optimizers = [
                torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
            ]
        else:
            groups = [{"params": hidden, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
            self.optimizers = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)]
        self.lr = lr
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0

    def update(self, ids: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
        """One optimizer step on one batch; returns its mean loss."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * learning_rate(self.step, share)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1]
            # Logits only where something is learned (the prompts are about half of all tokens), that number rounded up
            # with positions that count for nothing: each new shape costs the CPU kernels time to prepare.
            target = labels[:, 1:].flatten()
            learned = (target != IGNORED).nonzero().squeeze(1)
            places = nn.functional.pad(learned, (0, -len(learned) % 512))
            logits = self.model.lm_head(hidden.flatten(0, 1)[places])
            target = nn.functional.pad(target[learned], (0, len(places) - len(learned)), value=IGNORED)
        loss = nn.functional.cross_entropy(logits.float(), target, ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(
                self.average, list(self.model.parameters()), 1 - min(EMA, self.step / (self.step + 10))
            )
        self.step += 1
        self.tokens += ids.numel()
        return loss.detach()

    def save(self, path: Path) -> None:
        """Write the checkpoint so that an interrupted write never destroys the previous one."""
        state = {
            "model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average, "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average = state["average"]
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def export(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the averaged weights in bf16 into `folder`."""
        pad, end = self.entries["pad_token_id"], self.entries["eos_token_id"]
        generation = {
            "bos_token_id": pad, "do_sample": True, "eos_token_id": [end, pad], "pad_token_id": pad,
            "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(self.entries, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        names = [name for name, _ in self.model.named_parameters()]
        weights = {n: t.to(torch.bfloat16).contiguous() for n, t in zip(names, self.average, strict=True)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def train(trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace, checkpoint: Path) -> None:
    """Train until the time budget is spent, logging and saving on the way."""
    seed = args.seed + trainer.step
    rows = RowMaker(tokenizer).rows(seed)
    pad = control_id(tokenizer, "<|endoftext|>")
    started, before = time.monotonic(), trainer.seconds
    logged, saved = started, started
    losses: list[float] = []
    for ids, labels in batches(rows, args.batch_tokens, pad):
        share = trainer.seconds / (60 * args.minutes)
        if share >= 1:
            break
        losses.append(trainer.update(ids, labels, share).item())
        now = time.monotonic()
        trainer.seconds = before + now - started
        if now - logged > 20:
            rate = trainer.tokens / trainer.seconds
            mean = sum(losses) / len(losses)
            print(
                f"{trainer.seconds:6.0f}s step {trainer.step} loss {mean:.4f} tokens {trainer.tokens} {rate:.0f}/s",
                flush=True,
            )
            logged, losses = now, []
        if now - saved > 120:
            trainer.save(checkpoint)
            saved = now
    trainer.save(checkpoint)


def main() -> None:
    """Read the command line, then train or export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=91, help="time budget, earlier runs included")
    parser.add_argument("--work", type=Path, default=Path("/tmp/demo_train"))
    parser.add_argument("--qwen3-config", type=Path, required=True, help="Qwen3's tokenizer_config.json")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export", type=Path, help="write the newest checkpoint here instead of training")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.nice(19)
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / "checkpoint.pt"
    saved_tokenizer = args.work / "tokenizer.json"
    if not saved_tokenizer.exists():
        save_tokenizer(train_tokenizer(SHAPE["vocab_size"], 0), args.qwen3_config, args.work, 1024)
    tokenizer = Tokenizer.from_file(str(saved_tokenizer))
    trainer = Trainer(tokenizer, args.optimizer, args.lr)
    if args.resume or args.export:
        trainer.load(checkpoint)
    if args.export:
        save_tokenizer(tokenizer, args.qwen3_config, args.export, SHAPE["max_position_embeddings"])
        trainer.export(args.export)
    else:
        train(trainer, tokenizer, args, checkpoint)


if __name__ == "__main__":
    main()
