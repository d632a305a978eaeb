"""Files that lie elsewhere are fetched once, noticed when they change, and told by their URL when
they cannot be had."""

import contextlib
import functools
import http.server
import json
import re
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import fsspec
import inject
import pytest
import yaml
from refused import refusal
from tables import rows

from fsdp_trainer.data.files import remote_files
from fsdp_trainer.data.files.file_splits import read_records, read_unit, split_units
from fsdp_trainer.data.files.sources import find_sources
from fsdp_trainer.errors import Stopped, UserError

A_FILE = "memory://bucket/set/a.jsonl"


def texts(sources):
    return [
        row.columns["text"]
        for source in sources
        for file in source.files
        for row in read_records(file)
    ]


def lines(*values):
    return "".join(json.dumps({"text": value}) + "\n" for value in values).encode()


@pytest.fixture
def bucket():
    """A remote folder in this process's memory."""
    system = fsspec.filesystem("memory")
    system.pipe(
        {
            "/bucket/set/a.jsonl": lines("a"),
            "/bucket/set/more/b.jsonl": lines("b", "c"),
            "/bucket/set/README.md": b"no data",
        }
    )
    yield system
    system.rm("/bucket", recursive=True)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Python's own server gives files from their beginning on only: `/ranged/` gives parts of them,
    `/secret/` nothing."""

    requests: list[str] = []  # noqa: RUF012
    stalls: int | None = None  # after so many bytes of a whole file, for 1.5 seconds

    def do_GET(self):
        self.requests.append(f"{self.path} {self.headers.get('Range', '')}")
        if self.path.startswith("/ranged/") and self.headers.get("Range"):
            content = Path(self.translate_path(self.path)).read_bytes()
            first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(len(content[first : last + 1])))
            self.end_headers()
            self.wfile.write(content[first : last + 1])
        else:
            super().do_GET()

    def copyfile(self, source, outputfile):
        if self.stalls:
            outputfile.write(source.read(self.stalls))
            outputfile.flush()
            time.sleep(1.5)
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)

    def send_head(self):
        if not self.path.startswith("/secret/"):
            return super().send_head()
        self.send_error(403)

    def log_message(self, *args):
        pass


@pytest.fixture
def web(tmp_path):
    """(URL, folder) of a server on this machine."""
    folder = tmp_path / "web"
    for name in ("ranged", "plain", "secret"):
        (folder / name).mkdir(parents=True)
    Handler.requests.clear()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.mark.parametrize(
    "path, names, expected",
    yaml.safe_load("""
- ['memory://bucket/set/a.jsonl', [a], [a]]
- ['memory://bucket/set', [a, b], [a, b, c]]
- ['memory://bucket/set/**/*.jsonl', [a, b], [a, b, c]]
- [['memory://bucket/set/more', 'memory://bucket/set/a.jsonl'], [more, a], [b, c, a]]
"""),
)
def test_a_url_is_a_file_a_folder_or_a_glob_and_is_fetched(bucket, tmp_path, path, names, expected):
    sources = find_sources(path, "data.path", tmp_path)
    assert [source.name for source in sources] == names
    assert texts(sources) == expected
    assert all(
        file.startswith(f"{tmp_path}/remote/memory/bucket/set")
        for source in sources
        for file in source.files
    )


def test_a_file_is_fetched_once_and_anew_when_it_has_changed(bucket, tmp_path):
    said, heard = [], []
    for fetched, text in ((1, "a"), (1, "a"), (2, "new")):
        if text == "new":
            bucket.pipe("/bucket/set/a.jsonl", lines(text))
        sources = find_sources(A_FILE, "data.path", tmp_path, said.append, heard.append)
        assert texts(sources) == [text]
        assert len(said) == fetched
    assert all("fetched" in line for line in heard)
    assert heard, "who waits hears that a download goes on"
    # another version is another file: a run may be reading the old one
    assert len(list(tmp_path.rglob("a.jsonl"))) == 2


def test_without_a_network_the_copy_serves_and_that_is_said(bucket, tmp_path, enter):
    said = []
    find_sources("memory://bucket/set", "data.path", tmp_path)
    enter(inject.fails("remote_open", ConnectionError("no route")))
    sources = find_sources("memory://bucket/set", "data.path", tmp_path, said.append)
    assert texts(sources) == ["a", "b", "c"]
    assert "no route" in said[0]
    assert "copy" in said[0]
    assert "no route" in refusal(find_sources, A_FILE, "data.path", tmp_path)


def test_the_other_ranks_of_a_node_read_what_the_first_has_found(bucket, tmp_path, monkeypatch):
    before = find_sources(A_FILE, "data.path", tmp_path)
    bucket.pipe("/bucket/set/a.jsonl", lines("changed in between"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_sources(A_FILE, "data.path", tmp_path) == before
    (note,) = (tmp_path / "remote/found").iterdir()
    note.write_text("{half")  # as a crash of the machine leaves it: the store is asked again
    assert find_sources(A_FILE, "data.path", tmp_path) != before


@pytest.mark.parametrize(
    "files, reason",
    yaml.safe_load(r"""
