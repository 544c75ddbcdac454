"""Servers, and the names that belong to each"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from .callers import Caller
from .errors import BadArgument
from .lines import Line
from .observe import Observer
from .sources import Given, Source, source_of


class Servers:
    _kind: type[Caller]

    def __init__(self, source: Given | Sequence[Given], *,
                 keys: Sequence[str] | None = None,
                 patience: float = 30,
                 observer: Observer | None = None) -> None:
        """One server: a DSN, which may name several hosts, or another source
        of connections.  Or several servers, over which names are spread by
        their keys, which by default are the DSNs.  `patience` is the time to
        wait for an unreachable server.  The observer is called for each wait
        and hold in the caller's thread, and for a loss in another thread."""
        given: list[Any] = (list(source) if isinstance(source, (list, tuple))
                            else [source])
        self.sources = [source_of(one, self._kind) for one in given]
        self.keys = [str(one.key) for one in self.sources
                     ] if keys is None else list(keys)
        if (not given or len(set(self.keys)) != len(given) or keys is None
                and len(given) > 1 and any(type(g) is not str for g in given)):
            raise BadArgument('each server needs a key of its own', '22023')
        self.patience, self.observer = patience, observer

    def server(self, name: str) -> Any:
        """The DSN, or other source, of the server of this name"""
        return self.source(name).given

    def source(self, name: str) -> Source:
        def weight(server: tuple[str, Source]) -> bytes:
            return hashlib.sha256(f'{server[0]}\0{name}'.encode()).digest()
        return max(zip(self.keys, self.sources), key=weight)[1]

    def check(self, name: str, near: str) -> None:
        if self.source(name) is not self.source(near):
            raise BadArgument(f'"{name}" is on another server', '22023')

    def line(self, caller: Caller, name: str) -> Line:
        return Line(caller, self.source(name), self.patience)
