"""Azure and Google, each through both drivers: the suite, a whole store, racing writers, the ways to an emulator."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from blobs_suite import BlobsSuite
from samples import CONFIG, same, tensors
from xml_door import XmlDoor, xml_door

from multilora_store.errors import StorageError, UsageError
from multilora_store.storage import open_store, sync
from multilora_store.storage.blobs import Blobs, open_blobs, redact
from multilora_store.storage.clouds import fsspec_options, obstore_settings, server_of
from multilora_store.storage.failures import scrub
from multilora_store.storage.probe import exclusive_create_holds, race

# aiohttp warns of every body of more than a megabyte that a driver hands it as bytes, as adlfs and gcsfs do.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

PACKAGES = {"az": "adlfs", "gs": "gcsfs"}
VARIABLES = (
    "AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ENDPOINT "
    "AZURE_ENDPOINT AZURE_STORAGE_USE_EMULATOR AZURITE_BLOB_STORAGE_URL AZURE_STORAGE_SAS_TOKEN GOOGLE_BASE_URL "
    "STORAGE_EMULATOR_HOST AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3 AWS_ENDPOINT"
).split()
ACCOUNT = "AccountName=acc;AccountKey=a2V5"


@pytest.fixture(params=["az-obstore", "az-fsspec", "gs-obstore", "gs-fsspec"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """URL and driver."""
    cloud, _, driver = request.param.partition("-")
    pytest.importorskip("obstore" if driver == "obstore" else PACKAGES[cloud])
    url = request.getfixturevalue("azure_url" if cloud == "az" else "google_url")
    if request.param != "gs-obstore":
        yield url, driver
        return
    with xml_door(request.getfixturevalue("google_endpoint")) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        yield url, driver


class TestClouds(BlobsSuite):
    @pytest.fixture
    def blobs(self, place: tuple[str, str]) -> Blobs:
        url, driver = place
        return open_blobs(url, driver=driver)

    def test_exclusive_creation_holds_and_is_probed(self, blobs: Blobs) -> None:
        assert blobs.exclusive == "unknown", "a server of one's own is not taken for the cloud"
        assert exclusive_create_holds(blobs)
        assert race(blobs, rounds=10)
        assert list(blobs.list()) == []

    def test_more_is_deleted_than_one_batch_holds(self, blobs: Blobs) -> None:
        """Azure takes 256 in one request, and tells of the one that is absent."""
        keys = [f"many/{number:03}" for number in range(260 if blobs.url.startswith("az") else 20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: blobs.write(key, b"x"), keys))
        assert sorted(info.key for info in blobs.list("many/")) == keys
        blobs.delete([*keys, "many/absent"])
        assert list(blobs.list()) == []

    def test_it_works_in_a_forked_worker(self, blobs: Blobs, place: tuple[str, str]) -> None:
        """Case 48: obstore does not survive a fork; the cloud's fsspec package answers there, by the same settings."""
        pytest.importorskip(PACKAGES[place[0][:2]])
        blobs.write("a", b"x")
        context = multiprocessing.get_context("fork")
        answer = context.Queue()
        worker = context.Process(target=lambda: answer.put(blobs.read("a")))
        worker.start()
        assert answer.get(timeout=60) == b"x"
        worker.join(30)


