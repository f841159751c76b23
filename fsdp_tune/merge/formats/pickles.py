"""Reads the pickles inside checkpoints without running anything that they name.

This is no subclass of `pickle.Unpickler`: that class can be made to allocate gigabytes by one opcode, to write to the
classes it is lent, or to overflow the C stack by hashing nested tuples. Here the closed list of opcodes that torch and
`pickle.dump` write for plain data is interpreted, names come from a closed table, and every object costs input bytes,
so memory is bounded by the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Refused(ValueError):
    """The pickle is damaged, or wants what plain data never needs. The message names it."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a global name may do: stand for `value`, be called with data (`call`), or be a class of `Record`s with `fields`."""

    name: str
    value: Any = None
    call: Callable[[tuple[Any, ...]], Any] | None = None
    fields: tuple[str, ...] | None = None


class Record:
    """Stands for an object of a class that is allowed by name: the fields that are of use, and nothing else.

    `state` is a tuple in the order of the class's fields (a checkpoint of many ranks has hundreds of thousands of them).
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: Allowed) -> None:
        self.kind = kind
        self.state: tuple[Any, ...] | None = None

    def set_state(self, state: Any) -> None:
        """From a dataclass's dictionary, or from the tuple that `TensorProperties.__getstate__` gives."""
        fields = self.kind.fields or ()
        if isinstance(state, dict):
            self.state = tuple(state.get(name) for name in fields)
            state.clear()  # the memo keeps it alive to the end, and nothing that torch writes refers to it again
        elif isinstance(state, tuple) and len(state) >= len(fields):
            self.state = state[: len(fields)]
        else:
            raise Refused(f"the state of a `{self.kind.name}` is a {type(state).__name__}")

    def get(self, name: str) -> Any:
        fields = self.kind.fields or ()
        return self.state[fields.index(name)] if self.state is not None else None


Names = Mapping[tuple[str, str], Allowed]
_MARK = object()
_UINT16, _INT32, _UINT32, _UINT64, _DOUBLE = (struct.Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))
_HASHABLE = (str, int, Record, type(None))


@dataclass(slots=True)
class _Machine:
    data: bytes
    names: Names
    persistent: Callable[[Any], Any] | None
    at: int = 0
    stack: list[Any] = field(default_factory=list[Any])
    memo: list[Any] = field(default_factory=list[Any])
    sparse_memo: dict[int, Any] = field(default_factory=dict[int, Any])

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise Refused("it ends in the middle of a value")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def unsigned(self, form: struct.Struct) -> int:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise Refused("it ends in the middle of a name")
        text = self.data[self.at : end].decode("ascii")
        self.at = end + 1
        return text

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise Refused("a mark stands where a value is due")
        return value

    def pop_to_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        raise Refused("a mark is missing")

    def push_name(self, module: Any, name: Any) -> None:
        allowed = self.names.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if allowed is None:
            raise Refused(f"it names `{module}.{name}`, which a checkpoint of tensors does not need; nothing was run")
        self.stack.append(allowed)

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Allowed) or function.call is None or not isinstance(arguments, tuple):
            raise Refused(f"it calls {_describe(function)}")
        self.stack.append(function.call(arguments))

    def new(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Allowed) or kind.fields is None or arguments != ():
            raise Refused(f"it makes an object of {_describe(kind)}")
        self.stack.append(Record(kind))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.set_state(state)
        elif not isinstance(target, dict):  # an OrderedDict's attributes, such as the `_metadata` of a state dict, are of no use here
            raise Refused(f"it sets the state of {_describe(target)}")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise Refused("it sets items of what is no mapping")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, _HASHABLE):
                raise Refused(f"it uses {_describe(key)} as a key")
            target[key] = value

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise Refused("it appends to what is no list")
        target.extend(values)

    def recall(self, index: int) -> None:
        if index < len(self.memo):
            self.stack.append(self.memo[index])
        elif index in self.sparse_memo:
            self.stack.append(self.sparse_memo[index])
        else:
            raise Refused(f"it recalls value {index}, which it never stored")

    def remember(self, index: int) -> None:
        """Indices count up in what torch writes; any other one costs an entry and not a table up to it."""
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            self.sparse_memo[index] = self.stack[-1]

    def long(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise Refused("it refers to a storage outside itself")
        self.stack.append(self.persistent(self.pop()))


def _describe(value: Any) -> str:
    return f"`{value.name}`" if isinstance(value, Allowed) else f"a {type(value).__name__}"


def _tuple(count: int) -> Callable[[_Machine], None]:
    def run(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)][::-1]
        m.stack.append(tuple(values))

    return run


_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: only a hint for readers of streams
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.pop(),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.stack.append(tuple(m.pop_to_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("]"): lambda m: m.stack.append([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("}"): lambda m: m.stack.append({}),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): lambda m: m.stack.append(m.byte()),
    ord("M"): lambda m: m.stack.append(m.unsigned(_UINT16)),
    ord("J"): lambda m: m.stack.append(m.unsigned(_INT32)),
    0x8A: lambda m: m.long(),
    ord("G"): lambda m: m.stack.append(_DOUBLE.unpack(m.take(8))[0]),
    0x8C: lambda m: m.stack.append(m.take(m.byte()).decode()),
    ord("X"): lambda m: m.stack.append(m.take(m.unsigned(_UINT32)).decode("utf-8", "surrogatepass")),
    ord("C"): lambda m: m.stack.append(m.take(m.take(1)[0])),
    ord("B"): lambda m: m.stack.append(m.take(m.unsigned(_UINT32))),
    ord("c"): lambda m: m.push_name(m.line(), m.line()),
    0x93: lambda m: m.push_name(*[m.pop(), m.pop()][::-1]),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.new(),
    ord("b"): lambda m: m.build(),
    0x94: lambda m: m.memo.append(m.stack[-1]),
    ord("q"): lambda m: m.remember(m.take(1)[0]),
    ord("r"): lambda m: m.remember(m.unsigned(_UINT32)),
    ord("h"): lambda m: m.recall(m.byte()),
    ord("j"): lambda m: m.recall(m.unsigned(_UINT32)),
    ord("Q"): lambda m: m.persistent_id(),
}
_STOP = ord(".")


def load(data: bytes, names: Names, *, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value that `data` holds. Refused for anything but plain data and the names in `names`."""
    machine = _Machine(data, names, persistent)
    steps = [_OPCODES.get(opcode) for opcode in range(256)]
    try:
        while True:
            opcode = data[machine.at]
            machine.at += 1
            step = steps[opcode]
            if step is not None:
                step(machine)
            elif opcode == _STOP:
                return machine.pop()
            else:
                raise Refused(f"it holds the instruction 0x{opcode:02x}, which plain data does not need")
    except (IndexError, UnicodeDecodeError) as error:
        raise Refused(f"it is damaged at byte {machine.at}") from error
