"""How one publisher's engine looks prompts up, as far as its events and its registration tell.

Purpose: queries judge a publisher by rules (reuse.py) that follow from its groups and options; and they judge many at
once of whom these rules ask for nothing but the prefix. Both are worked out once and kept until something is learned.

Invariants: what is kept belongs to the newest version of the groups, the lookahead and the granule.

If broken: hits would follow the rules of another engine.
"""

from __future__ import annotations

from indexer.index.groups import UNKNOWN, Groups
from indexer.index.options import EngineOptions
from indexer.index.residents import Residents
from indexer.index.reuse import ReuseRules, Spec, rules_of


class PublisherReuse:
    def __init__(self, options: EngineOptions, groups: Groups, residents: Residents) -> None:
        self._options = options
        self._groups = groups
        self._residents = residents
        self._rules: ReuseRules | None = None
        self._rules_version = (-1, -1)
        self._plain_groups: tuple[int, ...] = ()
        self._plain_version: tuple[int, int | None] = (-1, None)

    @property
    def rules(self) -> ReuseRules | None:
        """How the engine would look a prompt up; None before anything was learned."""
        version = self._groups.version, self._residents.lookahead_tokens
        if self._rules_version != version:
            self._rules_version = version
            has_groups = bool(self._groups.by_index)
            self._rules = rules_of(self._groups, self._options, drops=self.drops_blocks) if has_groups else None
        return self._rules or self._rules_without_groups()

    def _rules_without_groups(self) -> ReuseRules | None:
        """Only offloaded blocks were announced so far: of one full-attention group, of a granule each."""
        granule = self._residents.granule
        return None if granule is None else ReuseRules((Spec(UNKNOWN, granule, None, None, (0,)),), granule, granule)

    @property
    def drops_blocks(self) -> bool:
        """Whether the engine computes the last block of a hit again, for EAGLE: not if its hashes look ahead."""
        return self._options.is_eagle and not self._residents.lookahead_tokens

    def drops(self, group: int) -> bool:
        """Whether this group drops the last block of a hit (EAGLE)."""
        rules = self.rules
        return rules is not None and any(spec.drops for spec in rules.specs if group in spec.groups)

    @property
    def rules_of_a_pool(self) -> ReuseRules:
        """Blocks count if every group has them; where there are several sizes, for no more than the smallest."""
        groups = {key.group for key in self._residents.holders} or {0}
        block = self.least_block_tokens
        assert block, "who has a key space has a granule"
        return ReuseRules((Spec(UNKNOWN, block, None, None, tuple(sorted(groups))),), block, block)

    @property
    def least_block_tokens(self) -> int:
        """Tokens of its smallest blocks; 0 = not known yet."""
        granule = self._residents.granule
        if granule is None or self._groups.is_coarse:
            return 0 if granule is None else self._groups.block_tokens_min
        return min((size for group in self._groups.by_index.values() for size in group.sizes), default=granule)

    @property
    def plain_groups(self) -> tuple[int, ...]:
        """The groups of its only specification, if hits are simply how far the prefix reaches, but for the last block
        if it drops blocks; else none."""
        version = self._groups.version, self._residents.granule
        if self._plain_version != version:
            self._plain_version = version
            self._plain_groups = self.rules.specs[0].groups if self.rules is not None and self.is_full_alone else ()
        return () if self.is_asked_always else self._plain_groups

    @property
    def is_full_alone(self) -> bool:
        """Full attention alone, with blocks of one granule: nothing counts behind a block that it has not got."""
        specs = self.rules.specs if self.rules is not None else ()
        return len(specs) == 1 and specs[0].is_full and specs[0].block_tokens == self._residents.granule

    @property
    def is_asked_always(self) -> bool:
        """Whether it may have a hit of a prompt of which nothing is found under plain keys."""
        takes_for_granted = self.rules is not None and self.rules.takes_for_granted
        is_elsewhere = bool(self._residents.lookahead_tokens) or self._options.engine_hash is not None
        return is_elsewhere or takes_for_granted
