"""Peak memory of training runs on GPUs that others have measured and published.

Only facts are kept here: what was trained, on what, and the figure that was read. Each row names its source.
Sources:

* xMem, Stone-ResearchLife/xMem, ``plot/data``: readings of the whole device less a first reading that is taken
  when a context exists already. torch 2.6. Plain loops of four steps.
* GPUMemNet, itu-rad/GPUMemNet: readings of the whole device, context included.
* PEFT, huggingface/peft, ``method_comparison/MetaMathQA/results``; rasbt/pytorch-memory-optim: largest reserved
  memory.
* LitGPT (``tutorials/resource-tables.md``), Liger-Kernel (``benchmark/data/all_benchmark_data.csv``), torchao
  (``torchao/optim/README.md``): largest allocated memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks import published_models as models

__all__ = ["PEAKS", "PublishedPeak"]

Quantity = Literal["device without context", "device", "reserved", "allocated"]
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class PublishedPeak:
    """One measured run.

    Attributes:
        id: Short, stable name.
        source: File of the repository named in :attr:`id` that holds the figure.
        model: Builds the module.
        batch: Builds the batch.
        loss: Returns the loss callable; called once an estimate, since it may keep what a loop keeps.
        optimizer: Callable from parameters to an optimizer, or ``None``.
        device: Name in the device catalogue.
        measured_bytes: The figure; ``None`` where the run ended out of memory.
        quantity: What was read.
        precision: Lightning's name.
        clip: Threshold of gradient clipping.
        accumulate: Micro-batches a step.
        environment: Variables that the run had set.
        peers: Published estimates of the same run, in bytes.
        notes: What is not known of the run.
    """

    id: str
    source: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[], Loss]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    device: str
    measured_bytes: int | None
    quantity: Quantity
    precision: str = "32-true"
    clip: float | None = None
    accumulate: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, int] = field(default_factory=dict)
    notes: str = ""


_RTX3060, _RTX4060, _A100 = "RTX3060-12GB", "RTX4060-8GB", "A100-40GB"
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}
_MONTE_CARLO, _ANOVA = "plot/data/002-Monte Carlo", "plot/data/001-Anova"


def _environment(run: str) -> dict[str, str]:
    """Return what a series had set: the first (folder ``001``) took cuBLAS its workspace."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":0:0"} if run[2:].startswith("001/") else {}


def _peers(xmem: int, dnnmem: int, schedtune: int = 0, llmem: int = 0) -> dict[str, int]:
    given = {"xMem": xmem, "DNNMem": dnnmem, "SchedTune": schedtune, "LLMem": llmem}
    return {name: size for name, size in given.items() if size}


def _xmem_cnn(
    number: int,
    run: str,
    device: str,
    measured: int | None,
    peers: dict[str, int],
    late_zero_grad: bool = False,
) -> PublishedPeak:
    """A CNN on CIFAR-10 pictures of 86 x 86 pixels.

    Args:
        number: Number of the row.
        run: Folder of the run, ``model_optimizer_batch_...``; a leading ``A/`` means the Anova series.
        device: Catalogue name.
        measured: Reading in bytes.
        peers: Published estimates.
        late_zero_grad: Gradients cleared between forward and backward, not before the forward pass.
    """
    name, optimizer, size, *_ = run.rpartition("/")[2].split("_")
    classes = 10 if name == "MnasNet" else 1000
    return PublishedPeak(
        f"xmem-{number:03d}", f"{_ANOVA if run.startswith('A/') else _MONTE_CARLO}/CNN/{run[2:]}",
        models.torchvision_cnn(models.XMEM_CNNS[name], classes), models.pictures(int(size), 86, 10),
        lambda: models.classification(late_zero_grad=late_zero_grad), _OPTIMIZERS[optimizer], device, measured,
        "device without context", environment=_environment(run), peers=peers,
    )  # fmt: skip


