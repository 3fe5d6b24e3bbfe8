"""Gives every test of this folder an empty working folder (``tmp_path``), its own cache and its own Minari folder."""

import pytest


@pytest.fixture(autouse=True)
def _own_folders(own_folders: object) -> None:
    pass
