"""`collect_rarely`: reduce the cost of garbage collection in our own processes."""

import atexit
import gc

__all__ = ["collect_rarely"]

_THRESHOLDS = (20_000, 20, 20)


def collect_rarely() -> None:
    """Collect garbage less often in this process, and not at all at exit.

    The modules of torch and MLflow are a million long-lived objects. Python traverses them
    repeatedly during imports and once more at exit, which is a third of a short run's time. Memory
    in reference cycles is freed later.
    """
    gc.set_threshold(*_THRESHOLDS)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
