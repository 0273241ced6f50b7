"""Clouds: our options and the environment's settings in the words of obstore and of each fsspec package.

The same URL, options and environment lead both drivers to the same server under the same account.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from multilora_store.errors import UsageError
from multilora_store.storage.blobs import redact

__all__ = ["FSSPEC_PACKAGE", "cloud_of", "fsspec_options", "obstore_settings", "refuse_secrets", "server_of"]

_CLOUD_OF: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
FSSPEC_PACKAGE: Final = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_OURS: Final = frozenset({"endpoint_url", "region", "anon", "retries", "timeout"})
_ENDPOINTS: Final = {
    "s3": ("endpoint_url", "endpoint", "aws_endpoint", "aws_endpoint_url"),
    "gs": ("endpoint_url", "base_url", "google_base_url"),
    "az": ("endpoint_url", "endpoint", "azure_endpoint", "azure_storage_endpoint"),
}
_IN_ENVIRONMENT: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or a role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to a file, or use the account of the machine",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SECRET: Final = re.compile(
    r"secret|password|username|^key$|(account|access|master|sas|encryption|customer)_?key|service_account_key|"
    r"token$|^credential$|connection_string",
    re.IGNORECASE,
)
_WAYS_OF_GCSFS: Final = frozenset({"anon", "browser", "cache", "cloud", "google_default"})
_ACCOUNT_IN_URL: Final = re.compile(r"abfss?://[^/@]+@([^./]+)\.")
_NO_ACCOUNT: Final = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


def cloud_of(url: str) -> str | None:
    """`s3`, `gs` or `az`; None for any other storage."""
    return _CLOUD_OF.get(url.partition("://")[0].partition("::")[0])


def server_of(url: str, given: Mapping[str, Any]) -> str | None:
    """The server that options or else the environment put in place of the cloud's own."""
    cloud = cloud_of(url)
    if cloud is None:
        return given.get("endpoint_url") or (given.get("client_kwargs") or {}).get("endpoint_url")
    for options in (given, given.get("client_kwargs") or {}, given.get("config") or {}):
        for name in _ENDPOINTS[cloud]:
            if options.get(name):
                return str(options[name])
    named = [_azure_account().get("endpoint")] if cloud == "az" else []
    for server in (*named, *(os.environ.get(name) for name in _IN_ENVIRONMENT[cloud])):
        if server:
            return None if (urlsplit(server).hostname or "").endswith(".core.windows.net") else server
    return {"gs": _google_emulator, "az": _azurite}.get(cloud, lambda: None)()


def refuse_secrets(url: str, given: Mapping[str, Any]) -> None:
    """Leaves options alone that hold no credentials.

    Raises:
        UsageError: one does.
    """
    cloud = cloud_of(url)
    if cloud is None:
        return
    nested = [given.get(name) or {} for name in ("config", "client_kwargs")]
    found = {name for options in (given, *nested) for name, value in options.items() if _is_secret(name, value)}
    if found:
        raise UsageError(
            f"credentials for {redact(url)} were given as options ({', '.join(sorted(found))})",
            why="options end up in configurations and logs",
            remedy=f"set {_CREDENTIALS[cloud]}",
        )


def _is_secret(name: str, value: Any) -> bool:
    if not isinstance(value, (str, bytes, dict)) or not _SECRET.search(name):
        return False  # an object that fetches credentials is none itself
    # gcsfs: the way to find credentials, or the file that holds them
    return not (name == "token" and isinstance(value, str) and (value in _WAYS_OF_GCSFS or value.endswith(".json")))