def test_a_whole_store(place: tuple[str, str], tmp_path: Path) -> None:
    url, driver = place
    store = open_store(url, driver=driver)
    made = [store.put("team/a", tensors(seed), CONFIG, tags=["last"]) for seed in range(3)]
    store.put("b", tensors(9), CONFIG)
    assert same(open_store(url, driver=driver, cache=False).get("team/a@last").tensors, tensors(2))
    assert [version.id for version in store.versions("team/a")] == [version.id for version in made]
    local, other = open_store(tmp_path / "copy"), open_store(f"{url}-other", driver=driver)
    sync(store, local)
    sync(local, other)
    third = open_store(f"{url}-third", driver=driver)
    sync(store, third)
    for copy in (local, other, third):
        assert same(copy.get("team/a").tensors, tensors(2))
        assert copy.verify().ok
        assert sync(store, copy).unchanged
    store.delete("b")
    assert store.names() == ["team/a"]
    for _ in range(2):
        store.gc(grace=timedelta())
    assert not list(store.blobs.list("adapters/b/"))
    assert open_store(url, driver=driver).verify().ok
    assert not store.journal.marker.single_writer


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_a_sync_between_two_clouds(
    driver: str, azure_url: str, google_url: str, google_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back, each end by its own driver's settings; what one side moved reaches the other."""
    for package in ("obstore", *PACKAGES.values()):
        pytest.importorskip(package)
    with xml_door(google_endpoint) as endpoint:
        if driver == "obstore":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        azure, google = open_store(azure_url, driver=driver), open_store(google_url, driver=driver)
        for seed in range(3):
            azure.put("team/a", tensors(seed), CONFIG, tags=["best"] if seed == 1 else [])
        assert sync(azure, google).contents == 3
        assert sync(azure, google).unchanged
        google.put("b", tensors(9), CONFIG)
        assert sync(google, azure).contents == 1
        for store in (azure, google):
            assert store.verify().ok
            assert same(store.get("team/a@best").tensors, tensors(1))
            assert same(store.get("b").tensors, tensors(9))


def test_a_missing_bucket_is_named(place: tuple[str, str]) -> None:
    url, driver = place
    blobs = open_blobs(f"{url[:5]}no-such-bucket-here/x", driver=driver)
    for write in (lambda: blobs.write("a", b"x"), lambda: blobs.create("a", b"x")):
        with pytest.raises(StorageError, match="no-such-bucket-here"):
            write()


def _writer(url: str, driver: str, number: int, commits: int) -> None:
    store = open_store(url, driver=driver)
    for count in range(commits):
        store.put("a", tensors(number * 1000 + count, layers=1), CONFIG)


@pytest.mark.slow
def test_racing_processes_make_one_history(place: tuple[str, str]) -> None:
    """Cases 6, 69, 114: eight processes, ten commits each."""
    url, driver = place
    open_store(url, driver=driver).put("first", tensors(0, layers=1), CONFIG)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_writer, args=(url, driver, number, 10)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
        assert worker.exitcode == 0
    store = open_store(url, driver=driver)
    assert [entry.seq for entry in store.log()] == list(range(1, 82))
    assert len({version.id for version in store.versions("a")}) == 80
    assert store.journal.refold() == store.journal.state()
    assert store.verify().ok


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_the_account_may_stand_beside_an_endpoint(
    azure_url: str, azure_endpoint: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore" if driver == "obstore" else "adlfs")
    key = obstore_settings(azure_url, {}, None)[0]["account_key"]
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    blobs = open_blobs(azure_url, driver=driver, endpoint_url=azure_endpoint)
    assert blobs.create("a", b"x")
    assert not blobs.create("a", b"y")


def test_the_emulator_that_obstore_knows(azure_url: str, azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azure_endpoint.rpartition("/")[0])
    blobs = open_blobs(azure_url, driver="obstore")
    assert blobs.exclusive == "unknown"
    assert blobs.create("a", b"x")


def test_an_emulator_that_ignores_conditions_is_found(careless_url: str, caplog: Any) -> None:
    """gcp-storage-emulator takes the condition and overwrites."""
    pytest.importorskip("gcsfs")
    _works_for_one_writer(careless_url, "fsspec", caplog)


def test_a_probe_holds_for_one_of_two_protocols(
    google_url: str, google_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One server may keep the conditions of one of Google's protocols and not those of the other."""
    for package in ("gcsfs", "obstore"):
        pytest.importorskip(package)
    with xml_door(google_endpoint) as endpoint:
        XmlDoor.conditions = False
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        assert exclusive_create_holds(open_blobs(google_url, driver="fsspec"))
        _works_for_one_writer(google_url, "obstore", caplog)


def _works_for_one_writer(url: str, driver: str, caplog: Any) -> None:
    store = open_store(url, driver=driver)
    for number in range(2):
        store.put("a", tensors(number), CONFIG)
    assert "single writer" in caplog.text
    assert store.journal.marker.single_writer
    assert [entry.seq for entry in open_store(url, driver=driver).log()] == [1, 2]


@pytest.mark.parametrize(
    ("url", "given", "environment", "server"),
    [
        ("s3://b/x", {}, {}, None),
        ("s3://b/x", {"endpoint_url": "http://h"}, {"AWS_ENDPOINT_URL": "http://e"}, "http://h"),
        ("s3://b/x", {"config": {"endpoint": "http://h"}}, {}, "http://h"),
        ("s3://b/x", {"client_kwargs": {"endpoint_url": "http://h"}}, {}, "http://h"),
        ("s3://b/x", {}, {"AWS_ENDPOINT_URL": "http://e", "AWS_ENDPOINT_URL_S3": "http://s"}, "http://s"),
        ("gs://b/x", {}, {"AWS_ENDPOINT_URL": "http://e"}, None),
        ("gs://b/x", {}, {"STORAGE_EMULATOR_HOST": "localhost:9"}, "http://localhost:9"),
        ("gs://b/x", {}, {"STORAGE_EMULATOR_HOST": "default"}, None),
        ("gs://b/x", {"endpoint_url": "http://h"}, {"STORAGE_EMULATOR_HOST": "http://e"}, "http://h"),
        ("az://c/x", {}, {"AWS_ENDPOINT_URL": "http://e", "STORAGE_EMULATOR_HOST": "http://e"}, None),
        ("az://c/x", {}, {"AZURE_STORAGE_CONNECTION_STRING": ACCOUNT}, None),
        ("az://c/x", {}, {"AZURE_STORAGE_CONNECTION_STRING": f"{ACCOUNT};EndpointSuffix=core.windows.net"}, None),
        (
            "az://c/x", {},
            {"AZURE_STORAGE_CONNECTION_STRING": f"{ACCOUNT};BlobEndpoint=https://acc.blob.core.windows.net/"}, None,
        ),
        (
            "az://c/x", {},
            {"AZURE_STORAGE_CONNECTION_STRING": f"{ACCOUNT};EndpointSuffix=local.cloud"},
            "https://acc.blob.local.cloud",
        ),
        (
            "az://c/x", {},
            {"AZURE_STORAGE_CONNECTION_STRING": f"{ACCOUNT};BlobEndpoint=http://h:1/acc;"}, "http://h:1/acc",
        ),
        ("az://c/x", {}, {"AZURE_STORAGE_ENDPOINT": "https://acc.blob.core.windows.net"}, None),
        ("az://c/x", {}, {"AZURE_STORAGE_USE_EMULATOR": "true"}, "http://127.0.0.1:10000"),
        ("sftp://h/x", {}, {"AWS_ENDPOINT_URL": "http://e"}, None),
    ],
)  # fmt: skip
def test_where_requests_go(
    url: str, given: dict[str, Any], environment: dict[str, str], server: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert server_of(url, given) == server


def test_options_in_the_words_of_each_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert obstore_settings("gs://b/x", {"anon": True}, None) == ({"skip_signature": True}, {})
    assert obstore_settings("gs://b/x", {}, "https://h") == ({"base_url": "https://h"}, {})
    config, client = obstore_settings("gs://b/x", {"anon": True}, "http://h")
    assert (config["base_url"], client) == ("http://h", {"allow_http": True})
    assert json.loads(config["service_account_key"])["disable_oauth"]
    assert fsspec_options("gs://b/x", {"endpoint_url": "http://h", "anon": True, "retries": 3, "timeout": 2.0}) == {
        "endpoint_url": "http://h", "token": "anon", "requests_timeout": 2.0,
    }  # fmt: skip
    assert fsspec_options("gs://b/x", {"token": "/etc/account.json"}) == {"token": "/etc/account.json"}
    with pytest.raises(UsageError, match="AZURE_STORAGE_CONNECTION_STRING"):
        fsspec_options("az://c/x", {"endpoint_url": "http://h"})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    assert fsspec_options("az://c/x", {"endpoint_url": "https://h"}) == {"account_name": "acc", "account_host": "h"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ACCOUNT)
    account = {"account_name": "acc", "account_key": "a2V5"}
    assert obstore_settings("az://c/x", {}, None) == (account, {})
    assert obstore_settings("abfss://c@acc.dfs.core.windows.net/x", {}, None) == (account, {})
    assert obstore_settings("abfss://c@other.dfs.core.windows.net/x", {}, None) == ({}, {})
    assert obstore_settings("az://c/x", {"anon": True}, None)[0] == {"account_name": "acc", "skip_signature": True}
    assert fsspec_options("az://c/x", {"timeout": 3}) == {"connection_timeout": 3, "read_timeout": 3}
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    assert obstore_settings("az://c/x", {}, "http://h/acc")[0]["use_emulator"] is False
    with pytest.raises(UsageError, match="takes no region"):
        obstore_settings("gs://b/x", {"region": "r"}, None)
    with pytest.raises(UsageError, match="takes no region"):
        fsspec_options("az://c/x", {"region": "r"})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://c/x", {"driver": "fsspec", "account_key": "hunter2"}),
        ("az://c/x", {"driver": "fsspec", "connection_string": "AccountKey=hunter2"}),
        ("az://c/x", {"driver": "fsspec", "sas_token": "hunter2"}),
        ("az://c/x", {"driver": "obstore", "config": {"account_key": "hunter2"}}),
        ("gs://b/x", {"driver": "fsspec", "token": "hunter2"}),
        ("gs://b/x", {"driver": "fsspec", "token": {"private_key": "hunter2"}}),
        ("gs://b/x", {"driver": "obstore", "config": {"service_account_key": "hunter2"}}),
        ("s3://b/x", {"driver": "obstore", "config": {"aws_secret_access_key": "hunter2"}}),
        ("s3://b/x", {"driver": "fsspec", "client_kwargs": {"aws_session_token": "hunter2"}}),
    ],
)
def test_credentials_are_no_options(url: str, options: dict[str, Any]) -> None:
    if options["driver"] == "obstore":
        pytest.importorskip("obstore")
    with pytest.raises(UsageError, match="given as options") as caught:
        open_blobs(url, **options)
    assert "hunter2" not in str(caught.value)


def test_what_may_be_shown_of_azure() -> None:
    assert redact("abfss://container@account.dfs.core.windows.net/x") == (
        "abfss://container@account.dfs.core.windows.net/x"
    )
    assert redact("abfss://user:secret@account.dfs.core.windows.net/x") == "abfss://account.dfs.core.windows.net/x"
    assert "a2V5" not in scrub(f"unable to connect: DefaultEndpointsProtocol=http;{ACCOUNT}")
