"""A device that is not the CPU, made in Python: its tensors lie in host memory that only its own operations may touch.

As on a GPU, an operation on tensors of two devices raises RuntimeError, numpy cannot read a tensor of this device, and
whatever brings a value to the host makes it wait, as does what is brought here without `non_blocking`; those waits are
counted, and so are the bytes of live tensors. Without values its tensors are shapes alone, as large as those of any
model, and what the host reads of them is made up.

`python -m simulated_device train ...` is the command line with the policy, its sampler and its optimizer on it. torch
takes one such device a process, so nothing here is imported by the tests' own.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "sim"
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "copy_", "_to_copy"}
"""Operations that take host tensors beside device ones on a GPU, too."""
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
"""Operations whose result the host has to wait for."""


class Counted:
    """What the device was asked for."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.place = torch.device("cpu")
        """Where its tensors really are: torch's meta device has shapes alone."""
        self.has_values = True


counted = Counted()


class Memory:
    """The storage of one tensor and its views."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        counted.live_bytes += num_bytes
        counted.peak_bytes = max(counted.peak_bytes, counted.live_bytes)

    def __del__(self, counted: Counted = counted) -> None:
        counted.live_bytes -= self.num_bytes


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device around a host tensor that nobody else sees."""

    host: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, host: torch.Tensor, memory: Memory | None = None) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        made.memory = memory or Memory(host.untyped_storage().nbytes())
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Values on the host; torch's own does not know what to do with a class of tensors."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        if id(self) not in memo:
            copied = DeviceTensor(self.host.clone())
            is_weight = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_weight else copied
        copy = memo[id(self)]
        assert isinstance(copy, torch.Tensor)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is a tensor like any other."""
        return self.host.__reduce_ex__(protocol)

    @property
    def data(self) -> torch.Tensor:
        """The values without their history."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Other memory for the same tensor; what lies in main memory takes none of the device's."""
        self.host = values.host if isinstance(values, DeviceTensor) else values
        self.memory = values.memory if isinstance(values, DeviceTensor) else Memory(0)

    def untyped_storage(self) -> torch.UntypedStorage:
        """By its address tied weights are told."""
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        """An address, as any device has them."""
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        counted.operations += 1
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        if name not in _INDEXING:
            strangers = [leaf for leaf in leaves if not isinstance(leaf, DeviceTensor) and leaf.dim()]
            if strangers:
                raise RuntimeError(f"{name}: tensors on {NAME}:0 and on {strangers[0].device}, of {strangers[0].shape}")
        if name in _WAITS:
            counted.waits[name] += 1
        if _waits_for_upload(name, args, kwargs):
            counted.waits["upload"] += 1
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            counted.waits["copy"] += 1
            return args[0].copy_(args[1].host) if counted.has_values else args[0].zero_()
        if name == "_local_scalar_dense" and not counted.has_values:
            return 0.5 if args[0].is_floating_point() else 0
        devices = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        to_host = any(device.type == "cpu" for device in devices)
        counted.waits["copy"] += to_host
        for_shapes = any(device.type == "meta" for device in devices)
        plain_args, plain_kwargs = pytree.tree_map(_on_host, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if to_host and not counted.has_values:
            return torch.zeros_like(result, device="cpu")
        if to_host:
            # A copy even where nothing had to be converted: the two devices share no memory.
            return result.clone() if any(_shares(result, own.host) for own in ours) else result
        return result if for_shapes else pytree.tree_map_only(torch.Tensor, lambda leaf: _wrapped(leaf, ours), result)


def _waits_for_upload(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether values of the host come here in a copy that a GPU's host waits for."""
    if name == "copy_":
        to_here = isinstance(args[0], DeviceTensor) and not isinstance(args[1], DeviceTensor)
        return to_here and not (kwargs.get("non_blocking", False) or args[2:3] == (True,))
    # Indices, too: torch copies them to the device of what they index.
    return name in _INDEXING and any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim()
        for leaf in pytree.tree_leaves(args[1:2])
    )


def _on_host(leaf: object) -> object:
    if isinstance(leaf, torch.device):
        return counted.place
    return leaf.host if isinstance(leaf, DeviceTensor) else leaf


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _wrapped(host: torch.Tensor, inputs: list[DeviceTensor]) -> DeviceTensor:
    for own in inputs:
        if own.host is host:
            return own
    for own in inputs:
        if _shares(own.host, host):
            return DeviceTensor(host, own.memory)
    return DeviceTensor(host)


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return DeviceTensor(torch.empty(size, dtype=dtype, device=counted.place))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device=counted.place))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `torch.tensor(..., device=...)` ends in, past the dispatch to Python."""
    assert isinstance(target, DeviceTensor)
    counted.waits["upload"] += bool(source.numel()) and not (non_blocking or isinstance(source, DeviceTensor))
    target.host.copy_(_on_host(source))
    return target


class Backend(_DummyBackendModule):
    """`torch.sim`, as far as torch asks for it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Gradient checkpointing restores autocast, even where none is on."""
        return [torch.bfloat16]


_LIBRARY: list[torch.library.Library] = []


def install(*, values: bool = True) -> torch.device:
    """Register the device with torch, once a process; without `values` its tensors have shapes alone."""
    counted.place, counted.has_values = torch.device("cpu" if values else "meta"), values
    if not _LIBRARY:
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=Backend())
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _LIBRARY.append(library)
        # Modules keep their parameters, and with them what is tied, when they move here.
        torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def main(arguments: list[str]) -> int:
    """The command line on this device."""
    from exgrpo_cli.commands import run
    from exgrpo_cli.training import setup

    device = install()
    setup.take_device = lambda requested, local_rank: device
    return run(arguments)


if __name__ == "__main__":
    # Under the one name by which torch knows its tensors.
    import simulated_device

    sys.exit(simulated_device.main(sys.argv[1:]))
