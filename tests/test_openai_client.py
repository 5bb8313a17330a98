"""The `openai` client against a real server over the demo checkpoint: what it gets is what the engine gives offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from kit import ROOT
from pydantic import BaseModel, Field
from server_kit import DEMO, ENGINE, Running, demo_llm, events, running

from nanoinfer import LLM, SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(demo_llm()) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(DEMO, **ENGINE) as llm:
        yield llm


def strict(response: BaseModel) -> None:
    """The client does not validate what it gets; this does."""
    type(response).model_validate_json(response.model_dump_json(exclude_unset=True), strict=False)


def test_chat_equals_the_offline_answer(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0]
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    strict(answer)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    # The demo thinks an empty thought first.
    assert expected.text == "<think>\n\n</think>\n\n" + choice.message.content
    assert answer.usage is not None and answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    assert answer.model == "demo" and answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, n: int) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 5, "n": n, "temperature": 2}
    options["extra_body"] = {"top_k": 0, "top_p": 1}
    options |= {"logprobs": True, "top_logprobs": 2, "max_tokens": 40}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        strict(chunk)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(one.delta.role is None for one in mine[1:])
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
        entries = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert entries == choice.logprobs.content
    assert n == 1 or len({choice.message.content for choice in whole.choices}) > 1


def test_the_ith_completion_is_that_of_the_ith_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "1, 2,", "temperature": 1.5, "max_tokens": 12}
    together = client.completions.create(**options, n=3, seed=7).choices
    alone = [client.completions.create(**options, seed=7 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in together] == alone


def test_logprobs_and_their_tokens_are_the_engines(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, logprobs=3)
    expected = offline.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert expected.finish_reason == "stop" and len(content) == len(expected.token_ids) - 1, (
        "the end is no token of the text"
    )
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text == expected.text and text == "".join(entry.token for entry in content)
    for entry, reference in zip(content, expected.logprobs, strict=False):
        best = sorted(reference.values(), key=lambda one: one.rank)[:3]
        assert entry.logprob == pytest.approx(next(iter(reference.values())).logprob, abs=1e-4)
        assert [one.token for one in entry.top_logprobs] == [one.decoded_token for one in best]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx([one.logprob for one in best], abs=1e-4)


def test_what_a_stop_string_cut_from_the_text_keeps_its_logprobs(client: openai.OpenAI) -> None:
    """vLLM's rule: every token that was generated has them, so they add up to completion_tokens."""
    options: dict[str, Any] = {"model": "demo", "prompt": "The sum of 1 and", "temperature": 0, "max_tokens": 30}
    options |= {"logprobs": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    (plain,) = client.completions.create(**options).choices
    text, tokens = plain.text, plain.logprobs.tokens
    assert len(tokens) == 30 and "".join(tokens) == text
    before = "".join(tokens[:9])
    stop = before[-1] + tokens[9][:1]  # across two tokens
    start = text.index(stop)
    whole = client.completions.create(**options, stop=stop)
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    streamed = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason, choice.model_extra["stop_reason"]) == (text[:start], "stop", stop)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:start]
    assert choice.logprobs.tokens == streamed == tokens[: whole.usage.completion_tokens]
    assert "".join(streamed).startswith(text[: start + len(stop)]) and stop not in "".join(streamed[:-1])


def test_logprobs_of_constrained_tokens_are_those_of_the_model_itself(client: openai.OpenAI) -> None:
    """The same tokens as a prompt that is only scored have the same ones."""
    prompt = "The capital of France is"
    options: dict[str, Any] = {"model": "demo", "logprobs": 0, "temperature": 0.3}
    extra = {"structured_outputs": {"choice": ["never"]}, "repetition_penalty": 1.5, "return_token_ids": True}
    (choice,) = client.completions.create(**options, prompt=prompt, max_tokens=9, extra_body=extra).choices
    assert choice.text == "never" and choice.finish_reason == "stop"
    extras = choice.model_extra
    ids = extras["prompt_token_ids"] + extras["token_ids"][: len(choice.logprobs.tokens)]
    scored = client.completions.create(**options, prompt=ids, max_tokens=0, echo=True).choices[0].logprobs
    values = choice.logprobs.token_logprobs
    assert values == pytest.approx(scored.token_logprobs[len(extras["prompt_token_ids"]) :], abs=1e-3)
    assert max(values) < 0


def test_completions_take_texts_and_ids_alike(client: openai.OpenAI, offline: LLM) -> None:
    texts = ["1, 2, 3,", "The capital of France is"]
    ids = [offline.get_tokenizer()(text)["input_ids"] for text in texts]
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [output.text for output in offline.generate(texts, params, use_tqdm=False)]
    for prompt in (texts, ids):
        answer = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=8)
        strict(answer)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    one = client.completions.create(model="demo", prompt=ids[0], temperature=0, max_tokens=8)
    assert one.choices[0].text == expected[0]
    chunks = list(client.completions.create(model="demo", prompt=texts, temperature=0, max_tokens=8, stream=True))
    for i, text in enumerate(expected):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) == text


