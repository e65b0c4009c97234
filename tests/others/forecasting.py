"""Forecasting packages: their own data sets, modules and batches."""

from __future__ import annotations

from tests.others.runs import Case

LENGTH, AHEAD, SERIES = 24, 6, 16


def _frame():
    from pytorch_forecasting.data.examples import generate_ar_data

    frame = generate_ar_data(seasonality=10.0, timesteps=80, n_series=SERIES, seed=42)
    frame["series"] = frame["series"].astype(str).astype("category")
    return frame


def _data_sets(**options):
    from pytorch_forecasting import TimeSeriesDataSet

    train = TimeSeriesDataSet(
        _frame()[lambda frame: frame.time_idx < 70],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=LENGTH,
        max_prediction_length=AHEAD,
        time_varying_unknown_reals=["value"],
        **options,
    )
    return train, TimeSeriesDataSet.from_dataset(train, _frame(), min_prediction_idx=70)


def _loaders(train, validation):
    return train.to_dataloader(train=True, batch_size=64), validation.to_dataloader(
        train=False, batch_size=64
    )


def fusion_transformer():
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer

    train, validation = _data_sets(
        static_categoricals=["series"],
        time_varying_known_reals=["time_idx"],
        min_encoder_length=LENGTH // 2,
        add_relative_time_idx=True,
        add_encoder_length=True,
    )
    module = TemporalFusionTransformer.from_dataset(
        train, learning_rate=0.01, hidden_size=32, attention_head_size=2, hidden_continuous_size=16,
        loss=QuantileLoss(), log_interval=-1, optimizer="adamw",
    )  # fmt: skip
    return module, *_loaders(train, validation)


def n_beats():
    from pytorch_forecasting import NBeats

    train, validation = _data_sets(
        categorical_encoders={}, min_encoder_length=LENGTH, min_prediction_length=AHEAD
    )
    module = NBeats.from_dataset(train, learning_rate=0.01, widths=[64, 128], log_interval=-1)
    return module, *_loaders(train, validation)


def darts_module(name, **options):
    """What ``fit`` of a darts model gives its Trainer: module, data module."""
    import darts.models
    import numpy as np
    import torchmetrics
    from darts import TimeSeries

    wave = np.sin(np.arange(600) / 7)[:, None] + 0.1 * np.random.default_rng(0).normal(size=(600, 2))
    series = TimeSeries.from_values(wave.astype(np.float32))
    model = getattr(darts.models, name)(
        LENGTH,
        AHEAD,
        batch_size=64,
        random_state=0,
        torch_metrics=torchmetrics.MeanAbsoluteError(),
        **options,
    )
    _, prepared = model._setup_for_fit_from_dataset(series=series[:500], val_series=series[500:])
    given = model._setup_for_train(prepared["train_dataset"], prepared["val_dataset"])
    data = given["datamodule"]
    return given["model"], data.train_dataloader(), data.val_dataloader()


def darts_n_beats():
    return darts_module("NBEATSModel", num_stacks=2, num_blocks=1, num_layers=2, layer_widths=256)


def darts_transformer():
    return darts_module("TransformerModel", d_model=32, nhead=4, dim_feedforward=64)


def darts_recurrent():
    return darts_module("BlockRNNModel", model="LSTM", hidden_dim=64)


def neural_forecast(name, **options):
    """What ``NeuralForecast.fit`` gives its Trainer."""
    import neuralforecast.models
    import numpy as np
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    steps = np.arange(120)
    frame = pd.concat(
        pd.DataFrame({"unique_id": str(each), "ds": steps, "y": np.sin(steps / (5 + each))})
        for each in range(SERIES)
    )
    dataset = TimeSeriesDataset.from_df(frame)[0]
    module = getattr(neuralforecast.models, name)(
        h=AHEAD, input_size=LENGTH, max_steps=6, batch_size=8, windows_batch_size=128, logger=False, **options
    )
    module.val_size, module.test_size = 20, 0
    data = TimeSeriesDataModule(dataset, batch_size=8, valid_batch_size=8, shuffle_train=True)
    return module, data.train_dataloader(), data.val_dataloader()


def neural_hits():
    return neural_forecast("NHITS", mlp_units=[[64, 64]] * 3)


def neural_patch_transformer():
    return neural_forecast(
        "PatchTST", hidden_size=32, n_heads=4, linear_hidden_size=64, patch_len=8, stride=4
    )


CASES = (
    Case(
        "pytorch-forecasting TemporalFusionTransformer", ("pytorch_forecasting",), fusion_transformer,
        options={"gradient_clip_val": 0.1}, tolerance=0.05,
    ),
    Case("pytorch-forecasting NBeats", ("pytorch_forecasting",), n_beats, options={"gradient_clip_val": 0.1}),
    Case("darts NBEATSModel", ("darts",), darts_n_beats, "pytorch_lightning"),
    Case("darts TransformerModel", ("darts",), darts_transformer, "pytorch_lightning"),
    Case("darts BlockRNNModel", ("darts",), darts_recurrent, "pytorch_lightning"),
    Case("neuralforecast NHITS", ("neuralforecast",), neural_hits, "pytorch_lightning"),
    Case("neuralforecast PatchTST", ("neuralforecast",), neural_patch_transformer, "pytorch_lightning"),
)  # fmt: skip
