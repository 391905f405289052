"""Hub names, with huggingface_hub itself against a server on this machine that speaks the hub's protocol."""

import functools
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from rich.console import Console

from kimi_jax.checkpoint import hub
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.hub import local_folder
from kimi_jax.checkpoint.safetensors import open_checkpoint
from kimi_jax.commands import convert
from kimi_jax.commands.options import EngineOptions, LayoutOptions
from kimi_jax.commands.progress import open_engine

DATA = Path(__file__).parents[1] / "data"

COMMIT, OLD = "c" * 40, "d" * 40
NAME = "moonshotai/Kimi-tiny"


class Hub(http.server.ThreadingHTTPServer):
    """One repository: `files` of the commit that `main` is."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = files, []
        self.cut: int | None = None
        """Bytes of a file after which its connection breaks, and the server is down."""
        self.down = False
        self.forbidden: str | None = None

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.down:
            return self.answer(403)  # unlike 500, not tried again
        if self.server.forbidden:
            return self.answer(403 if self.server.forbidden == "GatedRepo" else 404, X_Error_Code=self.server.forbidden)
        if path == f"/api/models/{NAME}/revision/main" or path == f"/api/models/{NAME}":
            return self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            return self.answer(200, json.dumps(listed).encode())
        prefix = f"/{NAME}/resolve/{COMMIT}/"
        if path.startswith(prefix):
            return self.file(self.server.files[path.removeprefix(prefix)])
        code = "RevisionNotFound" if path.startswith(f"/api/models/{NAME}/") else "RepoNotFound"
        return self.answer(404, X_Error_Code=code)

    do_HEAD = do_GET

    def file(self, content):
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[first:]
        headers = {"ETag": etag, "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if first:
            headers["Content_Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and self.server.cut is not None and len(body) > self.server.cut:
            self.send_response(206 if first else 200)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: self.server.cut])
            self.wfile.flush()
            self.close_connection = self.server.down = True
            return None
        return self.answer(206 if first else 200, body, **headers)


@pytest.fixture
def server(tiny):
    files = {path.name: path.read_bytes() for path in tiny.directory.iterdir()}
    server = Hub({**files, "modeling.py": b"raise SystemExit", "figure.png": b"x"})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def download(server, tmp_path):
    """`download(name)`: the folder and the lines told."""

    def run(name=NAME, endpoint=server.endpoint):
        told = []
        folder = local_folder(Path(name), told.append, cache=tmp_path / "cache", endpoint=endpoint)
        return folder, told

    return run


def test_a_repository_is_downloaded_once_and_loads(server, download, tiny):
    folder, told = download()
    assert told == [f"{NAME}@{COMMIT}: downloading {hub_bytes(server) / 1e9:,.3f} GB to {folder.parents[2]}"]
    wanted = {name for name in server.files if name.endswith((".safetensors", ".json")) or name == "tiktoken.model"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert not wanted & {"modeling.py", "figure.png"}
    for name in wanted:
        assert (folder / name).read_bytes() == server.files[name]
    before = len(server.requests)
    assert download() == (folder, [f"{NAME}@{COMMIT} from the cache"])
    assert not [path for _, path, _ in server.requests[before:] if "/resolve/" in path]
    tiny.directory = folder
    assert tiny.load()["model"]["norm"]["weight"].shape == (128,)


def hub_bytes(server):
    return sum(
        len(c) for n, c in server.files.items() if n.endswith((".safetensors", ".json")) or n == "tiktoken.model"
    )


def test_a_download_that_was_cut_keeps_the_files_it_had(server, download, tmp_path):
    server.cut = 500_000  # only the shards of 1.2 MB are longer
    with pytest.raises(CheckpointError, match="the same command goes on with the files"):
        download()
    (folder,) = (tmp_path / "cache").glob("*/snapshots/*")
    kept = {path.name for path in folder.iterdir()}
    with pytest.raises(
        CheckpointError, match=r"missing shard|not all in the cache|neither model\.safetensors\.index\.json nor"
    ):
        open_checkpoint(download(endpoint="http://127.0.0.1:9")[0])
    server.cut, server.down = None, False
    begun = len(server.requests)
    assert download()[0] == folder
    asked = {
        Path(path).name for command, path, _ in server.requests[begun:] if command == "GET" and "/resolve/" in path
    }
    assert asked == {path.name for path in folder.iterdir()} - kept
    for path in folder.iterdir():
        assert path.read_bytes() == server.files[path.name]


def test_a_commit_can_be_pinned(download):
    folder, told = download(f"{NAME}@{COMMIT}")
    assert folder.name == COMMIT
    assert told[0].startswith(f"{NAME}@{COMMIT}: downloading")


def test_the_cache_serves_without_a_network(download):
    folder, _ = download()
    assert download(endpoint="http://127.0.0.1:9") == (
        folder,
        [f"{NAME}@{COMMIT} from the cache; the hub cannot be reached"],
    )


def test_no_network_and_no_cache(download):
    with pytest.raises(CheckpointError, match=r"no such folder here, and the hub cannot be reached and its files"):
        download(endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "forbidden", "message"),
    [
        (f"{NAME}@v9", None, "has no revision v9"),
        ("nobody/nothing", None, "no repository of that name on the hub"),
        (NAME, "GatedRepo", "asks for your agreement first"),
    ],
)
def test_what_the_hub_refuses_is_told(server, download, name, forbidden, message):
    server.forbidden = forbidden
    with pytest.raises(CheckpointError, match=f"{name}: no such folder here, and .*{message}"):
        download(name)


def test_space_is_looked_for_before_anything_is_downloaded(server, download, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=rf"{NAME}: 0\.\d GB to download and 0\.0 GB free at .*HF_HOME"):
        download()
    assert not [path for command, path, _ in server.requests if "/resolve/" in path and command == "GET"]


def test_a_repository_without_weights_is_no_checkpoint(server, download):
    server.files = {"config.json": b"{}"}
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        download()


def test_a_plan_by_name_fetches_no_weights_and_equals_that_of_the_headers(server, tiny, tmp_path, monkeypatch, capsys):
    fetch = functools.partial(local_folder, cache=tmp_path / "cache", endpoint=server.endpoint)
    monkeypatch.setattr(hub, "local_folder", fetch)

    def planned(checkpoint):
        where = LayoutOptions("hgx-ib-16")
        convert.run_plan(convert.PlanOptions(checkpoint=checkpoint, layout=where, processes=2, json=True))
        return {k: v for k, v in json.loads(capsys.readouterr().out).items() if k != "plan_seconds"}

    by_name = planned(Path(NAME))
    fetched = {Path(path).name for command, path, _ in server.requests if command == "GET" and "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors.index.json"}
    assert by_name == planned(tiny.directory)
    assert by_name["skipped_bytes"] == sum(
        value.nbytes for key, value in tiny.tensors().items() if not key.startswith("language_model.")
    )


def test_a_plan_by_name_needs_an_index(server, tmp_path, monkeypatch, capsys):
    del server.files["model.safetensors.index.json"]
    fetch = functools.partial(local_folder, cache=tmp_path / "cache", endpoint=server.endpoint)
    monkeypatch.setattr(hub, "local_folder", fetch)
    message = f"{NAME}: no such folder here, and the repository of that name on the hub has no model.safe"
    with pytest.raises(CheckpointError, match=message):
        convert.run_plan(convert.PlanOptions(checkpoint=Path(NAME)))


def test_a_plan_by_name_tells_what_the_index_lacks(server, tmp_path, monkeypatch, capsys):
    index = json.loads(server.files["model.safetensors.index.json"])
    del index["weight_map"]["language_model.lm_head.weight"]
    index["weight_map"]["language_model.extra"] = "model-00001-of-000007.safetensors"
    server.files["model.safetensors.index.json"] = json.dumps(index).encode()
    fetch = functools.partial(local_folder, cache=tmp_path / "cache", endpoint=server.endpoint)
    monkeypatch.setattr(hub, "local_folder", fetch)
    with pytest.raises(CheckpointError, match=r"language_model\.lm_head\.weight: missing") as refused:
        convert.run_plan(convert.PlanOptions(checkpoint=Path(NAME)))
    assert "language_model.extra: not part of the model" in str(refused.value)


@pytest.mark.parametrize("name", ["gone", "/models/kimi", "a/b/c", "../a", "a/.b"])
def test_what_is_no_name_is_a_path(name):
    assert local_folder(Path(name), pytest.fail) == Path(name)


def test_a_folder_wins_over_a_name(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder(Path("owner/name"), pytest.fail) == Path("owner/name")


def test_checkpoints_and_drafters_are_opened_by_name(monkeypatch):
    folders = {"owner/model": DATA / "tiny_random", "owner/drafter": DATA / "tiny_random_drafter"}
    monkeypatch.setattr(hub, "local_folder", lambda path, tell, outline=False: folders[str(path)])
    options = EngineOptions(checkpoint=Path("owner/model"))
    opened = open_engine(options, Console(quiet=True), Path("owner/drafter"))
    assert opened.folder == folders["owner/model"]
    assert opened.engine.drafter is not None
    assert opened.engine.parameters.keys() == {"target", "drafter", "vision"}
