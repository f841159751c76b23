"""Encode rows as token ids, a chunk of rows at a time, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import numpy as np

from fsdp_tune.core.errors import failed_error
from fsdp_tune.data.duplicates import token_hashes
from fsdp_tune.data.format.formats import Chat, Example, FormatSettings, Ids, LabelledText, Text
from fsdp_tune.data.format.row_account import KeyUse
from fsdp_tune.data.format.row_notes import Note, RowNotes
from fsdp_tune.data.format.templates import BUNDLED
from fsdp_tune.data.read.row_files import BadRow, RowError
from fsdp_tune.data.store import Int32, Int64, Mask
from fsdp_tune.data.tokenise.chat import RenderedChat, render_chat, template_for
from fsdp_tune.data.tokenise.content_hash import content_hash
from fsdp_tune.data.tokenise.conversations import chat_tokens
from fsdp_tune.data.tokenise.encoder_protocol import Encoder, TextEncoder
from fsdp_tune.data.tokenise.encoding import EncodedText, encode_segments, encode_texts
from fsdp_tune.data.tokenise.special_tokens import (
    AS_CONTROL,
    AS_TEXT,
    INSEPARABLE,
    InChat,
    InseparableError,
    RestoringEncoder,
    SpecialTokens,
    notes_of,
)

CHUNK_ROWS = 1000


CHUNK_BYTES = 2 << 20
"""Largest size of a chunk, in bytes of row content; a larger row is a chunk by itself."""


NUMBER_BYTES = 8


ALONE_CHUNKS = 10
"""Number of chunks before other processes are started, since starting them takes a second and small data do
not need them."""


REPEATED_RENDERINGS = 4
"""Number of chats per chunk that are rendered twice, to detect a template whose text differs from call to
call."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read; `file` counts over the files of all sources."""

    source: int
    file: int
    number: int
    values: dict[str, object]


@dataclass(slots=True)
class Tokenised:
    """The concatenated examples of one chunk, and the findings about its rows."""

    tokens: Int32
    trained: Mask
    lengths: Int64
    supervised: Int64
    """Number of targets of each example: its trained tokens except the first token."""
    sources: Int64
    origins: Int64
    """[examples, 2]: file, row in the file."""
    hashes: np.ndarray[Any, np.dtype[np.uint64]]
    """Hash of each row's content, which decides whether it is held out, independent of order, seed and
    tokenizer."""
    token_hashes: np.ndarray[Any, np.dtype[np.uint64]]
    """Hash of the tokens and targets of each example's row, by which duplicates are found."""
    bad: list[tuple[int, BadRow]] = field(default_factory=list[tuple[int, BadRow]])
    """(number of the file, bad row)."""
    untrained: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """File and row of examples without a trained token."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """rows, unencoded, bad_unencoded, eos_supervised, eos_appended_to_chat, bos_once, bos_more,
    bos_repeated_in_text, bos_missing_in_chat, no_space, split_rows, split_examples."""
    keys: Counter[tuple[int, KeyUse]] = field(default_factory=Counter[tuple[int, KeyUse]])
    """Rows of each source by the use of a key."""
    notes: RowNotes = field(default_factory=RowNotes)


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Tokenises chunks of rows; sent to each process once."""

    encoder: Encoder
    settings: tuple[FormatSettings, ...]
    """One entry per source."""

    def chunk(self, rows: list[RawRow], *, check_only: bool = False) -> Tokenised:
        """Tokenise a chunk. With `check_only`, only count bad rows and encode nothing: an earlier chunk
        already had one."""
        work = _Chunk(self.encoder, self.settings)
        examples: list[tuple[RawRow, Example]] = []
        for row in rows:
            try:
                uses = set[KeyUse]()
                examples.append((row, self.settings[row.source].example(row.values, uses)))
                work.keys.update((row.source, use) for use in uses)
            except RowError as error:
                work.bad.append((row.file, error.bad_row(row.number)))
        work.counts["rows"] = len(rows)
        if check_only:
            work.counts["unencoded"], work.counts["bad_unencoded"] = len(rows), len(work.bad)
            return work.finish()
        texts = work.encode_texts([(row, example) for row, example in examples if isinstance(example, Text)])
        chats = work.encode_chats([(row, example) for row, example in examples if isinstance(example, Chat)])
        for row, example in examples:
            if isinstance(example, Text):
                work.add(row, example, next(texts))
            elif isinstance(example, Ids):
                work.add(row, example, EncodedText(example.input_ids, example.trained, ()))
            elif isinstance(example, LabelledText):
                work.add(row, example, work.encode_segments(row, example))
            else:
                work.add_chat(row, example, next(chats))
        return work.finish()


