"""The command line. Exit status: 0 done, 1 it failed (and a sentence says why), 2 a wrong setting or argument."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer
import uvloop

from indexer import __version__
from indexer.client import IndexClient
from indexer.client.calls import Settings as ClientSettings
from indexer.errors import IndexerError, ServiceError, SettingsError
from indexer.keys import new_key
from indexer.logs import set_up_logs
from indexer.settings import Settings, load_settings

DEFAULT_URL = "http://127.0.0.1:8090"

app = typer.Typer(
    name="kv-indexer",
    help="The KV-cache content index: which engine still holds how much of this prompt?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFlag = Annotated[Path | None, typer.Option(help="TOML file with settings.", metavar="FILE")]
DatabaseFlag = Annotated[str | None, typer.Option(help="PostgreSQL to use instead of the embedded one.", metavar="URL")]
DataDirFlag = Annotated[str | None, typer.Option(help="Directory of the embedded Postgres. (./data)", metavar="DIR")]
WaitFlag = Annotated[bool | None, typer.Option("--wait", help="Keep trying while the database cannot be reached.")]
UrlFlag = Annotated[str, typer.Option(help="Address of a running service.")]
TokenFlag = Annotated[
    str | None,
    typer.Option(envvar="INDEXER_TOKEN", help="Token of a key, if it asks for one; others can see arguments."),
]
CaFileFlag = Annotated[
    Path | None,
    typer.Option(envvar="INDEXER_CA_FILE", help="Certificates to trust, for https, as PEM.", metavar="FILE"),
]


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. (127.0.0.1)")] = None,
    port: Annotated[str | None, typer.Option(help="Port to listen on, 0 = any free one. (8090)")] = None,
    data_dir: DataDirFlag = None,
    database_url: DatabaseFlag = None,
    config: ConfigFlag = None,
    wait: WaitFlag = None,
    simulate: Annotated[
        bool | None, typer.Option("--simulate", help="Start a simulated fleet of three engines beside it.")
    ] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(help="File of the keys that callers need, one a line.", metavar="FILE")
    ] = None,
    tls_cert_file: Annotated[str | None, typer.Option(help="Certificate, as PEM, for HTTPS.", metavar="FILE")] = None,
    tls_key_file: Annotated[str | None, typer.Option(help="Its private key, as PEM.", metavar="FILE")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback without keys: anyone may do anything.")
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Services to start on this machine, to answer at one port. (1)", metavar="N")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least severe level logged: debug, info, warning or error. (info)")
    ] = None,
    end_with_input: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Follow engines and answer queries, until SIGTERM or Ctrl-C."""
    flags = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "database_url": database_url,
        "wait": wait,
        "simulate": simulate,
        "api_keys_file": api_keys_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
        "insecure": insecure,
        "replicas": replicas,
        "log_level": log_level,
    }
    settings = load_settings(flags, config)
    set_up_logs(settings.log_level, settings.log_format)
    if end_with_input:
        _end_with_input()
    raise typer.Exit(_run(_serve(settings)))


async def _serve(settings: Settings) -> int:
    if settings.replicas > 1:
        from indexer.replicas import Replicas

        return await Replicas(settings).run()
    from indexer.service import Service  # the other commands start faster without it

    return await Service(settings).run()


@app.command()
def migrate(
    data_dir: DataDirFlag = None,
    database_url: DatabaseFlag = None,
    config: ConfigFlag = None,
    wait: WaitFlag = None,
) -> None:
    """Bring the database to the newest schema. `serve` does so by itself."""
    settings = load_settings({"data_dir": data_dir, "database_url": database_url, "wait": wait}, config)
    set_up_logs(settings.log_level, settings.log_format)
    _run(_migrate(settings))
    typer.echo("the database has the newest schema")


async def _migrate(settings: Settings) -> None:
    from indexer.database import Database

    database = Database(settings)
    try:
        await database.open()
    finally:
        await database.close()


@app.command()
def simulate(
    url: UrlFlag = DEFAULT_URL,
    engines: Annotated[int, typer.Option(min=1, max=100, help="How many engines.")] = 3,
    rate: Annotated[float, typer.Option(min=0.01, max=10_000, help="Requests per second, of all engines.")] = 8.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same workload.")] = 0,
    duration_s: Annotated[float | None, typer.Option(min=0, help="Seconds to run; default: until Ctrl-C.")] = None,
    restarts: Annotated[bool, typer.Option(help="Restart engines and reset caches now and then.")] = True,
    token: TokenFlag = None,
    ca_file: CaFileFlag = None,
    any_name: Annotated[bool, typer.Option("--any-name", hidden=True)] = False,
    end_with_input: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run simulated engines against a service, and compare its answers with theirs."""
    from indexer.simulate.command import simulate_command

    if end_with_input:
        _end_with_input()
    client: ClientSettings = {"api_key": token, "ca_file": ca_file, "any_name": any_name}
    raise typer.Exit(simulate_command(url, engines, rate, seed, duration_s, restarts, **client))


def _end_with_input() -> None:
    """End like on SIGTERM when standard input closes: its writer, the service that started us, is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="input", daemon=True).start()