- - [train-00000-of-00001.csv, test-00000-of-00001.csv]
  - 'several splits: train test\. Name.*''memory://bucket/hub/train\*'''
- - [main/train-0-of-1.csv, main/test-0-of-1.csv,
     socratic/train-0-of-1.csv, socratic/test-0-of-1.csv]
  - (?s)'memory://bucket/hub/main/train\*'.*memory://bucket/hub/socratic
- [[notes.pdf], no file in this folder]
- [[], no such file or folder]
"""),
)
def test_a_remote_folder_that_is_not_to_be_read_is_told(bucket, tmp_path, files, reason):
    for name in files:
        bucket.pipe(f"/bucket/hub/{name}", b"text\nx\n")
    with pytest.raises(UserError, match=reason):
        find_sources("memory://bucket/hub", "data.path", tmp_path)


@pytest.mark.parametrize("folder", ["ranged", "plain"])
def test_a_broken_off_download_goes_on(web, tmp_path, folder):
    """A download goes on from where it was if the server gives parts, else from the beginning."""
    url, files = web
    content = lines(*(f"{i} " + "x" * 100 for i in range(1000)))
    (files / folder / "a.jsonl").write_bytes(content)
    (of_url,) = remote_files.list_files(f"{url}/{folder}/a.jsonl", "data.path")
    copy = of_url.copy_in(tmp_path)
    copy.parent.mkdir(parents=True)
    (copy.parent / ".a.jsonl.part").write_bytes(content[:5000])
    Handler.requests.clear()
    find_sources(f"{url}/{folder}/a.jsonl", "data.path", tmp_path)
    assert copy.read_bytes() == content
    assert [p.name for p in copy.parent.iterdir()] == ["a.jsonl"]
    assert any("bytes=5000" in request for request in Handler.requests)
    assert any(not request.split()[1:] for request in Handler.requests) == (folder == "plain")


def test_a_stop_ends_a_download_at_once_and_the_next_start_goes_on(web, tmp_path):
    url, files = web
    content = lines(*("x" * 1000 for i in range(20_000)))
    (files / "ranged/a.jsonl").write_bytes(content)
    Handler.stalls = 1 << 20

    def stop(line):
        raise Stopped("SIGTERM")

    with pytest.raises(Stopped):
        find_sources(f"{url}/ranged/a.jsonl", "data.path", tmp_path, progress=stop)
    Handler.stalls = None
    (part,) = tmp_path.rglob(".a.jsonl.part")
    assert 0 < part.stat().st_size < len(content)
    Handler.requests.clear()
    (source,) = find_sources(f"{url}/ranged/a.jsonl", "data.path", tmp_path)
    assert Path(source.files[0]).read_bytes() == content
    assert all("bytes=" in request for request in Handler.requests)


@pytest.mark.parametrize("folder", ["ranged", "plain"])
def test_a_web_file_is_read_where_it_lies(web, folder):
    url, files = web
    numbers = [str(i) for i in range(50)]
    (files / folder / "a.jsonl").write_bytes(lines(*numbers))
    units = split_units(f"{url}/{folder}/a.jsonl", 100)
    assert [row.columns["text"] for unit in units for row in read_unit(unit)] == numbers
    assert (len(units) > 1) == (folder == "ranged")


@pytest.mark.parametrize(
    "path, reason",
    rows(r"""
