"""Who goes first. A policy only compares; it holds no requests."""

from __future__ import annotations

from typing import Protocol

from services.engine.request import Request

Rank = tuple[int, ...]
"""Sorts requests: the smallest goes first. No two live requests have the same one."""


class Policy(Protocol):
    """The order of the requests."""

    def rank(self, request: Request) -> Rank:
        """Its place among the running: served in this order, preempted from the other end."""

    def place(self, request: Request) -> Rank:
        """Its place in the waiting line."""


class FirstCome:
    """By priority, then by arrival. One that ran before goes first among equals."""

    def rank(self, request: Request) -> Rank:
        """The victim is so the least urgent one, and the latest of those."""
        return (request.priority, request.arrival)

    def place(self, request: Request) -> Rank:
        """What was computed for a preempted one is soonest lost."""
        return (request.priority, 0 if request.runs else 1, request.arrival)
