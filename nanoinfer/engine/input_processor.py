"""`InputProcessor`: what users pass to `generate` into checked `Sequence`s.

Everything about a call is checked before any of it is scheduled, so that a bad prompt harms no other request. Errors
are ValueErrors that name the prompt's index, what was given and what is allowed.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nanoinfer.engine import sequence
from nanoinfer.sampling_params import Grammar, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One prompt: text, token ids, or vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}, which may bring a
# "cache_salt": blocks are shared only under equal salts.
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class ProcessedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


def as_prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt alone, or several: a list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping, bytes, bytearray)):
        return [prompts]  # bytes are refused by name later, not taken for ids
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r}; a prompt is a string, a list of token ids or a dict")
    items = list(prompts)
    if items and all(isinstance(item, (Number, np.generic)) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


class InputProcessor:
    """max_model_len: of prompt plus output. default_params: for requests that bring none. seed: the engine's."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        default_params: SamplingParams,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.default_params = default_params
        self.seed = seed
        # May be called from several threads, hence not a number that is added to.
        self._seq_ids = itertools.count()

    def process(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammar | None = None,
    ) -> list[tuple[ProcessedPrompt, list[sequence.Sequence]]]:
        """Checks a whole call, whose prompts become `n` sequences each. Raises ValueError; nothing has happened then.

        grammar: a fresh one, of which each sequence gets a copy (copy.deepcopy) if there is more than one.
        """
        prompt_list = as_prompt_list(prompts)
        params_list = self._match_params(params, len(prompt_list))
        processed = [self._prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompt_list)]
        for i, one in enumerate(params_list):
            self._check_params(one, f"params[{i}]" if isinstance(params, Sequence) else "params")
        made = [(prompt, self._sequences(prompt, one)) for prompt, one in zip(processed, params_list, strict=True)]
        if grammar is not None:
            sequences = [seq for _, group in made for seq in group]
            try:
                for seq in sequences:
                    seq.grammar = copy.deepcopy(grammar) if len(sequences) > 1 else grammar
            except TypeError as error:
                raise ValueError(f"the grammar cannot be copied, which several completions need: {error}") from error
        return made

    def check_params(self, params: SamplingParams | None) -> SamplingParams:
        """Those of one request, or the default ones. Raises ValueError on what can be told without its prompt."""
        (one,) = self._match_params(params, 1)
        self._check_params(one, "params")
        return one

    def needs_tokenizer(self, prompt: Prompt, params: SamplingParams) -> bool:
        """Whether `process` would tokenize texts, which may take its time.

        Then it raises ValueError on what can be told before.
        """
        _, ids, _ = self._parts(prompt, "prompts[0]")
        if ids is not None and params.bad_words:
            self._prompt(prompt, "prompts[0]")
        return ids is None or bool(params.bad_words)

    def render_chat(self, messages: Any, where: str, **template_options: Any) -> dict[str, Any]:
        """A conversation through the checkpoint's chat template, up to where the assistant answers, as a prompt."""
        if self.tokenizer is None:
            raise ValueError("chat needs the checkpoint's tokenizer, and this checkpoint has none")
        if not self.tokenizer.chat_template:
            raise ValueError("chat needs a chat template, and this checkpoint's tokenizer has none; use generate")
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"{where} is {messages!r}; a conversation is a list of at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"{where}[{i}] is {message!r}; a message is a dict with 'role' and 'content'")
            if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
                raise ValueError(f"{where}[{i}]: 'content' is {message.get('content')!r}; it must be a string")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **template_options
        )
        return {"prompt": text, "prompt_token_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}

    def _match_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, Sequence):
            raise ValueError(f"params is {params!r}; it must be SamplingParams, one or one per prompt")
        params = list(params)
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(params)} params; give one, or one per prompt")
        for i, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise ValueError(f"params[{i}] is {one!r}; it must be SamplingParams")
        return params

    def _prompt(self, prompt: Prompt, where: str) -> ProcessedPrompt:
        text, ids, salt = self._parts(prompt, where)
        if ids is None:
            assert self.tokenizer is not None
            ids = self.tokenizer(text)["input_ids"]
        token_ids = self._check_ids(ids, where)
        if not token_ids:
            raise ValueError(f"{where} is empty; a prompt needs at least one token")
        limit = self.max_model_len - 1
        if len(token_ids) > limit:
            raise ValueError(
                f"{where} has {len(token_ids)} tokens; at most {limit} are allowed (max_model_len "
                f"{self.max_model_len} less one for the output)"
            )
        return ProcessedPrompt(text, token_ids, salt)

    def _parts(self, prompt: Prompt, where: str) -> tuple[str | None, Any, str]:
        """(text, ids, cache salt). The ids are as they were given, or None if the text is to be tokenized."""
        text: Any = None
        ids: Any = prompt
        salt: Any = None
        if isinstance(prompt, Mapping):
            if surplus := sorted(set(prompt) - _PROMPT_KEYS):
                raise ValueError(f"{where} has the keys {surplus}; allowed are {sorted(_PROMPT_KEYS)}")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"{where}: 'cache_salt' is {salt!r}; it must be a non-empty string")
            if text is None and ids is None:
                raise ValueError(f"{where} is {dict(prompt)!r}; it needs 'prompt' or 'prompt_token_ids'")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: 'prompt' is {text!r}; it must be a string")
        if ids is None and self.tokenizer is None:
            raise ValueError(f"{where} is text, but this checkpoint has no tokenizer; pass token ids")
        return text, ids, salt or ""

    def _check_ids(self, ids: Any, where: str) -> list[int]:
        """A new list of plain ints, all of them in the vocabulary."""
        if isinstance(ids, np.ndarray):
            if ids.ndim != 1:
                raise ValueError(f"{where} is an array of shape {ids.shape}; token ids form one dimension")
            ids = list(ids)
        if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
            raise ValueError(f"{where} is {ids!r}; a prompt is a string, a list of token ids or a dict")
        token_ids = []
        for token_id in ids:
            if type(token_id) is not int:
                token_id = _as_int(token_id, where)
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{where} contains the id {token_id}; the vocabulary is 0 to {self.vocab_size - 1}")
            token_ids.append(token_id)
        return token_ids

    def _check_params(self, params: SamplingParams, where: str) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise ValueError(
                        f"{where}: {name} contains {token_id}; the vocabulary is 0 to {self.vocab_size - 1}"
                    )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{where}: stop strings need a tokenizer, and this checkpoint has none")
        if params.bad_words and self.tokenizer is None:
            raise ValueError(f"{where}: bad_words need a tokenizer, and this checkpoint has none")

    def _sequences(self, prompt: ProcessedPrompt, params: SamplingParams) -> list[sequence.Sequence]:
        bad_words = self._bad_words(params)
        group: list[sequence.Sequence] = []
        seed = params.seed
        for index in range(params.n):
            seq_id = next(self._seq_ids)
            if seed is None:
                seed = xxhash.xxh3_64_intdigest(seq_id.to_bytes(8, "little"), seed=self.seed % 2**64)
            group.append(
                sequence.Sequence(
                    seq_id=seq_id,
                    token_ids=list(prompt.token_ids) if group else prompt.token_ids,
                    params=params,
                    seed=(seed + index) % 2**64,
                    max_tokens=min(params.max_tokens, self.max_model_len - len(prompt.token_ids)),
                    eos_token_ids=self.eos_token_ids,
                    cache_key=prompt.cache_salt.encode(),
                    index=index,
                    leader=group[0] if group else None,
                    bad_words=bad_words,
                )
            )
        return group

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at a text's beginning and (if the space is part of its first token) within.

        The rule is vLLM's.
        """
        found = []
        for word in params.bad_words:
            assert self.tokenizer is not None
            plain = tuple(self.tokenizer(word.lstrip(), add_special_tokens=False)["input_ids"])
            spaced = tuple(self.tokenizer(" " + word.lstrip(), add_special_tokens=False)["input_ids"])
            found.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)


def _as_int(value: Any, where: str) -> int:
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{where} contains {value!r} ({type(value).__name__}); token ids are integers")
