"""A CUDA device that is none: tensors say that they are on cuda:0 and hold their values on the CPU.
What code for CUDA does with them is found and counted on a machine without a GPU, with values to
compare: tensors of host and device mixed (refused as CUDA refuses them), launches, copies, and
every place where the host would wait for the device. Not covered: NCCL, DDP's reducer, kernels
themselves, their order on streams. Only for a process of its own, which `start` makes one with a
GPU for good."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended.process import load_guard
from tests.support.tape import Tape

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) + "/" for folder in ("gmeta", "models", "metaio"))
CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
# The host waits in these for the values that decide a shape, or that it asked for.
WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::bincount", "aten::unique_dim",
    "aten::_unique2", "aten::unique_consecutive", "aten::masked_select", "aten::equal",
}  # fmt: skip
# Operations that launch no kernel, beside views.
SILENT = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::detach", "aten::_local_scalar_dense", "aten::is_pinned",
    "aten::lift_fresh", "aten::record_stream", "aten::set_", "prim::device",
    "aten::_efficientzerotensor",
}  # fmt: skip


@dataclass
class Counts:
    """What the device was asked for; each place is "file:line what"."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    to_device: list[str] = field(default_factory=list)
    to_host: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)  # copies whose host memory is not pinned
    collectives: list[str] = field(default_factory=list)
    with_work: bool = True  # count the next two as well, which takes a fifth of a step here
    flops: int = 0
    bytes: int = 0  # read and written by the kernels

    @property
    def num_launches(self) -> int:
        """Count the kernels."""
        return self.launches.total()


_NOW, _BESIDE = Counts(), Counts()


def is_beside() -> bool:
    """Whether this is one of Python's own threads, as the checkpoint writer's or the mover of rows:
    not what computes, in the main thread and in autograd's."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not thread.name.startswith("Dummy")


def counts() -> Counts:
    """Return where to count now: what computes, and what goes on beside it."""
    return _BESIDE if is_beside() else _NOW


@contextmanager
def counting(onto: Counts | None = None) -> Iterator[Counts]:
    """Count what happens inside, apart from what was counted before, or on top of these."""
    global _NOW
    before, _NOW = _NOW, onto or Counts()
    try:
        yield _NOW
    finally:
        _NOW = before


class OnDevice(Tensor):
    """A tensor that says cuda:0; `held` has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, held: Tensor, **_: Any) -> "OnDevice":
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    def tolist(self) -> Any:
        """Return the values, as the real one does after waiting for the stream."""
        counts().waits.append(f"{place()} tolist")
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as torch does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, _: object) -> None:
        """Do nothing: memory is the host's."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


def held(value: Any) -> Any:
    """Return what a tensor of the device holds; anything else as it is."""
    return value.held if isinstance(value, OnDevice) else value


def place() -> str:
    """Return the innermost line of ours on the stack, else of TorchRec or fbgemm."""
    other = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        if not other and any(f"/{part}/" in name for part in ("torchrec", "fbgemm_gpu")):
            other = f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "autograd"


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of plain tuples, lists and dicts, in half of the time of torch's tree_map."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(function, one) for one in tree])
    if kind is dict:
        return {name: mapped(function, one) for name, one in tree.items()} if tree else tree
    return function(tree)


def held_in(tree: Any) -> Any:
    """Return arguments with what each device tensor holds: mapped(held, tree), but faster."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(
            [
                one.held
                if isinstance(one, OnDevice)
                else held_in(one)
                if type(one) in NESTS
                else one
                for one in tree
            ]
        )
    if kind is dict:
        return {name: held_in(one) for name, one in tree.items()} if tree else tree
    return held(tree)


NESTS = (tuple, list, dict)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of arguments or results."""
    found: list[Tensor] = []
    kind = type(tree)
    for one in tree.values() if kind is dict else tree if kind in NESTS else (tree,):
        if isinstance(one, Tensor):
            found.append(one)
        elif type(one) in NESTS:
            found += tensors_in(one)
    return found


class _Pinned:
    """Which host memory is pinned; a CPU build of torch has none."""

    storages: ClassVar[dict[int, StorageWeakRef]] = {}

    @classmethod
    def add(cls, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        cls.storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    @classmethod
    def has(cls, tensor: Tensor) -> bool:
        found = cls.storages.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()


class _Capturing:
    """What is captured now, if anything is."""

    tape: ClassVar[Tape | None] = None


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation as `_called` does, onto the tape of a captured graph if there is one."""
    # A stream is captured: what other threads do meanwhile is on streams of their own.
    if _Capturing.tape is None or is_beside():
        return _called(func, args, kwargs)
    now = counts()
    before = len(now.waits) + len(now.to_device) + len(now.to_host)
    result = _called(func, args, kwargs)
    if before != len(now.waits) + len(now.to_device) + len(now.to_host):
        raise RuntimeError(f"operation not permitted when stream is capturing: {func} at {place()}")
    on_host = kwargs if kwargs.get("device") is None else {**kwargs, "device": HOST}
    _Capturing.tape.note(func, *mapped(held, (args, on_host, result)))
    return result


