"""The least that TCP costs: two processes, one connection, blocking sockets, no protocol but a byte that says which way and one that says
that everything has come. Both know the slices."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.drivers.protocol import Target, repeat, run
from benchmarks.drivers.slices import Slices, Transfer

WRITE, READ, DONE = b"w", b"r", b"d"


def views(memory: np.ndarray, offsets: Sequence[int], size: int) -> list[memoryview]:
    return [memory.data[offset : offset + size] for offset in offsets]


def send(sock: socket.socket, slices: Sequence[memoryview]) -> None:
    for view in slices:
        sock.sendall(view)


def receive(sock: socket.socket, slices: Sequence[memoryview]) -> None:
    for view in slices:
        if sock.recv_into(view, len(view), socket.MSG_WAITALL) != len(view):
            raise ConnectionError("the peer closed within a slice")


class SocketTransfer(Transfer):
    def __init__(self, arguments: Sequence[str]) -> None:
        self.slices = Slices.from_arguments(arguments)
        self.memory = self.slices.new_memory()
        self._target = Target("benchmarks.drivers.socket_loop", self.slices.arguments)
        self._socket = socket.create_connection(("127.0.0.1", self._target.announced["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._views = views(self.memory, self.slices.here, self.slices.size)

    def measure(self, operation: str, times: int) -> list[float]:
        return repeat(self._write if operation == "write" else self._read, times)

    def _write(self) -> None:
        self._socket.sendall(WRITE)
        send(self._socket, self._views)
        if self._socket.recv(1) != DONE:
            raise ConnectionError("the peer closed before it had everything")

    def _read(self) -> None:
        self._socket.sendall(READ)
        receive(self._socket, self._views)

    def close(self) -> None:
        self._socket.close()
        self._target.close()


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    slices = Slices.from_arguments(arguments)
    memory = slices.new_memory()
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = views(memory, slices.there, slices.size)
        while kind := sock.recv(1):
            if kind == WRITE:
                receive(sock, mine)
                sock.sendall(DONE)
            else:
                send(sock, mine)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return {"port": listening.getsockname()[1]}, thread


if __name__ == "__main__":
    run(SocketTransfer, serve_target)
