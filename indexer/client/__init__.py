"""The client library: asks a running service, from a router or any other program (docs/client.md).

Purpose: an answer in time, or none. Whatever the network or the service does, a query ends by its deadline, and what it
returns then says that there is no signal, and why. Only a mistake of the caller (a wrong type, a closed client) raises.

Usable alone: nothing of the service is imported, only `msgspec`, `httptools`, `xxhash` and the standard library.
"""

from __future__ import annotations

from indexer.client.answers import Counts, Failure, GroupReach, Hit, Outcome, PrefixHits, QueryWarning, Reason, Span
from indexer.client.async_client import AsyncIndexClient
from indexer.client.prompts import MultimodalItem, local_hashes
from indexer.client.sync_client import IndexClient

__all__ = [
    "AsyncIndexClient",
    "Counts",
    "Failure",
    "GroupReach",
    "Hit",
    "IndexClient",
    "MultimodalItem",
    "Outcome",
    "PrefixHits",
    "QueryWarning",
    "Reason",
    "Span",
    "local_hashes",
]
