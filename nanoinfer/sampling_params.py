"""`SamplingParams`: how one request is sampled and when it stops. Checked when it is built, immutable afterwards.

Names and meanings are vLLM's; `max_tokens` defaults to 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# Below this, vLLM takes a temperature for greedy, too.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low <= value <= high) or (low_open and value == low):  # type: ignore[operator]
        bound = f"in {'(' if low_open else '['}{low}, {high}{']' if high < math.inf else ')'}"
        raise ValueError(f"{name} is {value!r}; it must be a finite number {bound}")


def _check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ValueError(f"{name} is {value!r}; it must be an integer {limit}")


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
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._normalize_stops()

    def _normalize_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop contains {text!r}; stop strings must be non-empty strings")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, since they are searched in the text")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in ids:
            if isinstance(token_id, bool) or not hasattr(token_id, "__index__") or int(token_id) < 0:
                raise ValueError(f"stop_token_ids contains {token_id!r}; token ids are non-negative integers")
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
