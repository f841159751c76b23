"""Several launches by one command on each machine: the first machine calls each one, and the others follow.

A launch opens a channel of its own (`launch.machines.rendezvous`) on the same port. So the channel of the
calls is closed before a launch and opened again after it. A call is over when every other machine has
answered it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from fsdp_tune.core.atomic import json_safe
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import ExitCode, ExitReason, FailedError, FsdpTuneError, Problem
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.channel import Channel
from fsdp_tune.launch.machines.directories import READ_SECONDS
from fsdp_tune.launch.machines.machine import State
from fsdp_tune.launch.machines.peers import LOST_SECONDS
from fsdp_tune.launch.machines.rendezvous import DECISION_SECONDS, JOIN_SECONDS
from fsdp_tune.launch.machines.store import CALL, LAUNCH
from fsdp_tune.launch.machines.verdicts import verdict_of
from fsdp_tune.run.rank_files import Verdict
from fsdp_tune.run.records import Document


@dataclass(frozen=True, slots=True)
class LaunchCall(Document):
    """What the first machine publishes between launches.

    `token`, `state` and `ended` are named as in `MachineReport`: a machine that has answered and waits for
    the launch reads the end of the command in this document, too.
    """

    token: str
    """Of the channel."""
    command: str
    """Differs between commands of the first machine."""
    call: int
    """Number of the called launch, from 1; 0 before the first."""
    run: str = ""
    """Its run directory: as much of its path as another machine needs."""
    state: State = "waiting"
    """final: no other launch follows."""
    ended: dict[str, object] | None = None
    """The verdict on the command, once it is final."""
    result: dict[str, Any] | None = None
    """What the command returns, if it has succeeded."""


@dataclass(frozen=True, slots=True)
class CallAnswer(Document):
    """What another machine publishes between launches."""

    token: str
    """Of the channel."""
    call: int
    """The last call that it has answered; 0 before the first."""
    command: str | None = None
    """The command of the first machine that it follows."""
    ended: dict[str, object] | None = None
    """How its command ends, if it does not follow any more."""


class _Calling:
    """A channel that is open between launches."""

    def __init__(self, start: Callable[[str], Channel]) -> None:
        """`start` opens a channel of a topic."""
        self._start = start
        self._channel: Channel | None = None
        self._token = ""

    def _publish(self, document: LaunchCall | CallAnswer, topic: str = CALL) -> Channel:
        if self._channel is None:
            self._channel, self._token = self._start(topic), secrets.token_hex(8)
        self._channel.publish(json_safe(replace(document, token=self._token).as_dict()))
        return self._channel

    def _close(self) -> None:
        """Let the others read the last document, and free the port for a launch."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None


