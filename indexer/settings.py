"""Every setting, its default and its bounds: read once into one frozen object.

Values come from, each stronger than the one before: the defaults here, a TOML file, the environment (`INDEXER_PORT`
for `port`), command-line flags. A value out of bounds or a key nobody knows is refused with one sentence that names the
setting and where it came from.

`Settings(...)` itself reads neither environment nor files: only `load_settings` does.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from indexer.errors import SettingsError

ENVIRONMENT_PREFIX = "INDEXER_"
CONFIG_VARIABLE = "INDEXER_CONFIG"
KIB = 1024
MIB = 1024 * KIB


def _check_database_url(url: SecretStr) -> SecretStr:
    scheme = url.get_secret_value().partition("://")[0]
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ValueError("must look like postgresql://user:password@host:5432/database")
    return url


def _read_media(media: object) -> object:
    """The form of the environment, as a table; whatever else it is, pydantic judges."""
    if not isinstance(media, str):
        return media
    pairs = [pair.partition("=") for pair in media.split(",") if pair.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError("must look like NAME=TIER,NAME=TIER")
    return {medium: tier for medium, _, tier in pairs}


MediumName = Annotated[str, StringConstraints(strip_whitespace=True, to_upper=True, pattern="^[A-Za-z0-9_.-]{1,128}$")]


class Settings(BaseSettings):
    """All settings; every description ends up in the table of docs/operations.md."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="Address the HTTP API listens on.")
    port: int = Field(8090, ge=0, le=65535, description="Port the HTTP API listens on; 0 = any free one.")
    data_dir: Path = Field(Path("./data"), description="Directory of the embedded Postgres.")
    database_url: Annotated[SecretStr, AfterValidator(_check_database_url)] | None = Field(
        None, description="PostgreSQL 14 or newer to use instead of the embedded one, as postgresql://..."
    )
    wait: bool = Field(False, description="Keep trying when the database cannot be reached at start.")
    simulate: bool = Field(False, description="Start a simulated fleet of three engines beside the service.")

    replicas: int = Field(
        1, ge=1, le=64, description="Services that `serve` starts on this machine, to answer at one port."
    )
    shared_port: int | None = Field(
        None, ge=1, le=65535, description="Port that several services on one machine answer on, each once it is ready."
    )

    api_keys: SecretStr | None = Field(
        None,
        description="Keys that callers need, each as NAME:SHA256:ROLE[:TENANT,TENANT]; `kv-indexer key new` makes one.",
    )
    api_keys_file: Path | None = Field(None, description="File with such keys, one a line; read again when it changes.")
    insecure: bool = Field(
        False, description="Listen on an address that is not loopback without keys: whoever reaches it may do anything."
    )
    tls_cert_file: Path | None = Field(
        None,
        description="Certificate of the HTTP API, with its chain, as PEM; makes it HTTPS. Read again when it changes,"
        " but for gRPC only when it starts.",
    )
    tls_key_file: Path | None = Field(None, description="Private key of that certificate, as PEM, not encrypted.")
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the gRPC services, 0 = any free one; needs the extra `grpc`."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Log lines as JSON or for people; auto = for people on a terminal, else JSON."
    )

    body_bytes_max: int = Field(
        32 * MIB, ge=1024, le=1024 * MIB, description="Largest request body in bytes; larger ones are answered 413."
    )
    prompt_tokens_max: int = Field(
        1_000_000, ge=1, le=10_000_000, description="Longest prompt of a query in tokens; longer ones are answered 422."
    )
    publishers_max: int = Field(
        10_000, ge=1, le=100_000, description="Most publishers registered at once; one more is answered 422."
    )
    metrics_publishers_max: int = Field(
        200, ge=0, le=10_000, description="Most publishers for which /metrics has numbers of each one."
    )
    requests_max: int = Field(
        1_024, ge=1, le=100_000, description="Most HTTP requests served at once; one more is answered 503."
    )

    ghosts_max: int = Field(
        8_192,
        ge=0,
        le=100_000_000,
        description="Most evicted hashes per publisher that stay resolvable as a parent; the oldest are forgotten.",
    )
    orphans_max: int = Field(
        8_192,
        ge=0,
        le=100_000_000,
        description="Most blocks per publisher that wait for an unknown parent; the oldest are dropped and counted.",
    )
    unplaced_max: int = Field(
        8_192,
        ge=0,
        le=100_000_000,
        description="Most residencies per publisher at a still unknown position; the oldest are dropped and counted.",
    )
    sparse_runs_max: int = Field(
        1_024,
        ge=0,
        le=1_000_000,
        description="Most sparse events per publisher that wait for an anchor; the oldest are dropped and counted.",
    )
    links_max: int = Field(
        65_536,
        ge=0,
        le=100_000_000,
        description="Most links from a hash to its parent remembered per publisher; the oldest are forgotten.",
    )
    links_stored_max: int = Field(
        4_096, ge=0, le=1_000_000, description="Most of those links that survive a restart of the service."
    )
    holders_max: int = Field(
        256,
        ge=1,
        le=10_000,
        description="Most (medium, group, owner) combinations of one publisher; events of others are counted only.",
    )
    unverified_max: int = Field(
        1_000_000,
        ge=0,
        le=100_000_000,
        description="Most residencies per publisher that stay unverified after a gap; the oldest are dropped, counted.",
    )
    unverified_max_s: float = Field(
        600,
        ge=0.1,
        le=2_592_000,
        description="Seconds after which what is still unverified is dropped; up to a quarter more.",
    )
    block_tokens_min: int = Field(
        1,
        ge=1,
        le=65_536,
        description="Of blocks with fewer tokens, only those that end on a multiple of it are kept, and hits are such"
        " multiples; the others are ghosts. For engines with pages of one token that evict from the end.",
    )
    media: Annotated[dict[MediumName, MediumName], BeforeValidator(_read_media), Field(max_length=1_000)] = Field(
        {},
        description="Further media and their tiers, as NAME=TIER,NAME=TIER or as a table of the config file.",
    )
    tail_bytes_max: int = Field(
        512 * KIB,
        ge=0,
        le=1024 * MIB,
        description="Bytes of first batches kept per publisher, to rebuild it when its granule is refined.",
    )
    journal_bytes_max: int = Field(
        1 * MIB,
        ge=0,
        le=1024 * MIB,
        description="Bytes of newest batches kept per publisher, for explanations and /v1/journal; 0 = none.",
    )
    journals_bytes_max: int = Field(
        64 * MIB,
        ge=0,
        le=64 * 1024 * MIB,
        description="The same of all publishers together: each keeps an equal share of it at most.",
    )

    expected_ttl_s: float = Field(
        2, ge=0.01, le=60, description="Seconds for which blocks of a routed prompt are expected, unless it says."
    )
    expected_blocks_max: int = Field(
        8_192, ge=0, le=1_000_000, description="Most blocks expected of one publisher; no more are taken meanwhile."
    )
    expected_blocks_total_max: int = Field(
        65_536, ge=0, le=10_000_000, description="Most blocks expected of all publishers together; the same."
    )
    prediction_window_max: int = Field(
        200, ge=1, le=100_000, description="Newest observations of a publisher that the prediction alarm looks at."
    )
    prediction_count_min: int = Field(
        50, ge=1, le=100_000, description="Observations without which there is no prediction alarm."
    )
    prediction_wrong_share_max: float = Field(
        0.2, ge=0, le=1, description="Share of wrong predictions above which the alarm is raised; it ends at the half."
    )

    heat_sample_every: int = Field(
        64, ge=0, le=1_000_000, description="Of so many queries one is remembered for GET /v1/hot-prefixes; 0 = none."
    )
    heat_keys_max: int = Field(
        500_000, ge=0, le=10_000_000, description="Most content keys of such queries kept, 8 bytes each; the newest."
    )
    heat_half_life_s: float = Field(
        600, ge=1, le=2_592_000, description="Seconds after which a query counts half of what it did for heat."
    )

    watchers_max: int = Field(
        64, ge=0, le=10_000, description="Most streams of GET /v1/watch at once; one more is answered 503."
    )
    watch_events_max: int = Field(
        1_024, ge=1, le=1_000_000, description="Newest events kept for all watchers; who is behind these has lagged."
    )
    watch_heartbeat_s: float = Field(
        15, ge=0.1, le=600, description="Seconds without an event after which a watcher is sent a comment."
    )

    flush_interval_s: float = Field(
        0.25, ge=0.01, le=60, description="Seconds from the begin of one flush to Postgres to that of the next."
    )
    flush_changes_max: int = Field(
        50_000, ge=1, le=10_000_000, description="Pending changes that start a flush before its time."
    )
    journal_rows_s: float = Field(
        0,
        ge=0,
        le=31_536_000,
        description="Seconds for which Postgres keeps what its rows were, so that `as_of` is answered; 0 = not at all.",
    )
    database_retry_max_s: float = Field(
        10, ge=0.1, le=600, description="Longest pause in seconds between two tries to reach the database."
    )

    receive_queue_max: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="Most messages of one publisher waiting in its ZMQ socket; more are lost and seen as a gap.",
    )
    message_bytes_max: int = Field(
        64 * MIB,
        ge=1024,
        le=1024 * MIB,
        description="Largest ZMQ message in bytes; a larger one drops the connection.",
    )
    held_batches_max: int = Field(
        20_000,
        ge=1,
        le=10_000_000,
        description="Most live batches of one publisher held during a replay; at the bound the replay is given up.",
    )
    held_bytes_max: int = Field(128 * MIB, ge=1024, le=64 * 1024 * MIB, description="The same bound in bytes.")
    replay_turn_wait_s: float = Field(10, ge=0, le=600, description="Longest wait in seconds for a replay's turn.")
    replay_idle_timeout_s: float = Field(
        2, ge=0.05, le=600, description="Seconds without an answer after which a replay is given up."
    )
    replay_timeout_s: float = Field(
        60, ge=0.1, le=3600, description="Seconds that a replay may take, all its tries together."
    )
    replay_tries_max: int = Field(
        3, ge=1, le=1000, description="Replays of one publisher in a row that may bring nothing new."
    )
    replay_cool_down_s: float = Field(
        30,
        ge=0,
        le=3600,
        description="Seconds for which a replay endpoint that did not answer is left alone; doubles, up to ten times.",
    )
    replays_max: int = Field(64, ge=1, le=10_000, description="Most replays at once; more wait for their turn.")
    disconnected_credit_s: float = Field(
        300,
        ge=0,
        le=2_592_000,
        description="Seconds after which a disconnected publisher no longer counts in answers; 0 = it always does.",
    )
    registration_expiry_s: float = Field(
        0,
        ge=0,
        le=31_536_000,
        description="Seconds after which a disconnected publisher is unregistered; 0 = never.",
    )
    restart_delay_min_s: float = Field(
        0.5, ge=0.01, le=600, description="Pause in seconds before a follower that failed is started again; it doubles."
    )
    restart_delay_max_s: float = Field(30, ge=0.1, le=600, description="Longest such pause in seconds.")
    slice_s: float = Field(
        0.0005,
        ge=0.0001,
        le=1,
        description="Seconds for which batches of all publishers are applied before other tasks' turn.",
    )

    ready_wait_s: float = Field(
        15,
        ge=0,
        le=600,
        description="Seconds that first replays of known publishers may hold back /readyz after a start.",
    )
    stop_deadline_s: float = Field(
        20, ge=1, le=600, description="Seconds for all of a clean stop; what is not done by then is cut off."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load_settings(
    flags: Mapping[str, object] | None = None,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Defaults < TOML file < environment < flags; a flag that is None was not given. Raises SettingsError."""
    environment = os.environ if environment is None else environment
    config = config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, source in (
        (str(config), _from_file(config) if config else {}),
        ("the environment", _from_environment(environment)),
        ("the command line", {name: value for name, value in (flags or {}).items() if value is not None}),
    ):
        values |= source
        origins |= dict.fromkeys(source, origin)
    try:
        return Settings(**values)
    except ValidationError as error:
        raise _first_fault(error, origins) from None


def environment_variable(setting: str) -> str:
    return ENVIRONMENT_PREFIX + setting.upper()


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError("config", f"the config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError("config", f"the config file {path} is not valid TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Only variables of known settings: an orchestrator may add others that begin with the same word."""
    names = ((name, environment_variable(name)) for name in Settings.model_fields)
    return {name: environment[variable] for name, variable in names if environment.get(variable)}


def _first_fault(error: ValidationError, origins: Mapping[str, str]) -> SettingsError:
    fault = error.errors(include_url=False, include_input=False)[0]
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    origin = origins.get(name, "the defaults")
    if fault["type"] == "extra_forbidden":
        return SettingsError(name, f"unknown setting {name} in {origin}")
    reason = fault["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    named = f"{name} ({environment_variable(name)})" if origin == "the environment" else name
    return SettingsError(name, f"bad setting {named} from {origin}: {reason}")
