"""The command line: flags out of the dataclasses, configuration files, and each verb's own work."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import ROOT
from server_kit import DEMO, ENGINE

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.entrypoints.cli import chat, flags, generate, serve
from nanoinfer.entrypoints.cli.main import VERBS, main, make_parser
from nanoinfer.entrypoints.openai.config import ServerConfig

FLOAT32 = ["--dtype", "float32", "--num-kvcache-blocks", "64", "--seed", "0"]
QUESTION = "What is 3 + 4?"


def parse(*arguments: str) -> argparse.Namespace:
    parser, _ = make_parser(arguments[0])
    return parser.parse_args(list(arguments))


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_every_option_is_a_flag_with_its_help() -> None:
    _, parsers = make_parser()
    for verb, classes in {
        "serve": [ServerConfig, EngineConfig],
        "chat": [EngineConfig],
        "run-batch": [EngineConfig],
    }.items():
        actions = {option: action for action in parsers[verb]._actions for option in action.option_strings}
        for cls in classes:
            for field in dataclasses.fields(cls):
                if field.name != "model":
                    action = actions[flag_of(field.name)]
                    assert action.help and len(action.help) > 10, f"{cls.__name__}.{field.name} has no help"


def test_flags_reach_the_classes_with_their_types() -> None:
    args = parse(
        "serve", "dir", "--max-model-len", "4k", "--max-num-batched-tokens", "2K", "-tp", "2", "--block-size", "16",
        "--no-enable-prefix-caching", "--step-timeout", "1.5", "--api-key", "a", "b", "--served-model-name", "x",
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--port", "0",
    )  # fmt: skip
    engine = flags.given(args, EngineConfig)
    assert engine == {
        "model": "dir", "max_model_len": 4000, "max_num_batched_tokens": 2048, "tensor_parallel_size": 2,
        "kvcache_block_size": 16, "enable_prefix_caching": False, "step_timeout": 1.5,
    }  # fmt: skip
    config = serve.server_config(args)
    assert config.api_key == ("a", "b") and config.port == 0 and config.served_model_name == ("x",)
    assert config.default_chat_template_kwargs == {"enable_thinking": False} and config.host == "127.0.0.1"
    assert EngineConfig(**engine)


def test_without_a_model_it_is_the_demo_under_its_name() -> None:
    args = parse("serve")
    assert flags.model_of(args) == DEMO and serve.server_config(args).served_model_name == ("nanoinfer-demo",)
    assert serve.server_config(parse("serve", "x")).served_model_name == ()


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("2M", 2**21), ("-1", -1)]
)
def test_human_integers(text: str, value: int) -> None:
    assert flags.human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "1.5", "0.0001k", "0x10", "1e3"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        flags.human_int(text)


def exit_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and all output of the command."""
    try:
        code: Any = main(list(arguments))
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-modl-len", "5"], "--max-modl-len"),
        (["serve", "--max-model-len", "many"], "--max-model-len"),
        (["serve", "--port", "70000"], "port is 70000"),
        (["serve", "--tool-call-parser", "xml"], "'hermes' and 'none'"),
        (["serve", "--default-chat-template-kwargs", "no"], "JSON object"),
        (["chat", "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "no/such/directory", "-p", "x"], "no/such/directory"),
        (["generate", "--file", "/no/such/file"], "/no/such/file"),
        (["nonsense"], "nonsense"),
        ([], "VERB"),
        (["bench"], "kind"),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, output = exit_of(capsys, *arguments)
    assert code in (1, 2) and said in output and "Traceback" not in output


def test_help_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        code, output = exit_of(capsys, verb.replace("_", "-"), "--help")
        assert code == 0 and output.startswith("usage: nanoinfer")
    code, output = exit_of(capsys, "serve", "--help=kv-cache")
    assert code == 0 and "--cpu-kvcache-gib" in output and "--port" not in output
    code, output = exit_of(capsys, "serve", "--help=max-num-seqs")
    assert code == 0 and "--max-num-seqs" in output and "--max-num-batched-tokens" not in output
    code, output = exit_of(capsys, "serve", "--help=nothing")
    assert code == 2 and "kv-cache" in output


def test_a_configuration_file_gives_defaults_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: dir\nmax-model-len: 4k\nenable_prefix_caching: false\napi-key: [a, b]\nport: 1\n")
    parser, parsers = make_parser("serve")
    flags.apply_config_file(parsers["serve"], str(file))
    args = parser.parse_args(["serve", "--port", "2", "--config", str(file)])
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.api_key, args.port) == (
        "dir", 4000, False, ["a", "b"], 2,
    )  # fmt: skip
    for wrong, said in (
        ("nonsense: 1", "'nonsense'"),
        ("port: x", "port"),
        ("- 1", "keys"),
        ("enforce_eager: 3", "true"),
    ):
        file.write_text(wrong)
        code, output = exit_of(capsys, "serve", "--config", str(file))
        assert code == 2 and said in output
    assert exit_of(capsys, "serve", "--config", "/no/such.yaml")[0] == 2


# --- Verbs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(DEMO, **ENGINE) as one:
        yield one


def test_a_chat_session(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    out = io.StringIO()
    session = chat.Session(llm, params, system="Be brief.", out=out)
    assert session.handle(QUESTION) and session.handle("")
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = llm.chat(history, params, use_tqdm=False)[0]
    content = expected.text.removeprefix("<think>\n\n</think>\n\n")
    assert content in out.getvalue() and "<think>" not in out.getvalue()
    assert f"[{len(expected.token_ids)} tokens" in out.getvalue() and "tok/s]" in out.getvalue()
    assert session.messages == [*history, {"role": "assistant", "content": content}]
    session.handle("/think")
    session.handle(QUESTION)
    history = [*session.messages[:-1]]
    second = llm.chat(history, params, use_tqdm=False, enable_thinking=False)[0]
    assert session.messages[-1]["content"] == second.text
    session.handle("/reset")
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    session.handle("/system Be long.")
    assert session.messages == [{"role": "system", "content": "Be long."}]
    session.handle("/nonsense")
    assert "/nonsense is no command" in out.getvalue()
    session.handle("x" * 5000)
    assert "/reset begins a new conversation" in out.getvalue() and len(session.messages) == 1
    assert not session.handle("/exit") and llm.engine.on_step is None


def test_ctrl_c_stops_an_answer_and_not_the_session(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    session = chat.Session(llm, SamplingParams(temperature=0, max_tokens=200), out=out)
    show = session._show

    def interrupted(reasoning: str, content: str) -> str:
        shown = show(reasoning, content)
        if content:
            raise KeyboardInterrupt
        return shown

    monkeypatch.setattr(session, "_show", interrupted)
    assert session.handle(QUESTION)
    assert "(stopped)" in out.getvalue() and not llm.engine.has_unfinished
    monkeypatch.undo()
    assert session.handle(QUESTION)


def test_generate_prints_what_the_engine_says(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["1, 2, 3,", "a"]
    expected = [o.text for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    greedy = ["generate", *FLOAT32, "--temperature", "0", "--max-tokens", "5"]
    assert main([*greedy, "--file", str(file)]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    assert main([*greedy, "-p", prompts[0], "--json", "--logprobs", "1"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["prompt"] == prompts[0] and line["outputs"][0]["text"] == expected[0]
    assert line["outputs"][0]["logprobs"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompts[1]))
    assert main(greedy) == 0
    assert capsys.readouterr().out == f"{expected[1]}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(greedy) == 2


def test_generate_in_chat_form(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)[0].text
    assert main(["generate", *FLOAT32, "--chat", "-p", QUESTION, "--temperature", "0", "--max-tokens", "40"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert generate.NOT_FLAGS


def test_run_batch_answers_in_order_and_bad_lines_alone(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    messages = [{"role": "user", "content": QUESTION}]
    chat_body = {"model": "nanoinfer-demo", "messages": messages, "temperature": 0, "max_tokens": 30}
    good = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat_body},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1, 2,", "temperature": 0}},
    ]
    bad = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {**chat_body, "n": 0}},
        {"custom_id": "d", "method": "POST", "url": "/v1/nothing", "body": {}},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}},
        {"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": "other"}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps(item) for item in [bad[0], good[0], *bad[1:], good[1]]]
    source.write_text("\n".join([*lines, "{", "[]"]) + "\n")
    uniproc = ["--distributed-executor-backend", "uni"]
    assert main(["run-batch", "-i", str(source), "-o", str(target), *FLOAT32, *uniproc]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["c", "a", "d", "e", "f", "b", None, None]
    assert [answer["response"]["status_code"] for answer in answers] == [400, 200, 400, 400, 404, 200, 400, 400]
    assert "n: " in answers[0]["response"]["body"]["error"]["message"]
    content = answers[1]["response"]["body"]["choices"][0]["message"]["content"]
    assert llm.chat(messages, params, use_tqdm=False)[0].text.endswith(content)
    text = answers[5]["response"]["body"]["choices"][0]["text"]
    sixteen = SamplingParams(temperature=0, max_tokens=16)
    assert text == llm.generate("1, 2,", sixteen, use_tqdm=False)[0].text
    assert "2 of 8 requests answered, 6 refused" in capsys.readouterr().err


def test_python_m_nanoinfer_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanoinfer", "--version"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0 and done.stdout.strip()


def test_help_loads_neither_torch_nor_the_server() -> None:
    source = (
        "import sys\nfrom nanoinfer.entrypoints.cli.main import make_parser\nmake_parser()\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'llguidance') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
