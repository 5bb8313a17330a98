"""`ChatTemplate`: a conversation into the token ids of its prompt, without letting text become control tokens.

The checkpoint's template is Jinja and joins strings, so a user's `<|im_end|>` would end the turn. Here every text that
comes from a request is marked before rendering wherever it spells an added token (a noncharacter that the request does
not contain goes after its first character); what is unmarked afterwards was written by the template. The prompt is then
tokenized piece by piece between the template's own control tokens, by a copy of the tokenizer that knows none. For a
conversation that spells no control token this gives what tokenizing the rendered prompt gives.

Templates run in transformers' sandbox (jinja2 ImmutableSandboxedEnvironment), and only the server's operator can set
one. Safe in any thread: nothing is changed after construction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Unicode noncharacters: for a program's own use, never for text.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
THINK_END = "</think>"


@dataclass(frozen=True)
class ChatPrompt:
    text: str
    token_ids: list[int]


class ChatTemplate:
    """allowed_options: what requests may pass to the template. parse_control_tokens: text may contain them after all.

    template: Jinja source that replaces the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        default_options: Mapping[str, Any] | None = None,
        allowed_options: Iterable[str] = (),
        parse_control_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template
        self._defaults = dict(default_options or {})
        self._allowed = {"enable_thinking", *allowed_options}
        self._parse_control_tokens = parse_control_tokens
        self._control_ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content}
        # Longest first, as a tokenizer matches them.
        tokens = sorted(map(re.escape, self._control_ids), key=len, reverse=True)
        self._control = re.compile("|".join(tokens) or r"(?!)")
        self._plain = without_added_tokens(tokenizer.backend_tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """Raises ValueError if there is no template, an option is not allowed or the template refuses the messages."""
        if not self._template:
            raise ValueError("this checkpoint has no chat template; use completions, or serve it with --chat-template")
        self._check_options(options or {})
        mark = "" if self._parse_control_tokens else self._unused_mark([messages, tools])
        conversation = [split_thinking(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                self._marked(conversation, mark),
                tools=self._marked(list(tools), mark) if tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{**self._defaults, **(options or {})},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return ChatPrompt(text.replace(mark, "") if mark else text, self._encode(text, mark))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name not in self._allowed:
                raise ValueError(
                    f"chat_template_kwargs has {name!r}; this server lets requests set {sorted(self._allowed)}"
                )
            if name == "enable_thinking" and not isinstance(value, bool):
                raise ValueError(f"chat_template_kwargs: enable_thinking is {value!r}; it must be true or false")

    def _unused_mark(self, values: Any) -> str:
        text = json.dumps(values, ensure_ascii=False)
        for mark in _MARKS:
            if mark not in text:
                return mark
        raise ValueError("the messages contain all of Unicode's noncharacters U+FDD0 to U+FDEF, which are not text")

    def _marked(self, value: Any, mark: str) -> Any:
        """A copy, with the mark inside everything that spells a control token."""
        if isinstance(value, str):
            return self._control.sub(lambda match: match[0][0] + mark + match[0][1:], value) if mark else value
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, mark) for item in value]
        return value

    def _encode(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._control.finditer(text):
            ids += self._encode_plain(text[start : match.start()], mark)
            ids.append(self._control_ids[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:], mark)

    def _encode_plain(self, text: str, mark: str) -> list[int]:
        if mark:
            text = text.replace(mark, "")
        return encode(self._plain, text) if text else []


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text alone. Unlike `Tokenizer.encode`, this lets other threads run meanwhile (tokenizers 0.23)."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy for which every text is plain text."""
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = []
    raw["post_processor"] = None
    return Tokenizer.from_str(json.dumps(raw))


def split_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's earlier turn with its think block in the content, as the template itself would split it.

    Done here because the tags in it are marked afterwards, so that the template does not see them.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or message.get("reasoning_content") or not isinstance(content, str):
        return dict(message)
    before, tag, _ = content.partition(THINK_END)
    if not tag:
        return dict(message)
    reasoning = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
    return {**message, "reasoning_content": reasoning, "content": content.split(THINK_END)[-1].lstrip("\n")}