def _xmem_text(
    number: int, run: str, device: str, measured: int, peers: dict[str, int], late_zero_grad: bool = False
) -> PublishedPeak:
    """A transformer on rows of at most 128 tokens; below 15 rows the longest may be shorter."""
    name, optimizer, size, *_ = run.rpartition("/")[2].split("_")
    builder = next(build for key, build in models.XMEM_TRANSFORMERS.items() if key in name)
    folder = {"A": _ANOVA, "M": _MONTE_CARLO, "C": "plot/data/005-ScalabilityOnCoLab"}[run[0]]
    return PublishedPeak(
        f"xmem-{number:03d}", f"{folder}/{'' if run[0] == 'C' else 'Transformer/'}{run[2:]}",
        builder, models.tokens(int(size), 128, masked=True),
        lambda: models.language_model(late_zero_grad=late_zero_grad, keep_keys=True), _OPTIMIZERS[optimizer],
        device, measured, "device without context", environment=_environment(run), peers=peers,
        notes="" if int(size) >= 15 else "at most 128 tokens",
    )  # fmt: skip


_XMEM = (
    _xmem_cnn(8, "M/001/ConvNeXtTiny_AdamW_261_0", _RTX4060, 4450156544, _peers(4433379328, 3139436544, 3719236157)),
    _xmem_cnn(10, "M/002/ConvNeXtTiny_Adam_674_1", _RTX3060, 10735321088, _peers(10838081536, 7581204480, 10524441969)),
    _xmem_cnn(12, "M/001/ConvNeXtTiny_RMSprop_303_0", _RTX4060, 5129633792, _peers(5079302144, 3565158400, 4320101663)),
    _xmem_cnn(14, "M/002/ConvNeXtTiny_SGD_439_0", _RTX4060, 7400849408, _peers(7140802560, 5079302144, 8571070710)),
    _xmem_cnn(16, "A/001/MnasNet_RMSprop_200_1", _RTX3060, 2237661184, _peers(1914699776, 1803550720, 2696675328)),
    _xmem_cnn(18, "M/002/MnasNet_AdamW_417_0", _RTX4060, 3816816640, _peers(3839885312, 3581935616, 5296294461), True),
    _xmem_cnn(20, "M/002/MnasNet_SGD_506_0", _RTX4060, 4603248640, _peers(4605345792, 4324327424, 8553632891)),
    _xmem_cnn(22, "M/002/MnasNet_RMSprop_308_1", _RTX3060, 3439329280,
              _peers(2948595712, 2759852032, 4231476019), True),
    _xmem_cnn(34, "M/001/MobileNetV2_Adagrad_477_0", _RTX4060, 6780092416, _peers(6759120896, 4928307200, 5296294461)),
    _xmem_cnn(36, "M/001/MobileNetV2_SGD_712_1", _RTX3060, 10053746688, _peers(9969860608, 7272923136, 9115197768)),
    _xmem_cnn(44, "M/001/ResNet101_SGD_351_1", _RTX3060, 8468299776, _peers(8824815616, 8516534272, 10306851963)),
    _xmem_cnn(46, "M/001/ResNet101_Adagrad_571_1", _RTX3060, None, _peers(12723421184, 12748587008, 13124165960)),
    _xmem_cnn(48, "M/001/VGG16_Adagrad_480_1", _RTX3060, 9730785280, _peers(9787408384, 7233077248, 10677167063)),
    _xmem_cnn(50, "M/001/VGG16_SGD_684_1", _RTX3060, 11804868608, _peers(12119441408, 9791602688, 10817550418)),
    _xmem_text(54, "A/001/EleutherAI-gpt-neo-125M_AdamW_20_1_10", _RTX3060, 7547650048,
               _peers(7300186112, 6081740800, 3855037235, 9530507264)),
    _xmem_text(56, "A/001/EleutherAI-gpt-neo-125M_SGD_35_1_10", _RTX3060, 10682892288,
               _peers(10294919168, 9539944448, 3855037235, 14332985344)),
    _xmem_text(58, "A/002/EleutherAI-gpt-neo-125M_Adam_15_1_10", _RTX3060, 5876219904,
               _peers(6524239872, 5140119552, 2931692667, 7930380288)),
    _xmem_text(60, "A/001/EleutherAI-gpt-neo-125M_AdamW_10_1_10", _RTX3060, 4445962240,
               _peers(4783603712, 3292528640, 3855037235, 6328156160)),
    _xmem_text(62, "M/002/EleutherAI-gpt-neo-125M_Adam_16_0_10", _RTX4060, 6937378816,
               _peers(6836715520, 5200936960, 2811525857, 8229224448), True),
    _xmem_text(64, "M/002/EleutherAI-gpt-neo-125M_AdamW_22_1_10", _RTX3060, 8239710208,
               _peers(8013217792, 6568280064, 3882667213, 10176430080), True),
    _xmem_text(74, "M/001/cerebras-Cerebras-GPT-111M_AdamW_9_0_8", _RTX4060, 3456106496,
               _peers(3755999232, 2462056448, 3761797857, 1902116864)),
    _xmem_text(76, "A/001/cerebras-Cerebras-GPT-111M_Adam_20_1_8", _RTX3060, 5909774336,
               _peers(5916065792, 4726980608, 3855037235, 2045771776)),
    _xmem_text(78, "A/001/cerebras-Cerebras-GPT-111M_SGD_5_1_8", _RTX3060, 1918894080,
               _peers(1887436800, 1627389952, 3855037235, 1850736640)),
    _xmem_text(88, "M/002/T5-small_Adam_12_1", _RTX3060, 3298820096, _peers(3372220416, 3474980864, 2564670095)),
    _xmem_text(90, "M/002/T5-small_SGD_36_0", _RTX4060, 7272923136, _peers(7090470912, 8491368448, 4466954732)),
    _xmem_text(92, "M/002/T5-small_Adam_45_1", _RTX3060, 9216983040, _peers(8959033344, 11624513536, 4901012767)),
    _xmem_text(94, "A/001/T5-small_AdamW_20_1", _RTX3060, 4622123008, _peers(4611637248, 5182062592, 2544138977)),
    _xmem_text(95, "C/Qwen-Qwen3-4B_SGD_1_0_4", _A100, 36704354304, _peers(35103178752, 20345520128)),
    _xmem_text(97, "C/deepseek-ai-DeepSeek-R1-Distill-Qwen-1.5B_SGD_1_0_11", _A100, 15229517824,
               _peers(15448670208, 9924771840)),
)  # fmt: skip


