"""Listening sockets of ranks: listed from /proc, restricted to the loopback interface, and avoided on one host."""

import os
import socket

import pytest

from hpcdist.comm.launch import environment


def test_listening_sockets_of_a_process_are_listed_with_address_and_port():
    with socket.create_server(("127.0.0.1", 0)) as local, socket.create_server(("0.0.0.0", 0)) as other:
        result = environment.listening(os.getpid())
        assert result[local.fileno()] == f"127.0.0.1:{local.getsockname()[1]}"
        assert result[other.fileno()] == f"0.0.0.0:{other.getsockname()[1]}"
        assert environment.is_loopback(result[local.fileno()]) and not environment.is_loopback(result[other.fileno()])
    assert environment.listening(2**30) == {}, "that process no longer exists"
    assert not environment.is_loopback("[::]:1024") and environment.is_loopback("[::1]:1024")


@pytest.mark.parametrize(("interface", "device"), [("lo", b"lo\0"), ("eth0", b"")])
def test_open_sockets_are_bound_to_the_loopback_device_if_tcp_uses_it_alone(monkeypatch, interface, device):
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", interface)
    with socket.create_server(("0.0.0.0", 0)) as server:
        environment.restrict_to_loopback()
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == device


@pytest.mark.parametrize(
    ("announced", "added"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"OMPI_MCA_btl": "^tcp"}),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {}),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, {"UCX_TLS": "^tcp"}),
        ({"PMI_SIZE": "2"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_btl": "self,tcp"}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_mpi_ft_enable": "1"}, {}),
    ],
)
def test_plain_mpirun_on_one_host_starts_no_tcp_transport(announced, added):
    variables = dict(announced)
    environment.exclude_tcp(variables)
    assert variables == announced | added
