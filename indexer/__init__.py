"""The KV-cache content index: which engine still holds how much of this prompt?"""

from __future__ import annotations

__version__ = "0.1.0"
