"""Styles that many parts of the screen use, as Content takes them."""
from __future__ import annotations

QUIET = "$foreground 60%"
"""text beside what matters"""
