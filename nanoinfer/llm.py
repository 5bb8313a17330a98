"""`LLM`: the offline API. Has an engine; adds the loop, the progress bar, chat and streaming."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engine.input_processor import Prompt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.output_processor import Request
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import KVCacheCapacity, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)

    model: a local directory or a Hugging Face hub id; options: those of `EngineConfig` (unknown ones raise TypeError).
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine: LLMEngine | None = LLMEngine(EngineConfig.create(model, **options))

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def capacity(self) -> KVCacheCapacity:
        """The KV pool, and the device and dtype in use."""
        return self.engine.capacity

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the checkpoint's generation_config.json."""
        return self.engine.input_processor.default_params

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; outputs are in their order.

        prompts: a string, token ids (list or numpy array), {"prompt": ...} or {"prompt_token_ids": ...}, or several
        of these. params: for all, or one per prompt; None takes the checkpoint's generation_config.json.
        `sampling_params` is vLLM's name for the same. Prompt plus output is capped at `max_model_len`.

        Raises ValueError on bad input, before anything runs. If an exception or Ctrl-C ends the call, its requests
        are aborted and the engine stays usable.
        """
        if params is not None and sampling_params is not None:
            raise ValueError("params and sampling_params are two names of one argument; give one of them")
        engine = self.engine
        requests = engine.prepare(prompts, sampling_params if params is None else params)
        try:
            engine.add(requests)
            with _Progress(engine, len(requests), disable=not use_tqdm or not sys.stderr.isatty()) as progress:
                num_left = len(requests)
                mine = set(map(id, requests))
                while num_left:
                    num_finished = sum(id(request) in mine for request in engine.step())
                    num_left -= num_finished
                    progress.update(num_finished)
        finally:
            engine.abort(requests)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        enable_thinking: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role": ..., "content": ...}) or several.

        enable_thinking: False asks Qwen3 to answer without thinking first; None leaves it to the chat template.
        """
        return self.generate(self._render(messages, enable_thinking, tools), params, use_tqdm)

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
    ) -> Iterator[str]:
        """Completes one prompt (or answers one conversation); yields pieces that concatenate to the final text.

        Leaving the loop early, or dropping the iterator, aborts the request. Raises ValueError if `n` is not 1.
        """
        if params is not None and params.n != 1:
            raise ValueError(f"n is {params.n}; a stream of text has one completion")
        if _is_conversation(prompt):
            prompt = self._render([prompt], enable_thinking, None)[0]
        return _Stream(self.engine, self.engine.add_requests([prompt], params)[0])

    def _render(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        enable_thinking: bool | None,
        tools: list[dict[str, Any]] | None,
    ) -> list[Prompt]:
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise ValueError(f"messages is {messages!r}; it must be a list of messages, or a list of such lists")
        one = all(isinstance(message, Mapping) for message in messages)
        conversations: Any = [messages] if one and messages else messages
        options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if tools is not None:
            options["tools"] = tools
        processor = self.engine.input_processor
        return [
            processor.render_chat(conversation, f"messages[{i}]", **options)
            for i, conversation in enumerate(conversations)
        ]

    def close(self) -> None:
        """Frees model and KV cache. Idempotent; the LLM cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and isinstance(value[0], Mapping)
        and "role" in value[0]
    )


class _Stream(Iterator[str]):
    """The iterator of `LLM.stream`. Not a generator, because one that was never started is not cleaned up after."""

    def __init__(self, engine: LLMEngine, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __next__(self) -> str:
        while True:
            # Another call's steps may have brought this request on, or to its end, since the last piece.
            is_done = self._request.is_done
            if delta := self._request.completions[0].new_text():
                return delta
            if is_done:
                self.close()  # a token in vain may still be in flight
                raise StopIteration
            try:
                self._engine.step()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._engine.abort([self._request])

    def __del__(self) -> None:
        # The collector runs at any moment, also within a step: leave it to the next one.
        self._engine.abort_later(self._request)


class _Progress:
    """The bar of `generate`: finished prompts, with the speeds of the steps so far."""

    def __init__(self, engine: LLMEngine, num_requests: int, disable: bool) -> None:
        self._engine = engine
        self._bar = tqdm(total=num_requests, desc="Processed prompts", disable=disable)
        self._prefill = [0.0, 0.0]  # tokens, seconds
        self._decode = [0.0, 0.0]
        self._previous = engine.on_step

    def __enter__(self) -> _Progress:
        if not self._bar.disable:
            self._engine.on_step = self._observe
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.on_step = self._previous
        self._bar.close()

    def update(self, num_finished: int) -> None:
        self._bar.update(num_finished)

    def _observe(self, stats: StepStats) -> None:
        if self._previous is not None:
            self._previous(stats)
        # A mixed step counts as prefill, which takes nearly all of its time.
        tally, tokens = (
            (self._prefill, stats.num_prefill_tokens)
            if stats.num_prefill_tokens
            else (self._decode, stats.num_decode_tokens)
        )
        tally[0] += tokens
        tally[1] += stats.seconds
        speeds = [f"{name} {n / s:.0f} tok/s" for name, (n, s) in self._speeds() if s]
        self._bar.set_postfix_str(", ".join(speeds), refresh=False)

    def _speeds(self) -> list[tuple[str, list[float]]]:
        return [("prefill", self._prefill), ("decode", self._decode)]
