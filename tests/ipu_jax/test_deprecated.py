"""Old public names: each is the object of the new name, and warns with it."""

import numpy as np
import pytest

import ipu_jax

RENAMED = {"Report": "VerificationReport", "Split": "LayerPlacement", "split": "balance_layers"}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_the_new_one_and_says_so(old):
    new = RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"\Aipu_jax\.{old} is called ipu_jax\.{new} now\Z") as warned:
        assert getattr(ipu_jax, old) is getattr(ipu_jax, new)
    assert warned[0].filename == __file__
    assert old not in ipu_jax.__all__


def test_an_old_method_is_the_new_one_and_says_so():
    pipeline = ipu_jax.Pipeline([ipu_jax.Stage(lambda w, x, mb: (w * mb).sum(), params="w")])
    with pytest.warns(DeprecationWarning, match=r"\APipeline.rebuilt is called Pipeline.replace now\Z") as warned:
        assert pipeline.rebuilt(stages=pipeline.stages).stages == pipeline.stages
    assert warned[0].filename == __file__


def test_an_old_method_of_a_schedule_is_the_new_one_and_says_so():
    schedule = ipu_jax.make_schedule("zb-h1", ipus=2, micro_batches=3)
    new = r"\ASchedule.cut_depth is called Schedule.weight_residual_depth now\Z"
    with pytest.warns(DeprecationWarning, match=new):
        assert schedule.cut_depth(0) == schedule.weight_residual_depth(0)


def test_an_old_attribute_is_the_new_one_and_says_so():
    pipeline = ipu_jax.Pipeline([ipu_jax.Stage(lambda w, x, mb: (w * mb).sum(), params="w")])
    report = pipeline.report(pipeline.shard({"w": np.float32(1)}), np.ones((1, 2), np.float32))
    with pytest.warns(DeprecationWarning, match=r"\APipelineReport.registers is called PipelineReport.channels now\Z"):
        assert report.registers == report.channels > 0


def test_an_unknown_name_is_unknown():
    with pytest.raises(AttributeError, match=r"\Amodule 'ipu_jax' has no attribute 'spilt'\Z"):
        _ = ipu_jax.spilt
