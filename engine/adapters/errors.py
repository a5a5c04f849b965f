"""The error of this room, apart so that reading a header needs no torch."""


class AdapterError(ValueError):
    """An adapter cannot be used; the text names the file, what was expected and what to do."""
