"""An index on the plain classes: payloads are decoded event by event, and queries walk block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from indexer.index import publisher, residents, scope
from indexer.index.content_index import ContentIndex
from indexer.index.prefix_query import PrefixQuery, PublisherHit
from tests.plain_index.ghosts import Ghosts
from tests.plain_index.holder import Holder, Pending
from tests.plain_index.key_space import KeySpace
from tests.plain_index.prefix_hits import hits_of


class PlainIndex(ContentIndex):
    """Whatever changes it or its publishers has to happen within `plain_classes`, and batches come without columns."""

    def hits(self, query: PrefixQuery) -> list[PublisherHit]:
        found = self.scope(query.tenant, query.model)
        return [] if found is None else hits_of(query, found)


@contextmanager
def plain_classes() -> Iterator[None]:
    """Meanwhile key spaces, holders and ghosts are made of the plain classes."""
    with (
        patch.object(scope, "KeySpace", KeySpace),
        patch.object(residents, "Holder", Holder),
        patch.object(residents, "Pending", Pending),
        patch.object(publisher, "Ghosts", Ghosts),
    ):
        yield
