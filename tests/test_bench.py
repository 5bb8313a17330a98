"""The benchmark's arithmetic: its workloads, its floor, its refusals, and one small run. Nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer.bench import host_time, machine
from nanoinfer.bench import throughput as bench
from nanoinfer.config import ModelConfig
from nanoinfer.step import StepStats

JSON_KEYS = {
    "workload", "device", "prompt_tokens", "output_tokens", "seconds", "output_tok_s", "prefill_tok_s", "decode_tok_s",
    "batch1_tok_s", "batch1_fraction_of_floor", "prefill_512_fraction", "rss_beyond_gib", "preemptions", "read_gb_s",
    "gemm_tflop_s", "floor_tok_s", "fraction_of_floor", "host_ms_per_step",
}  # fmt: skip
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 10016,
}


def stats(**counts: Any) -> StepStats:
    names = ("prefill_tokens", "decode_tokens", "sampled", "context_tokens", "attention_pairs", "running", "waiting")
    zeros = {f"num_{name}": 0 for name in (*names, "preemptions")}
    return StepStats(**{**zeros, "seconds": 0.0, "execute_seconds": 0.0, **counts})


@pytest.fixture(scope="module")
def floor() -> Any:
    return bench.Floor.of_model(ModelConfig.from_dict(bench.QWEN3_0_6B), itemsize=2)


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "output_tokens"), [("w1", 9_583, 4_818), ("nano-vllm", 142_827, 133_966)]
)
def test_workloads_are_the_published_ones(name: str, prompt_tokens: int, output_tokens: int) -> None:
    workload = bench.Workload.draw(name, bench.PRESETS[name].num_seqs, seed=0)
    assert sum(map(len, workload.prompts)) == prompt_tokens
    assert sum(workload.output_lens) == output_tokens
    assert all(0 <= token <= 10_000 for prompt in workload.prompts for token in prompt)


def test_workload_shrinks_as_the_peers_script_does() -> None:
    few, all_ = bench.Workload.draw("w1", 4, seed=0), bench.Workload.draw("w1", 32, seed=0)
    assert few.prompts == all_.prompts[:4]
    assert len(few.output_lens) == 4
    assert bench.Workload.draw("w1", 4, seed=1).prompts != few.prompts


def test_weights_and_kv_cache_of_qwen3_0_6b(floor: Any) -> None:
    # Per layer: q and o 1024 x 2048, k and v 1024 x 1024, three of 1024 x 3072; then 151936 x 1024.
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    assert floor.linear_weights == 28 * layer == 440_401_920
    assert floor.linear_bytes + floor.head_bytes == 1_191_968_768
    assert floor.kv_bytes == 114_688
    assert floor.linear_bytes == 880_803_840
    assert floor.pair_flops == 229_376


def test_floor_in_another_dtype_and_with_untied_embeddings() -> None:
    untied = ModelConfig.from_dict(bench.QWEN3_0_6B | {"tie_word_embeddings": False})
    floor = bench.Floor.of_model(untied, itemsize=4)
    assert floor.kv_bytes == 2 * 114_688
    assert floor.linear_bytes + floor.head_bytes == 2 * 1_191_968_768


def test_floor_of_int8_weights_reads_a_byte_each_and_a_scale_per_output(floor: Any) -> None:
    int8 = bench.Floor.of_model(ModelConfig.from_dict(bench.QWEN3_0_6B), itemsize=2, quantization="int8")
    # Outputs of q, k, v, o, gate, up and down.
    outputs = 2048 + 2 * 1024 + 1024 + 2 * 3072 + 1024
    assert int8.linear_bytes == 440_401_920 + 28 * 4 * outputs
    assert int8.head_bytes == 151936 * (1024 + 4)
    assert (int8.kv_bytes, int8.pair_flops) == (floor.kv_bytes, floor.pair_flops)
    rates = bench.Machine(read_gb_s=10.0, gemm_tflop_s=1.0)
    decode = stats(num_decode_tokens=1, num_sampled=1, num_context_tokens=100)
    assert int8.seconds(decode, rates) == pytest.approx((597_968_384 + 100 * 114_688) / 1e10, rel=1e-12)
    prompt = stats(num_prefill_tokens=1000, num_attention_pairs=500_500)
    assert int8.seconds(prompt, rates) == pytest.approx((1000 * 440_401_920 + 500_500 * 229_376) / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        # One row decoding: reading the weights outweighs 1.19e9 FLOP.
        (stats(num_decode_tokens=1, num_sampled=1, num_context_tokens=100), (1_191_968_768 + 100 * 114_688) / 1e10),
        # A chunk of a long prompt samples nothing: 1000 tokens, 880,803,840 FLOP each, and the pairs; no head.
        (
            stats(num_prefill_tokens=1000, num_context_tokens=1000, num_attention_pairs=500_500),
            (1000 * 880_803_840 + 500_500 * 229_376) / 1e12 + 1000 * 114_688 / 1e10,
        ),
        # One token of a prompt, nothing sampled: the linears are read, the head's 311,164,928 bytes are not.
        (
            stats(num_prefill_tokens=1, num_context_tokens=1, num_attention_pairs=1),
            (880_803_840 + 114_688) / 1e10,
        ),
        # A mixed step: both kinds of tokens, the head for the sampled rows alone.
        (
            stats(num_prefill_tokens=500, num_decode_tokens=12, num_sampled=14, num_context_tokens=2000),
            (512 * 880_803_840 + 14 * 311_164_928) / 1e12 + 2000 * 114_688 / 1e10,
        ),
    ],
)
def test_floor_of_a_step(floor: Any, step: StepStats, seconds: float) -> None:
    rates = bench.Machine(read_gb_s=10.0, gemm_tflop_s=1.0)
    assert floor.seconds(step, rates) == pytest.approx(seconds, rel=1e-12)


def simulate(workload: Any, budget: int) -> list[StepStats]:
    """The steps of an engine with a pool that never fills: running sequences first, then in order of arrival."""
    prompts, outputs = [len(prompt) for prompt in workload.prompts], workload.output_lens
    computed, sampled, steps = [0] * len(prompts), [0] * len(prompts), []
    while any(done < wanted for done, wanted in zip(sampled, outputs, strict=True)):
        counts = dict.fromkeys(("prefill_tokens", "decode_tokens", "sampled", "context_tokens", "attention_pairs"), 0)
        left = budget
        for i in (i for i in range(len(prompts)) if sampled[i] < outputs[i]):
            tokens = min(prompts[i] + sampled[i] - computed[i], left)
            if tokens == 0:
                break
            left -= tokens
            if sampled[i]:
                counts["decode_tokens"] += 1
            else:
                counts["prefill_tokens"] += tokens
                counts["attention_pairs"] += sum(range(computed[i] + 1, computed[i] + tokens + 1))
            computed[i] += tokens
            counts["context_tokens"] += computed[i]
            if computed[i] == prompts[i] + sampled[i]:
                sampled[i] += 1
                counts["sampled"] += 1
        steps.append(stats(**{f"num_{name}": count for name, count in counts.items()}))
    return steps


@pytest.mark.parametrize(("gemm", "read", "seconds"), [(2.0, 24.0, 25.2), (2.2, 28.0, 21.8)])
def test_floor_of_w1_is_the_published_one(floor: Any, gemm: float, read: float, seconds: float) -> None:
    workload, rates = bench.Workload.draw("w1", 32, seed=0), bench.Machine(read, gemm)
    # The published seconds are those of whole prompts in one step each; chunks of 1024 tokens cost 0.7 % less, since
    # the first sequences decode while the last prompts are computed.
    for budget, tolerance in ((1 << 20, 0.003), (1024, 0.01)):
        steps = simulate(workload, budget)
        assert sum(step.num_prefill_tokens for step in steps) == 9_583
        assert sum(step.num_sampled for step in steps) == 4_818
        assert sum(floor.seconds(step, rates) for step in steps) == pytest.approx(seconds, rel=tolerance)


def test_summary_attributes_mixed_steps_to_prefill(floor: Any) -> None:
    steps = [
        stats(num_prefill_tokens=90, num_sampled=1, num_context_tokens=90, seconds=2.0, execute_seconds=1.5),
        stats(num_prefill_tokens=10, num_decode_tokens=1, num_sampled=2, num_preemptions=1, seconds=1.0),
        stats(num_decode_tokens=2, num_sampled=2, num_context_tokens=110, seconds=0.5, execute_seconds=0.25),
        stats(num_decode_tokens=1, num_sampled=1, num_context_tokens=60, seconds=0.25, execute_seconds=0.25),
    ]
    workload = bench.Workload("w1", [[1] * 90, [2] * 10], [4, 2])
    alone = [stats(num_prefill_tokens=128, num_sampled=1, num_context_tokens=128), stats(num_decode_tokens=1)]
    whole = stats(num_prefill_tokens=1024, num_sampled=2, num_context_tokens=1024, num_attention_pairs=512 * 513)
    run = bench.Run(
        bench.Timed(4.0, 6, steps), bench.Timed(2.0, 64, alone), bench.Timed(8.0, 8, [whole] * 4), rss_beyond=3 * 2**28
    )
    rates = bench.Machine(10.0, 1.0)
    summary = bench.summarize(workload, run, floor, rates)
    expected = {"prompt_tokens": 100, "output_tokens": 6, "output_tok_s": 1.5, "preemptions": 1, "mean_batch": 1.5}
    expected |= {"batch1_tok_s": 32.0, "prefill_tok_s": 100 / 3, "decode_tok_s": 4.0, "host_ms_per_step": 125.0}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    least = sum(floor.seconds(step, rates) for step in steps)
    assert summary["floor_tok_s"] == pytest.approx(6 / least)
    assert summary["fraction_of_floor"] == pytest.approx(least / 4.0)
    assert summary["batch1_fraction_of_floor"] == pytest.approx(sum(floor.seconds(step, rates) for step in alone) / 2)
    # Eight prompts of 512: 880,803,840 FLOP a token, 311,164,928 for each head, 131,328 pairs of 229,376 a prompt.
    flops = 8 * (512 * 880_803_840 + 311_164_928 + 131_328 * 229_376)
    assert summary["prefill_512_fraction"] == pytest.approx(flops / 1e12 / 8.0)
    assert summary["rss_beyond_gib"] == 0.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["w1"], "unrecognized"),
        (["--num-seq", "4"], "unrecognized"),
        (["--temperature", "0"], "unrecognized"),
        (["--workload", "w2"], "invalid choice"),
        (["--num-seqs", "0"], "--num-seqs 0"),
        (["--workload", "w1", "--num-seqs", "33"], "--num-seqs 33"),
        (["--num-seqs", "four"], "invalid int"),
        (["--seed", "-1"], "seed is -1"),
        (["--dtype", "int8"], "int8"),
        (["--quantization", "int4"], "invalid choice: 'int4'"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size is 0"),
        (["--cpu-kvcache-gib", "-1", "--device", "cpu"], "cpu_kvcache_gib is -1"),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], "--gpu-memory-utilization"),
        (["--load-format", "auto"], "--load-format"),
        (["--workload", "w1", "--max-model-len", "512"], "--max-model-len 512"),
        (["--plot", "growth.svg"], "--plot"),
        (["--growth", "--model", "somewhere"], "--model"),
        (["--growth", "--tensor-parallel-size", "2"], "one rank"),
        (["--growth", "--plot", "no/such/folder/growth.svg"], "no/such/folder"),
    ],
)
def test_wrong_and_surplus_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench.parse_args(arguments)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_options_reach_the_engine() -> None:
    args, config = bench.parse_args(["--device", "cpu", "--num-seqs", "3", "--max-num-batched-tokens", "64"])
    assert (args.workload, args.num_seqs, args.json) == ("w1", 3, False)
    assert (config.device, config.load_format, config.dtype, config.seed) == ("cpu", "dummy", "bfloat16", 0)
    assert (config.max_model_len, config.max_num_batched_tokens, config.enforce_eager) == (2048, 64, False)
    assert config.quantization is None
    _, config = bench.parse_args(
        ["--device", "cpu", "--model", "somewhere", "--enforce-eager", "--quantization", "int8"]
    )
    assert (config.model, config.load_format, config.enforce_eager) == ("somewhere", "auto", True)
    assert config.quantization == "int8"


class FakeLLM:
    """Returns as many tokens as `produce` makes of the number asked for; `cached` prompt tokens are not computed."""

    def __init__(self, produce: Any, cached: int = 0) -> None:
        self.engine = SimpleNamespace(on_step=None, executor=None)
        self._produce, self._cached = produce, cached

    def generate(self, prompts: list[list[int]], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.engine.on_step(stats(num_prefill_tokens=sum(map(len, prompts)) - self._cached))
        assert all(p.ignore_eos for p in params)
        counts = [self._produce(p.max_tokens) for p in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]


def test_missing_tokens_and_cached_prompts_are_not_measured() -> None:
    workload = bench.Workload("w1", [[1, 2, 3], [4, 5]], [4, 2])
    run = bench.run_workload(FakeLLM(lambda n: n), workload, seed=0)
    assert run.workload.output_tokens == 6 and len(run.workload.steps) == 1
    assert (run.batch1.output_tokens, run.batch1.steps) == (64, [stats(num_prefill_tokens=128)])
    assert (run.prefill.output_tokens, run.prefill.steps) == (8, [stats(num_prefill_tokens=8 * 512)])
    assert run.rss_beyond is None
    with pytest.raises(RuntimeError, match="produced"):
        bench.run_workload(FakeLLM(lambda n: n - 1), workload, seed=0)
    with pytest.raises(RuntimeError, match="cache"):
        bench.run_workload(FakeLLM(lambda n: n, cached=1), workload, seed=0)


def test_the_best_repeat_of_the_fastest_method_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call(durations: list[float]) -> Any:
        remaining = iter(durations)

        def advance() -> None:
            nonlocal now
            now += next(remaining)

        return advance

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now)
    # The first call of each is its warm-up.
    methods = {"slow": (8.0, call([0.1, 4.0, 2.0])), "fast": (8.0, call([9.0, 3.0, 1.0]))}
    assert machine.best_rate(methods, 2, "cpu") == (8.0, "fast")


def test_a_small_run_prints_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(bench, "measure_machine", lambda device, dtype, ranks: bench.Machine(10.0, 1.0))
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    bench.main([*options, "--workload", "w1", "--num-seqs", "2", "--cpu-kvcache-gib", "0.1", "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    report = json.loads(lines[0])
    workload = bench.Workload.draw("w1", 2, seed=0)
    assert report.keys() >= JSON_KEYS
    assert (report["workload"], report["device"], report["read_gb_s"]) == ("w1", "cpu", 10.0)
    assert report["prompt_tokens"] == sum(map(len, workload.prompts))
    assert report["output_tokens"] == sum(workload.output_lens)
    assert report["settings"]["dtype"] == "float32" and report["threads"] >= 1


def test_host_only_prints_a_step_for_each_number_of_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure_host_time", lambda: host_time.measure_host_time((1, 3)))
    bench.main(["--host-only", "--json"])
    report = json.loads(capsys.readouterr().out)
    for name in ("host_ms_per_step", "host_ms_per_step_gpu"):
        assert report[name].keys() == {"1", "3"}
        assert all(milliseconds > 0 for milliseconds in report[name].values())
