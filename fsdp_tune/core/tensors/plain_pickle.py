"""Read pickles of checkpoints without running anything that they name.

`load` is Python's own interpreter of pickles with a closed list of opcodes and of names. Nothing is imported,
and the opcodes that could allocate more than the file holds, change a class, or overflow the C stack (by
hashing nested tuples) are left out or replaced. The interpreter in C is not used, because its opcodes cannot
be restricted.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:

    class _PythonUnpickler:
        """The members of `pickle._Unpickler` that are used here; typeshed does not have them all."""

        dispatch: ClassVar[dict[int, Callable[[Any], None]]]
        stack: list[Any]
        memo: object
        append: Callable[[object], None]

        def __init__(self, file: IO[bytes]) -> None: ...
        def pop_mark(self) -> list[object]: ...
        def load(self) -> Any: ...
else:
    from pickle import _Unpickler as _PythonUnpickler  # the interpreter in Python

# What torch and `pickle.dump` write for plain data, in protocols 2 to 5.
_OPCODES = [
    "PROTO",
    "FRAME",
    "MARK",
    "POP",
    "STOP",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "SETITEM",
    "SETITEMS",
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "NEWOBJ",
    "BUILD",
    "MEMOIZE",
    "BINPUT",
    "LONG_BINPUT",
    "BINGET",
    "LONG_BINGET",
    "BINPERSID",
]


class Refused(ValueError):
    """The pickle is damaged, or contains what plain data never needs. The message names it."""


@dataclass(frozen=True, slots=True)
class AllowedGlobal:
    """The replacement of a global name: a `value`, a function called with data (`call`), or a class of
    `Record`s with `fields`."""

    name: str
    value: Any = None
    call: Callable[[tuple[object, ...]], object] | None = None
    fields: tuple[str, ...] | None = None

    def __call__(self, *arguments: object) -> object:
        if self.call is None:
            raise Refused(f"it calls `{self.name}`")
        return self.call(arguments)


class Record:
    """Stands in for an object of an allowed class: the fields in use, and nothing else.

    `state` is a tuple in the order of the class's fields, since a checkpoint of many ranks has hundreds of
    thousands of records.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: AllowedGlobal) -> None:
        self.kind = kind
        self.state: tuple[Any, ...] | None = None

    def set_state(self, state: object) -> None:
        """Take the fields from a dataclass's dictionary, or from the tuple that
        `TensorProperties.__getstate__` returns."""
        fields, found = self.kind.fields or (), type(state).__name__
        if isinstance(state, dict):
            by_name = cast("dict[object, object]", state)
            self.state = tuple(by_name.get(name) for name in fields)
            # the memo keeps it alive to the end, and nothing that torch writes refers to it again
            by_name.clear()
            return
        values = cast("tuple[object, ...] | None", state if isinstance(state, tuple) else None)
        if values is None or len(values) < len(fields):
            raise Refused(f"the state of a `{self.kind.name}` is a {found}")
        self.state = values[: len(fields)]

    def get(self, name: str) -> object:
        fields = self.kind.fields or ()
        return self.state[fields.index(name)] if self.state is not None else None


Names = Mapping[tuple[str, str], AllowedGlobal]
_HASHABLE = (str, int, Record, type(None))


class _Memo(list[object]):
    """The values that a pickle refers back to. A dictionary would double the memory for the metadata of many
    ranks."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if index == len(self):
            self.append(value)
        elif index < len(self):
            super().__setitem__(index, value)
        # Indices count up in what torch writes. A value at any other index is not stored, and cannot be
        # recalled.


class _Unpickler(_PythonUnpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _PythonUnpickler.dispatch[code] for name in _OPCODES for code in getattr(pickle, name)
    }

    def __init__(self, data: bytes, names: Names, persistent: Callable[[object], object] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent, self.memo = names, persistent, _Memo()

    def find_class(self, module: str, name: str) -> AllowedGlobal:
        allowed = self._names.get((module, name))
        if allowed is None:
            raise Refused(
                f"it names `{module}.{name}`, which a checkpoint of tensors does not need; nothing was run"
            )
        return allowed

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise Refused("it refers to a storage outside itself")
        return self._persistent(pid)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, AllowedGlobal) or kind.fields is None or arguments != ():
            raise Refused(f"it creates an object of {_describe(kind)}")
        self.append(Record(kind))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.set_state(state)
        elif not isinstance(
            target, dict
        ):  # attributes of an OrderedDict, such as the `_metadata` of a state dict, are not used
            raise Refused(f"it sets the state of {_describe(target)}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise Refused(f"it sets items of {_describe(target)}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, _HASHABLE):
                raise Refused(f"it uses {_describe(key)} as a key")
            target[key] = value

    dispatch |= {
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _describe(value: object) -> str:
    return f"`{value.name}`" if isinstance(value, AllowedGlobal) else f"a {type(value).__name__}"


def load(data: bytes, names: Names, *, persistent: Callable[[object], object] | None = None) -> Any:
    """Return the value in `data`. Raises: Refused for anything but plain data and the names in `names`."""
    try:
        return _Unpickler(data, names, persistent).load()
    except Refused:
        raise
    except KeyError as error:
        raise Refused(f"it contains the instruction {error}, which plain data does not need") from error
    except Exception as error:
        raise Refused(f"it is damaged ({error})") from error
