"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key for localhost."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key
