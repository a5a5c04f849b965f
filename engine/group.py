"""Requests that begin, wait and go on together; an ordinary request is a group of one."""
from __future__ import annotations

from dataclasses import dataclass

from .blocks import blocks_for
from .kv_keys import block_keys
from .request import Request


@dataclass(slots=True, eq=False)
class Group:
    """The unit of admission and preemption. Of its requests none decodes while another has more than one token to compute."""

    requests: list[Request]
    """those that have not ended"""
    number: int
    """in the order of arrival"""
    passed: int = 0
    """later groups that were let through while it waited"""
    preempted: bool = False
    """it ran before, and still holds its slots"""
    whole: bool = False
    """it has all blocks that it can ever need"""
    lacking: int = -1
    """free KV blocks that were too few for it; as long as there are not more it need not be tried"""

    @property
    def ready(self) -> bool:
        """Whether each of its requests can draw a token with the next one that it computes."""
        return all(request.pending == 1 for request in self.requests)

    @property
    def least_blocks(self) -> int:
        """KV blocks without which it cannot draw a token each, what its prompts have in common counted once."""
        need = sum(blocks_for(len(request.ids) + 1) for request in self.requests)
        if len(self.requests) == 1:
            return need
        keys = [key for request in self.requests for key in block_keys(request.ids[:-1], request.history.stretches)]
        return need - len(keys) + len(set(keys))
