from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from indexer import keys
from indexer.errors import SettingsError
from indexer.keys import Key, Role, configured_keys, digest_of, new_key, parse_keys, with_fleet_key
from indexer.settings import Settings

DIGEST = digest_of(b"token").hex()


@pytest.mark.parametrize("tenants", [None, ["a"], ["b", "a"], ["a,b c#%", "\u00e9:/"]])
@pytest.mark.parametrize("role", ["query", "operate", "admin"])
def test_a_new_key_is_what_its_line_configures(role: str, tenants: list[str] | None) -> None:
    token, key = new_key("router-1", role, tenants)
    assert key.digest == digest_of(token.encode())
    assert parse_keys(f"# of the router\n  {key}  # and more: x:y\n\n") == [key]
    assert key.tenants == (None if tenants is None else frozenset(tenants))
    assert str(key.role) == role
    assert token not in str(key) + repr(key)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_key("k", "query")[0] for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 4 + 43


def test_several_keys_are_separated_by_any_white_space() -> None:
    text = f"a:{DIGEST}:query b:{DIGEST}:operate:x\tc:{DIGEST.upper()}:admin:x,y%20z"
    assert parse_keys(text) == [
        Key("a", bytes.fromhex(DIGEST), Role.QUERY),
        Key("b", bytes.fromhex(DIGEST), Role.OPERATE, frozenset("x")),
        Key("c", bytes.fromhex(DIGEST), Role.ADMIN, frozenset({"x", "y z"})),
    ]


@pytest.mark.parametrize(
    "word",
    [
        "kvi_secret",
        "kvi_secret:kvi_secret",
        "name:kvi_secret:query",
        f"name:{DIGEST}:kvi_secret",
        f"name:{DIGEST}:Query",
        f"name:{DIGEST}",
        f"name:{DIGEST}:query:",
        f"name:{DIGEST}:query:a,,b",
        f":{DIGEST}:query",
        f"{'x' * 65}:{DIGEST}:query",
        f"a b:{DIGEST}:query",
    ],
)
def test_a_bad_key_is_refused_without_repeating_it(word: str) -> None:
    with pytest.raises(ValueError, match="key 2") as caught:
        parse_keys(f"good:{DIGEST}:query {word}")
    assert "secret" not in str(caught.value)
    assert DIGEST not in str(caught.value)
    with pytest.raises(SettingsError) as refused:
        configured_keys(Settings(api_keys=SecretStr(word)))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "role", "tenants"),
    [("", "query", None), ("a b", "query", None), ("a", "root", None), ("a", "query", [""])],
)
def test_a_key_that_could_not_be_configured_is_not_made(name: str, role: str, tenants: list[str] | None) -> None:
    with pytest.raises(SettingsError, match="bad key"):
        new_key(name, role, tenants)


def test_without_a_setting_there_are_no_keys_at_all() -> None:
    assert configured_keys(Settings()) is None


def test_keys_of_setting_and_file_are_taken_together(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"b:{DIGEST}:admin\n")
    found = configured_keys(Settings(api_keys=SecretStr(f"a:{DIGEST}:query"), api_keys_file=path))
    assert found is not None
    assert [(key.name, key.role) for key in found] == [("a", Role.QUERY), ("b", Role.ADMIN)]
    with pytest.raises(SettingsError, match="two keys with the name 'b'"):
        configured_keys(Settings(api_keys=SecretStr(f"b:{DIGEST}:query"), api_keys_file=path))


def test_too_many_keys_are_refused_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEYS_MAX", 2)
    words = [f"{name}:{DIGEST}:query" for name in ("a", "b", "a")]
    assert len(configured_keys(Settings(api_keys=SecretStr(" ".join(words[:2])))) or ()) == 2
    with pytest.raises(SettingsError, match="3 keys are configured; at most 2"):
        configured_keys(Settings(api_keys=SecretStr(" ".join(words))))


@pytest.mark.parametrize("text", ["", "# none\n"])
def test_a_file_without_keys_would_shut_everybody_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingsError, match="nobody could ask"):
        configured_keys(Settings(api_keys_file=path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, binary):
        with pytest.raises(SettingsError, match=str(path)):
            configured_keys(Settings(api_keys_file=path))


def test_settings_do_not_show_keys() -> None:
    settings = Settings(api_keys=SecretStr(f"a:{DIGEST}:query"))
    assert DIGEST not in repr(settings) + str(settings)


def test_a_simulated_fleet_gets_a_key_where_one_is_needed() -> None:
    assert with_fleet_key(Settings(simulate=True)) == (Settings(simulate=True), None)
    plain = Settings(api_keys=SecretStr(f"a:{DIGEST}:query"))
    assert with_fleet_key(plain) == (plain, None)
    settings, token = with_fleet_key(plain.model_copy(update={"simulate": True}))
    found = configured_keys(settings)
    assert token is not None
    assert found is not None
    assert found[1] == Key("simulated-fleet", digest_of(token.encode()), Role.OPERATE, frozenset({"default"}))
