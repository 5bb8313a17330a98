"""`Request`, its `Completion`s and `OutputProcessor`: new tokens of sequences into text, stop strings, and finally
`RequestOutput`s.

A completion pulls from its sequence whatever it has not taken yet. After a step that failed half-way, texts are made
again from the tokens, which are what counts; what was streamed of them stays streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.detokenizer import Detokenizer, StopStrings, TokenTable
from nanoinfer.engine.sequence import Sequence
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.step import TokenLogprobs


@dataclass
class CompletionDelta:
    """What a completion has grown by; finish_reason is set in the last one."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def output(self, table: TokenTable | None) -> CompletionOutput:
        """In the form that users get."""
        logprobs = cumulative = None
        if self.logprobs is not None:
            logprobs = [_logprob_dict(entry, table) for entry in self.logprobs]
            cumulative = sum((entry.logprobs[0] for entry in self.logprobs), 0.0)
        return CompletionOutput(
            self.index, self.text, self.token_ids, logprobs, cumulative, self.finish_reason, self.stop_reason
        )


class Completion:
    """A sequence with its text, which grows by what is certain to be in the final text."""

    def __init__(self, seq: Sequence, table: TokenTable | None) -> None:
        self.seq = seq
        # Ended, with all of its text; or aborted.
        self.is_done = False
        self._table = table
        self._num_streamed_pieces = self._num_streamed_tokens = 0
        self.restart()

    def restart(self) -> None:
        """Forgets the text, to make it again from the tokens."""
        params = self.seq.params
        # One per token, and one when it has ended: the same pieces when they are made again.
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
        return "".join(self._pieces)

    def advance(self) -> str | None:
        """Takes in the sequence's new tokens. Returns the stop string that they complete, if one does."""
        if self._detokenizer is None:
            return None
        seq = self.seq
        hidden = seq.is_ended_by_token and not seq.params.include_stop_str_in_output
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
        """What came since the last call of this or of `new_delta`."""
        new = self._pieces[self._num_streamed_pieces :]
        self._num_streamed_pieces = max(self._num_streamed_pieces, len(self._pieces))
        return "".join(new)

    def new_delta(self) -> CompletionDelta:
        """What came since the last call, tokens included."""
        start = self._num_streamed_tokens
        self._num_streamed_tokens = max(start, self.seq.num_output_tokens)
        return self._delta(self.new_text(), start)

    def output(self) -> CompletionOutput:
        return self._delta(self.text, 0).output(self._table)

    def _delta(self, text: str, start: int) -> CompletionDelta:
        seq = self.seq
        return CompletionDelta(
            seq.index,
            text,
            seq.token_ids[seq.num_prompt_tokens + start :],
            seq.logprobs[start:] if seq.params.logprobs is not None else None,
            seq.finish_reason.value if seq.finish_reason else None,
            seq.stop_reason,
        )


def _logprob_dict(entry: TokenLogprobs, table: TokenTable | None) -> dict[int, Logprob]:
    result: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        decoded = table.text_of(token_id) if table is not None else None
        result.setdefault(token_id, Logprob(logprob, rank, decoded))
    return result


@dataclass(eq=False)
class Request:
    """A prompt and its `n` completions."""

    request_id: str
    prompt: str | None
    completions: list[Completion]
    table: TokenTable | None
    # Made once: outputs of a stream share them.
    _prompt_token_ids: list[int] = field(init=False)
    _prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._prompt_token_ids = self.seq.token_ids[: self.seq.num_prompt_tokens]

    @property
    def seq(self) -> Sequence:
        """Of the first completion."""
        return self.completions[0].seq

    @property
    def is_done(self) -> bool:
        return all(completion.is_done for completion in self.completions)

    def output(self) -> RequestOutput:
        return self.wrap([completion.output() for completion in self.completions])

    def wrap(self, completions: list[CompletionOutput], finished: bool | None = None) -> RequestOutput:
        seq = self.seq
        if finished is None:
            finished = all(completion.seq.is_finished for completion in self.completions)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
            prompt_logprobs=self.prompt_logprobs(),
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """None if they were not asked for, or the request ended before they were known."""
        seq = self.seq
        if seq.params.prompt_logprobs is None or seq.lacks_prompt_logprobs:
            return None
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None, *(_logprob_dict(entry, self.table) for entry in seq.prompt_logprobs)]
        return self._prompt_logprobs


class OutputProcessor:
    """requests: those in progress, by the id of each sequence of theirs that is. finished: those that no step has
    returned yet.
    """

    def __init__(self, table: TokenTable | None) -> None:
        self._table = table
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []

    def make_request(self, prompt: str | None, sequences: list[Sequence], request_id: str | None = None) -> Request:
        completions = [Completion(seq, self._table) for seq in sequences]
        return Request(request_id or str(sequences[0].seq_id), prompt, completions, self._table)

    def restart(self) -> list[Sequence]:
        """Makes all requests take in their tokens anew. Returns all their sequences."""
        unfinished = [
            completion
            for request in dict.fromkeys(self.requests.values())
            for completion in request.completions
            if completion.seq.seq_id in self.requests
        ]
        for completion in unfinished:
            completion.restart()
        return [completion.seq for completion in unfinished]

    def process(self, sequences: list[Sequence]) -> list[tuple[Sequence, str]]:
        """Moves their requests on. Returns those that a stop string ends, for the scheduler to finish."""
        stopped = []
        for seq in sequences:
            request = self.requests.get(seq.seq_id)
            if request is None:
                continue
            completion = request.completions[seq.index]
            stop = completion.advance()
            if stop is not None:
                stopped.append((seq, stop))
            if stop is not None or seq.is_finished:
                completion.flush()
                completion.is_done = True
                if request.is_done and request not in self.finished:
                    self.finished.append(request)
                del self.requests[seq.seq_id]
        return stopped

    def take_finished(self) -> list[Request]:
        finished, self.finished = self.finished, []
        return finished

    def drop(self, request: Request) -> None:
        """The request was aborted: no step is to return it."""
        for completion in request.completions:
            completion.is_done = True
            self.requests.pop(completion.seq.seq_id, None)
        self.finished = [other for other in self.finished if other is not request]
