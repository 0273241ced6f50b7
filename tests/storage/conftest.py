"""Stores to test with: a cache of each test's own, and an S3 server where one can be started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's cache, for one test only."""
    folder = tmp_path / "cache-of-the-user"
    monkeypatch.setenv("MULTILORA_CACHE", str(folder))
    return folder


@pytest.fixture
def memory_url() -> str:
    """A root in memory that no other test uses."""
    return f"memory://t{uuid.uuid4().hex}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A ministack server: MULTILORA_MINISTACK or `ministack` on the PATH; skipped where there is none."""
    program = os.environ.get("MULTILORA_MINISTACK") or shutil.which("ministack")
    if program is None:
        pytest.skip("no S3 server: pip install ministack into its own environment, and set MULTILORA_MINISTACK")
    port = _free_port()
    environment = {**os.environ, "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3"}
    output = tmp_path_factory.mktemp("ministack") / "output.txt"
    with open(output, "wb") as log:
        server = subprocess.Popen([program], env=environment, stdout=log, stderr=log, start_new_session=True)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{endpoint}/_ministack/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, output.read_text()[-2000:]
                time.sleep(0.1)
        yield endpoint
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test's own."""
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = f"b{uuid.uuid4().hex[:20]}"
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT"), timeout=10).close()
    return f"s3://{bucket}/run"
