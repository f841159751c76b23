"""What `torch.cuda` shows of the emulated device (`native/`): the functions of `torch._C` that a torch
without CUDA lacks.

It runs in every process of a command and imports nothing of the project.
"""

import atexit
import collections
import itertools
import json
import os
import pickle
import sys
import types
from pathlib import Path

import torch

PREFIX = "EMULATED_CUDA_"
HIP = os.environ.get(PREFIX + "HIP")
"""The version of ROCm for a GPU of AMD."""
ABORT = (
    "Memory access fault by GPU node-{} (Agent handle: 0x55fea5592860) on address 0x7fc133800000. "
    "Reason: Page not present.\n"
)
"""What ROCm's runtime prints before it ends the process."""


def install(native, kernels):
    """Give torch the device and its kernels in Python. Called once, after torch is imported."""
    for part in (_devices, _memory, _streams, _storages, _process_groups):
        part(native)
    if PREFIX + "TRITON" not in os.environ:
        _compiler()
    kernels.install(native)
    if fault := os.environ.get(PREFIX + "FAULT"):
        _fail(native, *fault.split(":"))
    if folder := os.environ.get(PREFIX + "REPORT"):
        report = Report(native)
        report.begin(races=PREFIX + "RACES" in os.environ)
        report.write_at_exit(Path(folder))


def _set(**functions):
    for name, function in functions.items():
        setattr(torch._C, name, function)


def _properties():
    major, minor = map(int, os.environ[PREFIX + "CAPABILITY"].split("."))
    memory = int(float(os.environ[PREFIX + "MEMORY_GIB"]) * 2**30)
    return types.SimpleNamespace(
        name=os.environ[PREFIX + "NAME"],
        major=major,
        minor=minor,
        total_memory=memory,
        multi_processor_count=int(os.environ[PREFIX + "MULTIPROCESSORS"]),
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        warp_size=64 if HIP else 32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
        gcnArchName="gfx942:sramecc+:xnack-" if HIP else "",
        uuid="00000000-0000-0000-0000-000000000001",
        pci_bus_id=1,
    )


def _devices(native):
    generators = tuple(native.default_generator(index) for index in range(native.device_count()))
    properties = _properties()

    def init():
        native.initialise()
        torch.cuda.default_generators = generators
        torch.cuda._get_device_properties = lambda device: properties

    _set(
        _cuda_init=init,
        _cuda_getDeviceCount=native.device_count,
        _cuda_getDevice=native.current_device,
        _cuda_setDevice=native.set_device,
        _cuda_exchangeDevice=native.exchange_device,
        _cuda_maybeExchangeDevice=native.exchange_device,
        _cuda_canDeviceAccessPeer=lambda one, other: True,
        _cuda_isInBadFork=lambda: False,
        _cuda_getCompiledVersion=lambda: 13000,
        _cuda_getDriverVersion=lambda: 13000,
        _cuda_getArchFlags=lambda: "gfx90a gfx942" if HIP else "sm_75 sm_80 sm_86 sm_90 sm_100",
        _cuda_synchronize=lambda: native.synchronize(native.current_device()),
        _cuda_ipc_collect=lambda: None,
        _cuda_sleep=lambda cycles: None,
        _cuda_getCurrentBlasHandle=lambda: 0,
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_getCurrentRawStream=lambda device: (
            torch.accelerator.current_stream(torch.device("cuda", device)).stream_id
        ),
        _has_cuda=True,
        _cuda_CUDAAllocator_AllocatorState=type("AllocatorState", (), {}),
        _set_cached_tensors_enabled=lambda enabled: None,
    )
    cuda = torch.cuda
    cuda._exchange_device = native.exchange_device
    # dynamo knows each by its own object
    cuda._maybe_exchange_device = lambda index: native.exchange_device(index)
    cuda._cudart = Runtime(native)
    cuda.is_current_stream_capturing = lambda: False
    cuda.nccl.version = lambda: (2, 28, 9)
    torch.version.cuda, torch.version.hip = (None, HIP) if HIP else ("13.0", None)
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.version = lambda: 91000
    cuda.default_generators = generators


