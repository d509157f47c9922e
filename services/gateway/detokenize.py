"""Token ids to text, one at a time, and back to the bytes behind it. Knows a vocabulary; nothing of stops or clients.

A detokenizer takes the ids of one choice in order and gives the text that each one completed. An
id is *released* with its text; released texts come in the order of the ids, one per id.

    ids        41   f0   9f   94   a5            20
    released  "a"                 "" "" "" "🔥"  " "      the character belongs to the id that completes it
    ids        f0   9f   41
    released            "" "�" "a"                        what a broken one becomes, to the last id that has bytes of it

An id is held as long as its last character is not complete, so that no text comes without its id.

The texts joined equal the tokenizer's own decoding of all ids, wherever the stream is cut.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from services.gateway.request import Delta
from services.gateway.vocabulary import Vocabulary, strip_left

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The text of one choice."""

    def push(self, token_id: int) -> Sequence[str]:
        """Takes an id; gives the texts of the oldest ids that were not yet released, one per id."""
        ...

    def finish(self) -> Sequence[str]:
        """The texts of the ids that are still held; the last of them has what a broken last character becomes."""
        ...


def new_detokenizer(vocabulary: Vocabulary, *, skip_special_tokens: bool) -> Detokenizer:
    """The detokenizer that fits the vocabulary."""
    skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
    if vocabulary.joining.by_bytes:
        return ByteDetokenizer(vocabulary, skipped)
    return PieceDetokenizer(vocabulary, skipped)


class ByteDetokenizer:
    """Byte-level BPE: the bytes of all ids, read as UTF-8. Ids are held only within a character."""

    __slots__ = ("_fragments", "_held", "_last", "_pending", "_skipped")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._fragments = vocabulary.fragments
        self._skipped = skipped
        self._pending = b""
        self._held: list[str] = []  # what ids have completed, of which the last goes on
        self._last = 0  # the last of them that has bytes

    def push(self, token_id: int) -> Sequence[str]:
        """Takes an id; gives the texts of the ids whose text is now known."""
        if token_id in self._skipped or not 0 <= token_id < len(self._fragments):
            fragment: str | bytes | int = b""
        else:
            fragment = self._fragments[token_id]
        if isinstance(fragment, str):
            if not self._pending:
                return (fragment,)
            fragment = fragment.encode()
        elif isinstance(fragment, int):
            fragment = b""
        if not fragment:
            self._held.append("")
            return () if self._pending else self._release()
        known = self._break() if self._pending and _breaks(self._pending, fragment) else ()
        text, self._pending = _decode(self._pending + fragment)
        self._last = len(self._held)
        self._held.append(text)
        return known if self._pending else [*known, *self._release()]

    def finish(self) -> Sequence[str]:
        """What an incomplete last character becomes belongs to the last id that has bytes of it."""
        return self._break() if self._pending else self._release()

    def _break(self) -> Sequence[str]:
        """The pending character stays incomplete."""
        self._held[self._last] += _BROKEN
        self._pending = b""
        return self._release()

    def _release(self) -> Sequence[str]:
        texts, self._held = self._held, []
        return texts


