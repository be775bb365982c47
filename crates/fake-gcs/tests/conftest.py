"""A running `baton dev fake-gcs`, and Google's client for it. Needs BATON_BIN."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

PROJECT = "test"


def client_of(url: str) -> storage.Client:
    return storage.Client(project=PROJECT, credentials=AnonymousCredentials(), client_options={"api_endpoint": url})


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server, with more arguments if wanted; its address. It ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        command = [os.environ["BATON_BIN"], "dev", "fake-gcs", "--port", "0", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        name, _, url = process.stdout.readline().strip().partition("=")
        assert name == "BATON_GCS_ENDPOINT"
        return url

    yield start
    for process in running:
        process.terminate()
        process.wait(10)


@pytest.fixture
def url(serve: Callable[..., str]) -> str:
    return serve()


@pytest.fixture
def client(url: str) -> storage.Client:
    return client_of(url)


@pytest.fixture
def bucket(client: storage.Client) -> storage.Bucket:
    return client.create_bucket("bucket")
