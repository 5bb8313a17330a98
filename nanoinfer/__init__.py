"""nanoinfer: a small, readable and fast inference engine for Qwen3."""

from nanoinfer.async_llm import AsyncLLM, QueueFullError, RequestFailedError
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.llm import LLM
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import RequestOutputKind, SamplingParams
from nanoinfer.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineDeadError",
    "Logprob",
    "QueueFullError",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