class Runtime:
    """`torch.cuda.cudart()`."""

    class cudaError:
        success = 0

        def __new__(cls, code):
            return code

    def __init__(self, native):
        self._native = native

    def cudaHostRegister(self, pointer, size, flags):
        if not self._native.can_pin(size):
            return 2  # cudaErrorMemoryAllocation
        self._native.pin(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer):
        self._native.unpin(pointer)
        return 0

    def cudaMemGetInfo(self, device=0):
        stats = self._native.memory_stats(device)
        reserved = sum(stats[pool]["reserved_bytes"]["current"] for pool in ("small_pool", "large_pool"))
        return self._native.total_memory() - reserved, self._native.total_memory()

    def cudaGetErrorString(self, code):
        return "no error" if code == 0 else "out of memory"

    def cudaProfilerStart(self):
        return 0

    def cudaProfilerStop(self):
        return 0


def _memory(native):
    def stats(device):
        pools = native.memory_stats(device)
        found = {
            "num_alloc_retries": pools["num_alloc_retries"],
            "num_ooms": pools["num_ooms"],
            "num_sync_all_streams": 0,
        }
        for kind in pools["small_pool"]:
            small, large = pools["small_pool"][kind], pools["large_pool"][kind]
            both = {name: small[name] + large[name] for name in small}
            both["peak"] = pools["peaks"][kind]
            found[kind] = {"all": both, "small_pool": small, "large_pool": large}
        return found

    trace = []

    def record(enabled, *_, **__):
        if not enabled:
            native.on_memory_change(None)
            return
        trace.clear()

        def changed(device, address, size, requested):
            action = "alloc" if size > 0 else "free_completed"
            stream = torch.accelerator.current_stream(torch.device("cuda", device)).stream_id
            trace.append(
                {
                    "action": action,
                    "addr": address,
                    "size": abs(requested),
                    "stream": stream,
                    "frames": [],
                    "time_us": 0,
                }
            )

        native.on_memory_change(changed)

    _set(
        _cuda_memoryStats=stats,
        _cuda_resetPeakMemoryStats=native.reset_peaks,
        _cuda_resetAccumulatedMemoryStats=lambda device: None,
        _cuda_hostMemoryStats=dict,
        _cuda_emptyCache=lambda: native.empty_cache(native.current_device()),
        _cuda_memorySnapshot=lambda *_: {
            "segments": native.segments(),
            "device_traces": [list(trace)],
            "allocator_settings": {},
        },
        _cuda_record_memory_history=record,
        _cuda_record_memory_history_legacy=record,
        _cuda_getAllocatorBackend=lambda: "native",
        _cuda_setMemoryFraction=lambda fraction, device: native.set_memory_limit(
            int(fraction * native.total_memory())
        ),
    )


# torch's C++ wants the very types of its generic streams and events, so these classes make and recognise
# those.
class _Generic(type):
    def __instancecheck__(cls, it):
        return isinstance(it, cls.generic)


class Stream(metaclass=_Generic):
    generic = torch.Stream

    def __new__(cls, device=None, priority=0, **_):
        return torch.Stream(torch.device("cuda", _index(device)), priority=priority)


class ExternalStream(Stream):
    pass


