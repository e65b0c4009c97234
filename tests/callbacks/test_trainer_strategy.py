from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_memprec._errors import TraceError
from lightning_memprec.callbacks._trainer_plan import plan_from_trainer
from lightning_memprec.callbacks._trainer_strategy import strategy_of
from lightning_memprec.memory.sharding.strategies import DDP, FSDP, FullyShard, ZeRO

strategies = pytest.importorskip("lightning.pytorch.strategies")


def read(strategy):
    return strategy_of(SimpleNamespace(strategy=strategy))


class DeepSpeedStrategy(strategies.DDPStrategy):
    """Stands for the real one, which needs DeepSpeed; it is known by its name."""

    def __init__(self, **zero) -> None:
        super().__init__()
        self.config = {"zero_optimization": zero} if zero else {}


def test_one_device_works_for_itself():
    assert read(strategies.SingleDeviceStrategy()) is None


def test_ddp_is_read_with_its_keywords():
    given = strategies.DDPStrategy(bucket_cap_mb=50, gradient_as_bucket_view=True, static_graph=True)
    assert read(given) == DDP(bucket_cap_mb=50, gradient_as_bucket_view=True, static_graph=True)


def test_fsdp_is_read_with_its_policy_and_precision():
    given = strategies.FSDPStrategy(
        auto_wrap_policy={torch.nn.Linear}, sharding_strategy="SHARD_GRAD_OP", cpu_offload=True
    )
    found = read(given)
    assert isinstance(found, FSDP)
    assert (found.sharding_strategy, found.cpu_offload, found.wrap) == ("SHARD_GRAD_OP", True, ())
    assert found.policy is given.kwargs["auto_wrap_policy"]
    assert dict(found.options) == {"use_orig_params": True}


def test_hybrid_fsdp_keeps_the_shape_of_its_mesh():
    given = strategies.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4))
    assert dict(read(given).options)["device_mesh"] == (2, 4)


def test_model_parallel_is_left_to_the_module():
    given = strategies.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)
    assert read(given) == FullyShard(tensor_parallel_size=2, by_module=True)


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        ({}, DDP()),
        ({"stage": 1, "reduce_bucket_size": 10}, ZeRO(stage=1, reduce_bucket_size=10)),
        (
            {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "overlap_comm": True,
                "allgather_bucket_size": "auto",
            },
            ZeRO(stage=2, offload_optimizer=True, overlap_comm=True),
        ),
        (
            {"stage": 3, "offload_param": {"device": "nvme"}, "stage3_max_live_parameters": 5},
            ZeRO(stage=3, offload_parameters=True, max_live_parameters=5),
        ),
    ],
    ids=["none", "1", "2", "3"],
)
def test_deepspeed_is_read_from_its_configuration(config, strategy):
    assert read(DeepSpeedStrategy(**config)) == strategy


def test_a_model_that_is_sharded_already_is_not_planned():
    from tests.callbacks.runs import make_module, make_trainer

    trainer = make_trainer()
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    with pytest.raises(TraceError, match="has sharded the model already"):
        plan_from_trainer(trainer, make_module(), torch.ones(2), device="cpu", set_up=True, on_device=False)