@dataclass(frozen=True, slots=True)
class _EncodedChat:
    rendered: RenderedChat
    encoder: TextEncoder
    ids: list[list[list[int]]] = field(default_factory=list[list[list[int]]])
    """Ids of the pieces of each example."""
    notes: tuple[Note, ...] = ()


class _Kept(NamedTuple):
    """What the store has of an example but its tokens; `number` is the row in the file."""

    tokens: int
    supervised: int
    source: int
    file: int
    number: int


class _Chunk:
    def __init__(self, encoder: Encoder, settings: tuple[FormatSettings, ...]) -> None:
        self._encoder, self._settings = encoder, settings
        self._special = SpecialTokens(encoder)
        self._has_way_out = False
        self._white_space: dict[int, bool] = {}
        self._ids: list[int] = []
        self._trained: list[bool] = []
        self._rows: list[_Kept] = []
        self._hashes: list[int] = []
        self.bad: list[tuple[int, BadRow]] = []
        self.untrained: list[tuple[int, int]] = []
        self.counts: Counter[str] = Counter()
        self.keys: Counter[tuple[int, KeyUse]] = Counter()
        self.notes = RowNotes()

    def encode_texts(self, texts: list[tuple[RawRow, Text]]) -> Iterator[EncodedText]:
        return encode_texts(
            [(text, self._settings[row.source]) for row, text in texts],
            self._encoder,
            self._special,
            self.counts,
        )

    def encode_segments(self, row: RawRow, example: LabelledText) -> EncodedText:
        return encode_segments(example, self._settings[row.source], self._encoder, self._special)

    def encode_chats(self, chats: list[tuple[RawRow, Chat]]) -> Iterator[_EncodedChat | None]:
        """Render all conversations, then encode them in one call, which uses all cores; yield None for one
        that cannot be rendered."""
        rendered = [
            self._rendered(row, chat, check_repeat=at < REPEATED_RENDERINGS)
            for at, (row, chat) in enumerate(chats)
        ]
        ordinary = [
            text for chat in rendered if chat is not None and not chat.ids for text in chat.rendered.examples
        ]
        pieces = iter(self._encoder.encode([piece for text in ordinary for piece in text.pieces]))
        for chat in rendered:
            if chat is not None and not chat.ids:
                chat = replace(
                    chat, ids=[list(islice(pieces, len(text.pieces))) for text in chat.rendered.examples]
                )
            yield chat

    def _rendered(self, row: RawRow, chat: Chat, *, check_repeat: bool) -> _EncodedChat | None:
        settings = self._settings[row.source]
        try:
            if settings.template is None:
                raise RowError("the row is a conversation, and there is no chat template")
            rendered = render_chat(chat, settings.template, self._encoder, check_repeat=check_repeat)
        except RowError as error:
            self.bad.append((row.file, error.bad_row(row.number, hint=self._way_out(chat, settings))))
            return None
        if not settings.encodes_special_tokens_as_text(chat):
            return _EncodedChat(
                rendered,
                self._encoder,
                notes=notes_of(AS_CONTROL, self._special.spelled_in([chat.messages, chat.tools])),
            )
        texts = [text.whole for text in rendered.examples]
        inside = self._special.in_chat(
            chat, settings.template, texts, keeps_added=settings.special_tokens == "auto"
        )
        notes = notes_of(AS_CONTROL, inside.kept)
        if not inside.as_text:
            return _EncodedChat(rendered, self._encoder, notes=notes)
        try:
            found = self._with_text(chat, settings.template, texts, inside)
        except RowError:
            return _EncodedChat(
                rendered, self._encoder, notes=(*notes, *notes_of(INSEPARABLE, inside.as_text))
            )
        return replace(found, notes=(*notes, *found.notes))

    def _way_out(self, chat: Chat, settings: FormatSettings) -> str | None:
        """Return a hint that names a bundled template for a rejected chat; for the first alone, since each
        takes many renderings."""
        if self._has_way_out or settings.template is None:
            return None
        self._has_way_out = True
        name = template_for(chat, self._encoder, settings.template)
        return (
            None
            if name is None
            else f"`{settings.template_key}: {name}` renders this row ({BUNDLED[name].purpose})"
        )

    def _with_text(self, chat: Chat, template: str, texts: list[str], inside: InChat) -> _EncodedChat:
        """Encode special tokens in the content of a chat as text. Raises: RowError if template or tokenizer
        cannot separate them."""
        replaced, placeholders = self._special.with_placeholders(chat, inside, "".join(texts))
        marked = render_chat(replaced, template, self._encoder, check_repeat=False)
        if [placeholders.restore(text.whole) for text in marked.examples] != texts:
            raise InseparableError
        encoder = RestoringEncoder(self._encoder, self._special, placeholders)
        return _EncodedChat(
            marked,
            encoder,
            [encoder.encode(text.pieces) for text in marked.examples],
            notes_of(AS_TEXT, inside.as_text),
        )

    def add_chat(self, row: RawRow, chat: Chat, encoded: _EncodedChat | None) -> None:
        if encoded is None:
            return
        append_eos = self._settings[row.source].append_eos
        try:
            examples = [
                tokens
                for text, ids in zip(encoded.rendered.examples, encoded.ids, strict=True)
                for tokens in chat_tokens(text, ids, encoded.encoder, append_eos=append_eos)
            ]
        except RowError as error:
            self.bad.append((row.file, error.bad_row(row.number)))
            return
        kept = [self._keep(row, chat, tokens.ids, tokens.trained) for tokens in examples]
        self.counts["eos_appended_to_chat"] += sum(tokens.eos_appended for tokens in examples)
        if len(examples) > 1:
            self.counts["split_rows"] += 1
            self.counts["split_examples"] += len(examples)
        if any(kept):
            border_notes = dict.fromkeys(note for tokens in examples for note in tokens.notes)
            self._note(row, (*chat.notes, *encoded.rendered.notes, *encoded.notes, *border_notes))

    def add(self, row: RawRow, example: Example, encoded: EncodedText) -> None:
        if self._keep(row, example, *self._ended(encoded.ids, encoded.trained, self._settings[row.source])):
            self._note(row, encoded.notes)

    def _note(self, row: RawRow, notes: tuple[Note, ...]) -> None:
        for note in notes:
            self.notes.add(note, row.file, row.number)

    def _keep(self, row: RawRow, example: Example, ids: list[int], trained: list[bool]) -> bool:
        """Add an example. Return False if it has no token to train."""
        supervised = sum(trained[1:])  # no position predicts the first token
        if not supervised:
            self.untrained.append((row.file, row.number))
            return False
        self._count(ids, trained, is_chat=isinstance(example, Chat))
        self._ids += ids
        self._trained += trained
        self._rows.append(_Kept(len(ids), supervised, row.source, row.file, row.number))
        self._hashes.append(content_hash(example))
        return True

    def _ended(
        self, ids: list[int], trained: list[bool], settings: FormatSettings
    ) -> tuple[list[int], list[bool]]:
        """Append the end-of-sequence token, trained, unless the row has its own, before white space or not;
        that is not trained then.

        An empty text stays empty and is dropped later.
        """
        eos = self._encoder.eos_id
        if not settings.append_eos or not ids:
            return ids, trained
        end = len(ids)
        while end and ids[end - 1] != eos and self._is_white_space(ids[end - 1]):
            end -= 1
        if end and ids[end - 1] == eos:
            return ids, [*trained[: end - 1], True, *[False] * (len(ids) - end)]
        return [*ids, eos], [*trained, True]

    def _is_white_space(self, token: int) -> bool:
        known = self._white_space.get(token)
        if known is None:
            known = self._white_space[token] = not self._encoder.decode([token]).strip()
        return known

    def _count(self, ids: list[int], trained: list[bool], *, is_chat: bool) -> None:
        encoder = self._encoder
        # searched from the end, where it usually is
        backwards = zip(reversed(ids), reversed(trained), strict=True)
        self.counts["eos_supervised"] += any(flag and token == encoder.eos_id for token, flag in backwards)
        if encoder.bos_id is not None and encoder.bos_id != encoder.eos_id:
            found = ids.count(encoder.bos_id)
            self.counts["bos_once"] += found == 1
            self.counts["bos_more"] += found > 1
            # in a chat the template writes them
            self.counts["bos_repeated_in_text"] += found > 1 and not is_chat
            self.counts["bos_missing_in_chat"] += (
                not found and is_chat and encoder.bos_id in encoder.prefix_ids
            )

    def finish(self) -> Tokenised:
        columns = np.array(self._rows, np.int64).reshape(-1, 5).T
        lengths, supervised, sources, files, numbers = (column.copy() for column in columns)
        tokens, trained = np.array(self._ids, np.int32), np.array(self._trained, np.uint8)
        origins = np.stack([files, numbers], axis=1)
        return Tokenised(
            tokens=tokens,
            trained=trained,
            lengths=lengths,
            supervised=supervised,
            sources=sources,
            origins=origins,
            hashes=np.array(self._hashes, np.uint64),
            token_hashes=token_hashes(tokens, trained, lengths, origins),
            bad=self.bad,
            untrained=self.untrained,
            counts=self.counts,
            keys=self.keys,
            notes=self.notes,
        )


