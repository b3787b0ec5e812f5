"""Which adapters and salts events of a model have named since the service started: for warnings, and to be shown.

Salts are kept as hashes only. At a bound no further name is kept, and nothing can be said of a name that is not there.
"""

from __future__ import annotations

from itertools import count

from indexer.identity.chain import salted_seed

ADAPTERS_MAX = 1_024
SALTS_MAX = 16_384
_numbers = count(1)


class NamesSeen:
    """Of one scope; adapters by the name that prompts have for them. No name is ever forgotten.

    `number`: of no other one, for those that remember what they have found here.
    """

    __slots__ = ("_salts", "adapters", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.adapters: dict[str, None] = {}  # in the order in which they came
        self._salts: set[int] = set()

    def note_adapter(self, lora_name: str) -> None:
        if len(self.adapters) < ADAPTERS_MAX:
            self.adapters[lora_name] = None

    def note_salt(self, cache_salt: str) -> None:
        if len(self._salts) < SALTS_MAX:
            self._salts.add(salted_seed(0, cache_salt))

    @property
    def has_all_adapters(self) -> bool:
        return len(self.adapters) < ADAPTERS_MAX

    def lack(self, lora_name: str | None, cache_salt: str | None) -> bool:
        """Whether either is given and has not been seen."""
        return bool(lora_name and self.lacks_adapter(lora_name)) or bool(cache_salt and self.lacks_salt(cache_salt))

    def lacks_adapter(self, lora_name: str) -> bool:
        """Whether no event has named it, as far as that is known."""
        return self.has_all_adapters and lora_name not in self.adapters

    def lacks_salt(self, cache_salt: str) -> bool:
        return len(self._salts) < SALTS_MAX and salted_seed(0, cache_salt) not in self._salts
