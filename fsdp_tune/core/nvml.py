"""NVIDIA's management library: one class that makes every call of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

NVML_SUCCESS = 0
NVML_FUNCTION_NOT_FOUND = 13
_LONGEST_TEXT = 96
"""Bytes: NVML_DEVICE_NAME_V2_BUFFER_SIZE, which is the longest of those that are read here."""


class Nvml:
    """The driver's management library. Every call goes through here, since old drivers and stand-ins for them
    lack functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: object) -> int:
        """Return the code of a function, which is NVML_FUNCTION_NOT_FOUND if the driver lacks it."""
        found = getattr(self._library, function, None)
        return NVML_FUNCTION_NOT_FOUND if found is None else int(found(*arguments))

    def succeeds(self, function: str, *arguments: object) -> bool:
        return self.call(function, *arguments) == NVML_SUCCESS

    def text(self, function: str, *arguments: object) -> str | None:
        """Return the text that a function writes into a buffer after its arguments; None if it fails."""
        buffer = ctypes.create_string_buffer(_LONGEST_TEXT)
        return (
            buffer.value.decode(errors="replace")
            if self.succeeds(function, *arguments, buffer, _LONGEST_TEXT)
            else None
        )

    def device_count(self) -> int:
        count = ctypes.c_uint()
        return count.value if self.succeeds("nvmlDeviceGetCount_v2", ctypes.byref(count)) else 0

    def describe(self, code: int) -> str:
        """Return the driver's text for a code."""
        describe = getattr(self._library, "nvmlErrorString", None)
        if describe is None:
            return f"error {code}"
        describe.restype = ctypes.c_char_p
        return describe(code).decode(errors="replace")


@contextmanager
def open_nvml() -> Iterator[Nvml | None]:
    """Yield the driver's management library, initialised; None if there is no driver."""
    try:
        nvml = Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        yield None
        return
    if not nvml.succeeds("nvmlInit_v2"):
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")