@dataclass(frozen=True)
class Operation:
    """What of an operation is the same at each call."""

    name: str
    is_view: bool  # or silent: it launches no kernel
    indexes: bool


@cache
def operation(func: Any) -> Operation:
    """Return what the operation's schema says."""
    name, returns = func._schema.name, func._schema.returns
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return Operation(name, is_view or name in SILENT, name.startswith("aten::index"))


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation of torch as CUDA would: on the values, where the result belongs, counted."""
    name = operation(func).name
    given = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
    on_device = [one for one in given if isinstance(one, OnDevice)]
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": HOST}
    is_cuda = bool(on_device) if asked is None else torch.device(asked).type == "cuda"
    if kwargs.pop("pin_memory", False):
        return _Pinned.add(func(*args, **kwargs))
    if name == "aten::_pin_memory":
        return _Pinned.add(args[0].clone())
    if name == "aten::is_pinned":
        return not isinstance(args[0], OnDevice) and _Pinned.has(args[0])
    if name == "aten::_to_copy":
        return _copied(func, given[0], is_cuda, kwargs)
    if name == "aten::copy_":
        return _copied_into(func, args, kwargs)
    if name.startswith("c10d::"):
        counts().collectives.append(name.removeprefix("c10d::").removesuffix("_"))
        # What torch gathers of objects it would have put on the GPU itself.
        if not on_device and name in ("c10d::allreduce_", "c10d::alltoall_base_"):
            _check_group(name, args)
    if name == "aten::_efficientzerotensor":
        # It has no memory, and what knows that stands above this place in torch's dispatcher: a
        # kernel would read where there is nothing. Autograd makes one, as of sgn's derivative.
        func = torch.ops.aten.zeros.default
    if not on_device:
        result = func(*args, **kwargs)
    else:
        if len(on_device) < len(given):
            _check_places(name, args, given)
        result = func(*held_in(args), **held_in(kwargs))
    if not is_cuda:
        return result
    count_launch(func, args, kwargs, given, result)
    by_memory = {id(one.held): one for one in on_device}  # in place, out=: the argument comes back

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return by_memory[id(value)] if id(value) in by_memory else OnDevice(value)

    return mapped(wrapped, result)


def _check_places(name: str, args: tuple[Any, ...], given: list[Tensor]) -> None:
    """Refuse arguments of host and device that torch refuses on CUDA."""
    # Kernels that go element by element take a single number of the host; joining takes none.
    joins = name in ("aten::cat", "aten::stack")
    on_host = [one for one in given if not isinstance(one, OnDevice) and (one.dim() or joins)]
    if not on_host:
        return
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        # torch takes such indices over to the device, and waits for that.
        counts().to_device.extend(f"{place()} {name}" for _ in on_host)
        counts().waits.append(f"{place()} {name} with indices of the host")
    elif not name.startswith(("c10d::", "aten::_foreach")):
        shapes = [tuple(one.shape) for one in on_host]
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name} at {place()} has tensors of "
            f"shape {shapes} on the host and others on cuda:0"
        )


def _check_group(name: str, args: tuple[Any, ...]) -> None:
    """Refuse tensors of the host in the job's own group: on GPUs it is NCCL's."""
    boxed = next(one for one in args if isinstance(one, torch.ScriptObject))
    if dist.ProcessGroup.unbox(boxed) == dist.group.WORLD:
        raise RuntimeError(
            f"No backend type associated with device type cpu: {name} at {place()} has tensors of "
            "the host for the job's own group"
        )


def _copied(func: Any, source: Tensor, is_cuda: bool, kwargs: dict[str, Any]) -> Tensor:
    """Do `to`: a copy between host and device, or a kernel that casts."""
    non_blocking = kwargs.pop("non_blocking", False)
    made = func(held(source), **kwargs)
    if is_cuda and isinstance(source, OnDevice):
        counts().launches["aten::_to_copy"] += 1
        return OnDevice(made)
    if is_cuda:
        _count_copy(counts().to_device, source, source, non_blocking)
        return OnDevice(made.clone() if made is source else made)
    if isinstance(source, OnDevice):
        # Without pinned memory of one's own a copy to the host is waited for.
        _count_copy(counts().to_host, made, source, non_blocking=False)
    return made


def _copied_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source, *rest = args
    non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
    func(held(target), held(source))
    if isinstance(target, OnDevice) and isinstance(source, OnDevice):
        counts().launches["aten::copy_"] += 1
    elif isinstance(target, OnDevice):
        _count_copy(counts().to_device, source, source, non_blocking)
    elif isinstance(source, OnDevice):
        _count_copy(counts().to_host, target, source, non_blocking)
    return target


def _count_copy(copies: list[str], host: Tensor, source: Tensor, non_blocking: bool) -> None:
    at = f"{place()} copy of {source.numel() * source.element_size()} bytes"
    copies.append(at)
    if not _Pinned.has(host):
        counts().pageable.append(at)
    if not non_blocking:
        counts().waits.append(at)


def count_launch(func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
    """Count the launch of an operation on the device, and its wait."""
    of = operation(func)
    name, now = of.name, counts()
    is_mask = of.indexes and any(
        one.dtype in (torch.bool, torch.uint8) for one in tensors_in(args[1:2])
    )
    unknown = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
    if name in WAITING or is_mask or unknown:
        now.waits.append(f"{place()} {name}")
    if of.is_view:
        return
    now.launches[name] += 1
    if not now.with_work:
        return
    now.bytes += sum(one.numel() * one.element_size() for one in (*given, *tensors_in(result)))
    now.flops += _flops(func, name, args, kwargs, result)


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    if packet not in flop_registry and name.endswith("_"):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), packet)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


class _Threads(threading.local):
    """Whether this thread was told which GPU of the machine it is on."""

    told = False


_threads = _Threads()
_on_cpu = False


@contextmanager
def without_gpu() -> Iterator[None]:
    """Refuse whatever takes memory of a GPU inside: what is done there is the CPU's."""
    global _on_cpu
    _on_cpu = True
    try:
        yield
    finally:
        _on_cpu = False


