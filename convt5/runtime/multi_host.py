"""Joins the hosts of a run, by flags, by environment variables, or by JAX's detection.

`train` and `eval` call it before anything else uses JAX. The same command works on Cloud TPU
slices, GKE, SLURM and with `launch/local.py`.
"""

import argparse
import contextlib
import errno
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from convt5 import errors
from convt5.runtime.flags import Flag

FLAGS = (
    Flag(
        "multi_host",
        "joins the other hosts of a run (jax.distributed). JAX finds them on Cloud TPU, GKE, "
        "SLURM and Open MPI 4. Elsewhere give the next three flags, or set "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
        {"action": "store_true"},
    ),
    Flag("coordinator_address", "HOST:PORT of the first process, the same for all processes.", {}),
    Flag("num_processes", "number of processes in the run.", {"type": int}),
    Flag("process_id", "index of this process, from 0.", {"type": int}),
)
_VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
_HEARTBEAT_SECS = 100  # JAX's default.
_WAIT_SECS = 300.0  # As long as JAX waits for all processes.


def settings(
    flags: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`; None for a run of one process.

    Flags take precedence over environment variables.

    Raises:
        UserError: only some of address, number and index are given, or they are invalid.
    """
    given = {}
    for name, variable in _VARIABLES.items():
        value = getattr(flags, name)
        if value is None and environ.get(variable):
            value = environ[variable]
            if name != "coordinator_address":
                value = _integer(variable, value)
        if value is not None:
            given[name] = value
    if not given and not flags.multi_host:
        return None
    missing = [f"--{name} (or {_VARIABLES[name]})" for name in _VARIABLES if name not in given]
    if missing and not flags.multi_host:
        raise errors.UserError(
            f"{' and '.join(f'{name}={value}' for name, value in given.items())} make this one of "
            f"several processes, but {' and '.join(missing)} is missing; give it, or --multi_host "
            "where JAX can find it (Cloud TPU, GKE, SLURM)."
        )
    if "coordinator_address" in given:
        _check_address(given["coordinator_address"])
    if not missing:
        index, count = given["process_id"], given["num_processes"]
        if not 0 <= index < count:
            raise errors.UserError(
                f"process_id={index} must be at least 0 and less than num_processes={count}."
            )
        given["cluster_detection_method"] = "deactivate"
    return given | {"heartbeat_timeout_seconds": _heartbeat(environ)}


@contextlib.contextmanager
def join(flags: argparse.Namespace) -> Iterator[None]:
    """Context in which this process has joined the run, if flags or environment request it.

    A process that fails exits at once, without JAX's shutdown barrier, which can wait for minutes:
    others may be waiting for this process.

    Raises:
        UserError: as `settings`, the other hosts cannot be found, or they cannot reach this one.
        TrainingError: the first process does not listen.
    """
    arguments = settings(flags)
    if arguments is None:
        yield
        return
    index, address = arguments.get("process_id"), arguments.get("coordinator_address")
    if index is not None and address is not None:
        _wait_for_first(address) if index else _check_can_listen(address)
    import jax

    try:
        jax.distributed.initialize(**arguments)
    except ValueError as error:
        raise errors.UserError(
            f"--multi_host finds no other hosts here ({error}); run it on Cloud TPU, GKE or SLURM, "
            "or give --coordinator_address, --num_processes and --process_id."
        ) from error
    try:
        yield
    except BaseException as error:
        if isinstance(error, errors.UserError) and error.exit_code >= 128:
            raise  # All processes were asked to stop, and stop together.
        _leave(error)


def _leave(error: BaseException) -> None:
    if not isinstance(error, errors.UserError):
        error = errors.of_files(error) or error
    if isinstance(error, errors.UserError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(getattr(error, "exit_code", 1))


def _check_address(address: str) -> None:
    """Checks the port, because JAX's runtime crashes or misbehaves with an invalid one."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]+", port) or not 0 < int(port) < 2**16:
        raise errors.UserError(
            f"coordinator_address={address!r} must be HOST:PORT with a port from 1 to 65535, such "
            "as 10.0.0.2:8476."
        )


def _check_can_listen(address: str, environ: Mapping[str, str] = os.environ) -> None:
    """Checks the port of the first process, because JAX's runtime crashes where it is in use."""
    port = address.rpartition(":")[2]
    everywhere = f"{'[::]' if socket.has_dualstack_ipv6() else ''}:{port}"
    bound = environ.get("JAX_COORDINATOR_BIND_ADDRESS", everywhere)
    host, _, port = bound.rpartition(":")
    if not port.isdecimal():
        return  # JAX tells what is wrong with its variable.
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family, dualstack_ipv6=host == "::").close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # JAX tells the rest.
        raise errors.UserError(
            f"coordinator_address={address!r}: this process cannot listen on port {port} "
            f"({os.strerror(error.errno)}); stop what uses it, or choose another port for all "
            "processes."
        ) from error


def _wait_for_first(address: str) -> None:
    """Waits until the first process listens, because JAX's runtime crashes if it never does."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _WAIT_SECS
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            if time.monotonic() > end:
                raise errors.TrainingError(
                    f"coordinator_address={address!r}: no process has listened there for "
                    f"{_WAIT_SECS:.0f} seconds ({error.strerror or error}); start process 0, and "
                    "check its address and the firewalls between the hosts."
                ) from error
        time.sleep(0.1)


def _heartbeat(environ: Mapping[str, str]) -> int:
    variable = "CONVT5_HEARTBEAT_SECS"
    return _integer(variable, environ.get(variable) or str(_HEARTBEAT_SECS))


def _integer(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise errors.UserError(f"{variable}={text!r} must be an integer.") from None