def _breaks(pending: bytes, fragment: bytes) -> bool:
    """Whether the beginning of a character does not go on so."""
    text, rest = _decode(pending + fragment[:1])
    return len(text) > 1 or bool(text and rest)


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of bytes, and what is the beginning of a character at their end."""
    text, used = utf_8_decode(data, "replace", False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:2] >= b"\xa0":  # half of a surrogate, which the codec waits for
        return text + rest.decode("utf-8", "replace"), b""
    return text, rest


class PieceDetokenizer:
    """Sentencepiece style: the texts of all ids one after another, bytes where a character has no piece.

    The reference decoder reads a run of byte pieces as a whole: one wrong byte in it turns each of
    them into U+FFFD. So a run is held until it ends.
    """

    __slots__ = ("_fragments", "_held", "_joining", "_pieces", "_run", "_skipped", "_started", "_strip")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._fragments = vocabulary.fragments
        self._pieces = vocabulary.pieces
        self._joining = vocabulary.joining
        self._skipped = skipped
        self._strip = vocabulary.joining.strip_count
        self._started = False
        self._held: list[int | None] = []  # bytes of the run; None for ids within it that give no text
        self._run = False

    def push(self, token_id: int) -> Sequence[str]:
        """Takes an id; gives the texts of the ids whose text is now known."""
        if token_id in self._skipped or not 0 <= token_id < len(self._fragments) or self._pieces[token_id] is None:
            if self._run:
                self._held.append(None)
                return ()
            return ("",)
        fragment = self._fragments[token_id]
        if isinstance(fragment, int):
            self._started = True
            self._run = True
            self._held.append(fragment)
            return ()
        text = self._text(token_id)
        if not self._run:
            return (self._stripped(text),)
        texts = self._end_run()
        texts.append(self._stripped(text))
        return texts

    def finish(self) -> Sequence[str]:
        """The texts of a last run."""
        return self._end_run() if self._run else ()

    def _text(self, token_id: int) -> str:
        if not self._started:
            self._started = True
            if self._joining.first_changes is not None:
                return self._joining.apply(self._pieces[token_id] or "", first=True)
        fragment = self._fragments[token_id]
        return fragment if isinstance(fragment, str) else ""

    def _end_run(self) -> list[str]:
        held, self._held, self._run = self._held, [], False
        try:
            bytes(byte for byte in held if byte is not None).decode()
        except UnicodeDecodeError:
            return ["" if byte is None else self._stripped(_BROKEN) for byte in held]
        texts: list[str] = []
        pending = b""
        for byte in held:
            text, used = utf_8_decode(pending + bytes((byte,)), "strict", False) if byte is not None else ("", 0)
            if byte is not None:
                pending = (pending + bytes((byte,)))[used:]
            texts.append(self._stripped(text))
        return texts

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            text, self._strip = strip_left(text, self._joining.strip_char, self._strip)
        return text


class ShownBytes:
    """The bytes of each token as the text of its choice has them: joined, they are that text in UTF-8.

    ids    f0 9f 94 a5    " a"   </s>        a token's own bytes where its text is shown as it is,
    text   "" "" "" "🔥"  "a"    ""          otherwise those of the text: some of it may be left out, or all
    bytes  f0 9f 94 a5     61    nothing
    """

    __slots__ = ("_begun", "_skipped", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._begun: dict[int, tuple[bytes, str]] = {}  # per choice: of a character that its next token goes on with

    def of(self, delta: Delta) -> list[bytes]:
        """The bytes of each token of the next delta: of all that the model wrote, whatever it is read as."""
        begun = self._begun.pop(delta.choice, _NOTHING)
        shares, begun = self._share(delta.token_ids, delta.written or delta.texts, begun, last=delta.finish is not None)
        if begun[0]:
            self._begun[delta.choice] = begun
        return shares

    def of_text(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[bytes]:
        """The bytes of each token of a text that ends with them."""
        return self._share(token_ids, texts, _NOTHING, last=True)[0]

    def _share(
        self, token_ids: Sequence[int], texts: Sequence[str], begun: tuple[bytes, str], *, last: bool
    ) -> tuple[list[bytes], tuple[bytes, str]]:
        texts = [*texts, *[""] * (len(token_ids) - len(texts))]
        shares: list[bytes] = []
        own, shown = begun
        start = 0
        for end, (token_id, text) in enumerate(zip(token_ids, texts, strict=True), 1):
            shares.append(b"" if token_id in self._skipped else self._vocabulary.token_bytes(token_id))
            own, shown = own + shares[-1], shown + text
            whole, rest = _decode(own)
            if not rest or whole != shown or (last and end == len(texts)):
                if rest or whole != shown or whole.encode() != own:
                    shares[start:] = [part.encode() for part in texts[start:end]]
                start, (own, shown) = end, _NOTHING
        return shares, (own, shown)


_NOTHING = (b"", "")