def obstore_settings(url: str, given: Mapping[str, Any], server: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of obstore's store, and what of it belongs to the HTTP client.

    Raises:
        UsageError: a region, where the cloud has none.
    """
    cloud = _cloud(url, given)
    config, client = dict(given.get("config") or {}), dict(given.get("client_options") or {})
    if server and server.startswith("http://"):
        client.setdefault("allow_http", True)
    if cloud == "az":
        _add_azure(config, url, given, server)
    elif server and not any(name in config for name in _ENDPOINTS[cloud]):
        config["base_url" if cloud == "gs" else "endpoint"] = server
    if given.get("region"):
        config.setdefault("region", given["region"])
    if cloud == "gs" and server and _is_unsigned(given, server):
        # Unsigned requests alone do not do: obstore looks for an account as soon as it writes.
        config["service_account_key"] = json.dumps({"gcs_base_url": server, **_NO_ACCOUNT})
    elif given.get("anon"):
        config.setdefault("skip_signature", True)
    return config, client


def _add_azure(config: dict[str, Any], url: str, given: Mapping[str, Any], server: str | None) -> None:
    account, named = _azure_account(), _ACCOUNT_IN_URL.match(url)
    if named is None or named[1] == account.get("account_name"):
        names = ("account_name",) if given.get("anon") else ("account_name", "account_key", "sas_key")
        for name in names:
            if name in account:
                config.setdefault(name, account[name])
    if server and server != _azurite():
        if not any(name in config for name in _ENDPOINTS["az"]):
            config["endpoint"] = server
        config.setdefault("use_emulator", False)  # which would go first


def fsspec_options(url: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Our options as the cloud's fsspec package takes them, its own as they are.

    Raises:
        UsageError: a region, where the cloud has none.
    """
    if cloud_of(url) is None:
        return dict(given)
    cloud, server = _cloud(url, given), server_of(url, given)
    found = {name: value for name, value in given.items() if name not in _OURS}
    if cloud == "s3":
        return _for_s3fs(given, found)
    return _for_gcsfs(given, found, server) if cloud == "gs" else _for_adlfs(given, found, server)


def _for_s3fs(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    config = dict(found.pop("config_kwargs", None) or {})
    client = dict(found.pop("client_kwargs", None) or {})
    if given.get("endpoint_url"):
        client["endpoint_url"] = given["endpoint_url"]
    if given.get("region"):
        client["region_name"] = given["region"]
    if given.get("timeout") is not None:
        config |= {"connect_timeout": given["timeout"], "read_timeout": given["timeout"]}
    if given.get("retries") is not None:
        config["retries"] = {"max_attempts": given["retries"], "mode": "standard"}
    if "anon" in given:
        found["anon"] = given["anon"]
    return {**found, "client_kwargs": client, "config_kwargs": config}


def _for_gcsfs(given: Mapping[str, Any], found: dict[str, Any], server: str | None) -> dict[str, Any]:
    if server:
        found["endpoint_url"] = server
    if _is_unsigned(given, server):
        found["token"] = "anon"  # noqa: S105  (says that there is none)
    if given.get("timeout") is not None:
        found["requests_timeout"] = given["timeout"]
    return found


def _for_adlfs(given: Mapping[str, Any], found: dict[str, Any], server: str | None) -> dict[str, Any]:
    if server:
        found |= _account_at(server, anon=bool(given.get("anon")))
    if given.get("anon") is not None:
        found["anon"] = given["anon"]
    if given.get("timeout") is not None:
        found |= {"connection_timeout": given["timeout"], "read_timeout": given["timeout"]}
    return found


def _cloud(url: str, given: Mapping[str, Any]) -> str:
    cloud = cloud_of(url)
    assert cloud is not None
    if given.get("region") and cloud != "s3":
        raise UsageError(f"{redact(url)} takes no region", why="only S3 has them", remedy="leave the option out")
    return cloud


def _is_unsigned(given: Mapping[str, Any], server: str | None) -> bool:
    """Whether requests carry no credentials: as asked for, or as Google's own clients do at an emulator."""
    return bool(given.get("anon")) or (server is not None and server == _google_emulator())


def _google_emulator() -> str | None:
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if host in ("", "default"):
        return None
    return host if "://" in host else f"http://{host}"


def _azurite() -> str | None:
    """The emulator that obstore is told of by AZURE_STORAGE_USE_EMULATOR, whose account it knows."""
    if os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() not in ("1", "true", "yes", "on"):
        return None
    return os.environ.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"


def _azure_account() -> dict[str, str]:
    """The account of AZURE_STORAGE_CONNECTION_STRING in obstore's words; obstore itself does not read it."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = {
        name.strip().lower(): value.strip() for name, _, value in (part.partition("=") for part in text.split(";"))
    }
    words = {"accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key"}
    found = {ours: parts[theirs] for theirs, ours in words.items() if parts.get(theirs)}
    if parts.get("blobendpoint"):
        found["endpoint"] = parts["blobendpoint"].rstrip("/")
    elif "account_name" in found and parts.get("endpointsuffix", "core.windows.net") != "core.windows.net":
        protocol = parts.get("defaultendpointsprotocol", "https")
        found["endpoint"] = f"{protocol}://{found['account_name']}.blob.{parts['endpointsuffix']}"
    return found


def _account_at(server: str, *, anon: bool) -> dict[str, str]:
    """The account of the environment at another server, as adlfs takes it."""
    account = _azure_account()
    name = account.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not name:
        raise UsageError(
            f"the account at {redact(server)} is not known",
            why="neither a connection string nor an account's name is in the environment",
            remedy=f"set {_CREDENTIALS['az']}",
        )
    keys = {
        "AccountKey": account.get("account_key") or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"),
        "SharedAccessSignature": account.get("sas_key") or os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
    }
    given = {} if anon else {name: value for name, value in keys.items() if value}
    if not given and not anon and server.startswith("https://"):  # an identity, which a connection string cannot name
        return {"account_name": name, "account_host": server.removeprefix("https://").rstrip("/")}
    named = {"AccountName": name, "BlobEndpoint": server, **given}
    return {"connection_string": ";".join(f"{name}={value}" for name, value in named.items())}
