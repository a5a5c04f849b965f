"""Token ids <-> text: every base's tokenizer, out of GGUF metadata or of a folder's files, and what adapters add to it."""
from __future__ import annotations

from .added import AddedVocabulary, read_added_vocabulary
from .specials import SpecialTokens
from .tokenizer import TextStream, Tokenizer

__all__ = ["AddedVocabulary", "SpecialTokens", "TextStream", "Tokenizer", "read_added_vocabulary"]