def tokenise(
    rows: Iterator[RawRow], tokeniser: Tokeniser, processes: int, *, check_only: Callable[[], bool]
) -> Generator[Tokenised, None, None]:
    """Yield chunks in the order of the rows, regardless of the number of processes. `check_only` is called
    before each chunk."""
    chunks = _chunks(rows)
    for chunk, _ in islice(chunks, ALONE_CHUNKS if processes > 1 else None):
        yield tokeniser.chunk(chunk, check_only=check_only())
    first = next(chunks, None)
    if first is not None:
        yield from _in_processes(chain([first], chunks), tokeniser, processes, check_only)


def _chunks(rows: Iterator[RawRow]) -> Iterator[tuple[list[RawRow], int]]:
    """Yield chunks of at most CHUNK_ROWS rows and CHUNK_BYTES bytes, or of one longer row, each with its
    bytes."""
    chunk: list[RawRow] = []
    chunk_bytes = 0
    for row in rows:
        size = content_bytes(row.values)
        if chunk and (len(chunk) == CHUNK_ROWS or chunk_bytes + size > CHUNK_BYTES):
            yield chunk, chunk_bytes
            chunk, chunk_bytes = [], 0
        chunk.append(row)
        chunk_bytes += size
    if chunk:
        yield chunk, chunk_bytes


