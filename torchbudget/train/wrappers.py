"""The modules that reduce gradients by themselves: DDP and FSDP2, and what they leave alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from torchbudget.distributed import fsdp_groups, is_distributed, is_dtensor, mesh_ranks
from torchbudget.errors import OptionError
from torchbudget.restoring import is_compiled


class DistributedModules:
    """The distributed modules among those that are trained.

    `DistributedDataParallel` never reduces gradients: the accumulator sums them itself, so that
    ranks may have unequal numbers of micro-batches. FSDP2 keeps only shards of the gradients, so it
    must reduce them itself, in the step's last backward.

    Args:
        modules: that are trained.

    Attributes:
        modules: all whose forward must be inside `accumulating`.
        sharded: whether FSDP2 shards any module.
        communicates: whether a forward or backward has collectives in it.

    Raises:
        OptionError: one is the older FSDP, which divides gradients before the weight over all ranks
            is known; or a DDP with an option that needs its own reduction.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = list(dict.fromkeys(part for module in modules for part in module.modules()))
        # Not imported here, which would read the environment: no such module exists without it.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in inner):
            raise OptionError(
                "FullyShardedDataParallel is not supported; torch.distributed.fsdp.fully_shard is"
            )
        self._replicated = [p for p in inner if isinstance(p, DistributedDataParallel)]
        self._shards: list[Any] = [p for p in inner if fsdp and isinstance(p, fsdp.FSDPModule)]
        # Flags that are set on an outermost one apply to all inside it.
        nested = {id(part) for one in self._shards for part in one.modules() if part is not one}
        self._roots = [one for one in self._shards if id(one) not in nested]
        self.modules: list[nn.Module] = [*self._replicated, *self._roots]
        self.sharded = bool(self._roots)
        self._given = modules
        self._several = is_distributed() and dist.get_world_size() > 1
        self.communicates = self.sharded or any(
            (self._several and isinstance(part, nn.SyncBatchNorm))
            or any(map(is_dtensor, part.parameters(recurse=False)))
            for part in inner
        )
        self.check_options()

    def check_options(self) -> None:
        """Raise an `OptionError` if DDP has an option that the accumulator would bypass."""
        for module in self._replicated:
            if module.static_graph or module._comm_hooks or module._delay_all_reduce_params:
                raise OptionError(
                    "DistributedDataParallel has static_graph=True, a communication hook "
                    "(register_comm_hook, mixed_precision=) or delay_all_reduce_named_params=: "
                    "leave it out, since GradAccumulator sums gradients itself"
                )

    def check_group(self, group: Any) -> None:
        """Raise an `OptionError` if modules are distributed over other ranks than share a step.

        Args:
            group: of the processes that share a step; `None`: all.
        """
        for module in self._replicated:
            own, shared = map(_ranks_of, (module.process_group, group))
            if own != shared:
                raise OptionError(
                    f"DistributedDataParallel joins the ranks {own}, but {shared} share a step: "
                    "pass its process_group as group="
                )
        for param_group in self._param_groups():
            number, sharing = _divisor(param_group.mesh_info), dist.get_world_size(group)
            if number != sharing:
                raise OptionError(
                    f"fully_shard reduces gradients over {number} ranks, but {sharing} share a "
                    "step: pass group= of the ranks of its mesh"
                )

    def _param_groups(self) -> Iterator[Any]:
        """The groups of parameters that FSDP2 shards and reduces together."""
        return (group for module in self._shards for group in fsdp_groups(module))

    def divisors(self) -> dict[int, float]:
        """Divisors of FSDP2's sum over ranks, by the id of each parameter that it reduces.

        Raises:
            OptionError: this version of torch does not say.
        """
        found = {}
        for group in self._param_groups():
            if getattr(group, "reduce_scatter_reduce_op", None) is not None:
                raise OptionError(
                    "this version of torch hides the factor of set_reduce_scatter_divide_factor: "
                    "do not call it; GradAccumulator divides by the weight in any case"
                )
            factor = getattr(group, "gradient_divide_factor", None)
            divisor = _divisor(group.mesh_info) if factor is None else factor
            found.update({id(one.sharded_param): float(divisor) for one in group.fsdp_params})
        return found

    def summed(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Parameters whose gradients the accumulator sums over ranks.

        Not those that FSDP2 reduces, nor those that DDP was told to ignore, which are each rank's
        own. A parameter that no such module contains is summed.
        """
        left = set(self.divisors())
        for module in self._replicated:
            named = module.module.named_parameters(remove_duplicate=False)
            left |= {id(one) for name, one in named if name in module.parameters_to_ignore}
        return [parameter for parameter in parameters if id(parameter) not in left]

    def check_meshes(self, parameters: Iterable[Tensor], group: Any) -> None:
        """Raise an `OptionError` if a DTensor that is summed is spread over ranks of the group.

        Their parts are of different elements, whose sum has no meaning.
        """
        if not is_distributed():
            return
        ranks = set(_ranks_of(group))
        for parameter in self.summed(parameters):
            if mesh_ranks(parameter) & (ranks - {dist.get_rank()}):
                raise OptionError(
                    "a parameter is a DTensor over ranks that share a step. If fully_shard made "
                    "it, pass module= as well; if it is tensor parallel, pass group= of the ranks "
                    "that have the same part of it, such as mesh.get_group('data')"
                )

    @contextmanager
    def others_refused(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Refuse the forward of a DDP module of these parameters that is not among the modules.

        Raises:
            OptionError: such a module runs inside.
        """
        # A hook on all modules would be compiled into the graph of compiled ones.
        if not self._several or any(map(is_compiled, self._given)):
            yield
            return
        mine = {id(parameter) for parameter in parameters}

        def refuse(module: nn.Module, _: Any) -> None:
            if (
                isinstance(module, DistributedDataParallel)
                and module not in self._replicated
                and torch.is_grad_enabled()
                and any(id(parameter) in mine for parameter in module.parameters())
            ):
                raise OptionError(
                    "GradAccumulator does not know this DistributedDataParallel, which reduces "
                    "gradients in every backward: pass the wrapped module, "
                    "GradAccumulator(optimizer, module=ddp)"
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """No gradients are reduced inside, except by FSDP2 in the step's last backward."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
        with ExitStack() as stack:
            for module in self._replicated:
                stack.enter_context(module.no_sync())
                # Otherwise the first forward after a step broadcasts buffers: a collective that a
                # rank without micro-batches would never join. See `broadcast_buffers`.
                module.require_forward_param_sync = False
            yield

    def clear(self) -> None:
        """Drop gradients that FSDP2 has not reduced, which `Optimizer.zero_grad` does not see."""
        for group in self._param_groups():
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):  # since the first forward
                    one._unsharded_param.grad = None

    def broadcast_buffers(self) -> None:
        """Copy DDP's buffers from its first rank to every rank, as each forward of DDP does.

        Those that it was told to ignore are each rank's own.
        """
        for module in self._replicated:
            if module.broadcast_buffers:
                for buffer in module.modules_buffers:
                    dist.broadcast(buffer, group_src=0, group=module.process_group)


def _ranks_of(group: Any) -> list[int]:
    return list(dist.get_process_group_ranks(group or dist.group.WORLD))


def _divisor(mesh: Any) -> int:
    """The number of ranks that FSDP2 reduces gradients over: sharding them, replicating them."""
    sizes = (getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "replicate_mesh_size", 1))
    return int(sizes[0] * sizes[1])
