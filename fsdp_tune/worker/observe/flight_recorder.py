"""Dump PyTorch's flight recorder when a rank has made no progress; `rank.flight_recorder_variables` are its
settings.

torch 2.11 and 2.13 read the same names (FlightRecorder.hpp, FlightRecorder.cpp, ProcessGroupNCCL.hpp): the
buffer's size is TORCH_FR_BUFFER_SIZE (0, off, before it became 2000), the files' prefix
TORCH_FR_DUMP_TEMP_FILE, and NCCL's watchdog writes them when TORCH_NCCL_DUMP_ON_TIMEOUT is set. That watchdog
speaks only after its own time-out, so a rank that stands still writes first.
`torchfrtrace RUN/logs/flight-recorder` compares the files of all ranks.
"""

from __future__ import annotations

import json
import sys
from typing import TypedDict

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Collective
from fsdp_tune.worker.rank import FLIGHT_FILE_PREFIX


class FlightEntry(TypedDict):
    """A collective in the buffer, with the fields that are read."""

    process_group: list[str]
    """Name and description."""
    collective_seq_id: int
    profiling_name: str
    retired: bool
    """Whether it has ended."""


def dump(run: RunDir, rank: int, device_type: str) -> Collective | None:
    """Write this rank's flight-recorder file. Returns the collective in progress, or else the last one, also
    where the file cannot be written.

    None where torch has no recorder (a device without one) or nothing was recorded.
    """
    from fsdp_tune.model.internals.torch_internals import FLIGHT_RECORDS

    records = FLIGHT_RECORDS.get(device_type)
    whole, as_json = (record.get() for record in records) if records is not None else (None, None)
    if whole is None or as_json is None:
        return None
    try:
        (run.flight_recorder / f"{FLIGHT_FILE_PREFIX}{rank}").write_bytes(whole())
    except OSError as error:
        sys.stderr.write(f"the flight recorder was not written: {error}\n")
    entries: list[FlightEntry] = [
        entry for entry in json.loads(as_json()).get("entries", []) if not entry.get("is_p2p")
    ]
    if not entries:
        return None
    unfinished = [entry for entry in entries if not entry["retired"]]
    shown = (unfinished or entries)[-1]
    entered: dict[str, int] = {}
    for entry in entries:
        entered[_group(entry)] = int(entry["collective_seq_id"])
    number, name = int(shown["collective_seq_id"]), str(shown["profiling_name"])
    return Collective(name, number, _group(shown), not unfinished, entered)


def _group(entry: FlightEntry) -> str:
    return str(entry["process_group"][0])
