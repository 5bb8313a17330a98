"""`SamplingParams`: how one request is sampled and when it stops. Checked when it is built, immutable afterwards.
And `Grammar`: what the engine asks of a constraint on the output.

Names and meanings are vLLM's; `max_tokens` defaults to 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

# Below this, vLLM takes a temperature for greedy, too.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
# OpenAI's bounds.
MAX_BIAS = 100.0


class RequestOutputKind(Enum):
    """What each output of a stream holds: all so far, what is new since the one before, or only the end is told."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class Grammar(Protocol):
    """Which tokens may come next, for one sequence. Called by the engine, from one thread at a time.

    Before a token is sampled `fill_mask` is asked, after it `accept` is told; so the grammar has accepted exactly the
    tokens of the output, whatever preemption does. An exception in it, a mask that allows nothing or a token that it
    does not accept ends its own request with an error, and no other.
    """

    @property
    def is_terminated(self) -> bool:
        """Nothing can follow. Asked after `accept`; ends the sequence, with finish_reason "stop"."""

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes what may come next: bit i % 32 of row[i // 32] is set if token i is allowed.

        row: [ceil(vocab_size / 32)] int32, all bits set when it is handed over.
        """

    def accept(self, token_ids: list[int]) -> bool:
        """Moves on over new tokens of the output; False if they are not allowed."""


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low <= value <= high) or (low_open and value == low):  # type: ignore[operator]
        bound = f"in {'(' if low_open else '['}{low}, {high}{']' if high < math.inf else ')'}"
        raise ValueError(f"{name} is {value!r}; it must be a finite number {bound}")


def _check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ValueError(f"{name} is {value!r}; it must be an integer {limit}")


def _check_token_id(name: str, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise ValueError(f"{name} contains {value!r}; token ids are non-negative integers")


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """Raises ValueError on a value outside its range, naming the field, the value and what is allowed.

    temperature: 0 is greedy.
    top_k: 0 or -1 keeps all; ties at the k-th value are kept.
    top_p: the smallest set of tokens whose probability reaches it (after top_k).
    min_p: drops tokens less probable than min_p times the best one (before top_k).
    repetition_penalty: over prompt and output, as in CTRL (Keskar et al., 2019): positive logits are divided by it,
        negative ones multiplied.
    presence_penalty, frequency_penalty: over the output, subtracted once and per occurrence.
    seed: makes the draws of this request a function of the seed alone.
    max_tokens: output tokens at most.
    stop: strings that end the output; cut from the text unless include_stop_str_in_output.
    stop_token_ids: ids that end the output, beside the model's end-of-sequence ids.
    ignore_eos: the model's end-of-sequence ids do not stop.
    min_tokens: no stop of any kind before so many output tokens.
    logprobs: number of best tokens whose log-probabilities are returned beside the chosen one's; of the raw
        distribution (before penalties, temperature and filters). None returns none.
    skip_special_tokens: control tokens are left out of the text.
    detokenize: False leaves `text` empty; stop strings then cannot work and are refused.
    n: completions of the prompt. The i-th one's seed is the request's plus i.
    prompt_logprobs: the same as `logprobs`, for the tokens of the prompt. Their request uses no cached blocks.
    logit_bias: token id to what is added to its logit, from -100 to 100.
    allowed_token_ids: only these can be sampled.
    bad_words: texts that the output must not contain: the last token of their tokenization (and of that with a space
        before) cannot follow the others.
    output_kind: of a stream (`AsyncLLM.generate`).

    Where min_tokens and bad_words would leave none of the tokens that allowed_token_ids or a grammar allow, these win.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, -1)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        _check_int("n", self.n, 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            allowed = ", ".join(kind.name for kind in RequestOutputKind)
            raise ValueError(f"output_kind is {self.output_kind!r}; it must be a RequestOutputKind: {allowed}")
        self._normalize_stops()
        self._normalize_constraints()

    def _normalize_constraints(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias is {self.logit_bias!r}; it must be a dict from token id to bias")
            for token_id, bias in self.logit_bias.items():
                _check_token_id("logit_bias", token_id)
                _check_number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
            biases = {int(token_id): float(bias) for token_id, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases or None)
        if self.allowed_token_ids is not None:
            ids = _as_tuple("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids is empty; it must name at least one token, or be None")
            for token_id in ids:
                _check_token_id("allowed_token_ids", token_id)
            object.__setattr__(self, "allowed_token_ids", tuple(int(token_id) for token_id in ids))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else _as_tuple("bad_words", self.bad_words)
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words contains {word!r}; bad words must be strings that are not blank")
        object.__setattr__(self, "bad_words", words)

    def _normalize_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop contains {text!r}; stop strings must be non-empty strings")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, since they are searched in the text")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in ids:
            _check_token_id("stop_token_ids", token_id)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(token_id) for token_id in ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """What the checkpoint's `generation_config.json` recommends; {} gives our defaults.

        As in transformers, `do_sample` false or absent means greedy when the file exists at all.
        """
        if not raw:
            return cls()
        fields = ("top_k", "top_p", "min_p", "repetition_penalty", "temperature")
        values = {name: raw[name] for name in fields if raw.get(name) is not None}
        if not raw.get("do_sample", False):
            values["temperature"] = 0.0
        if raw.get("max_new_tokens") is not None:
            values["max_tokens"] = raw["max_new_tokens"]
        return cls(**values)
