"""`Request` and `OutputProcessor`: new tokens of sequences into text, stop strings, and finally `RequestOutput`s.

A request pulls from its sequence whatever it has not taken yet, so that nothing is lost or doubled if a step was
interrupted between the scheduler's update and this one.
"""

from __future__ import annotations

from nanoinfer.engine.detokenizer import Detokenizer, StopStrings, TokenTable
from nanoinfer.engine.sequence import FinishReason, Sequence
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.step import TokenLogprobs


class Request:
    """A sequence with its text. `text` grows by what is certain to be in the final text."""

    def __init__(self, request_id: str, prompt: str | None, seq: Sequence, table: TokenTable | None) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.seq = seq
        self._table = table
        self._pieces: list[str] = []
        self._num_taken = 0
        self._num_streamed = 0
        self._flushed = False
        params = seq.params
        self._detokenizer: Detokenizer | None = None
        if table is not None and params.detokenize:
            self._detokenizer = Detokenizer(table, params.skip_special_tokens)
        assert isinstance(params.stop, tuple)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

    @property
    def is_finished(self) -> bool:
        return self.seq.is_finished

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def advance(self) -> str | None:
        """Takes in the sequence's new tokens. Returns the stop string that they complete, if one does."""
        if self._detokenizer is None:
            return None
        seq = self.seq
        ended_by_token = seq.finish_reason is FinishReason.STOP
        hidden = ended_by_token and not seq.params.include_stop_str_in_output
        last = seq.num_output_tokens - hidden
        while self._num_taken < last:
            token_id = seq.token_ids[seq.num_prompt_tokens + self._num_taken]
            self._num_taken += 1
            # As in vLLM, stop strings count from the token after the first min_tokens ones.
            search = not seq.params.min_tokens or self._num_taken > seq.params.min_tokens
            released, stop = self._stops.feed(self._detokenizer.feed(token_id), search)
            self._pieces.append(released)
            if stop is not None:
                self._flushed = True
                return stop
        return None

    def flush(self) -> None:
        """The sequence has ended: what was held back is part of the text."""
        if self._detokenizer is not None and not self._flushed:
            self._flushed = True
            released, _ = self._stops.feed(self._detokenizer.flush(), search=False)
            self._pieces.append(released + self._stops.flush())

    def new_text(self) -> str:
        """What came since the last call."""
        text = self.text
        delta, self._num_streamed = text[self._num_streamed :], len(text)
        return delta

    def output(self) -> RequestOutput:
        seq = self.seq
        logprobs = cumulative = None
        if seq.params.logprobs is not None:
            logprobs = [self._logprob_dict(entry) for entry in seq.logprobs]
            cumulative = sum(entry.logprobs[0] for entry in seq.logprobs)
        completion = CompletionOutput(
            text=self.text,
            token_ids=seq.output_token_ids,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            finish_reason=seq.finish_reason.value if seq.finish_reason else None,
            stop_reason=seq.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            outputs=[completion],
            finished=seq.is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        result: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            decoded = self._table.text_of(token_id) if self._table is not None else None
            result.setdefault(token_id, Logprob(logprob, rank, decoded))
        return result


class OutputProcessor:
    """The requests in progress, by their sequence's id."""

    def __init__(self, table: TokenTable | None) -> None:
        self._table = table
        self.requests: dict[int, Request] = {}

    def add(self, request_id: str, prompt: str | None, seq: Sequence) -> Request:
        request = Request(request_id, prompt, seq, self._table)
        self.requests[seq.seq_id] = request
        return request

    def process(self, sequences: list[Sequence]) -> tuple[list[Request], list[tuple[Sequence, str]]]:
        """(requests that are now finished, sequences that a stop string ends: for the scheduler to finish)."""
        finished, stopped = [], []
        for seq in sequences:
            request = self.requests.get(seq.seq_id)
            if request is None:
                continue
            stop = request.advance()
            if stop is not None:
                stopped.append((seq, stop))
            if stop is not None or seq.is_finished:
                request.flush()
                del self.requests[seq.seq_id]
                finished.append(request)
        return finished, stopped
