"""Numbers of things, as sentences have them."""


def counted(number: int, what: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
