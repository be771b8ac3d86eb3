"""Give each test a mark by which its processes are found."""

import uuid

import pytest


@pytest.fixture
def mark():
    return uuid.uuid4().hex
