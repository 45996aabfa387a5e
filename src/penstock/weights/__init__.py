"""Versions, and how bytes go from trainer to engine workers."""
