"""Test that states which an earlier commit saved are restored bit by bit: as they were, and on other IPUs.

The layout of arrays and their names in files are the same as then, so a checkpoint is read as it is.
"""

import zipfile

import pytest

from ipu_jax import Checkpoints
from support import earlier, resumed
from support.trained import quick_compiles


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    zipfile.ZipFile(earlier.SAVED).extractall(folder)
    return folder


@pytest.mark.parametrize(("ipus", "topology"), [(2, "same"), (3, "other"), (1, "other")])
@pytest.mark.parametrize("name", earlier.STEPS)
def test_a_state_from_before_is_restored(saved, name, ipus, topology):
    with quick_compiles():
        step = earlier.STEPS[name](ipus)
        expected = earlier.saved_state(name, step)
        with Checkpoints(saved / name, step) as checkpoints:
            found = checkpoints.restore(earlier.first_state(name, step), resume="must")
        assert found is not None
        assert found.topology == topology
        assert resumed.differing(resumed.plain(step, found.state), resumed.plain(step, expected)) == []