/plain/nothing.jsonl → no such file
/secret/a.jsonl?Signature=abc → (?s)access is denied \(403.*Credentials
/plain/page → has an unknown type
"""),
)
def test_what_a_server_refuses_is_told_with_the_url_and_without_its_secret(
    web, tmp_path, path, reason
):
    url, files = web
    (files / "plain/page").write_text("<html>")
    message = refusal(find_sources, url + path, "data.path", tmp_path)
    assert re.search(reason, message)
    assert url + path.split("?")[0] in message
    assert "abc" not in message


def test_a_new_signature_is_the_same_data_and_an_expired_one_leaves_the_copy(web, tmp_path):
    url, files = web
    (files / "ranged/a.jsonl").write_bytes(lines("a"))
    cache, said = tmp_path / "cache", []

    def source(query, say=said.append):
        [only] = find_sources(f"{url}/ranged/a.jsonl{query}", "data.path", cache, say)
        return only.files

    first = source("?X-Amz-Date=1&X-Amz-Signature=oldsecret")
    assert source("?X-Amz-Date=2&X-Amz-Signature=newsecret") == first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "send_head", lambda self: self.send_error(403))
        assert source("?X-Amz-Date=3&X-Amz-Signature=expired") == first
    assert "access is denied (403" in said[-1]
    recorded = "".join(file.read_text() for file in (cache / "remote/found").iterdir())
    assert not any(word in recorded + "".join(said) for word in ("secret", "expired"))


def test_addresses_that_differ_in_the_query_alone_are_two_files(web, tmp_path, monkeypatch):
    url, files = web
    for name in ("1", "2"):
        (files / f"plain/{name}.jsonl").write_bytes(lines(name))
    served = Handler.translate_path

    def chosen(self, path):
        return served(self, f"/plain/{path[-1]}.jsonl")

    monkeypatch.setattr(Handler, "translate_path", chosen)
    paths = [f"{url}/get.jsonl?key=secretkey&id={name}" for name in ("1", "2")]
    sources = find_sources(paths, "data.path", tmp_path)
    assert sorted(texts(sources)) == ["1", "2"]


def test_a_copy_of_a_file_with_a_long_name_has_a_shorter_one(web, tmp_path):
    url, files = web
    name = f"{'n' * 245}.jsonl"
    (files / "plain" / name).write_bytes(lines("a"))
    sources = find_sources(f"{url}/plain/{name}", "data.path", tmp_path / "cache")
    assert texts(sources) == ["a"]
    assert sources[0].name == "n" * 245


def test_a_server_that_is_not_there_is_told(tmp_path):
    assert "cannot be reached" in refusal(
        find_sources, "http://127.0.0.1:9/a.jsonl", "data.path", tmp_path
    )


@pytest.mark.parametrize(
    "path, reason",
    rows("""
s3://bucket/a.jsonl → pip install 'fsdp_trainer[remote]'
gs://bucket/a.jsonl → pip install 'fsdp_trainer[remote]'
hf://datasets/x → hf://datasets/ORG/NAME
wat://bucket/a.jsonl → wat:// is not known
openai/gsm8k → hf://datasets/openai/gsm8k
"""),
)
def test_a_url_that_cannot_work_is_told_before_anything_is_loaded(preview, path, reason):
    if path.startswith(("s3", "gs")) and any(map(find_spec, ("s3fs", "gcsfs"))):
        pytest.skip("the package is there")
    output = preview(f"data.path={path}", "logging.wat=1", code=2)
    assert "2 problems" in output
    assert reason in output


def test_the_program_streams_from_a_web_server_that_gives_no_parts_of_a_file(web, train):
    url, files = web
    (files / "plain/a.jsonl").write_bytes(lines(*(f"text {i}" for i in range(100))))
    path = f'"{url}/plain/a.jsonl?sig=SECRET"'
    stream = [f"data=pretrain data.streaming=true data.path={path}"]
    stream += ["batch.seq_len=32 batch.rows=2"]
    run = train("run", *stream, "train.steps=2")
    assert run.metrics[-1]["step"] == 2
    records = [file for file in run.folder.rglob("*") if file.is_file()]
    names = [file.name for file in records]
    assert names.count("config.yaml") == 2  # of the run and of its checkpoint
    assert "events.jsonl" in names
    assert not [file for file in records if b"SECRET" in file.read_bytes()]
    assert "SECRET" not in run.out + run.err
