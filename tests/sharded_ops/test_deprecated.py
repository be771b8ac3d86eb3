"""Old public names: each is the object of the new name, and warns with it."""

import pytest

import sharded_ops

RENAMED = {"take_last": "take_along_last_dim"}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_the_new_one_and_says_so(old):
    new = RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"\Asharded_ops\.{old} is called sharded_ops\.{new} now\Z") as warned:
        assert getattr(sharded_ops, old) is getattr(sharded_ops, new)
    assert warned[0].filename == __file__
    assert old not in sharded_ops.__all__


def test_an_unknown_name_is_unknown():
    with pytest.raises(AttributeError, match=r"\Amodule 'sharded_ops' has no attribute 'embeding'\Z"):
        _ = sharded_ops.embeding
