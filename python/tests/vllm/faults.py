"""A proxy between two stores that damages traffic as the test requires."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

HEADER = 12
BLOCKS = 4
"""The kind of the frame that precedes blocks; `docs/kvstore.md` describes the frames."""

Fault = Callable[[bytes, bytes], tuple[bytes, str]]
"""Takes a frame of blocks and the blocks; returns the bytes to forward, and the next state: `on`,
`stall` or `cut`."""


def flip(at: int) -> Fault:
    """Damages one bit of the blocks."""

    def fault(frame: bytes, blocks: bytes) -> tuple[bytes, str]:
        damaged = bytearray(blocks)
        damaged[at] ^= 1
        return frame + damaged, "on"

    return fault


def short(count: int, then: str) -> Fault:
    """Forwards this many bytes of the blocks and no more."""
    return lambda frame, blocks: (frame + blocks[:count], then)


def flip_frame(frame: bytes, blocks: bytes) -> tuple[bytes, str]:
    """Damages the frame itself."""
    return frame[:-1] + bytes([frame[-1] ^ 1]) + blocks, "on"


def replace_frame(frame: bytes, blocks: bytes) -> tuple[bytes, str]:
    """Sends a frame of no kind in its place."""
    return frame[:5] + b"\xff" + frame[6:] + blocks, "on"


class Proxy:
    """Proxies connections of peers to the store at `target`, an address as `tcp://IP:PORT`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fault: Fault | None = None
        """Applied to the next blocks, once."""
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            cut(one)

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for work, source, sink in (
                    (self._carry, near, far),
                    (self._carry_frames, far, near),
                ):
                    threading.Thread(target=work, args=(source, sink), daemon=True).start()
        except OSError:
            return

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        cut(source)
        cut(sink)

    def _carry_frames(self, source: socket.socket, sink: socket.socket) -> None:
        reader = source.makefile("rb")
        try:
            while len(header := reader.read(HEADER)) == HEADER:
                frame = header + reader.read(int.from_bytes(header[:4], "little"))
                if header[5] != BLOCKS:
                    sink.sendall(frame)
                    continue
                blocks = reader.read(bytes_behind(frame))
                fault, self.fault = self.fault, None
                data, then = fault(frame, blocks) if fault else (frame + blocks, "on")
                sink.sendall(data)
                if then == "stall":
                    # Later bytes are read and never forwarded; the connection stays open.
                    while reader.read(1):
                        pass
                if then == "cut":
                    break
        except OSError:
            pass
        cut(source)
        cut(sink)


def bytes_behind(frame: bytes) -> int:
    """Return the number of bytes of blocks that follow the frame."""
    answers = struct.iter_unpack("<BQQI", frame[HEADER + 12 :])
    return sum(length for status, _, _, length in answers if status == 0)


def cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
