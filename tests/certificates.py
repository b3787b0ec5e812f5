"""Certificates for tests: of an authority of their own, for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import trustme


class CertificateFiles(NamedTuple):
    authority: Path
    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "127.0.0.1") -> CertificateFiles:
    """Files in this folder; those that were there are replaced."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(name)
    files = CertificateFiles(folder / "authority.pem", folder / "cert.pem", folder / "key.pem")
    authority.cert_pem.write_to_path(files.authority)
    issued.private_key_pem.write_to_path(files.key)
    for place, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(files.cert, append=place > 0)
    return files