def _set_device(_: object) -> None:
    _threads.told = True
    if threading.current_thread() is not threading.main_thread():
        # A mode is of one thread. This one begins: it stays in it.
        PretendedDevice().__enter__()


def _ask_for_gpu() -> None:
    """Refuse what Python's own threads would get of the machine's first GPU: it is another rank's.
    For the main thread start_ranks chooses, for autograd's threads torch does."""
    name = threading.current_thread().name
    if _on_cpu:
        raise RuntimeError(f"a run on the CPU asks for a GPU at {place()}")
    if not _threads.told and not name.startswith(("MainThread", "Dummy")):
        raise RuntimeError(f"thread {name} asks for a GPU at {place()}, and was not told which")


def asked_for(made: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function of torch.cuda that is asked for what is on the current GPU."""

    def asked(*_: Any) -> Any:
        _ask_for_gpu()
        return made()

    return asked


class _Stream:
    """Every stream and context of streams: what is launched is done at once."""

    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts().waits.append(f"{place()} stream.synchronize")

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Event":
        return _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        counts().waits.append(f"{place()} event.synchronize")

    def elapsed_time(self, _: object) -> float:
        return 1.0


class _Graph:
    """A CUDA graph: the operations of its capture, called again as one launch."""

    def __init__(self) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        counts().launches["a graph"] += 1
        self.tape.replay()

    def pool(self) -> None: ...


@contextmanager
def _capturing(graph: _Graph, **_: Any) -> Iterator[None]:
    """Capture what is launched inside."""
    _Capturing.tape = graph.tape
    try:
        yield
    finally:
        _Capturing.tape = None


class PretendedDevice(TorchDispatchMode):
    """Inside, what is made on cuda without a tensor of it is there, too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch.compile in: nothing is compiled, and keeping it out costs a tenth."""
        return False

    def __enter__(self) -> "PretendedDevice":
        torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


class Counting(TorchDispatchMode):
    """Inside, what a true device is asked for is counted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        count_launch(func, args, kwargs, given, result)
        return result


def start() -> None:
    """Give this process a pretended GPU."""
    load_guard()
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": asked_for(lambda: 0),
        "set_device": _set_device,
        "is_bf16_supported": lambda *_, **__: True,
        "current_stream": asked_for(_Stream),
        "default_stream": asked_for(_Stream),
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _capturing,
        "stream": lambda stream: _Stream(),
        "device": _Stream,
        "synchronize": lambda *_: counts().waits.append(f"{place()} cuda.synchronize"),
        "mem_get_info": lambda *_: (140 << 30, 141 << 30),
    }.items():
        setattr(torch.cuda, name, value)
    torch.empty = _empty  # threads that arrange batches are not inside PretendedDevice
    # Module.to replaces parameters: torch cannot swap the memory of tensors of different kinds.
    torch.__future__.set_overwrite_module_params_on_conversion(True)


_empty_of_torch = torch.empty


def _empty(*size: Any, pin_memory: bool = False, **rest: Any) -> Tensor:
    """torch.empty, with the pinned memory that a CPU build of torch has none of."""
    made = _empty_of_torch(*size, **rest)
    if not pin_memory:
        return made
    _ask_for_gpu()
    return _Pinned.add(made)


def to_device(module: nn.Module) -> nn.Module:
    """Put a module on the device, outside of PretendedDevice too."""
    with PretendedDevice():
        return module.to(CUDA)