def _rasbt(
    number: int, script: str, batch: int, precision: str, optimizer: Callable[[Any], torch.optim.Optimizer],
    measured: int, accumulate: int = 1,
) -> PublishedPeak:  # fmt: skip
    return PublishedPeak(
        f"rasbt-{number:02d}", f"{script}, logs.md", models.torchvision_cnn("vit_l_16", 10),
        models.pictures(batch, 224, 10),
        lambda: models.classification(late_zero_grad=accumulate == 1, micro_batches=accumulate),
        optimizer, _A100, measured, "reserved", precision=precision, accumulate=accumulate,
        notes="memory size of the A100 not stated",
    )  # fmt: skip


_RASBT = (
    _rasbt(1, "01_pytorch-vit.py", 64, "32-true", lambda p: torch.optim.Adam(p, lr=5e-5), 26_790_000_000),
    _rasbt(
        3, "02_mixed-precision.py", 64, "16-mixed", lambda p: torch.optim.Adam(p, lr=5e-5), 18_210_000_000
    ),
    _rasbt(
        5, "04_lower-batchsize.py", 16, "bf16-true", lambda p: torch.optim.Adam(p, lr=5e-5), 5_690_000_000
    ),
    _rasbt(
        7, "06_sgd-with-scheduler.py", 4, "bf16-true", lambda p: torch.optim.SGD(p, lr=0.01), 2_020_000_000, 4
    ),
)


def _peft(
    number: int, result: str, model: Callable[[], nn.Module], measured: int, full: bool
) -> PublishedPeak:
    # 650 tokens: the length of the longest batch is not recorded, 768 at most; all rows share it.
    return PublishedPeak(
        f"peft-{number:02d}", f"method_comparison/MetaMathQA/results/{result}.json", model,
        models.tokens(4, 650, masked=True), models.language_model,
        lambda p: torch.optim.AdamW(p, lr=1e-5 if full else 1e-4), "L40S-48GB", measured, "reserved",
        precision="bf16-true" if full else "32-true", clip=1.0, notes="longest batch not recorded: 650 tokens taken",
    )  # fmt: skip


_PEFT = (
    _peft(1, "full-finetuning--llama-3.2-3B-lr_0.00001", models.llama_3b, 38_868_615_168, True),
    _peft(2, "lora--llama-3.2-3B-rank32", models.llama_3b_lora, 22_292_725_760, False),
    _peft(10, "ia3--llama-3.2-3B-default", models.llama_3b_ia3, 23_234_347_008, False),
)


