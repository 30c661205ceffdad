"""Flags and environment say which process of a run this is, and mistakes are told."""

import argparse
import concurrent.futures
import socket

import pytest

from convt5 import errors, train
from convt5.configuration import command_line
from convt5.runtime import multi_host

ALL = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.2:8476",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


def settings(environ=None, **flags):
    given = dict.fromkeys(("coordinator_address", "num_processes", "process_id")) | flags
    return multi_host.settings(argparse.Namespace(**{"multi_host": False} | given), environ or {})


def test_a_process_alone_joins_nothing():
    assert settings() is None


def test_the_environment_alone_makes_a_process_one_of_several():
    found = settings(ALL)
    assert (found["num_processes"], found["process_id"]) == (4, 3)
    assert found["coordinator_address"] == "10.0.0.2:8476"
    # JAX must not look for other clusters, such as the SLURM job that a test runs in.
    assert found["cluster_detection_method"] == "deactivate"


def test_flags_go_before_the_environment():
    assert settings(ALL, process_id=0)["process_id"] == 0


def test_the_rest_is_left_to_jax_with_the_flag():
    found = settings({"JAX_COORDINATOR_ADDRESS": "head:1"}, multi_host=True)
    assert found.keys() == {"coordinator_address", "heartbeat_timeout_seconds"}


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, {"process_id": 1}, r"--coordinator_address .* is missing"),
        (ALL | {"JAX_PROCESS_ID": "4"}, {}, "process_id=4 must be at least 0 and less than"),
        (ALL | {"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES='two' must be an integer"),
        (ALL | {"JAX_COORDINATOR_ADDRESS": "head"}, {}, "'head' must be HOST:PORT"),
        (ALL | {"CONVT5_HEARTBEAT_SECS": "soon"}, {}, "CONVT5_HEARTBEAT_SECS='soon'"),
    ],
)
def test_settings_that_make_no_sense_are_told(environ, flags, message):
    with pytest.raises(errors.UserError, match=message):
        settings(environ, **flags)


@pytest.mark.parametrize("address", ["head:", "head:abc", "head:0", "head:65536", ":8476", "h:-1"])
def test_an_address_without_a_port_that_exists_is_told(address):
    """The runtime of JAX crashes of a port that is no number, and accepts others."""
    with pytest.raises(errors.UserError, match=f"address='{address}' must be HOST:PORT with"):
        settings(ALL, coordinator_address=address)


@pytest.mark.parametrize("address", ["head:1", "10.0.0.2:65535", "[::1]:8476"])
def test_an_address_is_a_host_and_a_port(address):
    assert settings(ALL, coordinator_address=address)["coordinator_address"] == address


@pytest.mark.parametrize("bound", [None, "127.0.0.1"])
def test_a_port_in_use_is_told_before_jax_crashes(monkeypatch, bound):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if bound:
            monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"{bound}:{port}")
        flags = [f"--coordinator_address=here:{port}", "--num_processes=2", "--process_id=0"]
        with pytest.raises(errors.UserError, match=r"cannot listen on port \d+ \(Address alr"):
            train.main(["--gin_file=none.gin", *flags])


@pytest.mark.parametrize("host", ["127.0.0.1", "host.invalid"])
def test_a_first_process_that_is_not_there_is_told_before_jax_crashes(monkeypatch, host):
    monkeypatch.setattr(multi_host, "_WAIT_SECS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = [f"--coordinator_address={host}:{port}", "--num_processes=2", "--process_id=1"]
    # Exit code 1: the first process may be on its way, and a repeated command may help.
    told = r"no process has listened there for 0 seconds \("
    with pytest.raises(errors.TrainingError, match=told):
        train.main(["--gin_file=none.gin", *flags])


def test_a_first_process_that_starts_later_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(multi_host._wait_for_first, f"127.0.0.1:{port}")
        with socket.create_server(("127.0.0.1", port)):
            waiting.result(timeout=60)


def test_the_commands_have_the_flags():
    parsed = command_line.parse(train.COMMAND, ["--gin_file=a.gin", "--num_processes=2"]).flags
    assert (parsed.num_processes, parsed.process_id) == (2, None)
