"""Predicts a step of greedy rows from its executables, term by term, and compares it with the roofline.

The roofline reads every weight and every row's KV once at the rate of large copies, or multiplies at the rate of tensor cores
if that is longer. All else is the bill: each term is seconds above the roofline.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import NamedTuple

from benchmarks.gpu_bill.cases import StepSize
from benchmarks.gpu_bill.kernel_time import AttentionWork, Device
from benchmarks.gpu_bill.program import COLLECTIVES
from benchmarks.gpu_bill.reading import Launch, Reading

OURS = "paged_"


class AttentionSizes(NamedTuple):
    """The attention of a layer, or of a GPU's part of it.

    Attributes:
        kv_per_token: bytes in bfloat16.
        tile_tokens: context tokens per turn of the decode kernel.
        pair_flops: operations for a query token and a token of its context.
        window: context tokens that a token sees; None: all.
    """

    num_kv_heads: int
    kv_per_token: int
    tile_tokens: int
    pair_flops: int
    window: int | None = None

    def work(self, size: StepSize) -> AttentionWork:
        """Of a step."""
        context = min(size.context, self.window or size.context)
        kv_bytes = size.rows * context * self.kv_per_token
        return AttentionWork(
            size.rows, context, size.chunk, self.num_kv_heads, kv_bytes, self.tile_tokens, self.pair_flops
        )


class ModelBytes(NamedTuple):
    """The sizes of a model, or of a GPU's part of it, that a step's time depends on; bytes in bfloat16.

    Attributes:
        weights: bytes of all layers and the head; of experts of those in use.
        active: of these bytes those that multiply a row.
        head: of these those that multiply sampled rows only.
        layers_per_call: layers of an executable in an engine.
        attention: of the layers of an executable that was compiled.
    """

    weights: int
    active: int
    head: int
    num_layers: int
    layers_per_call: int
    attention: tuple[AttentionSizes, ...]


@dataclass(frozen=True)
class Step:
    """A predicted step; all terms in seconds.

    Attributes:
        weights, kv: of the roofline; `compute` is what tensor cores take beyond these.
        products: of products beyond the weights' bytes: rates, padding to the bucket, missing tensor cores.
        attention: of attention beyond the bytes of the decode rows' KV.
        empty_blocks: of blocks of its grid that find no work.
        collectives: of sums over the GPUs that share the model.
        others: of norms, rotations, KV writes, sampling and temporaries.
        uploads: of the device's waits for what the host uploads.
        updates: of the device's waits for graphs that are recorded anew.
        host: of its waits for all other work of the host.
        kernels, waits: launches of the step, and how often the host waits for the device within it.
        update_work: seconds of the host for graphs that are recorded anew, hidden or not.
    """

    weights: float
    kv: float
    compute: float
    products: float
    attention: float
    empty_blocks: float
    collectives: float
    others: float
    uploads: float
    updates: float
    host: float
    kernels: float
    waits: float
    update_work: float

    @property
    def roofline(self) -> float:
        """Seconds of the least step."""
        return self.weights + self.kv + self.compute

    @property
    def seconds(self) -> float:
        """Seconds of the predicted step."""
        on_device = self.products + self.attention + self.empty_blocks + self.collectives + self.others
        return self.roofline + on_device + self.uploads + self.updates + self.host

    def row(self) -> dict[str, float]:
        """All numbers by name."""
        return asdict(self) | {
            "roofline": self.roofline,
            "seconds": self.seconds,
            "ratio": self.seconds / self.roofline,
        }


@dataclass
class Sums:
    """Seconds and counts over the launches of a step."""

    products: float = 0.0
    attention: float = 0.0
    empty_blocks: float = 0.0
    collectives: float = 0.0
    others: float = 0.0
    kernels: float = 0.0
    streamed: float = 0.0
    graph_nodes: float = 0.0
    graphs: float = 0.0
    calls: float = 0.0
    waits: float = 0.0

    def add(self, other: "Sums", times: float) -> None:
        """Add another's, several times."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + times * value)


