"""Answers two prompts in chat form, with the demo checkpoint unless another model is named.

python example.py                                   the model of a few million parameters that ships with nanoinfer
python example.py --model Qwen/Qwen3-0.6B           a directory or a Hugging Face hub id
"""

import argparse
import logging

from nanoinfer import LLM, SamplingParams
from nanoinfer.demo import demo_model_path

PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()), help="default: the demo checkpoint")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="of keys and values")
    parser.add_argument("--quantization", choices=("int8",), help="of the weights, when they are loaded")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    params = SamplingParams(temperature=0.6, max_tokens=args.max_tokens)
    with LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    ) as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(conversations, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"\nPrompt: {prompt!r}\nCompletion: {output.text!r}")


if __name__ == "__main__":
    main()
