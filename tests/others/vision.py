"""Images: timm and torchmetrics, segmentation, a GAN with manual optimization."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.others.runs import Case


def _images(count=24, size=32, classes=5, batch_size=8):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, size, size, generator=generator)
    y = torch.randint(classes, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True), DataLoader(
        TensorDataset(x[:8], y[:8]), batch_size=batch_size
    )


class Classifier(pl.LightningModule):
    """An image classifier as tutorials write it."""

    def __init__(self, backbone: str = "resnet10t", classes: int = 5, lr: float = 1e-3, steps: int = 100):
        super().__init__()
        import timm

        self.save_hyperparameters()
        self.model = timm.create_model(backbone, pretrained=False, num_classes=classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.classification.MulticlassAccuracy(classes, average="micro"),
                "f1": torchmetrics.classification.MulticlassF1Score(classes),
                "auroc": torchmetrics.classification.MulticlassAUROC(classes),
            }
        )
        self.train_metrics, self.val_metrics = metrics.clone("train/"), metrics.clone("val/")
        self.best = torchmetrics.MaxMetric()
        self.history = []

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        self.log_dict(self.train_metrics(logits, y), on_step=False, on_epoch=True)
        self.log("train/loss", loss, prog_bar=True)
        self.history.append(round(loss.item(), 4))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.log("val/loss", self.criterion(logits, y))

    def on_validation_epoch_end(self):
        figures = self.val_metrics.compute()
        self.best(figures["val/acc"])
        self.log_dict(figures)
        self.log("val/best", self.best.compute())
        self.val_metrics.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.hparams.steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def resnet():
    return Classifier("resnet10t"), *_images()


def vision_transformer():
    return Classifier("test_vit2"), *_images(size=64)


def efficientnet():
    return Classifier("test_efficientnet"), *_images(size=64)


class Segmenter(pl.LightningModule):
    """The example of segmentation-models-pytorch."""

    def __init__(self):
        super().__init__()
        import segmentation_models_pytorch as smp

        self.model = smp.create_model(
            "Unet", encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=1
        )
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.outputs = []

    def shared_step(self, batch):
        import segmentation_models_pytorch as smp

        image, mask = batch["image"], batch["mask"]
        assert image.shape[2] % 32 == 0
        assert mask.max() <= 1.0
        assert mask.min() >= 0
        logits = self.model(image - self.mean)
        loss = self.loss_fn(logits, mask)
        predicted = (logits.sigmoid() > 0.5).float()
        counts = smp.metrics.get_stats(predicted.long(), mask.long(), mode="binary")
        return {"loss": loss, **dict(zip(("tp", "fp", "fn", "tn"), counts, strict=True))}

    def training_step(self, batch, batch_idx):
        out = self.shared_step(batch)
        self.outputs.append(out)
        return out

    def on_train_epoch_end(self):
        import segmentation_models_pytorch as smp

        counts = [torch.cat([each[key] for each in self.outputs]) for key in ("tp", "fp", "fn", "tn")]
        self.log("train_iou", smp.metrics.iou_score(*counts, reduction="micro"))
        self.outputs.clear()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.shared_step(batch)["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=1e-5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }


class Masks(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 64, 64, generator=generator)
        return {"image": image, "mask": (image[:1] > 0).float(), "name": f"image {index}"}


def segmentation():
    return Segmenter(), DataLoader(Masks(), batch_size=4), DataLoader(Masks(), batch_size=4)


class GAN(pl.LightningModule):
    """Lightning's own example: two optimizers, stepped by hand."""

    def __init__(self, latent_dim: int = 64, lr: float = 2e-4, width: int = 256):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, width), nn.LeakyReLU(0.2), nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width),
            nn.LeakyReLU(0.2), nn.Linear(2 * width, 3 * 32 * 32), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z).view(-1, 3, 32, 32)

    def adversarial_loss(self, y_hat, y):
        return nn.functional.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], self.hparams.latent_dim)
        z = z.type_as(images)

        self.toggle_optimizer(optimizer_g)
        self.generated_images = self(z)
        valid = torch.ones(images.size(0), 1).type_as(images)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), valid)
        fake = torch.zeros(images.size(0), 1).type_as(images)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        self.log("val_score", self.discriminator(batch[0]).mean())

    def on_validation_epoch_end(self):
        z = self.validation_z.type_as(self.generator[0].weight)
        self.sample = self(z)

    def configure_optimizers(self):
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(
            self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)
        )
        return [optimizer_g, optimizer_d], []


def gan():
    return GAN(), *_images(count=96, batch_size=32)


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(24):
            yield torch.randn(3, 32, 32, generator=generator), int(torch.randint(5, (), generator=generator))


def stream():
    _, validation = _images()
    return Classifier("resnet10t"), DataLoader(Stream(), batch_size=8), validation


CASES = (
    Case("timm ResNet, torchmetrics, OneCycleLR", ("timm",), resnet),
    Case("timm ViT", ("timm",), vision_transformer, callbacks={"EMAWeightAveraging": {"decay": 0.9}}),
    Case(
        "timm EfficientNet, SWA", ("timm",), efficientnet,
        callbacks={"StochasticWeightAveraging": {"swa_lrs": 1e-3, "swa_epoch_start": 1}},
    ),
    Case("an IterableDataset", ("timm",), stream),
    Case("segmentation-models-pytorch U-Net", ("segmentation_models_pytorch",), segmentation),
    # `type_as(self.generator[0].weight)` would make integers of the noise.
    Case("GAN, manual optimization", (), gan, quantization={"exclude": ["generator.0"]}),
)  # fmt: skip