def predict(readings: Sequence[Reading], device: Device, model: ModelBytes, size: StepSize) -> Step:
    """A step of greedy rows, by the executables of one case."""
    assumed = device.assumed
    if size.chunk:
        readings = [reading for reading in readings if not reading.decode_only]
    works = [layer.work(size) for layer in model.attention]
    kv_bytes = sum(work.kv_bytes for work in works) * model.num_layers / len(works)
    step, groups = Sums(), math.ceil(model.num_layers / model.layers_per_call)
    layers = _cheapest(readings, device, "layers", works)
    step.add(layers, model.num_layers)
    for kind in ("embed", "head", "sample"):
        step.add(_cheapest(readings, device, kind, works), 1.0)
    step.calls += groups + 3
    step.graphs += groups * min(1.0, layers.graph_nodes)
    memory_s = model.weights / assumed.copy_rate, kv_bytes / assumed.copy_rate
    flops = (model.active - model.head) * size.tokens + model.head * size.sequences
    compute_s = max(0.0, flops / assumed.tensor_rate - sum(memory_s))
    uploads = assumed.uploads * assumed.upload_bubble
    on_device = step.products + step.attention + step.empty_blocks + step.collectives + step.others
    device_s = on_device + uploads
    # a target without a driver shows no graph of products; a device records all launches of the layers
    share = 1.0 if groups > 1 else assumed.graph_update_share
    update_work = share * layers.kernels * model.num_layers * assumed.graph_update
    host = _host_s(step, device, 0.0, device_s)
    return Step(
        *memory_s,
        compute_s,
        products=step.products - memory_s[0] - compute_s,
        attention=step.attention - memory_s[1],
        empty_blocks=step.empty_blocks,
        collectives=step.collectives,
        others=step.others,
        uploads=uploads,
        updates=_host_s(step, device, update_work, device_s) - host,
        host=host,
        kernels=step.kernels,
        waits=step.waits,
        update_work=update_work,
    )


def _host_s(step: Sums, device: Device, update_work: float, device_s: float) -> float:
    """What the device waits for: all of the host's work that no compute hides.

    Args:
        update_work: seconds for graphs that are recorded anew.
        device_s: seconds of the device's own work.
    """
    assumed = device.assumed
    calls = step.calls * assumed.executable_call
    launches = step.streamed * assumed.stream_launch + step.graphs * assumed.graph_launch
    busy = assumed.host_step + calls + launches + update_work
    exposed = max(0.0, busy - device_s)
    if step.waits:  # the next step is planned and dispatched only after the device is done
        first = assumed.host_step + assumed.executable_call
        exposed = max(exposed, first + step.waits * assumed.host_wait)
    return exposed


def _cheapest(readings: Iterable[Reading], device: Device, kind: str, works: Sequence[AttentionWork]) -> Sums:
    """The sums of the cheapest executable of a kind, of layers for one layer: a runner has variants for what rows ask."""
    candidates = [reading for reading in readings if reading.kind == kind and reading.error is None]
    assert candidates, f"no executable {kind}"
    sums = [_sums(reading, device, works) for reading in candidates]
    return min(
        sums,
        key=lambda total: total.products + total.attention + total.others,
    )


def _sums(reading: Reading, device: Device, works: Sequence[AttentionWork]) -> Sums:
    """The sums of one executable, of layers for one layer; the layers' kernels are launched in their order."""
    path = reading.path(device.assumed.loop_turns)
    sums = Sums(waits=reading.waits(device.assumed.loop_turns))
    attends, of_decodes, of_chunks = _attending(path), cycle(works), cycle(works)
    rows = reading.num_rows
    for launch in path:
        sums.kernels += launch.turns
        kernel = reading.kernels.get(launch.thunk.kernel)
        if launch.thunk.kernel in attends and kernel is not None:
            work = next(of_decodes)
            sums.attention += launch.turns * device.attention_s(launch, kernel, work)
            sums.empty_blocks += launch.turns * device.empty_blocks_s(launch, kernel, work)
        elif launch.attends_chunks:
            sums.attention += launch.turns * device.chunk_attention_s(next(of_chunks))
        elif launch.thunk.kind in COLLECTIVES:
            sums.collectives += launch.turns * device.seconds(launch, kernel, rows)
        elif launch.traffic.weight:
            sums.products += launch.turns * device.seconds(launch, kernel, rows)
        else:
            sums.others += launch.turns * device.seconds(launch, kernel, rows)
        if launch.in_graph:
            sums.graph_nodes += launch.turns
        else:
            sums.streamed += launch.turns
    layers = int(reading.key[2]) if reading.kind == "layers" else 1
    averaged = Sums()
    averaged.add(sums, 1 / layers)
    return averaged


def _attending(path: Iterable[Launch]) -> set[str]:
    """The kernels that read the KV of decode rows: those with `decode` in their names, or else all of ours that read pages."""
    ours = {launch.thunk.kernel for launch in path if launch.traffic.pages and launch.thunk.kernel.startswith(OURS)}
    return {name for name in ours if "decode" in name} or ours
