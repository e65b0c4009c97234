"""Text: transformers in a LightningModule, LoRA, sentence embeddings. No model is downloaded."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.others.runs import Case

VOCABULARY = 500


class Texts(Dataset):
    """Texts of different lengths, as a tokenizer leaves them."""

    def __init__(self, count=24, longest=48):
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator).tolist()
        self.texts = [
            torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        ids = self.texts[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "label": sum(ids) % 2}


def pad(samples):
    """What ``DataCollatorWithPadding`` returns: a BatchEncoding."""
    from transformers import BatchEncoding

    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(key):
        return torch.tensor([sample[key] + [0] * (longest - len(sample[key])) for sample in samples])

    batch = {key: padded(key) for key in ("input_ids", "attention_mask")}
    return BatchEncoding({**batch, "labels": torch.tensor([sample["label"] for sample in samples])})


def _loaders(batch_size=8):
    return (
        DataLoader(Texts(), batch_size=batch_size, shuffle=True, collate_fn=pad),
        DataLoader(Texts(8), batch_size=batch_size, collate_fn=pad),
    )


class GLUETransformer(pl.LightningModule):
    """After Lightning's tutorial on fine-tuning transformers on GLUE."""

    def __init__(self, learning_rate: float = 2e-5, warmup_steps: int = 2, weight_decay: float = 0.01):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
        self.model = BertForSequenceClassification(config)
        self.metric = torchmetrics.classification.BinaryAccuracy()
        self.outputs = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        loss = self(**batch)[0]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        val_loss, logits = self(**batch)[:2]
        self.outputs.append({"loss": val_loss, "preds": torch.argmax(logits, 1), "labels": batch["labels"]})
        return val_loss

    def on_validation_epoch_end(self):
        preds = torch.cat([x["preds"] for x in self.outputs]).detach().cpu().numpy()
        labels = torch.cat([x["labels"] for x in self.outputs]).detach().cpu().numpy()
        self.log("val_loss", torch.stack([x["loss"] for x in self.outputs]).mean(), prog_bar=True)
        self.log("accuracy", float((preds == labels).mean()))
        self.outputs.clear()

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        no_decay = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())
        groups = [
            {
                "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def bert():
    return GLUETransformer(), *_loaders()


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4))


class LanguageModel(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def _step(self, batch):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return self.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
        ).loss

    def training_step(self, batch, batch_idx):
        loss = self._step(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("perplexity", torch.exp(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def gpt2():
    return LanguageModel(tiny_gpt2()), *_loaders()


def lora():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return LanguageModel(get_peft_model(tiny_gpt2(), config)), *_loaders()


class Embedder(pl.LightningModule):
    """Sentence embeddings, learned by contrast within the batch."""

    def __init__(self):
        super().__init__()
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
        from transformers import BertConfig, BertModel

        self.encoder = BertModel(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
            )
        )
        self.pooling, self.normalize = Pooling(64), Normalize()

    def embed(self, batch):
        features = {"attention_mask": batch["attention_mask"]}
        features["token_embeddings"] = self.encoder(
            batch["input_ids"], batch["attention_mask"]
        ).last_hidden_state
        return self.normalize(self.pooling(features))["sentence_embedding"]

    def _step(self, batch):
        scores = self.embed(batch) @ self.embed(batch).T * 20
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=self.device))

    def training_step(self, batch, batch_idx):
        return self._step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def sentences():
    return Embedder(), *_loaders()


CASES = (
    Case("transformers BERT, padded texts", ("transformers",), bert),
    Case(
        "transformers GPT-2", ("transformers",), gpt2,
        options={"accumulate_grad_batches": 3, "gradient_clip_val": 1.0},
    ),
    Case("PEFT LoRA of GPT-2", ("transformers", "peft"), lora),
    Case("sentence-transformers pooling", ("sentence_transformers",), sentences),
)  # fmt: skip
