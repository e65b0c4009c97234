"""The FP32 masters of a model, and the optimizers that step them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_memprec.master_weights import gradients
from lightning_memprec.master_weights.checkpoint import LoadHook, SaveHook, attach_hooks, detach_hooks
from lightning_memprec.master_weights.pair import Pair, merge, merged, round_trips, write_back

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

__all__ = ["MasterStore"]

_HALF = (torch.float16, torch.bfloat16)


class MasterStore:
    """Holds one FP32 master for every half parameter that an optimizer steps.

    In an optimizer the masters stand in the place of the parameters, in the very lists of ``param_groups``, so
    that schedulers and whoever else holds the optimizer notice nothing. A parameter that belongs to several
    optimizers, or appears in the module under several names, has one master.

    Parameters that no optimizer steps have none. If their FP32 values cannot be represented in half, those are
    kept in host memory, so that checkpoints hold them.
    """

    def __init__(self) -> None:
        self.pairs: dict[nn.Parameter, Pair] = {}
        self.originals: dict[nn.Parameter, Tensor] = {}
        self.process_group: Any = None
        self.is_stepping = False
        self._by_master: dict[nn.Parameter, Pair] = {}
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self.hooks: list[SaveHook | LoadHook] = []
        self.has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # A copy, as spawned processes get, belongs to other parameters.

    # --- the module ---

    def remember(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Keep the FP32 values of a parameter that is about to be cast, if casting would lose any."""
        original = (
            parameter.data.float()
        )  # Not `detach()`, which would share the parameter's version counter.
        if parameter not in self.pairs and not round_trips(original, dtype):
            self.originals[parameter] = original

    def serves(self, module: nn.Module) -> bool:
        """Tell whether this is the store of a module, or of none yet."""
        known = {*self.pairs, *self.originals}
        return not known or any(parameter in known for parameter in module.parameters())

    def attach(self, module: nn.Module) -> None:
        """Let checkpoints of ``module`` hold FP32 values, and forget parameters of any other module."""
        parameters = set(module.parameters())
        self.pairs = {p: pair for p, pair in self.pairs.items() if p in parameters}
        self.originals = {p: original for p, original in self.originals.items() if p in parameters}
        self._by_master = {pair.master: pair for pair in self.pairs.values()}
        for previous in attach_hooks(module, self):
            self._inherit(previous)

    def _inherit(self, previous: MasterStore) -> None:
        """Take over from the plugin of an earlier Trainer."""
        for parameter in [*previous.pairs, *previous.originals]:
            value = previous.value(parameter)
            if value is not None and not round_trips(value, parameter.dtype):
                self.originals[parameter] = value
        detach_hooks(previous)

    def value(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the FP32 values of a parameter with what others wrote over it, or ``None`` if it has none."""
        if parameter.dtype not in _HALF:
            return None
        pair = self.pairs.get(parameter)
        if pair is not None:
            return pair.master.detach() if pair.is_moved else merged(parameter, pair.master)
        original = self.originals.get(parameter)
        return None if original is None else merged(parameter, original.to(parameter.device))

    def load(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the FP32 values of a parameter; the half ones are the caller's to set."""
        pair = self.pairs.get(parameter)
        if pair is not None:
            with torch.no_grad():
                pair.master.copy_(value)
            pair.version = pair.master._version
        elif round_trips(value, parameter.dtype):
            self.originals.pop(parameter, None)
        else:
            self.originals[parameter] = value.detach().to("cpu", torch.float32, copy=True)

    def drop_gradients(self) -> None:
        """Free all gradients of half parameters and their masters."""
        for pair in self.pairs.values():
            gradients.drop(pair)

    def to_host(self) -> None:
        """Free the gradients and move the masters to host memory, as Lightning moves the module there."""
        self.drop_gradients()
        for pair in self.pairs.values():
            pair.to(torch.device("cpu"))
            if hasattr(pair.parameter, "grad_dtype"):
                # It would outlive a later cast: `module.float()` would go on getting gradients in half.
                pair.parameter.grad_dtype = None

    # --- the optimizers ---

    def connect(self, optimizers: Iterable[Optimizer]) -> None:
        """Give the optimizers masters; afterwards keep in host memory what no optimizer steps."""
        for pair in self.pairs.values():
            pair.to(pair.parameter.device)
            merge(pair)
        for optimizer in optimizers:
            self.adopt(optimizer)
        for parameter, original in self.originals.items():
            self.originals[parameter] = original.cpu()

    def adopt(self, optimizer: Optimizer) -> list[Pair]:
        """Put masters in the place of half parameters in ``param_groups``, also of groups added since.

        Returns:
            All pairs of the optimizer, in order.
        """
        found = []
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                pair = self._by_master.get(parameter)
                if pair is None and parameter.dtype in _HALF:
                    pair = self.pairs.get(parameter) or self._create(parameter)
                    parameters[index] = pair.master
                    _take_state(optimizer, pair, group)
                if pair is not None:
                    found.append(pair)
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        return found

    def _create(self, parameter: nn.Parameter) -> Pair:
        original = self.originals.pop(parameter, None)
        source = (
            parameter.detach().float()
            if original is None
            else merged(parameter, original.to(parameter.device))
        )
        # `data`: a master needs a version counter of its own, to tell who wrote last.
        return self._register(Pair(parameter, source.data))

    def _register(self, pair: Pair) -> Pair:
        if self.process_group is not None:
            # DDP gave every rank the halves of rank zero; ranks seeded differently hold other masters.
            torch.distributed.broadcast(pair.master.data, group=self.process_group, group_src=0)
        self.pairs[pair.parameter] = self._by_master[pair.master] = pair
        return pair

    def settle(self, pair: Pair) -> None:
        """Carry over to a parameter what was done to its master while that stood in its place.

        Args:
            pair: One of ours, or one made for the time being, for a parameter that no optimizer stepped.
        """
        parameter, master = pair.parameter, pair.master
        parameter.requires_grad_(master.requires_grad)
        if parameter not in self.pairs:
            if any(m is master for o in self._hooked for group in o.param_groups for m in group["params"]):
                self.originals.pop(parameter, None)
                self._register(pair)
            else:
                self.load(parameter, master)
        write_back([pair])

    def mirror_requires_grad(self, *, to_masters: bool) -> None:
        """Make masters require gradients as their parameters do, or the other way round."""
        for pair in self.pairs.values():
            source, target = pair.parameter, pair.master
            if not to_masters:
                source, target = target, source
            target.requires_grad_(source.requires_grad)

    # --- a step ---

    def refresh(self) -> None:
        """Round masters that were changed outside a step, as schedule-free optimizers do, into the halves."""
        write_back([pair for pair in self.pairs.values() if pair.is_moved])

    def before_backward(self, *, alone: bool = True, expects_gradients: bool = False) -> None:
        """Bring the parameters' gradients in line with the optimizers'.

        Args:
            alone: Whether nobody but autograd touches the gradients, so that they can accumulate in FP32 in
                place. DDP's reducer wants them in the parameter's dtype.
            expects_gradients: Whether the reducer will look for a gradient on every parameter that was used
                since it last reduced, as DDP does to find unused ones.
        """
        for pair in self.pairs.values():
            if gradients.is_shown(pair) and gradients.is_half(pair.parameter.grad):
                # Autograd leaves no such thing: DDP with `gradient_as_bucket_view` has moved the FP32 gradient
                # into half buckets when it made them anew.
                pair.parameter.grad = pair.master.grad
            gradients.follow_optimizer(pair)
            if not alone:
                gradients.hide(pair)
            if expects_gradients and pair.unreduced:
                pair.parameter.grad = torch.zeros_like(pair.parameter)

    def after_backward(self, *, local: bool = False, average: bool = False) -> None:
        """Hand the new gradients to the masters, in FP32.

        Args:
            local: Whether these are gradients of this rank alone, as under DDP's ``no_sync``.
            average: Whether ranks may hold such gradients, which are averaged now.
        """
        pairs = list(self.pairs.values())
        if average:
            gradients.average_over_ranks(pairs, self.process_group)
        for pair in pairs:
            pair.unreduced |= local and pair.parameter.grad is not None
            gradients.take(pair)
            gradients.show(pair)

    def prepare(self, optimizer: Optimizer) -> None:
        """Make masters and their gradients ready for a step of ``optimizer``."""
        for pair in self.adopt(optimizer):
            merge(pair)
            gradients.follow_optimizer(pair)

    def write_back(self, optimizer: Optimizer) -> None:
        """Round the masters of an optimizer into their parameters."""
        write_back(self.adopt(optimizer))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.is_stepping:
            self.prepare(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.write_back(optimizer)


def _take_state(optimizer: Optimizer, pair: Pair, group: dict[str, Any]) -> None:
    """Move the state that an optimizer made in its constructor to the master, in FP32."""
    if pair.parameter not in optimizer.state:
        return
    state = optimizer.state.pop(pair.parameter)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dtype in _HALF:
            state[key] = value.float()
    if isinstance(optimizer, torch.optim.Adagrad):
        state["sum"].fill_(group["initial_accumulator_value"])  # It was rounded to half.
    optimizer.state[pair.master] = state
