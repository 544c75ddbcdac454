"""Waits, holds and losses, for measurements"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger('dlock')


class Observation(NamedTuple):
    """`waited` for a lock that was acquired, or `failed` to acquire; `held`
    until the release, or until it was `lost`"""
    what: str
    name: str
    scope: str
    seconds: float
    error: BaseException | None = None


Observer = Callable[[Observation], object]


def tell(observer: Observer, observation: Observation) -> None:
    """An error of an observer does not reach the program."""
    try:
        observer(observation)
    except Exception:
        log.exception('observer of %s', observation)


def logged(observation: Observation) -> None:
    """An observer that logs: Locks(dsn, observer=dlock.logged)"""
    log.info('%s %s in %s scope: %.3f s%s', observation.what, observation.name,
             observation.scope, observation.seconds,
             f': {observation.error}' if observation.error else '')
