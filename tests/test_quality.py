"""`bench.py --quality`: the distances of known distributions, and forced tokens through the real engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bench import TINY

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench import quality
from nanoinfer.bench.quality import Distance, ForcedText
from nanoinfer.demo.questions import held_out_set


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_distance_of_known_distributions() -> None:
    reference = [logits(0.5, 0.25, 0.25), logits(0.2, 0.8, 1e-30)]
    tested = [logits(0.25, 0.5, 0.25), logits(0.2, 0.8, 1e-30)]
    found = Distance.between(reference, tested)
    # 0.5 log(0.5 / 0.25) + 0.25 log(0.25 / 0.5) in the first position, and nothing in the second.
    assert found.max_kl == pytest.approx(0.25 * math.log(2)) and found.mean_kl == pytest.approx(0.125 * math.log(2))
    assert (found.positions, found.top1_agreement) == (2, 0.5)
    norm = math.sqrt(math.log(2) ** 2 + 2 * math.log(4) ** 2)
    assert found.max_logit_error == pytest.approx(math.sqrt(2) * math.log(2) / norm)
    assert found.mean_logit_error == pytest.approx(found.max_logit_error / 2)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=20), st.floats(-50, 50))
def test_a_constant_does_not_change_a_distribution(values: list[float], constant: float) -> None:
    one = torch.tensor([values])
    found = Distance.between([one], [one + constant])
    assert found.max_kl == pytest.approx(0, abs=1e-4)
    other = Distance.between([one], [one.flip(1)])
    weights = [math.exp(value) for value in one[0].tolist()]
    # Flipped, a token has the other's probability, and the normalizer is the same.
    pairs = zip(weights, one[0].tolist(), one[0].flip(0).tolist(), strict=True)
    expected = sum(weight * (mine - flipped) for weight, mine, flipped in pairs) / sum(weights)
    assert other.max_kl == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_not_a_number_is_not_hidden() -> None:
    one = torch.ones(1, 4)
    assert math.isnan(Distance.between([one, one], [one, one * math.nan]).max_kl)


@pytest.fixture
def llm(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "seed": 0}
    with LLM(tmp_path, num_kvcache_blocks=64, **options) as llm:
        yield llm


def test_forced_tokens_give_the_logits_that_the_model_has_after_them(llm: LLM) -> None:
    text = ForcedText([[5, 6, 7], [8, 9, 10, 11, 12], [13]], [[20, 21, 22], [23], [24, 25]])
    steps = quality.forced_logits(llm, text)
    assert [len(step) for step in steps] == [3, 2, 1]
    # The best token after the same tokens as a prompt, which no forcing has touched.
    alive = [[0, 1, 2], [0, 2], [0]]
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
    for index, (step, members) in enumerate(zip(steps, alive, strict=True)):
        prompts = [text.prompts[i] + text.continuations[i][:index] for i in members]
        for row, output in zip(step, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
            token = output.outputs[0].token_ids[0]
            assert token == int(row.argmax())
            assert output.outputs[0].logprobs[0][token].logprob == pytest.approx(
                float(row.log_softmax(-1)[token]), abs=1e-4
            )


def test_prompts_that_do_not_fit_one_step_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "num_kvcache_blocks": 64}
    with LLM(tmp_path, max_num_batched_tokens=16, **options) as llm, pytest.raises(RuntimeError, match="in step"):
        quality.forced_logits(llm, ForcedText([[1] * 10, [2] * 10], [[3, 4], [5, 6]]))


def test_the_report_has_each_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nanoinfer.bench import throughput

    monkeypatch.setattr("nanoinfer.bench.workload.QWEN3_0_6B", TINY)
    monkeypatch.setattr(quality, "_FORCED_PER_FAMILY", 1)
    monkeypatch.setattr(quality, "_ASKED_PER_FAMILY", 1)
    monkeypatch.setattr(quality, "_SHAPE_INPUT", 8)
    families = ("addition", "comparing", "spelling", "alphabet", "capitals", "opposites")
    few = {family: held_out_set(1)[family] for family in families}
    monkeypatch.setattr(quality, "held_out_set", lambda per_family: few)
    small = {"dtype": "float32", "cpu_kvcache_gib": 0.25}  # mapping the usual 4 GiB takes seconds
    monkeypatch.setattr(quality, "REFERENCE", small)
    monkeypatch.setattr(quality, "SETTINGS", {"same": small})
    throughput.main(["--quality", "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["accuracy"].keys() == {"float32", "same"} and report["accuracy"]["same"] > 0.5
    for model in ("demo", "shape"):
        assert report[model].keys() == {"same"}
        assert report[model]["same"]["top1_agreement"] == 1.0 and report[model]["same"]["max_logit_error"] < 1e-5
    table = quality.quality_markdown(report)
    assert "| shape | same |" in table
