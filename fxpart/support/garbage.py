"""`collect_rarely`: a process of our own leaves the modules that it imports in peace."""

import atexit
import gc

__all__ = ["collect_rarely"]

_THRESHOLDS = (20_000, 20, 20)


def collect_rarely() -> None:
    """Look for garbage less often in this process, and not at all at its end.

    The modules of torch and MLflow are a million objects that stay. Python goes over them again and
    again while they are imported, and once more at exit: a third of a short run's time. Memory
    that only cycles keep alive is returned later.
    """
    gc.set_threshold(*_THRESHOLDS)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
