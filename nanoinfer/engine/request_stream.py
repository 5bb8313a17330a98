"""`Mailbox` and `RequestStream`: one request, from the side of whoever reads its outputs on an event loop.

The engine loop's thread hands over what a step brought with `Mailbox.post`, which only schedules; all else of a mailbox
happens in the event loop that made it, so it needs no lock. What has not been read yet is merged.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from nanoinfer.engine.output_processor import CompletionDelta, Request
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.sampling_params import RequestOutputKind, SamplingParams


class RequestFailedError(RuntimeError):
    """Something went wrong that is this request's alone: its grammar raised, or allowed nothing."""


class Mailbox:
    """What has come for one request and has not been read. For the event loop that it was made in.

    request: None until the engine loop has it, as long as its prompt is tokenized. is_aborted: the loop's note, then.
    """

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.request: Request | None = None
        self.is_aborted = False
        self.kind = params.output_kind
        self.loop = asyncio.get_running_loop()
        self.error: BaseException | None = None
        self.lacks_prompt_logprobs = params.prompt_logprobs is not None
        # By completion, all that has come; of a stream of deltas, all that has not been read.
        self._parts: dict[int, CompletionOutput] = {}
        if self.kind is not RequestOutputKind.DELTA:
            with_logprobs = params.logprobs is not None
            self._parts = {index: _fresh(index, with_logprobs) for index in range(params.n)}
        self._unread: set[int] = set()
        self._unfinished = set(range(params.n))
        self._has_been_read = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_started(self) -> bool:
        """Whether a step has taken it up. Safe in any thread."""
        if self.request is None:
            return False
        seq = self.request.seq
        return seq.first_scheduled_time is not None or seq.is_finished

    @property
    def is_complete(self) -> bool:
        return not self._unfinished or self.error is not None

    @property
    def can_be_read(self) -> bool:
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return bool(self._unread) and not self._unfinished
        return bool(self._unread)

    def push(self, delta: CompletionDelta) -> None:
        """Takes in what a completion has grown by."""
        if self.error is not None:
            return
        assert self.request is not None
        new = delta.output(self.request.table)
        if (part := self._parts.setdefault(delta.index, new)) is not new:
            _extend(part, new)
        self._unread.add(delta.index)
        if new.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come. What has come can still be read."""
        self.error = error
        self._wake()

    def read(self) -> RequestOutput:
        assert self.request is not None
        if self.kind is RequestOutputKind.DELTA:
            parts = [self._parts.pop(index) for index in sorted(self._unread)]
        else:
            parts = [
                replace(part, token_ids=part.token_ids.copy(), logprobs=part.logprobs and part.logprobs.copy())
                for part in self._parts.values()
            ]
        self._unread.clear()
        output = self.request.wrap(parts, finished=not self._unfinished)
        if self.kind is RequestOutputKind.DELTA and self._has_been_read:
            output.prompt_logprobs = None
        self._has_been_read = True
        return output

    async def make_prompt_logprobs(self) -> None:
        """Once, and in another thread: those of a long prompt would hold up all streams."""
        assert self.request is not None
        made = await self.loop.run_in_executor(None, self.request.prompt_logprobs)
        self.lacks_prompt_logprobs = made is None

    async def wait(self) -> None:
        """Until something has come, or has gone wrong."""
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request_id} is already being waited for")
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _fresh(index: int, with_logprobs: bool) -> CompletionOutput:
    if with_logprobs:
        return CompletionOutput(index=index, logprobs=[], cumulative_logprob=0.0)
    return CompletionOutput(index=index)


def _extend(part: CompletionOutput, new: CompletionOutput) -> None:
    part.text += new.text
    part.token_ids += new.token_ids
    if part.logprobs is not None and new.logprobs is not None:
        part.logprobs += new.logprobs
        part.cumulative_logprob = (part.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
    part.finish_reason, part.stop_reason = new.finish_reason, new.stop_reason


# For a mailbox: what a completion has grown by, or why nothing more will come.
Letter = tuple[Mailbox, CompletionDelta | Exception]


def post(letters: Iterable[Letter]) -> list[Mailbox]:
    """Sends letters, in one piece per event loop. From any thread.

    Returns the mailboxes whose event loop is closed, so that nobody is left who could read them.
    """
    batches: dict[asyncio.AbstractEventLoop, list[Letter]] = defaultdict(list)
    for letter in letters:
        batches[letter[0].loop].append(letter)
    unreachable: list[Mailbox] = []
    for loop, batch in batches.items():
        try:
            loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            unreachable += [mailbox for mailbox, _ in batch]
    return unreachable


def _deliver(batch: list[Letter]) -> None:
    for mailbox, letter in batch:
        if isinstance(letter, Exception):
            mailbox.fail(letter)
        else:
            mailbox.push(letter)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request. Closing it, cancelling whoever waits for it, or dropping it aborts the request.

    For the event loop that it was made in. Not a generator, because one that was never started is not cleaned up after.
    """

    def __init__(self, mailbox: Mailbox, discard: Callable[[Mailbox], None]) -> None:
        self._mailbox = mailbox
        self._discard = discard
        self._is_over = False

    @property
    def request_id(self) -> str:
        return self._mailbox.request_id

    async def __anext__(self) -> RequestOutput:
        mailbox = self._mailbox
        while not self._is_over:
            try:
                if mailbox.can_be_read:
                    if mailbox.lacks_prompt_logprobs:
                        await mailbox.make_prompt_logprobs()
                    output = mailbox.read()
                    self._is_over = output.finished
                    return output
                if mailbox.error is not None:
                    self._is_over = True
                    raise mailbox.error
                await mailbox.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """The iteration ends; a request that has not ended is aborted."""
        self._close()

    def _close(self) -> None:
        self._is_over = True
        if not self._mailbox.is_complete:
            self._discard(self._mailbox)

    def __del__(self) -> None:
        self._close()
