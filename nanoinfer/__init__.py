"""nanoinfer: a small, readable and fast inference engine for Qwen3."""

from nanoinfer.executor.base import EngineDeadError
from nanoinfer.llm import LLM
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.version import __version__

__all__ = ["LLM", "CompletionOutput", "EngineDeadError", "Logprob", "RequestOutput", "SamplingParams", "__version__"]
