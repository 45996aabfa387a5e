"""The zstd that compresses deltas: Python's own from 3.14 on, before that the same as a package."""

from __future__ import annotations

import sys

from penstock.errors import WeightsError

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError as error:
    raise WeightsError("the transport delta needs zstd: pip install 'penstock[delta]', or use disk") from error

__all__ = ["zstd"]
