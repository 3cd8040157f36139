"""Ranks as threads of this process."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from dsv41.ops.exchange import LocalTransport


def told(call: Callable[[], Any], kind: type[Exception]) -> str:
    """The text of the error that ``call`` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def on_ranks(size: int, work: Callable[[LocalTransport], Any], patience: float = 30.0) -> list[Any]:
    """``work(transport)`` on every rank at once, in the context of the caller; results in rank order.

    The first error of a rank is raised here; the others meet a broken barrier and end.
    """
    transports = LocalTransport.group(size, patience)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(transports[rank])
        except BaseException as error:  # handed to the caller
            errors.append((rank, error))
            transports[rank].leave()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, r), daemon=True)
        for r in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * patience)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0][1]
    return results