class FirstMachine(_Calling):
    """The first machine of several launches. Leaving the context announces the end of the command."""

    def __init__(self, start: Callable[[str], Channel], machines: int, hang_seconds: float) -> None:
        """`start` opens a channel of a topic. `hang_seconds`: limit for the others to answer the first
        call; later ones at most `LOST_SECONDS`."""
        super().__init__(start)
        self._machines, self._hang_seconds = machines, hang_seconds
        self._call = LaunchCall("", secrets.token_hex(8), 0)

    def __enter__(self) -> Self:
        self._publish(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = Verdict(ExitCode.OK, ExitReason.FINISHED, 0) if error is None else verdict_of(error)
        self._publish(replace(self._call, call=self._call.call + 1, state="final", ended=ended.as_dict()))
        self._close()

    def succeed(self, result: dict[str, Any]) -> None:
        """Keep what the command returns, for the others to read at its end."""
        self._call = replace(self._call, result=result)

    def call(self, run: str) -> None:
        """Announce the next launch, and return when every other machine has answered.

        Raises: FsdpTuneError if one is missing, has failed or was stopped.
        """
        self._call = replace(self._call, call=self._call.call + 1, run=run)
        channel, started = self._publish(self._call), LIVED.now()
        limit = self._hang_seconds if self._call.call == 1 else min(self._hang_seconds, LOST_SECONDS)
        while missing := [
            machine for machine in range(1, self._machines) if not self._has_answered(channel, machine)
        ]:
            channel.refuse_fatal()
            if (waited := LIVED.now() - started) > limit:
                raise FailedError(self._missing(missing, waited))
            time.sleep(READ_SECONDS)
        self._close()

    def _has_answered(self, channel: Channel, machine: int) -> bool:
        """Raises: FsdpTuneError if the command of the machine has ended."""
        answer: CallAnswer | None = None
        with suppress(ValueError, KeyError, TypeError):  # a document of the launch before
            answer = CallAnswer.from_dict(channel.document(machine))
        if answer is None:
            return False
        if answer.ended is not None:
            raise _error_of(answer.ended, f"machine {machine}")
        return (answer.command, answer.call) == (self._call.command, self._call.call)

    def _missing(self, missing: list[int], waited: float) -> Problem:
        message = (
            f"{self._machines - len(missing)} of {self._machines} machines answered within "
            f"{format_seconds(waited)}; missing: {', '.join(f'machine {machine}' for machine in missing)}"
        )
        hint = (
            "start the same command on each of them with its `--machine-rank N`; if it has ended, see its "
            "output"
        )
        return Problem("machines-missing", message, hint=hint)


class OtherMachine(_Calling):
    """A machine that is not the first of several launches. Leaving the context with an error announces it."""

    def __init__(self, start: Callable[[str], Channel]) -> None:
        """`start` opens a channel of a topic."""
        super().__init__(start)
        self._answer = CallAnswer("", 0)
        self._has_end = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._has_end:
            ended = replace(self._answer, ended=verdict_of(error).as_dict())
            self._publish(ended)
            self._close()
            self._publish(ended, LAUNCH)  # the first machine may wait there already
        self._close()

    def next_call(self) -> LaunchCall:
        """Wait for the next launch, answer its call and return it; the last one is final.

        Raises: FsdpTuneError if the first machine has failed, was stopped or is lost.
        """
        channel = self._publish(self._answer)
        while (call := self._new_call(channel)) is None:
            self._refuse_lost(channel)
            time.sleep(READ_SECONDS)
        self._answer = replace(self._answer, command=call.command, call=call.call)
        self._publish(self._answer)
        self._close()
        if call.state == "final":
            self._has_end = True
            _raise_failure(call.ended or {}, "machine 0")
        return call

    def _new_call(self, channel: Channel) -> LaunchCall | None:
        """Raises: FailedError if another command of the first machine is there."""
        with suppress(ValueError, KeyError, TypeError):  # a document of the launch before
            call = LaunchCall.from_dict(channel.document(0))
            if self._answer.command not in (None, call.command):
                raise FailedError(
                    Problem(
                        "machine-lost",
                        "machine 0 is lost: its command was started again",
                        hint="start this machine's command again, too; it then joins the new one",
                    )
                )
            return call if call.call > self._answer.call else None
        return None

    def _refuse_lost(self, channel: Channel) -> None:
        silent_seconds = channel.silent_seconds(0)
        limit = JOIN_SECONDS if self._answer.command is None else DECISION_SECONDS
        is_lost = (
            channel.unchanged_seconds(0) > limit if silent_seconds is None else silent_seconds > LOST_SECONDS
        )
        if is_lost:
            why = f": {fault}" if (fault := channel.last.fault) else ""
            seconds = format_seconds(limit if silent_seconds is None else silent_seconds)
            message = f"nothing has come from the first machine for {seconds}{why}"
            hint = "see the output of its command, and `launch.main_process_ip`"
            raise FailedError(Problem("first-machine-missing", message, hint=hint))


def _raise_failure(ended: dict[str, object], machine: str) -> None:
    """Raises: the error with which a command ended; none after a success."""
    error = _error_of(ended, machine)
    if error.exit_code is not ExitCode.OK:
        raise error


def _error_of(ended: dict[str, object], machine: str) -> FsdpTuneError:
    """Return the error with which the command of a machine ended."""
    try:
        verdict = Verdict.from_dict(ended)
    except (ValueError, KeyError, TypeError):
        return FailedError(Problem("machine-failed", f"{machine} has sent an end that cannot be read"))
    if verdict.problem is None:
        problem = Problem("machine-failed", f"{machine} was stopped by a signal")
    else:
        problem = replace(
            verdict.problem, code="machine-failed", message=f"{machine}: {verdict.problem.message}"
        )
    return FsdpTuneError(problem, exit_code=verdict.exit_code)
