"""Fixtures of the methods' tests."""

from __future__ import annotations

from methods.by_hand import case

__all__ = ["case"]
