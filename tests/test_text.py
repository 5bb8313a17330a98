"""Tokens to text: whatever the pieces, the text is that of decoding all ids at once; a stop string cuts where it
begins, however it came; and what ends an output, end to end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kit
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import byte_tokenizer, checkpoint, fake_llm, make_llm
from transformers import PreTrainedTokenizerBase

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.detokenizer import Detokenizer, StopStrings, TokenTable

# Characters of one to four bytes, joiners, combining marks, right-to-left, spaces, and what byte-level BPE splits.
TEXTS = [
    "the quick brown fox", "Héllo wörld", "你好，世界", "안녕하세요", "مرحبا بالعالم", "👨‍👩‍👧‍👦 🏳️‍🌈 é",
    "a\u0301b\u200d", "\n\n  \t x",
    "Ġnot a space", "ÿþ", "�", " <think>\nab</think>", "नमस्ते", "𝔘𝔫𝔦", "",
]  # fmt: skip


def tokenizers() -> list[Any]:
    real = kit.qwen3_tokenizer_dir()
    return [
        pytest.param("byte", id="byte-level"),
        pytest.param("real", id="qwen3", marks=pytest.mark.skipif(real is None, reason="no Qwen3 tokenizer here")),
    ]


_LOADED: dict[str, PreTrainedTokenizerBase] = {}


def load(name: str) -> PreTrainedTokenizerBase:
    if name not in _LOADED:
        _LOADED[name] = byte_tokenizer() if name == "byte" else kit.qwen3_tokenizer()
    return _LOADED[name]


def feed_all(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip: bool) -> list[str]:
    """The pieces, the final flush last."""
    detokenizer = Detokenizer(TokenTable(tokenizer), skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


def assert_text_is_decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    for skip in (True, False):
        pieces = feed_all(tokenizer, ids, skip)
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == expected
        # What is given out is final: at each moment it is a beginning of the text, so no U+FFFD comes too early.
        so_far = ""
        for piece in pieces:
            so_far += piece
            assert expected.startswith(so_far)


# --- Detokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tokenizers())
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_text_of_decoding_them_at_once(name: str, data: st.DataObject) -> None:
    """Random ids are mostly broken UTF-8; ids beyond the tokenizer (padding rows of the model) are nothing."""
    tokenizer = load(name)
    size = len(tokenizer)
    low = st.integers(0, 255)
    special = st.integers(size - 30, size + 200)
    ids = data.draw(st.lists(st.one_of(low, special, st.integers(0, size - 1)), max_size=30))
    assert_text_is_decode(tokenizer, ids)


@pytest.mark.parametrize("name", tokenizers())
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_however_its_characters_are_split(name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert_text_is_decode(tokenizer, ids)
    for cut in range(0, len(ids), 3):
        assert_text_is_decode(tokenizer, ids[cut:])


@pytest.mark.parametrize("name", tokenizers())
@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_many_bytes_come_whole(name: str, text: str) -> None:
    """No U+FFFD unless the text has one, and no piece waits longer than its character."""
    tokenizer = load(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert_text_is_decode(tokenizer, ids)
    if "�" not in text:
        assert not any("�" in piece for piece in feed_all(tokenizer, ids, False))
    for count in range(len(ids) + 1) if "�" not in text else ():
        whole = tokenizer.decode(ids[:count], skip_special_tokens=False)
        released = "".join(feed_all(tokenizer, ids[:count], False)[:-1])
        assert released == (whole if text.startswith(whole) else whole.rstrip("�"))


@pytest.mark.parametrize("name", tokenizers())
def test_special_tokens_are_skipped_or_shown_and_plain_added_tokens_always_shown(name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer("<|im_start|>a<think>b</think>c<|im_end|><|endoftext|>", add_special_tokens=False)["input_ids"]
    shown = "".join(feed_all(tokenizer, ids, False))
    skipped = "".join(feed_all(tokenizer, ids, True))
    assert shown == "<|im_start|>a<think>b</think>c<|im_end|><|endoftext|>"
    assert skipped == tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think>c"


def test_two_detokenizers_of_one_table_are_independent() -> None:
    tokenizer = byte_tokenizer()
    table = TokenTable(tokenizer)
    first, second = Detokenizer(table, True), Detokenizer(table, True)
    ids = tokenizer("🏳")["input_ids"]
    texts = ["", ""]
    for token_id in ids:
        texts[0] += first.feed(token_id)
        texts[1] += second.feed(ids[0])
    assert texts[0] == "🏳"


def test_a_tokenizer_that_is_not_byte_level_is_refused_by_name() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="byte-level"):
        TokenTable(other)


# --- StopStrings -------------------------------------------------------------------------------------------------


def first_stop(text: str, stops: tuple[str, ...], allowed_from: int = 0) -> tuple[int, int, str] | None:
    """(start, end, stop) of the match that is complete first, the longest of those; by trying every end.

    allowed_from: a match must end beyond so many characters.
    """
    for end in range(allowed_from + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return end - len(stop), end, stop
    return None


def feed_pieces(stops: tuple[str, ...], include: bool, pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stops, include)
    released = []
    for piece in pieces:
        text, stop = finder.feed(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, finder.flush()], None


def cut(text: str, marks: list[int]) -> list[str]:
    edges = [0, *sorted(mark % (len(text) + 1) for mark in marks), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=1000, deadline=None)
@given(st.text("abc", max_size=25), stop_lists, st.booleans(), st.lists(st.integers(0, 100), max_size=12))
@example("aab", ("ab",), False, [1, 2])
@example("abab", ("abb", "ba"), False, [1, 2, 3])
@example("aaab", ("aab", "b"), True, [1, 2, 3])
def test_where_a_stop_cuts_does_not_depend_on_how_the_text_came(
    text: str, stops: tuple[str, ...], include: bool, marks: list[int]
) -> None:
    match = first_stop(text, stops)
    pieces = cut(text, marks)
    released, stop = feed_pieces(stops, include, pieces)
    if match is None:
        assert stop is None and "".join(released) == text
        return
    start, end, expected = match
    assert stop == expected
    assert "".join(released) == text[: end if include else start]


@settings(max_examples=500, deadline=None)
@given(st.text("abc", max_size=20), stop_lists, st.lists(st.integers(0, 100), max_size=10))
def test_text_is_held_back_exactly_as_long_as_a_stop_could_still_cut_it(
    text: str, stops: tuple[str, ...], marks: list[int]
) -> None:
    """The rest is the longest suffix that begins a stop string: not a character less, not one more."""
    finder = StopStrings(stops, False)
    seen = out = ""
    for piece in cut(text, marks):
        released, stop = finder.feed(piece)
        seen, out = seen + piece, out + released
        if stop is not None:
            return
        could_begin = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)]
        assert len(seen) - len(out) == max(could_begin, default=0)
        assert seen.startswith(out)


@settings(max_examples=500, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
       st.integers(0, 20))  # fmt: skip
@example("xaby", ("ab", "xabx"), 3)
@example("abb", ("b", "abab"), 2)
def test_a_match_that_ends_while_search_is_off_does_not_count(text: str, stops: tuple[str, ...], num_off: int) -> None:
    """For min_tokens: the first characters come, one by one, with the search off."""
    finder = StopStrings(stops, False)
    match = first_stop(text, stops, num_off)
    out, found = "", None
    for i, char in enumerate(text):
        released, found = finder.feed(char, search=i >= num_off)
        out += released
        if found is not None:
            break
    else:
        out += finder.flush()
    if match is None:
        assert found is None and out == text
    else:
        assert found == match[2] and out == text[: match[0]]


# --- End to end, with a script in the model's place --------------------------------------------------------------

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def directory() -> Path:
    return checkpoint("tied", tokenizer=True).directory


def ids_of(text: str) -> list[int]:
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


IM_END = 264
FILLER = ids_of("z")[0]


def run(directory: Path, script: list[int] | str, **options: Any) -> Any:
    """The completion of an engine whose model says `script`, and then z for ever."""
    ids = ids_of(script) if isinstance(script, str) else script
    llm = fake_llm(directory, kit.scripted(byte_tokenizer(), PROMPT, [*ids, FILLER]))
    params = SamplingParams(temperature=0, **options)
    output = llm.generate(PROMPT, params)[0]
    kit.assert_idle(llm.engine)
    streaming = fake_llm(directory, kit.scripted(byte_tokenizer(), PROMPT, [*ids, FILLER]))
    assert "".join(streaming.stream(PROMPT, params)) == output.text
    kit.assert_idle(streaming.engine)
    return output.outputs[0]


def test_the_control_tokens_are_what_these_tests_take_them_for() -> None:
    assert byte_tokenizer().convert_tokens_to_ids("<|im_end|>") == IM_END
    assert byte_tokenizer().eos_token_id == IM_END


def test_end_of_turn_ends_the_output_and_is_not_in_the_text(directory: Path) -> None:
    for options in ({}, {"skip_special_tokens": False}, {"logprobs": 1}):
        completion = run(directory, "héllo<|im_end|>more", **options)
        assert completion.text == "héllo"
        assert completion.token_ids == ids_of("héllo<|im_end|>")
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_skip_special_tokens_hides_or_shows_those_inside_the_output(directory: Path) -> None:
    script = "a<|im_start|>b<think>c"
    assert run(directory, script, max_tokens=6).text == "ab<think>cz"
    assert run(directory, script, max_tokens=6, skip_special_tokens=False).text == "a<|im_start|>b<think>cz"


@pytest.mark.parametrize("text", ["the end of it all", "naïve 👨‍👩‍👧 stop"])
def test_a_stop_string_cuts_the_text_before_it(directory: Path, text: str) -> None:
    """For every substring as the stop: across tokens, within one, and across the bytes of a character."""
    for length in (1, 2, 3, 5, 9):
        for start in range(0, len(text) - length, 2):
            stop = text[start : start + length]
            first = first_stop(text, (stop,))
            assert first is not None
            completion = run(directory, text, stop=stop, max_tokens=60)
            assert completion.text == text[: first[0]]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            # No token after the one that completed the stop.
            ids = completion.token_ids
            assert stop in byte_tokenizer().decode(ids) and stop not in byte_tokenizer().decode(ids[:-1])
            kept = run(directory, text, stop=[stop], include_stop_str_in_output=True, max_tokens=60)
            assert kept.text == text[: first[1]]


def test_of_several_stops_the_one_that_is_complete_first_counts(directory: Path) -> None:
    completion = run(directory, "one two three four", stop=["three", "wo t", "four", "zz"])
    assert (completion.text, completion.stop_reason) == ("one t", "wo t")


def test_held_back_text_is_released_when_the_output_ends_without_the_stop(directory: Path) -> None:
    assert run(directory, "xyz STO", stop="STOP", max_tokens=7).text == "xyz STO"
    assert run(directory, "xyz STO<|im_end|>", stop="STOP").text == "xyz STO"
    assert run(directory, "xyz STO<|im_end|>P", stop="STOP").finish_reason == "stop"


def test_a_stop_string_on_the_last_token_that_is_allowed_is_a_stop(directory: Path) -> None:
    completion = run(directory, "wxyz", stop="z", max_tokens=4)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("wxy", "stop", "z")


def test_a_stop_token_id_ends_and_is_named_and_hidden(directory: Path) -> None:
    q = ids_of("q")[0]
    completion = run(directory, "abcqd", stop_token_ids=[q, 250])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("abc", "stop", q)
    assert completion.token_ids == ids_of("abcq")
    kept = run(directory, "abcqd", stop_token_ids=[q], include_stop_str_in_output=True)
    assert (kept.text, kept.token_ids) == ("abcq", ids_of("abcq"))


def test_ignore_eos_ignores_all_of_them_but_not_stop_token_ids(directory: Path) -> None:
    completion = run(directory, [IM_END, 2, IM_END, 2], ignore_eos=True, max_tokens=9)
    assert completion.token_ids == [IM_END, 2, IM_END, 2] + [FILLER] * 5
    assert completion.finish_reason == "length"
    completion = run(directory, [IM_END, 2, IM_END, 2], ignore_eos=True, stop_token_ids=[2])
    assert completion.token_ids == [IM_END, 2] and completion.stop_reason == 2


def test_min_tokens_holds_every_kind_of_stop_off(directory: Path) -> None:
    # Stop strings: the script says one within the first min_tokens tokens, and one after.
    completion = run(directory, "xy%cd%ef", stop="%", min_tokens=4)
    assert completion.text == "xy%cd" and completion.stop_reason == "%"
    completion = run(directory, "xy%%cd", stop="%%", min_tokens=3)
    assert completion.text == "xy" and completion.stop_reason == "%%"
    completion = run(directory, "xy%%cd", stop="%%", min_tokens=4, max_tokens=6)
    assert completion.text == "xy%%cd" and completion.finish_reason == "length"
    # A match that was complete too early does not count later either.
    completion = run(directory, "xcdyq", stop=["cd", "xcdq"], min_tokens=3, max_tokens=5)
    assert completion.text == "xcdyq" and completion.finish_reason == "length"
    # Ids: a scripted model is not banned from them, so they must not stop before their time.
    completion = run(directory, [IM_END, 2, 250, IM_END, 2], stop_token_ids=[250], min_tokens=4)
    assert completion.token_ids == [IM_END, 2, 250, IM_END]


def test_without_detokenization_there_is_no_text_and_all_else_is_the_same(directory: Path) -> None:
    completion = run(directory, "xyz<|im_end|>", detokenize=False, logprobs=0)
    assert completion.text == "" and completion.token_ids == ids_of("xyz<|im_end|>")
    assert completion.finish_reason == "stop" and len(completion.logprobs) == 4


def test_a_character_that_is_cut_off_by_the_end_becomes_one_replacement(directory: Path) -> None:
    ids = ids_of("a👨")
    completion = run(directory, ids, max_tokens=len(ids) - 1)
    assert completion.text == byte_tokenizer().decode(ids[:-1]) == "a�"


def test_logprobs_name_their_tokens(directory: Path) -> None:
    llm = make_llm(directory)
    output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=5))[0]
    for entry in output.outputs[0].logprobs or pytest.fail("no logprobs"):
        for token_id, value in entry.items():
            assert value.decoded_token == byte_tokenizer().decode([token_id])


def with_eos(config: Any, generation: Any, tokenizer: bool) -> Path:
    target = kit.new_directory()
    shutil.copytree(checkpoint("tied", tokenizer=tokenizer).directory, target, dirs_exist_ok=True)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "eos_token_id": config}))
    (target / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": generation}))
    return target


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (None, None, False, set()),
        (2, None, False, {2}),
        (None, 3, False, {3}),
        (None, None, True, {IM_END}),
        (2, [3, 4], True, {2, 3, 4, IM_END}),
        ([2, 9], 2, False, {2, 9}),
    ],
)
def test_end_of_sequence_comes_from_three_sources_together(
    config: Any, generation: Any, tokenizer: bool, expected: set[int]
) -> None:
    target = with_eos(config, generation, tokenizer)
    for eos in {2, 3, 4, 9, IM_END}:
        llm = fake_llm(target, kit.scripted(byte_tokenizer(), PROMPT, [50, eos, 60]))
        completion = llm.generate(PROMPT, SamplingParams(max_tokens=5))[0].outputs[0]
        if eos in expected:
            assert (completion.token_ids, completion.finish_reason) == ([50, eos], "stop")
        else:
            assert (completion.token_ids, completion.finish_reason) == ([50, eos, 60, 60, 60], "length")


@pytest.mark.parametrize("bad", ["2", 2.0, [2, "3"], True, {"a": 1}])
def test_an_end_of_sequence_that_is_no_id_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        make_llm(with_eos(bad, None, False))
    with pytest.raises(ValueError, match="eos_token_id"):
        make_llm(with_eos(2, bad, False))


@pytest.fixture(scope="module")
def real_model(directory: Path) -> Iterator[LLM]:
    with make_llm(directory, num_kvcache_blocks=200) as llm:
        yield llm


def test_a_batch_with_stops_gives_each_prompt_its_own_text(real_model: LLM) -> None:
    """With the tiny model: each text is cut at its stop, whatever its neighbours do, also while streaming."""
    tokenizer = byte_tokenizer()
    prompts = [[i, 2 * i] for i in range(12)]
    plain = real_model.generate(prompts, kit.greedy(30))
    params = []
    for i, output in enumerate(plain):
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
        middle = len(output.text) // 2
        params.append(kit.greedy(30, stop=output.text[middle : middle + 1 + i % 3] or "?"))
    for output, uncut, one in zip(real_model.generate(prompts, params), plain, params, strict=True):
        assert isinstance(one.stop, tuple)
        match = first_stop(uncut.text, one.stop)
        assert output.text == (uncut.text if match is None else uncut.text[: match[0]])
        assert uncut.token_ids[: len(output.token_ids)] == output.token_ids
        assert "".join(real_model.stream(output.prompt_token_ids, one)) == output.text
