"""Between a client and a PostgreSQL server on its socket: loses what is told about one commit, or the commit itself."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from enum import Enum
from pathlib import Path

_NAME = ".s.PGSQL.5432"
_COMMIT = re.compile(rb"COMMIT(?!TED)")  # a BEGIN may name its isolation


class Lost(Enum):
    """What a cut connection takes with it."""

    QUESTION = "the commit does not reach the server"
    ANSWER = "the server commits, and nobody hears of it"


class Relay:
    """Listens in `at`, as a server with its socket there would; `lose` is for the next commit alone."""

    def __init__(self, server: Path, at: Path) -> None:
        self._server = server / _NAME
        self.lose: Lost | None = None
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(at / _NAME))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(str(self._server))
                except OSError:  # it is away
                    client.close()
                    server.close()
                    continue
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """What the client asks; a commit whose answer is lost is sent when nobody listens any more."""
        with client, server, suppress(OSError):
            while data := client.recv(65536):
                lost = self.lose if _COMMIT.search(data) else None
                if lost is not None:
                    self.lose = None
                    client.shutdown(socket.SHUT_RDWR)
                if lost is not Lost.QUESTION:
                    server.sendall(data)
                if lost is not None:
                    break
            server.shutdown(socket.SHUT_WR)

    @staticmethod
    def _back(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        with suppress(OSError):  # also where the server has died with a question unread, which is no end but an error
            client.shutdown(socket.SHUT_RDWR)
