"""Waits, holds and losses, for metrics and logs"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger('dlock')


class Observation(NamedTuple):
    """An acquire (`waited`) or its failure (`failed`), a release (`held`) or a
    loss (`lost`), with the time of the wait or the hold"""
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
