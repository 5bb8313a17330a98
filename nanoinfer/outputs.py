"""What `LLM.generate` returns, shaped as vLLM's outputs, with shortcuts so that nano-vllm scripts run unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of the raw probability; rank 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion.

    token_ids: with the id that stopped it, if one did; text: without that one and without special tokens.
    logprobs: per output token a dict from token id to Logprob, the chosen token first; None if not asked for.
    finish_reason: "stop", "length", "abort", "error" (in a grammar), or None while running.
    stop_reason: the stop string or stop token id that matched; None for end of sequence and for length.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and what was generated for it.

    outputs: `n` completions (a stream of deltas: only those with something new). finished: all of them are.
    num_cached_tokens: prompt tokens taken from the prefix cache.
    prompt_logprobs: per prompt token a dict from token id to Logprob, its own first; None for the first token, which
        nothing precedes. None if not asked for; in a stream of deltas, only the first output has it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    def __getitem__(self, key: str) -> str | list[int]:
        """`out["text"]` and `out["token_ids"]`, nano-vllm's form."""
        if key == "text":
            return self.text
        if key == "token_ids":
            return self.token_ids
        raise KeyError(f"{key!r}; RequestOutput has the keys 'text' and 'token_ids', and attributes for the rest")
