"""A store's URL and its credentials."""

import os
import re
from configparser import ConfigParser
from configparser import Error as ParserError
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from isthmus.errors import ConfigError

SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
SUFFIX = ".isthmus.toml"  # of a file that names a run by its URL and holds a replica's key
CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_CLIENT_ID",
        "AZURE_STORAGE_TOKEN",
    ),
}
REGION_NAMES = ("AWS_REGION", "AWS_DEFAULT_REGION")
ENDPOINT_NAMES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?")
_AWS_KEY = ("access_key_id", "secret_access_key", "session_token")


def is_url(text: str) -> bool:
    """Whether the text is a URL rather than a path."""
    return "://" in text


def parse_url(url: str) -> tuple[str, Path | None]:
    """The URL without secrets, and the folder if it is one."""
    shown = re.sub(r"//[^/]*@", "//***@", re.sub(r"[?#].*", "", url))
    schemes = "a folder, file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    if not url.strip() or not url.isprintable():
        raise ConfigError(f"the store's URL is empty or not printable; write {schemes}")
    scheme, _, rest = url.partition(":") if re.match(r"[A-Za-z][A-Za-z0-9+]*:", url) else ("", "", url)
    if not scheme or (scheme == "file" and rest.startswith(("///", "//localhost/"))):
        folder = Path(unquote(urlsplit(url).path) if scheme else url).expanduser().absolute()
        return str(folder), folder
    if scheme not in CREDENTIALS or not rest.startswith("//"):
        raise ConfigError(f"{shown!r} is not a store; write {schemes}")
    if "@" in rest:
        cure = "they belong in the environment or the credentials file"
        raise ConfigError(f"{shown!r} holds credentials; {cure}")
    bucket, *prefix = rest[2:].rstrip("/").split("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}", bucket):
        cure = "a bucket has 3 to 63 letters, digits and ._-, and begins with a letter or digit"
        raise ConfigError(f"{shown!r} names the bucket {bucket!r:.80}; {cure}")
    for part in prefix:
        if not SEGMENT.fullmatch(part):
            cure = "write letters, digits and ._=+- between single slashes"
            raise ConfigError(f"{shown!r} has {part!r:.80} in its prefix; {cure}")
    return "/".join([f"{scheme}://{bucket}", *prefix]), None


def connect(root: str, folder: Path | None) -> Any:
    """An obstore client without retries and with a very long time-out: the store sets both per request.

    It checks credentials first, because obstore would go on to ask the cloud's metadata service. The user
    must state whose credentials are used.
    """
    from obstore.store import LocalStore, from_url  # a machine without obstore reads run directories

    if folder:
        return LocalStore(folder)
    scheme = root.partition(":")[0]
    options = aws_options() if scheme == "s3" else {}
    said = "access_key_id" in options or any(map(os.environ.get, CREDENTIALS[scheme]))
    usual = Path.home() / ".config/gcloud/application_default_credentials.json"
    if not said and not (scheme == "gs" and usual.exists()):
        names = " or ".join(CREDENTIALS[scheme])
        names = names.replace("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        raise ConfigError(f"no credentials for {root}: set {names}, or fill the usual credentials file")
    settings: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(days=1),
            "connect_timeout": timedelta(seconds=5),
            "allow_http": options.get("endpoint", "").startswith("http://"),
        },
        "retry_config": {"max_retries": 0},
        **options,
    }
    try:
        return from_url(root, **settings)
    except Exception:  # its text may hold secrets that it read
        raise ConfigError(f"cannot use {root}: the environment's settings for it do not fit") from None


def aws_options(named: str | None = None) -> dict[str, str]:
    """Endpoint, key and region from where the AWS tools look: the environment first, then the usual files.

    For a named profile, the files' key has priority.
    """
    home, profile = Path.home() / ".aws", named or os.environ.get("AWS_PROFILE", "default")
    keys, config = ConfigParser(interpolation=None), ConfigParser(interpolation=None)
    try:
        keys.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
        config.read(os.environ.get("AWS_CONFIG_FILE", home / "config"))
    except (ParserError, UnicodeDecodeError, OSError):
        raise ConfigError("the AWS credentials or config file is malformed") from None
    section = profile if profile == "default" else f"profile {profile}"
    said = dict(config[section]) if config.has_section(section) else {}
    said |= dict(keys[profile]) if keys.has_section(profile) else {}
    env = {name: value for name, value in os.environ.items() if value}
    if "AWS_ACCESS_KEY_ID" in env and not named:
        said |= {f"aws_{name}": env.get(f"AWS_{name.upper()}", "") for name in _AWS_KEY}
    options = {name: said[f"aws_{name}"] for name in _AWS_KEY if said.get(f"aws_{name}")}
    if ("access_key_id" in options) != ("secret_access_key" in options):
        raise ConfigError("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both")
    if region := next((env[name] for name in REGION_NAMES if name in env), said.get("region")):
        options["region"] = region
    if endpoint := next((env[name] for name in ENDPOINT_NAMES if name in env), said.get("endpoint_url")):
        if not ENDPOINT.fullmatch(endpoint):
            raise ConfigError("AWS_ENDPOINT_URL is malformed; write https://host or https://host:port")
        options["endpoint"] = endpoint
    return options


def where_s3_is() -> str:
    """A hint for a failed connection: most often the endpoint is unset in this terminal, or mistyped."""
    endpoint = aws_options().get("endpoint", "")
    return f"at {endpoint}" if endpoint else "at AWS: no AWS_ENDPOINT_URL is set here"
