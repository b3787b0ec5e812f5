from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from indexer.api.ports import ApiLimits
from indexer.errors import SettingsError
from indexer.index.limits import IndexLimits
from indexer.service import limits_from
from indexer.settings import Settings, environment_variable, load_settings
from indexer.stream.limits import StreamLimits


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_defaults_hold_when_nothing_is_said() -> None:
    settings = load_settings(environment={})
    assert (settings.host, settings.port, settings.data_dir, settings.database_url) == (
        "127.0.0.1", 8090, Path("data"), None,
    )  # fmt: skip


def test_each_source_is_stronger_than_the_one_before(tmp_path: Path) -> None:
    config = write(tmp_path, 'port = 1001\nhost = "::1"\npublishers_max = 7\n')
    environment = {"INDEXER_PORT": "1002", "INDEXER_HOST": "127.0.0.2"}
    settings = load_settings({"port": "1003", "host": None}, config, environment)
    assert (settings.port, settings.host, settings.publishers_max) == (1003, "127.0.0.2", 7)


def test_the_config_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    config = write(tmp_path, "port = 1001\n")
    assert load_settings(environment={"INDEXER_CONFIG": str(config)}).port == 1001
    other = tmp_path / "other.toml"
    other.write_text("port = 1002\n")
    assert load_settings({}, other, {"INDEXER_CONFIG": str(config)}).port == 1002


def test_an_empty_variable_is_not_set() -> None:
    assert load_settings(environment={"INDEXER_PORT": ""}).port == 8090


def test_foreign_variables_with_our_prefix_are_left_alone() -> None:
    load_settings(environment={"INDEXER_SERVICE_HOST": "10.0.0.1", "INDEXER_PORT_8090_TCP": "tcp://10.0.0.1:8090"})


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_PORT", "1234")
    assert load_settings().port == 1234


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("port", "http"),
        ("port", "80.5"),
        ("host", "x" * 300),
        ("wait", "perhaps"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("body_bytes_max", "0"),
        ("prompt_tokens_max", "0"),
        ("flush_interval_s", "0"),
        ("flush_interval_s", "inf"),
        ("flush_interval_s", "nan"),
        ("stop_deadline_s", "-1"),
        ("database_url", "mysql://h/x"),
        ("database_url", "localhost:5432"),
        ("media", "LUSTRE"),
        ("media", "=STORAGE"),
        ("media", "LUSTRE=" + "x" * 129),
        ("media", ",".join(f"M{i}=CPU" for i in range(1_001))),
    ],
)
def test_a_bad_value_names_its_setting_and_where_it_came_from(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"bad setting {name} \({environment_variable(name)}\)") as caught:
        load_settings(environment={environment_variable(name): value})
    assert caught.value.setting == name
    with pytest.raises(SettingsError, match=f"bad setting {name} from the command line"):
        load_settings({name: value}, environment={})


def test_media_are_a_table_of_the_file_or_pairs_in_the_environment(tmp_path: Path) -> None:
    expected = {"LUSTRE": "STORAGE", "CXL": "CPU"}
    config = write(tmp_path, '[media]\nlustre = "storage"\nCXL = "CPU"\n')
    assert load_settings({}, config, {}).media == expected
    assert load_settings(environment={"INDEXER_MEDIA": "lustre=STORAGE, CXL=CPU,"}).media == expected


def test_a_password_never_shows() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environment={"INDEXER_DATABASE_URL": "mysql://me:hunter2@h/x"})
    assert "hunter2" not in str(caught.value)
    settings = load_settings(environment={"INDEXER_DATABASE_URL": "postgresql://me:hunter2@h/x"})
    assert "hunter2" not in repr(settings) + str(settings)


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting prot in .*config\.toml"):
        load_settings({}, write(tmp_path, "prot = 1\n"), {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", "not valid TOML"),
        ("port = 'x'", "bad setting port"),
        ("[server]\nport = 1", "unknown setting server"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings({}, write(tmp_path, text), {})


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (binary, tmp_path / "none.toml", tmp_path):
        with pytest.raises(SettingsError):
            load_settings({}, path, {})


def test_settings_are_frozen_and_read_nothing_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_PORT", "1234")
    settings = Settings()
    assert settings.port == 8090
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("kind", [IndexLimits, StreamLimits, ApiLimits])
def test_every_bound_of_a_part_is_a_setting(kind: type[IndexLimits | StreamLimits | ApiLimits]) -> None:
    limits = limits_from(kind, Settings())  # type: ignore[type-var]
    assert {field.name for field in fields(kind)} <= set(Settings.model_fields)
    without_default = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    assert limits == kind(**{name: getattr(limits, name) for name in without_default})  # the same defaults
