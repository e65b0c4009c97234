"""FSDP2 in Lightning, started by ``test_strategies.py``: refused with masters, right without."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from plugins.runs import loader, make_module, make_trainer

from lightning_memprec.plugins import MasterWeightPrecision


def configure_model(self):
    """Shard as the plugin's message says."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=mp_policy)


def run(plugin):
    from lightning.pytorch.strategies import ModelParallelStrategy

    computed = []
    module = make_module(configure_model=configure_model)
    module.net.register_forward_hook(lambda net, args, output: computed.append(output.dtype))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    trainer = make_trainer(plugin, strategy=strategy)
    trainer.fit(module, loader())
    parameters = trainer.optimizers[0].param_groups[0]["params"]
    print({p.dtype for p in parameters} | {p.dtype for p in module.state_dict().values()}, set(computed))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        run(MasterWeightPrecision())
    except Exception as error:
        print(type(error).__name__, error)
    run(None)