def test_echo_gives_the_prompts_logprobs_too(client: openai.OpenAI, offline: LLM) -> None:
    text = "The capital of é is"
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    expected = offline.generate(text, params, use_tqdm=False)[0]
    reference = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    options: dict[str, Any] = {"model": "demo", "prompt": text, "temperature": 0, "echo": True, "logprobs": 2}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(**options, max_tokens=4)
    (choice,) = answer.choices
    assert choice.text == text + expected.text and choice.model_extra["token_ids"] == expected.token_ids
    assert choice.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    values = [next(iter(entry.values())).logprob for entry in reference]
    assert logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
    assert all(len(top) >= 1 for top in logprobs.top_logprobs[1:])
    for token, offset, end in zip(
        logprobs.tokens, logprobs.text_offset, [*logprobs.text_offset[1:], None], strict=True
    ):
        assert choice.text[offset:end] in (token, "", "é")
    chunks = list(client.completions.create(**options, max_tokens=4, stream=True))
    pieces = [chunk.choices[0] for chunk in chunks]
    assert "".join(piece.text for piece in pieces) == choice.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [value for piece in pieces for value in getattr(piece.logprobs, name)]
        if name == "token_logprobs":
            assert streamed[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
        elif name != "top_logprobs":
            assert streamed == getattr(logprobs, name)
    scored = client.completions.create(**options, max_tokens=0)
    assert scored.choices[0].text == text and scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1 : len(expected.prompt_token_ids)], abs=1e-4
    )


def test_the_default_of_completions_is_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="1", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_stop_strings_cut_and_are_named(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    text = offline.chat(MESSAGES, params, use_tqdm=False)[0].text.removeprefix("<think>\n\n</think>\n\n")
    stop = text[2:4]
    for extra, expected in (({}, text[:2]), ({"include_stop_str_in_output": True}, text[:4])):
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, stop=[stop, "never"], extra_body=extra
        )
        choice = answer.choices[0]
        assert choice.message.content == expected
        assert choice.finish_reason == "stop" and choice.model_extra["stop_reason"] == stop


def test_the_clients_stream_helper_builds_the_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    assert models[0].model_extra["max_model_len"] == 1024


def test_errors_have_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="1024 tokens long; the prompt has 16") as long:
        client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be less than or equal to 2") as hot:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=3)
    assert hot.value.param == "temperature" and hot.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=r"messages.0.content.0.type: Input should be 'text'"):
        image: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="x")


def test_the_raw_stream_is_events_and_ends_with_done(server: Running) -> None:
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "max_tokens": 3})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[-1] == "[DONE]" and "[DONE]" not in found[:-1]
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in found[:-1])


def test_tokenize_and_detokenize(server: Running, offline: LLM) -> None:
    tokenizer = offline.get_tokenizer()
    with server.client() as client:
        text = "A <|im_end|> é 😀"
        answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == tokenizer(text)["input_ids"] and answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 1024 and len(answer["token_strs"]) == answer["count"]
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert chat == tokenizer(rendered)["input_ids"]
        assert client.post("/detokenize", json={"tokens": [1024]}).status_code == 400
        assert client.get("/version").json()["version"] and client.get("/health").text == ""


class Sum(BaseModel):
    kind: Literal["sum", "difference"]
    terms: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=3)
    name: str = Field(max_length=8)


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two digits.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "</tool_call>"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def test_parse_gives_a_pydantic_object(client: openai.OpenAI) -> None:
    for extra in (NO_THINKING, {}):
        answer = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Sum, extra_body=extra, seed=3
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(answer.choices[0].message.parsed, Sum)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("extra", [NO_THINKING, {}], ids=["no_thinking", "thinking"])
def test_a_forced_tool_call_comes_whole_and_in_pieces(client: openai.OpenAI, tool_choice: Any, extra: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "tools": [ADD], "tool_choice": tool_choice}
    options |= {"seed": 1, "extra_body": extra, "max_tokens": 200, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**options)
    strict(answer)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.type == "function" and call.id
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "b"} and 0 <= arguments["a"] <= 9
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.name == "add" and streamed.function.arguments == call.function.arguments


def test_the_conversation_goes_on_with_what_the_client_got(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        tools=[ADD],
        tool_choice="required",
        seed=1,
        max_tokens=200,
        extra_body=NO_THINKING,
    )
    message = answer.choices[0].message
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    second = client.chat.completions.create(
        model="demo", messages=[*MESSAGES, message, *results], tools=[ADD], max_tokens=5
    )
    assert second.usage.prompt_tokens > answer.usage.prompt_tokens


def test_the_page_is_served_from_the_package(server: Running) -> None:
    with server.client() as client:
        page = client.get("/")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        for name in ("app.js", "style.css", "icon.svg"):
            file = ROOT / "nanoinfer" / "entrypoints" / "web" / name
            assert client.get(f"/web/{name}").content == file.read_bytes()
        for path in ("/web/..%2f..%2fllm.py", "/web/nothing.js", "/web/%2e%2e/cli/main.py"):
            assert client.get(path).status_code == 404
        assert "http://" not in page.text.replace("http://www.w3.org", "") and "https://" not in page.text
