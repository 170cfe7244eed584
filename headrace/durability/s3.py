"""A bucket of S3, or of an S3-compatible service, as a store.

Two rules. `create` is a conditional put, and it is exact: each one puts a unique mark into the object's metadata, so
that one whose answer was lost can tell whether the existing object is its own. And a bucket that does not honour
conditions (some services accept the header and overwrite) is refused before the first `create`: without conditions two
coordinators could write one log. Credentials come from the environment or from AWS's own files, never from the url.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store as Bucket

from headrace.durability.store import check_name
from headrace.errors import ConfigError, ObjectMissing, StoreError, StoreFull, WrongStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

CREATE_TRIES = 6
PAUSE_SECONDS = 0.05  # before the second try; doubled for each later one
MARK = "headrace-mark"  # in the metadata of what `create` made

_OPTIONS = ("endpoint", "region", "allow_http")
_STATUS = re.compile(r"status code: (\d{3})")
_FAULTS = (OSError, exceptions.BaseError, ValueError)


class S3Store:
    """`s3://bucket/prefix`, with `?endpoint=..&region=..&allow_http=true` if needed."""

    can_append = False

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        strange = [name for name in options if name not in _OPTIONS]
        if strange:
            raise ConfigError(f"{url}: an S3 store has no option {strange[0]!r}; its options are {', '.join(_OPTIONS)}")
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        if parts.scheme != "s3" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]+", self.bucket) or parts.fragment:
            raise ConfigError(f"{url} is not an S3 store: write s3://bucket/prefix")
        if self.prefix:
            check_name(self.prefix)
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.address = url  # with its options
        self.endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or _environment_endpoint()
        config = _config(self.endpoint, options)
        client: ClientConfig = {
            "allow_http": _may_use_http(url, self.endpoint, options.get("allow_http", "")),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=120),
        }
        patient: RetryConfig = {
            "max_retries": 5,
            "backoff": {"init_backoff": timedelta(seconds=PAUSE_SECONDS), "max_backoff": timedelta(seconds=2)},
            "retry_timeout": timedelta(seconds=30),
        }
        prefix = self.prefix or None
        self._objects = Bucket(self.bucket, prefix=prefix, config=config, client_options=client, retry_config=patient)
        # We retry a create ourselves, and look at what is there first; the library would not look.
        once: RetryConfig = {"max_retries": 0}
        self._without_retries = Bucket(
            self.bucket, prefix=prefix, config=config, client_options=client, retry_config=once
        )
        self._is_checked = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def put(self, name: str, data: bytes) -> None:
        check_name(name)
        with self._explained("write", name):
            obstore.put(self._objects, name, data)

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        self._check_conditions()
        return self._create(name, data)

    def get(self, name: str) -> bytes:
        check_name(name)
        with self._explained("read", name):
            return obstore.get(self._objects, name).bytes().to_bytes()

    def get_part(self, name: str, start: int, size: int) -> bytes:
        check_name(name)
        with self._explained("read", name):
            try:
                return obstore.get_range(self._objects, name, start=start, length=size).to_bytes() if size else b""
            except exceptions.GenericError as error:
                if _status(error) == 416:  # the object ends before `start`
                    return b""
                raise

    def exists(self, name: str) -> bool:
        check_name(name)
        with self._explained("look at", name):
            try:
                obstore.head(self._objects, name)
            except FileNotFoundError:
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder)
        with self._explained("list", prefix):
            found = obstore.list(self._objects, folder or None, chunk_size=1000)
            return sorted(meta["path"] for chunk in found for meta in chunk if meta["path"].startswith(prefix))

    def delete(self, name: str) -> None:
        check_name(name)
        with self._explained("delete", name):
            try:
                obstore.delete(self._objects, name)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise

    def append(self, name: str, data: bytes) -> None:
        raise StoreError(f"{self.url}/{name}: S3 objects cannot grow; create new ones")

    def sync(self, name: str) -> None:
        raise StoreError(f"{self.url}/{name}: S3 objects are durable as soon as they exist")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _create(self, name: str, data: bytes) -> bool:
        mark = uuid.uuid4().hex
        pause = PAUSE_SECONDS
        for attempt in range(1, CREATE_TRIES + 1):
            with self._explained("create", name):
                try:
                    obstore.put(self._without_retries, name, data, mode="create", attributes={MARK: mark})
                    return True
                except exceptions.AlreadyExistsError:
                    found = self._mark_of(name)
                    if found is not None:
                        return found == mark
                except exceptions.GenericError as error:
                    if attempt == CREATE_TRIES or not _is_transient(error):
                        raise
            time.sleep(pause)  # the answer was lost, or another create is in progress
            pause *= 2
        raise StoreError(
            f"cannot create {self.url}/{name}: other processes keep creating and deleting it. Find out which"
        )

    def _mark_of(self, name: str) -> str | None:
        """The mark of the object: "" if it was not made by `create`, None if it does not exist."""
        try:
            return str(obstore.get(self._objects, name, options={"head": True}).attributes.get(MARK, ""))
        except FileNotFoundError:
            return None

    def _check_conditions(self) -> None:
        """Checks once that the bucket refuses a second `create` of the same name."""
        with self._lock:
            if self._is_checked:
                return
            probe = f"probes/{uuid.uuid4().hex}"
            try:
                self._create(probe, b"first")
                is_honest = not self._create(probe, b"second")
            finally:
                with self._explained("delete", probe):
                    obstore.delete(self._objects, probe)
            if not is_honest:
                raise WrongStore(
                    f"{self.url} ignores conditional puts (If-None-Match: *) and overwrites objects: two processes "
                    "could both write the log there. Use a store with conditional puts (AWS S3, MinIO, R2, Ceph, ...)"
                )
            self._is_checked = True

    @contextmanager
    def _explained(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            raise self._error(doing, f"{self.url}/{name}", error) from None

    def _error(self, doing: str, what: str, error: Exception) -> StoreError:
        text = str(error)
        reason = " ".join(text.partition("\n\nDebug source:")[0].split())[:500]
        if "NoSuchBucket" in text:
            return WrongStore(f"cannot {doing} {what}: there is no bucket {self.bucket!r} at {self._where}. Create it")
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(f"{what} is missing: restore it from a backup, or check that {self.url} is right")
        if _status(error) == 507 or "StorageFull" in text or "QuotaExceeded" in text:
            return StoreFull(f"cannot {doing} {what}: no space is left ({reason}). Free some space and start again")
        if isinstance(error, exceptions.PermissionDeniedError):
            return StoreError(
                f"cannot {doing} {what}: access denied. The policy must allow s3:GetObject, s3:PutObject,"
                f" s3:DeleteObject and s3:ListBucket ({reason})"
            )
        if isinstance(error, exceptions.UnauthenticatedError) or "redential" in text or "169.254.169.254" in text:
            return StoreError(
                f"cannot {doing} {what}: credentials are missing or wrong. Set AWS_ACCESS_KEY_ID and "
                f"AWS_SECRET_ACCESS_KEY, or AWS_PROFILE ({reason})"
            )
        return StoreError(
            f"cannot {doing} {what}: {reason}. Check that {self._where} can be reached from here, then start again"
        )

    @property
    def _where(self) -> str:
        return self.endpoint or "AWS"


def _status(error: Exception) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a moment later: there was no answer, or the server has a problem."""
    status = _status(error)
    return status >= 500 or status in (408, 409, 429) or (status == 0 and "HTTP error" in str(error))


