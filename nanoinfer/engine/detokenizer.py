"""Token ids to text, one at a time: `TokenTable`, `Detokenizer` and `StopStrings`.

Qwen3's tokenizer is a byte-level BPE: a token is a string of bytes, and a character may be spread over several tokens.
So bytes are what is decoded incrementally, which gives the text of decoding all ids at once by construction, also where
the bytes are not UTF-8 (tokenizers' DecodeStream raises there).
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values (Radford et al., 2019): character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTable:
    """The bytes of each token id, looked up once. Ids that the tokenizer does not know (padding rows) have none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self.special_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or type(backend.decoder).__name__ != "ByteLevel":
            raise ValueError(f"{type(tokenizer).__name__} is not a byte-level tokenizer, as Qwen3's are")

    def bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.backend_tokenizer.id_to_token(token_id) or ""
            try:
                known = bytes(map(self._alphabet.__getitem__, token))
            except KeyError:
                known = token.encode()
            self._bytes[token_id] = known
        return known

    def text_of(self, token_id: int) -> str:
        """The token alone, for showing; broken characters become U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


class Detokenizer:
    """Feeds of ids whose texts, with the final flush, concatenate to the decoding of all ids."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is now certain; a character's first bytes are held back until its last."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._table.bytes_of(token_id))

    def flush(self) -> str:
        """What an unfinished character decodes to."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds stop strings in text that comes in pieces; holds back only what could still begin one.

    Of several matches the one that is complete first counts, the longer of two that are complete at once: so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""

    def feed(self, piece: str, search: bool = True) -> tuple[str, str | None]:
        """(text released, stop string found). With `search` off, a match that ends within this piece does not count."""
        text = self._held + piece
        if not self._stops:
            return text, None
        if search:
            matches = [
                (start + len(stop), start, stop)
                for stop in self._stops
                # What ends within the held text was there when it did not count.
                if (start := text.find(stop, max(0, len(self._held) - len(stop) + 1))) >= 0
            ]
            if matches:
                end, start, stop = min(matches)
                self._held = ""
                return text[: end if self._include else start], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that begins `stop` without being all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