class Event(metaclass=_Generic):
    generic = torch.Event

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return torch.Event(
            device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def _index(device):
    return torch.cuda._utils._get_device_index(device, optional=True)


class StreamContext:
    """`with torch.cuda.stream(…)`."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self._device = torch.cuda.device(self.stream.device)
            self._device.__enter__()
            self._before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is not None:
            torch.accelerator.set_stream(self._before)
            self._device.__exit__(None, None, None)


def _streams(native):
    cuda = torch.cuda
    new = {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "current_stream": lambda device=None: torch.accelerator.current_stream(
            torch.device("cuda", _index(device))
        ),
        "default_stream": lambda device=None: native_default(_index(device)),
        "set_stream": lambda stream: None if stream is None else torch.accelerator.set_stream(stream),
    }

    def native_default(index):
        return torch.Stream(stream_id=0, device_index=index, device_type=1)

    for name, value in new.items():
        setattr(cuda, name, value)
    for name in ("Stream", "Event", "ExternalStream"):
        setattr(sys.modules["torch.cuda.streams"], name, new[name])


def _storages(native):
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def as_bytes(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resized(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        native.resize_storage(as_bytes(storage), int(size))
        return storage

    torch.UntypedStorage.resize_ = resized
    torch.UntypedStorage.clone = lambda storage: (
        as_bytes(storage).clone().untyped_storage() if storage.device.type == "cuda" else clone(storage)
    )


def _process_groups(native):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    native.bind_nccl()
    module = sys.modules["torch._C._distributed_c10d"]
    c10d._NCCL_AVAILABLE = True
    for holder in (module, c10d, dist):
        holder.ProcessGroupNCCL = native.ProcessGroupNCCL
    module._dump_nccl_trace = lambda *_, **__: pickle.dumps(_flight_recorder(native))
    module._dump_nccl_trace_json = lambda *_, **__: json.dumps(_flight_recorder(native)).encode()
    module._DEFAULT_PG_NCCL_TIMEOUT = c10d.default_pg_nccl_timeout = module._DEFAULT_PG_TIMEOUT


def _flight_recorder(native):
    return {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": native.collectives()}


def _compiler():
    compiled = torch.compile

    def compile_without_triton(*arguments, backend="inductor", **options):
        """Trace and differentiate as the compiler does, and run operation by operation: Triton has no target
        here."""
        if backend == "inductor":
            backend = "aot_eager"
            options.pop("mode", None)
            options.pop("options", None)
        return compiled(*arguments, backend=backend, **options)

    torch.compile = compile_without_triton


def _fail(native, device, step, how):
    """Let a device fail in the first forward after so many steps of an optimizer: with an error of CUDA by
    its number, or it `hangs` or `aborts`."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if os.environ.get("LOCAL_RANK") != device:
        return
    steps, armed = itertools.count(1), []

    def stepped(*_):
        if next(steps) == int(step):
            armed.append(register_module_forward_pre_hook(fail))

    def fail(*_):
        if armed:
            armed.pop().remove()
            if path := os.environ.get(PREFIX + "LOST"):
                Path(path).write_text(device)
            if how == "aborts":
                os.write(2, ABORT.format(device).encode())
                os.abort()
            native.fail_device(-1 if how == "hangs" else int(how))

    register_optimizer_step_post_hook(stepped)


class Report:
    """What a process counts of waits of the host and of races between streams.

    `synchronisations`: kind, operation, call sites from the innermost, times, and in how many steps of an
    optimizer; `races`: sentences;
    `operations`: kernels launched.
    """

    FRAMES = 12

    def __init__(self, native):
        self._native = native
        self._counts = collections.defaultdict(collections.Counter)
        self._step = 0

    def begin(self, *, races):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._races_before = len(self._native.races())
        self._native.on_synchronise(self._synchronised)
        if races:
            self._native.watch_orders(lambda: " < ".join(self._sites()))

    def end(self):
        """Stop counting and return what was counted."""
        self._native.on_synchronise(None)
        self._native.watch_orders(None)
        self._hook.remove()
        counts = [
            {"kind": kind, "operation": what, "site": site, "times": steps.total(), "steps": len(steps)}
            for (kind, what, site), steps in self._counts.items()
        ]
        document = {"argv": sys.argv, "rank": os.environ.get("RANK"), "operations": self._native.operations()}
        return document | {"synchronisations": counts, "races": self._native.races()[self._races_before :]}

    def write_at_exit(self, folder):
        def write():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{os.getpid()}.json").write_text(json.dumps(self.end(), indent=1))

        atexit.register(write)

    def _stepped(self, *_):
        self._step += 1

    def _synchronised(self, kind, what):
        self._counts[(kind, what, " < ".join(self._sites()))][self._step] += 1

    def _sites(self):
        frame, sites = sys._getframe(), []
        while frame is not None and len(sites) < self.FRAMES:
            path = frame.f_code.co_filename
            if path != __file__:
                sites.append(f"{_short(path)}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return sites or ["a thread of C++"]


def _short(path):
    for root in ("site-packages/", "fsdp_tune/"):
        _, found, after = path.rpartition(root)
        if found:
            return after if root == "site-packages/" else f"fsdp_tune/{after}"
    return path
