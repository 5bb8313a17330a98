"""`Request` and `OutputProcessor`: new tokens of sequences into text, stop strings, and finally `RequestOutput`s.

A request pulls from its sequence whatever it has not taken yet. After a step that failed half-way, texts are made again
from the tokens, which are what counts; what was streamed of them stays streamed.
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
        # Ended, with all of its text; or aborted.
        self.is_done = False
        self._table = table
        self._num_streamed = 0
        self.restart()

    def restart(self) -> None:
        """Forgets the text, to make it again from the tokens."""
        params = self.seq.params
        self._pieces: list[str] = []
        self._num_taken = 0
        self._flushed = False
        self._detokenizer: Detokenizer | None = None
        if self._table is not None and params.detokenize:
            self._detokenizer = Detokenizer(self._table, params.skip_special_tokens)
        assert isinstance(params.stop, tuple)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

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
    """requests: those in progress, by their sequence's id. finished: those that no step has returned yet."""

    def __init__(self, table: TokenTable | None) -> None:
        self._table = table
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []

    def make_request(self, prompt: str | None, seq: Sequence) -> Request:
        return Request(str(seq.seq_id), prompt, seq, self._table)

    def restart(self) -> list[Sequence]:
        """Makes all requests take in their tokens anew. Returns all their sequences."""
        for request in self.requests.values():
            request.restart()
        return [request.seq for request in self.requests.values()]

    def process(self, sequences: list[Sequence]) -> list[tuple[Sequence, str]]:
        """Moves their requests on. Returns those that a stop string ends, for the scheduler to finish."""
        stopped = []
        for seq in sequences:
            request = self.requests.get(seq.seq_id)
            if request is None:
                continue
            stop = request.advance()
            if stop is not None:
                stopped.append((seq, stop))
            if stop is not None or seq.is_finished:
                request.flush()
                self.finished.append(request)
                request.is_done = True
                del self.requests[seq.seq_id]
        return stopped

    def take_finished(self) -> list[Request]:
        finished, self.finished = self.finished, []
        return finished

    def drop(self, request: Request) -> None:
        """The request was aborted: no step is to return it."""
        request.is_done = True
        self.requests.pop(request.seq.seq_id, None)
        self.finished = [other for other in self.finished if other is not request]