def _environment_endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""


def _may_use_http(url: str, endpoint: str, allowed: str) -> bool:
    """Plain http is allowed for a server on this machine, and elsewhere only if the url says so."""
    if allowed not in ("", "true", "false"):
        raise ConfigError(f"{url}: allow_http must be true or false")
    if not endpoint:
        return False
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url}: the endpoint must be like https://host:port, not {endpoint!r}")
    if parts.scheme == "https":
        return False
    if allowed == "true" or (allowed == "" and _is_loopback(parts.hostname)):
        return True
    raise ConfigError(f"{url}: {endpoint} is not encrypted. Use https, or add allow_http=true if you trust the network")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config(endpoint: str, options: dict[str, str]) -> S3Config:
    config: S3Config = {}
    if endpoint:
        config["endpoint"] = endpoint
    profile = {} if "AWS_ACCESS_KEY_ID" in os.environ else _profile()
    if "aws_access_key_id" in profile and "aws_secret_access_key" in profile:
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile["aws_secret_access_key"]
        if "aws_session_token" in profile:
            config["session_token"] = profile["aws_session_token"]
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = options.get("region") or environment or profile.get("region")
    if region:
        config["region"] = region
    return config


def _profile() -> dict[str, str]:
    """The chosen profile from AWS's own files, which the library itself does not read."""
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = chosen or "default"
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        path = Path(os.environ.get(variable) or file).expanduser()
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if parser.has_section(section):
            found.update(parser.items(section))
    if chosen and not found:
        raise ConfigError(
            f"AWS_PROFILE is {chosen!r}, but neither ~/.aws/config nor ~/.aws/credentials has that profile"
        )
    return found
