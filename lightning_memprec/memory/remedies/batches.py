"""Smaller batches: fewer samples at a time, in training or validation, and shorter sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memprec.memory.largest_batch import batch_size_of, resized
from lightning_memprec.memory.plan import TrainingPlan, ValidationPlan
from lightning_memprec.memory.remedies.change import Change, need_of
from lightning_memprec.memory.remedies.snippet import Code, setting
from lightning_memprec.memory.sequences import resequenced, sequence_length_of

__all__ = ["micro_batches", "shorter_sequences", "validation_batches"]

# Shorter than this, a text is hardly one any more.
_SHORTEST = 128


def micro_batches(plan: TrainingPlan, model: nn.Module | None, budget_bytes: int) -> Iterator[Change]:
    """Find the largest micro-batch that fits: a straight line through two traces, then divisors below it."""
    size = batch_size_of(plan.batch)
    if size is None or size < 2:
        return
    divisors = [d for d in range(size // 2, 0, -1) if size % d == 0]

    def need_bytes(micro: int) -> int | None:
        # More than two micro-batches need no more memory than two: traced with two to save time.
        need = need_of(replace(_with_batch(plan, size, micro), accumulate_grad_batches=2))
        return None if need is None else need.device_bytes

    # Batch norm refuses a single sample: then the next size is the smallest.
    tried = ((micro, need_bytes(micro)) for micro in divisors[:-3:-1])
    micro, smallest = next(((m, need) for m, need in tried if need is not None), (divisors[-1], None))
    largest = need_bytes(divisors[0])
    if smallest is not None and largest is not None and divisors[0] > micro:
        slope = (largest - smallest) / (divisors[0] - micro)
        fitting = [d for d in divisors if d >= micro and smallest + slope * (d - micro) <= budget_bytes]
        micro = fitting[0] if fitting else micro
    accumulate = plan.accumulate_grad_batches * (size // micro)
    normalized = model is not None and any(isinstance(module, _BatchNorm) for module in model.modules())
    note = "; batch norm sees fewer samples at a time" if normalized else ""
    yield Change(
        "micro_batch",
        f"a micro-batch of {micro} with {accumulate} accumulation steps",
        f"batch_size={micro}, Trainer(accumulate_grad_batches={accumulate})",
        f"same effective batch in more, smaller steps{note}",
        lambda p: replace(_with_batch(p, size, micro), accumulate_grad_batches=2),
        exact=not normalized,
        topics=frozenset({"batch", "accumulation"}),
        same_work=False,
        code=setting("accumulate_grad_batches", accumulate)
        | Code(remarks=(f"batch_size={micro} where the training data is loaded.",)),
    )


def _with_batch(plan: TrainingPlan, size: int, micro: int) -> TrainingPlan:
    batch = resized(plan.batch, size, micro)
    return replace(plan, batch=batch, accumulate_grad_batches=plan.accumulate_grad_batches * (size // micro))


def validation_batches(plan: TrainingPlan, budget_bytes: int) -> Iterator[Change]:
    """Halve the validation batch until the run fits, or one sample is left: some traces, by bisection."""
    validation = plan.validation
    if validation is None:
        return
    largest = max((batch_size_of(loader.batch) or 0 for loader in validation.loaders), default=0)
    halved = [largest >> k for k in range(largest.bit_length() - 1, 0, -1)]  # 1, 2, 4, ...

    def changed(p: TrainingPlan, size: int) -> TrainingPlan:
        return replace(p, validation=_with_validation_batch(validation, size))

    fitting, untried = 0, len(halved)
    while untried - fitting > 1:
        middle = (fitting + untried) // 2
        need = need_of(changed(plan, halved[middle]))
        fits = need is not None and need.device_bytes <= budget_bytes
        fitting, untried = (middle, untried) if fits else (fitting, middle)
    if halved:
        size = halved[fitting]
        yield Change(
            "validation_batch",
            f"a validation batch of {size}",
            f"batch_size={size} in `val_dataloader`",
            "more, smaller steps of validation",
            lambda p: changed(p, size),
            exact=True,
            topics=frozenset({"validation"}),
            same_work=False,
            code=Code(remarks=(f"batch_size={size} where the validation data is loaded.",)),
        )


def _with_validation_batch(validation: ValidationPlan, most: int) -> ValidationPlan:
    """Cut the batches of all loaders to a size; each validation then takes more of them."""
    loaders = []
    for loader in validation.loaders:
        size = batch_size_of(loader.batch)
        if size is not None and size > most:
            count = loader.num_batches
            loader = replace(
                loader,
                batch=resized(loader.batch, size, most),
                num_batches=None if count is None else -(-count * size // most),
            )
        loaders.append(loader)
    return replace(validation, loaders=tuple(loaders))


def shorter_sequences(plan: TrainingPlan, budget_bytes: int) -> Iterator[Change]:
    """Halve the length of token sequences until the run fits, or they are hardly a text any more."""
    length = sequence_length_of(plan.batch)
    if length is None or length < 2 * _SHORTEST:
        return
    size = length // 2
    while size >= 2 * _SHORTEST:
        need = need_of(replace(plan, batch=resequenced(plan.batch, length, size)))
        if need is None or need.device_bytes <= budget_bytes:
            break
        size //= 2
    yield Change(
        "shorter_sequences",
        f"sequences of {size} tokens instead of {length}",
        f"max_length={size} where the data is tokenized",
        "the model sees less context; long samples are cut or split",
        lambda p: replace(p, batch=resequenced(p.batch, length, size)),
        topics=frozenset({"sequence"}),
        same_work=False,
        code=Code(remarks=(f"max_length={size} where the data is tokenized.",)),
    )