def content_bytes(value: object) -> int:
    """Return the approximate number of bytes of text and numbers in a value of a row."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(
            len(str(key)) + content_bytes(item) for key, item in cast(dict[object, object], value).items()
        )
    if isinstance(value, list):
        items = cast(list[object], value)
        if items and isinstance(items[0], (int, float)):
            return NUMBER_BYTES * len(items)
        return sum(map(content_bytes, items))
    return NUMBER_BYTES


def _in_processes(
    chunks: Iterator[tuple[list[RawRow], int]],
    tokeniser: Tokeniser,
    processes: int,
    check_only: Callable[[], bool],
) -> Generator[Tokenised, None, None]:
    executor = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(tokeniser,)
    )
    pending: deque[tuple[Future[Tokenised], int]] = deque()
    bytes_pending = 0
    try:
        for chunk, size in chunks:
            # Enough chunks that no process waits, and few enough to bound memory: chunks of a single large
            # row are submitted one by one.
            while pending and (
                len(pending) >= 3 * processes or bytes_pending + size > 3 * processes * CHUNK_BYTES
            ):
                done, freed = pending.popleft()
                bytes_pending -= freed
                yield done.result()
            pending.append((executor.submit(_work, chunk, check_only()), size))
            bytes_pending += size
        while pending:
            yield pending.popleft()[0].result()
    except BrokenProcessPool as error:
        raise failed_error(
            "tokenising-died",
            "a process that tokenises was killed, most likely because memory ran out",
            hint="`--set data.num_proc=1` tokenises in this process",
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_tokeniser: Tokeniser | None = None
"""In a child process, the tokeniser that it was started with."""


def _begin(tokeniser: Tokeniser) -> None:
    global _tokeniser
    _tokeniser = tokeniser
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there is a process for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: Any) -> None:
    """Exit when the parent ends. A killed parent cannot end its children, which would otherwise wait for work
    forever."""
    parent.join()
    os._exit(1)


def _work(rows: list[RawRow], check_only: bool) -> Tokenised:  # noqa: FBT001  an executor passes by position
    assert _tokeniser is not None
    return _tokeniser.chunk(rows, check_only=check_only)
