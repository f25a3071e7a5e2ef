"""Why something failed, in the words of the exception, on one line."""

__all__ = ["reason"]


def reason(error: BaseException, most: int = 240) -> str:
    """Return the class and the message of `error` on one line of about `most` characters."""
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= most else text[: most - 3] + "..."
