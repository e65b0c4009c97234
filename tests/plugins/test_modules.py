from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import Reference, fit, loader, make_module, net, same


class Recurrent(nn.Module):
    """Keeps its weights in a flat list, too."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(6, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.cell(x[:, None])[0][:, 0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.layer(x[:, None])[:, 0])


class Oddities(nn.Module):
    """Parameters without dimensions, without elements, and of other dtypes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x):
        return self.layer(x) * self.scale + self.empty.sum() + self.complex.real.to(x.dtype)


class Renormed(nn.Module):
    """An embedding that shortens the rows it looks up, in place, in the forward pass."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, max_norm=0.5)

    def forward(self, x):
        return self.table((x[:, 0] > 0).long())


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))


NETWORKS = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "GroupNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)),
    "weight_norm": normed,
    "max_norm": Renormed,
}


def built(make):
    torch.manual_seed(8)
    return make()


@pytest.mark.parametrize("name", NETWORKS)
def test_modules_train_as_with_masters_written_out(name):
    network = built(NETWORKS[name])
    module = make_module(copy.deepcopy(network))
    fit(module)
    reference = Reference(network)
    losses = []
    for batch in loader():
        loss = reference.loss(batch)
        if name == "max_norm":  # What forward has written over the half rows.
            half, master = reference.half.table.weight, reference.masters.table.weight
            master.data = torch.where(half != master.bfloat16(), half.float(), master).detach()
        losses.append(loss.detach().clone())
        reference.backward(loss)
        reference.step()
    assert same(module.losses, losses)
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_parameters_of_every_shape_and_dtype():
    module = make_module(built(Oddities))
    fit(module)
    dtypes = {name: value.dtype for name, value in module.net.named_parameters()}
    assert dtypes.pop("complex") == torch.complex64
    assert dtypes.pop("whole") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    state = module.net.state_dict()
    assert {state["scale"].dtype, state["empty"].dtype} == {torch.float32}
    assert state["scale"] != state["scale"].bfloat16()
    assert not torch.equal(state["complex"], built(Oddities).complex)


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_module_without_parameters():
    module = make_module(
        nn.Identity(), configure_optimizers=lambda self: None, training_step=lambda self, *_: None
    )
    fit(module)
    assert not module.state_dict()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_parameters_without_a_shape_are_refused():
    with pytest.raises(ValueError, match=r"\['net.weight', 'net.bias'\] have no shape yet"):
        fit(make_module(nn.LazyLinear(2)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant):
    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        return nn.functional.mse_loss(checkpoint(self.net, x, use_reentrant=reentrant), batch[1])

    module = make_module(training_step=training_step)
    fit(module)
    reference = Reference(net())
    reference.fit(loader())
    assert same(module.net.state_dict(), reference.masters.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module():
    module = make_module()
    # Traced and differentiated ahead of time, without the C++ compiler that the default backend needs.
    fit(torch.compile(module, backend="aot_eager"))
    reference = Reference(net())
    reference.fit(loader())
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_gradients_of_gradients_accumulate():
    def penalized(network, x, y):
        x = x.requires_grad_()
        output = network(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return nn.functional.mse_loss(output, y) + slope.square().mean()

    module = make_module(training_step=lambda self, batch, batch_idx: penalized(self.net, *batch))
    fit(module, accumulate_grad_batches=2)
    reference = Reference(net())
    for index, (x, y) in enumerate(loader()):
        reference.backward(penalized(reference.half, x.bfloat16(), y.bfloat16()) / 2)
        if index % 2:
            reference.step()
    assert same(module.net.state_dict(), reference.masters.state_dict())


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_on_a_frozen_model(base):
    peft = pytest.importorskip("peft")
    network = net().to(base)
    frozen = {key: value.clone() for key, value in network.state_dict().items()}
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    module = make_module(
        adapted, optimizer=lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-2)
    )
    trainer = fit(module, plugin=MasterWeightPrecision(keep_fp32=["*lora_*"]))
    dtypes = {"lora" if "lora" in name else "base": p.dtype for name, p in module.named_parameters()}
    assert dtypes == {"lora": torch.float32, "base": torch.bfloat16}
    assert not trainer.precision_plugin.store.pairs
    state = module.state_dict()
    for key, value in frozen.items():
        saved = state["net.base_model.model." + key.replace(".", ".base_layer.")]
        assert torch.equal(saved.float(), value.float())
