"""Connections that are cut in the middle of an append; `python tests/proxy.py` cuts at every single byte."""

import socket

import proxy

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def exchange(port: int) -> bytes:
    """What is answered until all is there, or the connection ends."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(PING)
        while heard != PONG and (more := client.recv(100)):
            heard += more
    return heard


def test_a_connection_is_cut_after_exactly_so_many_bytes(valkey):
    with proxy.Proxy(valkey.socket) as between:
        assert exchange(between.port) == PONG
        for n in range(len(PING)):
            between.cut("asked", n)
            assert exchange(between.port) == b""
        for n in range(len(PONG)):
            between.cut("answered", n)
            assert exchange(between.port) == PONG[:n]
        assert between.cuts == len(PING) + len(PONG)
        assert between.passed["asked"] == sum(range(len(PING))) + (1 + len(PONG)) * len(PING)
        between.cut("answered", len(PONG))
        assert exchange(between.port) == PONG


def test_a_cut_connection_leaves_no_duplicate_in_postgresql(postgres, postgres_url):
    done = proxy.run("postgresql", postgres, postgres_url, (13, 5), (97, 67))
    assert done.cuts > 100
    assert done.stored["answered"] > 0


def test_a_cut_connection_leaves_no_duplicate_in_valkey(valkey, valkey_url):
    done = proxy.run("valkey", valkey, valkey_url, (17, 1), (97, 19))
    assert done.cuts > 100
    assert done.stored["answered"] > 0
