"""Work in threads that do not keep a process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Run work in a daemon thread: a lost call, which blocks until its deadline, does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
