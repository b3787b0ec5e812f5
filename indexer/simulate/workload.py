"""Invents requests: conversations that share a few system prompts and grow turn by turn.

Some use a LoRA adapter, a cache salt or images; some requests are sent twice, some have a length that is a multiple of
every block size, so that engines announce copies. The same seed gives the same requests. Pure: time passes elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.simulate.cache import Image, Prompt
from indexer.simulate.flavours import ADAPTERS, IMAGES, LORA_IDS, MODEL, SALTS
from indexer.simulate.scheduler import Job

VOCABULARY = 32_000
IMAGE_TOKEN = 31_999
TENANTS = ("tenant-1", "tenant-2")
ALIGNED_TOKENS = 32
PROMPT_TOKENS_MAX = 2_048

EXAMPLE_FIRST_TOKEN = 1_000
EXAMPLE_TOKENS = 97
EXAMPLE_SYSTEM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Assignment:
    """A job and the engine it is for, by its place in the fleet."""

    engine: int
    job: Job


@dataclass(slots=True)
class _Conversation:
    engine: int
    history: list[int]
    turns_left: int
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    images: list[Image] = field(default_factory=list)
    repeat: Job | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What an engine must take to serve it."""
        has = {ADAPTERS: self.lora_name, SALTS: self.cache_salt, IMAGES: self.images}
        return frozenset(need for need, value in has.items() if value)

    def prompt(self) -> Prompt:
        return Prompt(tuple(self.history), self.lora_name, self.cache_salt, tuple(self.images), self.session_id)


def example_prompt() -> tuple[str, list[int]]:
    """Model and tokens of a prompt that a fleet soon has cached and keeps warm: how its first system prompt starts."""
    return MODEL, list(range(EXAMPLE_FIRST_TOKEN, EXAMPLE_FIRST_TOKEN + EXAMPLE_TOKENS))


class Workload:
    """Requests for a fleet. `takes`: per engine, what its prompts may have (`Flavour.takes`)."""

    def __init__(self, seed: int, takes: Sequence[frozenset[str]], conversations: int = 24) -> None:
        self._chance = random.Random(seed)
        self._takes = takes
        self._started = 0
        example = list(range(EXAMPLE_FIRST_TOKEN, EXAMPLE_FIRST_TOKEN + EXAMPLE_SYSTEM_TOKENS))
        self._system_prompts = [example, *(self._tokens(length) for length in (128, 208, 336, 500))]
        self._conversations = [self._new_conversation() for _ in range(conversations)]

    def wait_s(self, rate: float) -> float:
        """Seconds until the next request, at `rate` requests a second on average."""
        return self._chance.expovariate(rate)

    def next_assignment(self) -> Assignment:
        """The next request: a turn of some conversation, or once more the one it sent before."""
        place = self._chance.randrange(len(self._conversations))
        conversation = self._conversations[place]
        if conversation.repeat is not None:
            job, conversation.repeat = conversation.repeat, None
            return Assignment(conversation.engine, job)
        if conversation.turns_left == 0 or len(conversation.history) > PROMPT_TOKENS_MAX - 300:
            conversation = self._conversations[place] = self._new_conversation()
        job = self._turn(conversation)
        return Assignment(conversation.engine, job)

    def variant(self, prompt: Prompt) -> Prompt:
        """A prompt to ask about: this one, its start, a continuation, or the same under another salt or adapter."""
        chance, length = self._chance, len(prompt.token_ids)
        match chance.randrange(6):
            case 0 | 1:
                return prompt
            case 2:
                end = chance.randint(1, length)
                images = tuple(image for image in prompt.images if image.offset + image.length <= end)
                return Prompt(prompt.token_ids[:end], prompt.lora_name, prompt.cache_salt, images)
            case 3:
                longer = (*prompt.token_ids, *self._tokens(chance.randint(1, 64)))
                return Prompt(longer, prompt.lora_name, prompt.cache_salt, prompt.images)
            case 4:
                return Prompt(prompt.token_ids, prompt.lora_name, chance.choice((None, *TENANTS)), prompt.images)
            case _:
                return Prompt(
                    prompt.token_ids, chance.choice((None, *sorted(LORA_IDS))), prompt.cache_salt, prompt.images
                )

    def _new_conversation(self) -> _Conversation:
        chance = self._chance
        self._started += 1
        weights = (6, *(1 for _ in self._system_prompts[1:]))
        system_prompt = chance.choices(self._system_prompts, weights)[0]
        engine = chance.randrange(len(self._takes))
        takes = self._takes[engine]
        return _Conversation(
            engine=engine,
            history=list(system_prompt),
            turns_left=chance.randint(2, 8),
            lora_name=chance.choice(sorted(LORA_IDS)) if ADAPTERS in takes and chance.random() < 0.15 else None,
            cache_salt=chance.choice(TENANTS) if SALTS in takes and chance.random() < 0.15 else None,
            session_id=f"session-{self._started}" if chance.random() < 0.3 else None,
        )

    def _turn(self, conversation: _Conversation) -> Job:
        """The user says something, the model will answer; both become history."""
        chance = self._chance
        conversation.turns_left -= 1
        if chance.random() < 0.08:
            self._add_image(conversation)
        if chance.random() < 0.1 or not conversation.needs <= self._takes[conversation.engine]:
            conversation.engine = chance.choice(self._engines_for(conversation.needs))
        conversation.history += self._tokens(chance.randint(10, 120))
        if chance.random() < 0.15:
            conversation.history += self._tokens(-len(conversation.history) % ALIGNED_TOKENS)
        job = Job(conversation.prompt(), tuple(self._tokens(chance.randint(8, 120))))
        conversation.repeat = job if chance.random() < 0.1 else None
        conversation.history += job.output
        return job

    def _engines_for(self, needs: frozenset[str]) -> list[int]:
        return [engine for engine, takes in enumerate(self._takes) if needs <= takes]

    def _add_image(self, conversation: _Conversation) -> None:
        if not self._engines_for(conversation.needs | {IMAGES}):
            return
        length = self._chance.choice((5, 20, 40))
        identifier = f"image-{self._chance.randrange(8)}-{length}"
        conversation.images.append(Image(identifier, len(conversation.history), length))
        conversation.history += [IMAGE_TOKEN] * length

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(VOCABULARY - 1), k=count)
