"""Every verb of the JSON API, by Google's own client: what it shows and does is what the real service shows and does."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest
import requests
from conftest import PROJECT, client_of
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

CONTENT = b"what an object holds"


def put(bucket: storage.Bucket, name: str, content: bytes = CONTENT, **options: object) -> storage.Blob:
    blob = bucket.blob(name)
    blob.upload_from_string(content, **options)
    return blob


def names(blobs: object) -> list[str]:
    return [blob.name for blob in blobs]  # type: ignore[attr-defined]


def test_buckets_are_listed_created_and_deleted(client: storage.Client) -> None:
    assert list(client.list_buckets()) == []
    created = client.create_bucket("one")
    put(client.bucket("two"), "object")
    assert names(client.list_buckets()) == ["one", "two"]
    assert created.exists() and client.get_bucket("one").name == "one"
    with pytest.raises(exceptions.Conflict):
        client.create_bucket("one")
    with pytest.raises(exceptions.Conflict, match="not empty"):
        client.bucket("two").delete()
    created.delete()
    assert names(client.list_buckets()) == ["two"]


def test_an_object_has_every_attribute_that_the_client_knows(bucket: storage.Bucket, url: str) -> None:
    written = put(bucket, "folder/ä b", content_type="text/plain")
    blob = bucket.get_blob("folder/ä b")
    assert blob.id == f"bucket/folder/ä b/{blob.generation}" and blob.generation == written.generation
    assert (blob.size, blob.content_type, blob.metageneration) == (len(CONTENT), "text/plain", 1)
    assert blob.md5_hash == base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    assert blob.crc32c == base64.b64encode(google_crc32c.Checksum(CONTENT).digest()).decode()
    assert blob.etag and blob.storage_class == "STANDARD" and blob.component_count is None
    assert blob.time_created <= blob.updated
    for link, content in [(blob.media_link, CONTENT), (blob.self_link + "?alt=media", CONTENT)]:
        assert link.startswith(url) and requests.get(link, timeout=10).content == content
    again = put(bucket, "folder/ä b", b"other")
    assert again.generation != blob.generation and again.etag != blob.etag


def test_listings_have_prefixes_delimiters_offsets_and_pages(client: storage.Client, bucket: storage.Bucket) -> None:
    every = ["a/", "a/1", "a/2", "a/b/3", "c", "d/4"]
    for name in every:
        put(bucket, name)
    assert names(client.list_blobs(bucket)) == every
    for size in range(1, 8):
        pages = list(client.list_blobs(bucket, page_size=size).pages)
        assert [name for page in pages for name in names(page)] == every
        assert len(pages) == -(-len(every) // size)
        folders = client.list_blobs(bucket, delimiter="/", page_size=size)
        assert names(folders) == ["c"] and folders.prefixes == {"a/", "d/"}
    inside = client.list_blobs(bucket, prefix="a/", delimiter="/")
    assert names(inside) == ["a/", "a/1", "a/2"] and inside.prefixes == {"a/b/"}
    trailing = client.list_blobs(bucket, delimiter="/", include_trailing_delimiter=True)
    assert names(trailing) == ["a/", "c"]
    assert names(client.list_blobs(bucket, start_offset="a/2", end_offset="d")) == ["a/2", "a/b/3", "c"]
    assert names(client.list_blobs(bucket, max_results=2)) == ["a/", "a/1"]
    assert names(client.list_blobs(bucket, prefix="nothing")) == []


def test_content_is_read_whole_in_part_by_generation_and_by_name(bucket: storage.Bucket, tmp_path: Path) -> None:
    blob = put(bucket, "object")
    for checksum in ["md5", "crc32c", None]:
        assert blob.download_as_bytes(checksum=checksum) == CONTENT
    assert blob.download_as_bytes(start=5, end=6) == CONTENT[5:7]
    assert blob.download_as_bytes(start=5, raw_download=True) == CONTENT[5:]
    blob.download_to_filename(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    with blob.open("rb") as file:
        assert file.read() == CONTENT
    assert bucket.blob("object", generation=blob.generation).download_as_bytes() == CONTENT
    with pytest.raises(exceptions.NotFound):
        bucket.blob("object", generation=1).download_as_bytes()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 5 << 20])
@pytest.mark.parametrize("checksum", ["md5", "crc32c"])
def test_a_resumable_upload_is_whole_whatever_its_size(bucket: storage.Bucket, size: int, checksum: str) -> None:
    content = os.urandom(size)
    blob = bucket.blob("large", chunk_size=256 << 10)
    with blob.open("wb", checksum=checksum) as file:
        file.write(content)
    assert bucket.get_blob("large").size == size
    assert bucket.blob("large").download_as_bytes() == content


def test_uploads_come_as_media_too(bucket: storage.Bucket, url: str) -> None:
    request = {"uploadType": "media", "name": "a/b"}
    answer = requests.post(
        f"{url}/upload/storage/v1/b/bucket/o",
        params=request,
        data=CONTENT,
        headers={"content-type": "text/x"},
        timeout=10,
    )
    assert answer.json()["name"] == "a/b"
    blob = bucket.get_blob("a/b")
    assert blob.download_as_bytes() == CONTENT and blob.content_type == "text/x"
    nameless = requests.post(f"{url}/upload/storage/v1/b/bucket/o", params={"uploadType": "media"}, timeout=10)
    assert nameless.status_code == 400


def test_content_that_is_not_what_its_writer_says_is_refused(bucket: storage.Bucket) -> None:
    for field, wrong in [("md5_hash", "AAAAAAAAAAAAAAAAAAAAAA=="), ("crc32c", "AAAAAA==")]:
        blob = bucket.blob("object")
        setattr(blob, field, wrong)
        with pytest.raises(exceptions.BadRequest):
            blob.upload_from_string(CONTENT, checksum=None)
    assert not bucket.blob("object").exists()


def test_attributes_are_patched_and_replaced(bucket: storage.Bucket) -> None:
    blob = put(bucket, "object", content_type="text/plain")
    blob.metadata, blob.cache_control = {"a": "1", "b": "2"}, "no-store"
    blob.patch()
    assert (blob.generation, blob.metageneration) == (bucket.get_blob("object").generation, 2)
    blob.metadata = {"a": None, "c": "3"}
    blob.patch()
    seen = bucket.get_blob("object")
    assert seen.metadata == {"b": "2", "c": "3"} and seen.cache_control == "no-store"
    assert (seen.content_type, seen.metageneration) == ("text/plain", 3)
    blob.metadata = {"only": "this"}
    blob.update()
    assert bucket.get_blob("object").metadata == {"only": "this"}
    assert bucket.blob("object").download_as_bytes() == CONTENT


def test_preconditions_hold_for_every_verb(bucket: storage.Bucket) -> None:
    blob = put(bucket, "object", if_generation_match=0)
    first = blob.generation
    with pytest.raises(exceptions.PreconditionFailed):
        put(bucket, "object", if_generation_match=0)
    second = put(bucket, "object", b"other", if_generation_match=first).generation
    blob = bucket.blob("object")
    stale = {"if_generation_match": first}
    blob.metadata = {"a": "1"}
    source = {"if_source_generation_match": first}
    for verb in [
        lambda: blob.reload(**stale),
        lambda: blob.download_as_bytes(**stale),
        lambda: blob.patch(**stale),
        lambda: blob.delete(**stale),
        lambda: bucket.copy_blob(blob, bucket, "copy", **source),
        lambda: bucket.blob("copy").rewrite(blob, **source),
        lambda: bucket.blob("whole").compose([blob], if_source_generation_match=[first]),
        lambda: blob.patch(if_metageneration_match=7),
    ]:
        with pytest.raises(exceptions.PreconditionFailed):
            verb()
    with pytest.raises(exceptions.PreconditionFailed) as refused:
        blob.delete(**stale)
    assert (refused.value.errors[0]["reason"], refused.value.errors[0]["domain"]) == ("conditionNotMet", "global")
    with pytest.raises(exceptions.NotModified):
        blob.reload(if_generation_not_match=second)
    assert names(bucket.list_blobs()) == ["object"]
    blob.delete(if_generation_match=second)
    assert not blob.exists()


def test_objects_are_composed_copied_and_rewritten(client: storage.Client, bucket: storage.Bucket) -> None:
    one, two = put(bucket, "part/1", b"one"), put(bucket, "part/2", b"two")
    whole = bucket.blob("whole")
    whole.content_type = "text/plain"
    whole.compose([one, two, one])
    assert whole.download_as_bytes() == b"onetwoone"
    seen = bucket.get_blob("whole")
    assert (seen.component_count, seen.md5_hash, seen.content_type) == (3, None, "text/plain")
    other = client.create_bucket("other")
    copied = bucket.copy_blob(one, other, "a/compose")
    assert copied.download_as_bytes() == b"one"
    target = other.blob("rewritten")
    assert target.rewrite(copied) == (None, 3, 3)
    assert other.get_blob("rewritten").md5_hash == one.md5_hash
    moved = bucket.rename_blob(two, "renamed")
    assert moved.download_as_bytes() == b"two" and not bucket.blob("part/2").exists()
    with pytest.raises(exceptions.NotFound):
        bucket.blob("nothing").compose([bucket.blob("is not there")])


def test_what_is_not_there_is_told_as_google_tells_it(bucket: storage.Bucket) -> None:
    blob = bucket.blob("not/there")
    for verb in [blob.reload, blob.delete, blob.download_as_bytes, blob.patch]:
        with pytest.raises(exceptions.NotFound) as missing:
            verb()
        assert missing.value.code == 404
    with pytest.raises(exceptions.NotFound, match="No such object: bucket/not/there") as missing:
        blob.reload()
    assert missing.value.errors == [
        {"message": "No such object: bucket/not/there", "domain": "global", "reason": "notFound"}
    ]
    assert bucket.get_blob("not/there") is None


def test_the_variable_for_emulators_leads_here(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(client_of(url).bucket("bucket"), "object")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    client = storage.Client(project=PROJECT, credentials=AnonymousCredentials())
    assert client.bucket("bucket").blob("object").download_as_bytes() == CONTENT


def test_the_command_line_of_google_finds_its_own_paths(url: str) -> None:
    """What `gcloud storage` asks besides: the layout of the bucket, and resumable uploads under a path of their own."""
    layout = requests.get(f"{url}/storage/v1/b/bucket/storageLayout", timeout=10).json()
    assert layout["hierarchicalNamespace"] == {"enabled": False}
    begun = requests.post(
        f"{url}/resumable/upload/storage/v1/b/bucket/o",
        params={"uploadType": "resumable"},
        json={"name": "a/b"},
        timeout=10,
    )
    done = requests.put(begun.headers["location"], data=CONTENT, headers={"content-range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}, timeout=10)
    assert done.json()["size"] == str(len(CONTENT))
    assert client_of(url).bucket("bucket").blob("a/b").download_as_bytes() == CONTENT


def test_faults_reach_this_client_too(serve: Callable[..., str]) -> None:
    url = serve("--fault", "list:status:503,times=1", "--fault", "write:status:403")
    client = client_of(url)
    with pytest.raises(exceptions.Forbidden):
        put(client.bucket("bucket"), "object")
    put(client.bucket("bucket"), "object")
    assert names(client.list_blobs("bucket")) == ["object"], "once more after a 503"


def test_a_fault_finds_an_object_whose_name_is_in_the_body(serve: Callable[..., str]) -> None:
    client = client_of(serve("--fault", "write:status:403,object=this", "--fault", "start:status:403,object=that"))
    put(client.bucket("bucket"), "another")
    with pytest.raises(exceptions.Forbidden):
        put(client.bucket("bucket"), "this one")
    with pytest.raises(exceptions.Forbidden):
        client.bucket("bucket").blob("that one").upload_from_file(io.BytesIO(CONTENT))
