"""Check before ranks start that they can connect to each other."""

from __future__ import annotations

import errno

from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.port_checks import loopback_refusal, port_refusal
from fsdp_tune.recipe.schema.recipe import Recipe

NO_FREE_PORT = (
    "end processes that hold ports, or widen the range that `sysctl net.ipv4.ip_local_port_range` shows"
)


def check_port(recipe: Recipe, machine_rank: int = 0) -> None:
    """Check that ranks can connect: the port of the recipe is free on the machine that listens, and a single
    machine has a loopback.

    Raises: FailedError (exit 1), instead of a later time-out.
    """
    port = recipe.launch.main_process_port
    if recipe.launch.num_machines == 1 and (refusal := loopback_refusal()) is not None:
        are_ports_used = refusal.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        raise failed_error(
            "no-loopback",
            "processes of this machine cannot connect to each other on 127.0.0.1: "
            f"{refusal.strerror or refusal}",
            hint=NO_FREE_PORT
            if are_ports_used
            else "`ip link set lo up` starts the loopback interface, which new network namespaces lack",
        )
    if port == "auto" or machine_rank != 0:
        return
    if (error := port_refusal(port)) is not None:
        raise failed_error(
            "port-taken",
            f"port {port} (`launch.main_process_port`) cannot be used: {error.strerror}",
            hint="set another port"
            + (
                ", the same on every machine"
                if recipe.launch.num_machines > 1
                else ", or `auto` for a free one"
            ),
        )