def _gpumemnet(
    name: str,
    source: str,
    model: Callable[[], nn.Module],
    batch: int,
    measured: int,
    fake: int,
    timm: bool = False,
) -> PublishedPeak:
    return PublishedPeak(
        f"gpumemnet-{name}", source, model, models.pictures(batch, 224, 1000),
        lambda: models.classification(label_smoothing=0.1 if timm else 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)) if timm else _OPTIMIZERS["Adam"],
        _A100, measured, "device", peers={"FakeTensor": fake},
        notes="torch version unknown" + (", flags of the run unknown, cuDNN's benchmark mode likely" if timm else ""),
    )  # fmt: skip


_OWN, _SHEET = "Test_Pipeline/GPUMemNet_CNN.xlsx", "Related_works/FakeTensor/fake_tensor.xlsx"
_GPUMEMNET = (
    _gpumemnet("own-04", _OWN, models.torchvision_cnn("resnet50"), 32, 5517606912, 2802336168),
    _gpumemnet("own-06", _OWN, models.torchvision_cnn("resnet50"), 128, 15854469120, 11184119207),
    _gpumemnet("own-13", _OWN, models.torchvision_cnn("efficientnet_b0"), 32, 5198839808, 2862625964),
    _gpumemnet("own-15", _OWN, models.torchvision_cnn("efficientnet_b0"), 128, 14503903232, 11434627621),
    _gpumemnet("timm-03", _SHEET, models.timm_model("resnet50"), 64, 8876195840, 5596263848, True),
    _gpumemnet("timm-17", _SHEET, models.timm_model("vit_base_patch16_224"), 8, 3660578816, 1317031783, True),
)


def _litgpt(number: int, model: str, batch: int, length: int, measured: int | None) -> PublishedPeak:
    return PublishedPeak(
        f"litgpt-{number:02d}", "tutorials/resource-tables.md", models.litgpt_lora(model), models.tokens(batch, length),
        models.chunked_language_model, lambda p: torch.optim.AdamW(p, lr=3e-4, weight_decay=0.01), _A100,
        measured, "allocated", precision="bf16-true", accumulate=2, notes="a later LitGPT; has to be installed",
    )  # fmt: skip


_LITGPT = (
    _litgpt(1, "phi-1_5", 1, 1044, 4_820_000_000),
    _litgpt(3, "phi-1_5", 4, 1044, 10_680_000_000),
    _litgpt(7, "Llama-2-7b-hf", 1, 1304, 21_300_000_000),
    _litgpt(9, "Llama-2-7b-hf", 4, 1304, None),
)

_LIGER_DATA = "benchmark/data/all_benchmark_data.csv"
_LIGER = (
    PublishedPeak(
        "liger-01", f"{_LIGER_DATA}, cross_entropy, V=32768", lambda: models.Logits(16384, 32768),
        lambda: torch.empty(16384, dtype=torch.int64, device="meta"), lambda: models.criterion, None,
        "A100-80GB", 10_737_550_336, "allocated",
    ),
    PublishedPeak(
        "liger-05", f"{_LIGER_DATA}, rms_norm, H=8192", models.llama_rms_norm,
        lambda: torch.empty(2048, 8192, dtype=torch.bfloat16, device="meta"), models.repeated_norm, None,
        "A100-80GB", 671_195_136, "allocated",
    ),
)  # fmt: skip


def _torchao(number: int, optimizer: Callable[[Any], torch.optim.Optimizer], measured: int) -> PublishedPeak:
    return PublishedPeak(
        f"torchao-{number:02d}", "torchao/optim/README.md", models.timm_model("vit_huge_patch14_224", 45),
        models.pictures(8, 224, 45), models.classification, optimizer, "RTX4080-16GB", measured, "allocated",
        precision="bf16-mixed", notes="compiled there, traced eagerly here",
    )  # fmt: skip


# An RTX 4070 Ti SUPER has the memory and the generation of an RTX 4080; allocated memory does not depend on more.
_TORCHAO = (
    _torchao(1, lambda p: torch.optim.AdamW(p, fused=True, weight_decay=0), 12_230_000_000),
    _torchao(2, models.adamw_8bit, 8_320_000_000),
)

PEAKS: tuple[PublishedPeak, ...] = (*_XMEM, *_RASBT, *_PEFT, *_GPUMEMNET, *_LITGPT, *_LIGER, *_TORCHAO)
