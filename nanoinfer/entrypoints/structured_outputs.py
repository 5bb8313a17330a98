"""Structured output: schemas, regular expressions, choices and grammars into the engine's `Grammar`, by llguidance.

Compiled in threads of their own (llguidance releases the GIL), after a trial in a child process under a deadline, and
kept in a bounded cache; a request gets a copy. What a grammar costs per token is bounded by llguidance's own limits;
one that exceeds them, or that is wrong, is an error of its own request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import llguidance.gbnf_to_lark
import llguidance.numpy as llguidance_numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from nanoinfer.async_llm import QueueFullError
from nanoinfer.entrypoints.grammar_trial import GrammarTrial, first_line
from nanoinfer.entrypoints.openai.protocol import check_depth
from nanoinfer.entrypoints.parsers.reasoning import THINK_END, THINK_START
from nanoinfer.entrypoints.parsers.tool_calls import TOOL_CALL_END, TOOL_CALL_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CACHED = 128
MAX_COMPILING = 2
# As json.dumps writes. Without it, white space may go on for ever wherever JSON allows any, and models fall for it.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LLGuidanceGrammar:
    """One output's way through a grammar; see `nanoinfer.sampling_params.Grammar`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < vocab_size)
        self._num_words = -(-vocab_size // 32)

    def __deepcopy__(self, memo: dict[int, Any]) -> LLGuidanceGrammar:
        copy = LLGuidanceGrammar.__new__(LLGuidanceGrammar)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped()

    def fill_mask(self, row: np.ndarray) -> None:
        mask = llguidance_numpy.allocate_token_bitmask(1, self._num_words * 32)
        llguidance_numpy.fill_next_token_bitmask(self._matcher, mask, 0)
        self._raise_on_error()
        row[:] = mask[0]
        may_end = self._matcher.is_accepting()
        for token_id in self._eos_token_ids:
            _set_bit(row, token_id, may_end)

    def accept(self, token_ids: list[int]) -> bool:
        for token_id in token_ids:
            if token_id in self._eos_token_ids and self._matcher.is_accepting():
                return True
            if not self._matcher.consume_token(token_id):
                self._raise_on_error()
                return False
        return True

    def _raise_on_error(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar stopped: {first_line(self._matcher.get_error())}")


class AfterThinking:
    """A grammar that holds once the think block is closed; before, everything may be said.

    is_open: the prompt has opened the block. If not, the first token decides: it opens the block, or the grammar holds.
    """

    def __init__(self, grammar: LLGuidanceGrammar, think_start_id: int, think_end_id: int, is_open: bool) -> None:
        self._grammar = grammar
        self._start_id, self._end_id = think_start_id, think_end_id
        self._is_open = is_open
        self._is_at_start = not is_open

    def __deepcopy__(self, memo: dict[int, Any]) -> AfterThinking:
        copy = AfterThinking.__new__(AfterThinking)
        copy.__dict__.update(self.__dict__)
        copy._grammar = self._grammar.__deepcopy__(memo)
        return copy

    @property
    def is_terminated(self) -> bool:
        return not self._is_open and self._grammar.is_terminated

    def fill_mask(self, row: np.ndarray) -> None:
        if self._is_open:
            return
        self._grammar.fill_mask(row)
        if self._is_at_start:
            _set_bit(row, self._start_id, True)

    def accept(self, token_ids: list[int]) -> bool:
        for token_id in token_ids:
            if self._is_open:
                self._is_open = token_id != self._end_id
            elif self._is_at_start and token_id == self._start_id:
                self._is_open = True
            elif not self._grammar.accept([token_id]):
                return False
            self._is_at_start = False
        return True


class GrammarCompiler:
    """timeout: seconds that one compilation may take. eos_token_ids: what may end an output."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._timeout = timeout
        self._ll_tokenizers: dict[bool, LLTokenizer] = {}
        self._trials = [GrammarTrial(self._tokenizer_parts) for _ in range(MAX_COMPILING)]
        self._free_trials = list(self._trials)
        self._cache: OrderedDict[tuple[str, bool], LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="nanoinfer-grammar")
        self._free = asyncio.Semaphore(MAX_COMPILING)
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        self._added_tokens = added
        self._think_ids = (added.get(THINK_START), added.get(THINK_END))

    async def compile(self, make_source: Callable[[], str], with_tags: bool = False) -> LLGuidanceGrammar:
        """A fresh grammar. make_source gives llguidance's form of it, and may raise ValueError, as this does.

        with_tags: the grammar names added tokens, such as <tool_call>; otherwise none occurs in the output. Raises
        QueueFullError if others are compiled for all of the deadline.
        """
        try:
            await asyncio.wait_for(self._free.acquire(), self._timeout)
        except asyncio.TimeoutError:
            raise QueueFullError(f"{MAX_COMPILING} other grammars are still being compiled; try again later") from None
        future = self._threads.submit(self._compile, make_source, with_tags)
        # Not when the caller has been cancelled: the thread goes on.
        future.add_done_callback(self._release_in(asyncio.get_running_loop()))
        return LLGuidanceGrammar(await asyncio.wrap_future(future), self._vocab_size, self._eos_token_ids)

    def after_thinking(self, grammar: LLGuidanceGrammar, is_open: bool) -> LLGuidanceGrammar | AfterThinking:
        """The grammar, for an answer that may think first. As it is where the model has no think tokens."""
        start, end = self._think_ids
        return grammar if start is None or end is None else AfterThinking(grammar, start, end, is_open)

    def tool_call_source(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        """One call or several of these functions ({"name", "parameters"}), in the form that Qwen3 writes them in."""
        opening, closing = (
            tag if tag in self._added_tokens else json.dumps(tag) for tag in (TOOL_CALL_START, TOOL_CALL_END)
        )
        rules = ['start: block ("\\n" block)*' if parallel else "start: block"]
        names = " | ".join(f"call_{i}" for i in range(len(tools)))
        rules.append(f'block: {opening} "\\n" ({names}) "\\n" {closing}')
        for i, tool in enumerate(tools):
            schema = {"x-guidance": _LAYOUT, **(tool.get("parameters") or {"type": "object"})}
            head = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
            rules.append(f'call_{i}: {head} %json {json.dumps(schema)} "}}"')
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def close(self) -> None:
        """Ends the trials. What compiles in a thread has passed one, so it will not take long."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _release_in(self, loop: asyncio.AbstractEventLoop) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free.release)

        return release

    def _compile(self, make_source: Callable[[], str], with_tags: bool) -> LLMatcher:
        source = make_source()
        _check_length(source, "the grammar")
        key = (source, with_tags)
        with self._lock:
            if (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return cached.deep_copy()
            trial = self._free_trials.pop()
        try:
            trial.run(source, with_tags, self._timeout)
        finally:
            with self._lock:
                self._free_trials.append(trial)
        matcher = LLMatcher(self._ll_tokenizer(with_tags), source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar is not usable: {first_line(matcher.get_error())}")
        with self._lock:
            self._cache[key] = matcher
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return matcher.deep_copy()

    def _ll_tokenizer(self, with_tags: bool) -> LLTokenizer:
        with self._tokenizer_lock:
            if with_tags not in self._ll_tokenizers:
                text, options = self._tokenizer_parts(with_tags)
                self._ll_tokenizers[with_tags] = LLTokenizer(text, **options)
            return self._ll_tokenizers[with_tags]

    def _tokenizer_parts(self, with_tags: bool) -> tuple[str, dict[str, Any]]:
        """What an LLTokenizer is made of.

        Without tags it knows no added token, so that a text such as "<|im_end|>" is spelled and does not end it.
        """
        text = self._tokenizer.backend_tokenizer.to_str()
        if not with_tags:
            raw = json.loads(text)
            for token in raw["added_tokens"]:  # they keep their ids, under names that nobody can write
                token.update(content=f"<|{secrets.token_hex(16)}|>", special=True)
            text = json.dumps(raw, ensure_ascii=False)
        return text, {"n_vocab": self._vocab_size, "eos_token": self._eos_token_ids}


def json_schema_source(schema: Mapping[str, Any] | str) -> str:
    if isinstance(schema, str):
        _check_length(schema, "the JSON schema")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"the JSON schema is {type(schema).__name__}; it must be an object")
    check_depth(schema, "the JSON schema")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_LAYOUT)


def json_object_source() -> str:
    return json_schema_source({"type": "object"})


def regex_source(regex: str) -> str:
    _check_length(regex, "the regular expression")
    return LLMatcher.grammar_from_regex(regex)


def choice_source(choices: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def grammar_source(grammar: str) -> str:
    """Lark's syntax as llguidance reads it, or GBNF with `::=`, which is converted."""
    _check_length(grammar, "the grammar")
    if "::=" in grammar:
        try:
            grammar = llguidance.gbnf_to_lark.any_to_lark(grammar)
        except Exception as error:
            raise ValueError(f"the grammar is not usable: {error}") from error
    return LLMatcher.grammar_from_lark(grammar)


def _check_length(text: str, what: str) -> None:
    """Before anything is done with it."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{what} has {len(text)} characters; at most {MAX_GRAMMAR_BYTES} are allowed")


def _set_bit(row: np.ndarray, token_id: int, value: bool) -> None:
    words, bit = row.view(np.uint32), np.uint32(1 << token_id % 32)
    words[token_id // 32] = words[token_id // 32] | bit if value else words[token_id // 32] & ~bit
