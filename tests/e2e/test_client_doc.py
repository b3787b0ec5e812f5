"""The code in docs/client.md runs, against a service as its users start it."""

from __future__ import annotations

import re
from pathlib import Path

from indexer.client import Hit
from tests.e2e.service_process import ServiceProcess

DOCUMENT = Path(__file__).parents[2] / "docs" / "client.md"
ADDRESS, NOBODY = '"http://127.0.0.1:8090"', '"http://127.0.0.1:1"'


def test_the_code_of_the_document_runs(data_dir: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert sum(ADDRESS in block for block in blocks) == 2
    names: dict[str, object] = {}
    with ServiceProcess(data_dir) as service:
        service.wait_until_ready()
        for block in blocks:
            # with more time than a router would give: the machine may be busy
            code = block.replace(ADDRESS, f'"{service.url}", deadline_s=20').replace(NOBODY, f"{NOBODY}, deadline_s=20")
            exec(compile(code, str(DOCUMENT), "exec"), names)
    weighted = names["weighted"]
    assert callable(weighted)
    assert weighted(Hit("w", 0, 48, 96, {"GPU": 32, "CPU": 64, "STORAGE": 96})) == 32 + 0.8 * 32 + 0.5 * 32