@app.command()
def query(
    model: Annotated[str, typer.Argument(help="The model that the engines serve.")],
    tokens: Annotated[
        list[str] | None,
        typer.Argument(help="Token ids, separated by spaces or commas; - or nothing = standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the token ids from a file.", metavar="FILE")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant. (default)")] = None,
    lora_name: Annotated[str | None, typer.Option(help="LoRA adapter of the request.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Cache salt of the request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    url: UrlFlag = DEFAULT_URL,
    token: TokenFlag = None,
    ca_file: CaFileFlag = None,
) -> None:
    """Ask how much of a prompt each engine holds."""
    token_ids = parse_tokens(_token_text(tokens, file))
    body = {"model": model, "token_ids": token_ids, "tenant": tenant, "lora_name": lora_name, "cache_salt": cache_salt}
    answer = ask(url, "POST", "/v1/prefix-hits", body, api_key=token, ca_file=ca_file)
    typer.echo(json.dumps(answer, indent=2) if as_json else format_hits(answer))


def ask(
    url: str, method: str, path: str, body: object = None, timeout_s: float = 30.0, **settings: Unpack[ClientSettings]
) -> dict[str, Any]:
    """Raises ServiceError, and SettingsError for an address that is none, or certificates that cannot be read."""
    try:
        client = IndexClient(url, **settings)
    except OSError as error:
        raise SettingsError("ca_file", f"the certificates cannot be read: {error}") from error
    except ValueError as error:
        raise SettingsError("url", str(error)) from error
    with client:
        outcome = client.call(method, path, body, timeout_s=timeout_s)
    if outcome.failure is not None:
        raise ServiceError(outcome.failure.message)
    try:
        answer: dict[str, Any] = json.loads(outcome.body)
    except ValueError as error:
        raise ServiceError(f"{url} is another service: {error}") from error
    return answer


def _token_text(tokens: Sequence[str] | None, file: Path | None) -> str:
    if file is not None:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError("file", f"{file} cannot be read: {error}") from error
    if not tokens or list(tokens) == ["-"]:
        return sys.stdin.read()
    return " ".join(tokens)


def parse_tokens(text: str) -> list[int]:
    """Integers separated by white space or commas, or a JSON array of them. Raises SettingsError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for place, word in enumerate(words):
        if not (word.isascii() and word.isdigit()):
            raise SettingsError("tokens", f"token {place} is {word[:40]!r}; token ids are integers from 0 on")
    if not words:
        raise SettingsError("tokens", "no token ids were given")
    return [int(word) for word in words]


def format_hits(answer: dict[str, Any]) -> str:
    """The answer as a table for people, warnings below it."""
    titles = ("worker", "rank", "hit", "resident", "tiers", "coverage", "batch")
    rows = [
        (
            hit["worker_id"],
            str(hit["dp_rank"]),
            str(hit["hit_tokens"]),
            str(hit["resident_tokens"]),
            " ".join(f"{tier}={tokens}" for tier, tokens in hit["tiers"].items()) or "-",
            hit["coverage"] if hit["coverage"] == "complete" else f"{hit['coverage']} ({hit['coverage_reason']})",
            "-" if hit["sequence_number"] is None else str(hit["sequence_number"]),
        )
        for hit in answer["hits"]
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [f"prompt of {answer['prompt_tokens']} tokens"]
    if rows:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (titles, *rows)]
    else:
        lines.append("no engine holds any of it")
    lines += [f"warning: {warning['message']}" for warning in answer["warnings"]]
    return "\n".join(lines)


@app.command("compile")
def compile_() -> None:
    """Compile what is compiled now, so that the first start does not have to."""
    from indexer.rehearsal import compile_kernels

    compile_kernels()


@app.command()
def audit(url: UrlFlag = DEFAULT_URL, token: TokenFlag = None, ca_file: CaFileFlag = None) -> None:
    """Compare the rows in Postgres with the index in memory of a running service; exit status 1 if they differ."""
    report = ask(url, "GET", "/v1/audit", timeout_s=600, api_key=token, ca_file=ca_file)
    typer.echo(json.dumps(report, indent=2))
    raise typer.Exit(0 if report["is_equal"] else 1)


keys_app = typer.Typer(help="Keys that callers of the HTTP API need.", no_args_is_help=True)
app.add_typer(keys_app, name="key")


@keys_app.command("new")
def new_key_(
    name: Annotated[str, typer.Option(help="Whose key it is.")],
    role: Annotated[str, typer.Option(help="query, operate or admin; each may do what those before it may.")],
    tenants: Annotated[
        str | None, typer.Option(help="Tenants that it is for; default: all.", metavar="TENANT,TENANT")
    ] = None,
) -> None:
    """Make a key: the first line printed is its token, which nobody can show again, the second what to configure."""
    token, key = new_key(name, role, None if tenants is None else tenants.split(","))
    typer.echo(f"{token}\n{key}")
    sys.stderr.write(
        "The first line is the token: give it to the caller, for its header `authorization: Bearer TOKEN`.\n"
        "The second is the key: add it to INDEXER_API_KEYS, or to the file that INDEXER_API_KEYS_FILE names.\n"
    )


@app.command("export-openapi")
def export_openapi(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
) -> None:
    """Print the OpenAPI document of the HTTP API."""
    text = json.dumps(_run(_openapi()), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


async def _openapi() -> dict[str, Any]:
    from indexer.service import Service

    document: dict[str, Any] = Service(Settings()).app.openapi()
    return document


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


def _run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def main(run: Callable[[], None] = app) -> None:
    try:
        run()
    except SettingsError as error:
        _fail(error, 2)
    except IndexerError as error:
        _fail(error, 1)


def _fail(error: IndexerError, status: int) -> None:
    sys.stderr.write(f"kv-indexer: {error}\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
