"""Why a measurement has no result, and which exit code says so."""
from __future__ import annotations

from .default_model import DefaultModelError
from .program import CANNOT_BE_USED, FAILED, WRONG_USAGE


class NotMeasured(ValueError):
    """Model and adapters are good, and yet nothing could be measured."""


class MissingPackages(ImportError):
    """What the comparison needs is not installed."""


def exit_code(error: Exception) -> int:
    if isinstance(error, MissingPackages):
        return WRONG_USAGE
    by_file = isinstance(error, (ValueError, OSError)) and not isinstance(error, (NotMeasured, DefaultModelError))
    return CANNOT_BE_USED if by_file else FAILED
