"""Files that several tests of models read."""

from functools import cache

import pytest
from image_models import make_image_folder
from plain import write_documents


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Return a file of tokens, and the documents in it as samples, see loss_of."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    return file, [({"input_ids": t[None]}, mask) for t, mask in write_documents(file)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that returns the folder of a model for images of a kind, made once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: make_image_folder(root / kind, kind))
