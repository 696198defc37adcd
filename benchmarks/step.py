"""The training step compared with others: time, memory, operations, bytes saved for the backward
pass, FLOPs.

    python benchmarks/step.py [--quick] [--json FILE] [--rounds N] [--dtypes fp32 bf16] [--device
    cpu]
    python benchmarks/step.py --images          # only: an image of 256 px beside texts of as many rows
    python benchmarks/step.py --device cuda     # one GPU: tokens/s, MFU and peak memory of the 0.9B model

One process, one thread, variants in turns (A B A B), medians of process CPU seconds with wall
seconds beside them (wall on a GPU). References (extra `bench`): PyPI mmdit 0.3.0 wired as MM-LDLM
wires it, diffusers' SD3 joint blocks, and the bare matrix products of the needed work. They run
unchanged: torch's default AdamW, bf16 weights in bf16. Operations are counted by a dispatch mode,
without views.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from _reference_steps import Ours, Shape, build, missing_peers  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DENSE = (Shape("S127 B8"), Shape("S512 B4", length=512, batch=4))
# Mean length 35 % of the longest, as random batches of real corpora have (the sketch
# reached 4.6 x on it), and for comparison 35 % of padding.
PADDED = Shape("S256 B8, 35 % filled", length=256, fill=0.35)
HALF_PADDED = Shape("S256 B8, 65 % filled", length=256, fill=0.65)
# An image of 256 px as 256 patches of 16 x 16 x 3 beside a short caption (vocabulary: what `mmldlm
# prepare` makes at most, unasked), and texts of as many rows.
IMAGE = Shape("256 px, S16 B4", length=16, batch=4, vocab=8192, latents=256, latent=768)
AS_TEXT = Shape("S271 B4", length=271, batch=4)
# Models of the kind that is trained on images of these sizes, narrow, in batches whose peak stands
# out of a process.
NARROW_IMAGES = (
    Shape(
        "16 px, S10 B192",
        depth=4,
        width=128,
        length=10,
        batch=192,
        vocab=500,
        latent=16,
        latents=16,
    ),
    Shape(
        "64 px, S16 B16",
        depth=4,
        width=256,
        length=16,
        batch=16,
        vocab=2000,
        latent=192,
        latents=64,
    ),
    Shape(
        "256 px, S16 B8",
        depth=4,
        width=256,
        length=16,
        batch=8,
        vocab=2000,
        latent=768,
        latents=256,
    ),
)
TINY = Shape("depth 24", depth=24, width=64, length=8, batch=2, vocab=1000, latent=32)
PEERS = ("mmldlm_wiring", "sd3_blocks")


# -- time -----------------------------------------------------------------------------------------


def measure(
    shape: Shape, dtype: str, names: tuple[str, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians a variant: CPU and wall seconds of forward + backward, and of the whole step with
    clip and AdamW.
    """
    return time_variants({name: build(name, shape, DTYPES[dtype]) for name in names}, rounds)


def time_variants(variants: dict, rounds: int) -> dict:
    """`measure` of these variants, in turns."""
    taken: dict = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, variant in variants.items():
            clocks = [(time.process_time(), time.perf_counter())]
            variant.forward_backward()
            clocks.append((time.process_time(), time.perf_counter()))
            if hasattr(variant, "update"):
                variant.update()
            clocks.append((time.process_time(), time.perf_counter()))
            if turn:  # the first one warms up
                taken[name].append(
                    tuple(
                        clocks[end][which] - clocks[0][which] for end in (1, 2) for which in (0, 1)
                    )
                )
    keys = ("passes_cpu", "passes_wall", "step_cpu", "step_wall")
    return {
        name: dict(zip(keys, map(statistics.median, zip(*rows)))) for name, rows in taken.items()
    }


def show(shape: Shape, dtype: str, times: dict[str, dict[str, float]]) -> None:
    print(
        f"\n{shape.name}, depth {shape.depth}, width {shape.width}, {dtype}: CPU ms (wall ms),"
        " ratio to ours"
    )
    ours = times["ours"]
    for name, row in times.items():
        passes, step = row["passes_cpu"] / ours["passes_cpu"], row["step_cpu"] / ours["step_cpu"]
        cells = {key: f"{1e3 * value:7.0f}" for key, value in row.items()}
        print(
            f"  {name:15} forward+backward {cells['passes_cpu']} ({cells['passes_wall']})"
            f" {passes:5.2f}   step {cells['step_cpu']} ({cells['step_wall']}) {step:5.2f}"
        )


# -- counts ---------------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    """Counts dispatched operations that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def count_ops(variant, with_update: bool) -> int:
    """aten operations of forward and backward, and of clip and AdamW."""
    variant.forward_backward()
    if with_update:
        variant.update()
    with CountOps() as counted:
        variant.forward_backward()
        if with_update:
            variant.update()
    return counted.count


def saved_bytes(variant) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once, weights and
    inputs not counted.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    known = {
        t.untyped_storage()._cdata for t in [*variant.model.parameters(), *variant.model.buffers()]
    }

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        # The tensor itself, where it is an output, would keep its graph alive for good.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = variant.loss()
    total = sum(storage.nbytes() for storage in kept.values())
    return total + _gradients_kept(loss)


def _gradients_kept(loss: torch.Tensor) -> int:
    """Our head keeps its gradients, not tensors that hooks see: they count as well."""
    found, todo, seen = 0, [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += sum(
            g.untyped_storage().nbytes()
            for g in getattr(node, "grads", None) or ()
            if g is not None
        )
        todo += [parent for parent, _ in node.next_functions]
    return found


def training_flops(variant: Ours) -> float:
    """FLOPs of forward and backward of a variant's batch, by the FLOP model."""
    from mmldlm.models.flops import estimate_flops

    lengths = variant.batch.attention_mask.sum(1).tolist()
    return estimate_flops(
        variant.model.config, lengths, len(variant.batch.text_positions)
    ).training


def flop_error(shape: Shape) -> float:
    """Relative error of the FLOP model against torch's counter, forward and backward.

    The counter knows no CPU flash attention, so attention runs as plain matrix products.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from mmldlm.models.flops import estimate_flops

    variant = Ours(shape, torch.float32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        variant.forward_backward()
    batch = variant.batch
    lengths = batch.attention_mask.sum(1).tolist()
    found = estimate_flops(variant.model.config, lengths, len(batch.text_positions))
    return abs(found.training / counter.get_total_flops() - 1)


# -- memory ---------------------------------------------------------------------------------------


def step_memory(name: str, shape: Shape) -> float:
    """MiB that forward and backward need beyond the model, in a process of its own (Linux)."""
    words = ["--memory-of", name, "--shape", repr(shape)]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"measuring the memory of {name} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def predicted_memory(shape: Shape) -> float:
    """MiB that preflight's model gives for what step_memory measures: activations, logits,
    gradients (fp32).

    An upper bound: while the backward pass makes gradients, activations are freed.
    """
    from mmldlm.tasks.registry import find_task
    from mmldlm.tasks.translation.config import TranslationConfig

    model = Ours(shape, torch.float32).model.config.model_dump()
    training = {"train_batch_size": shape.batch, "dtype": "fp32", "freeze": "none"}
    sizes = find_task("translation").model_sizes(
        TranslationConfig(model=model, training=training), shape.length
    )
    return (sizes["activations"] + sizes["logits_cpu"] + 4 * sizes["trainable"]) / 2**20


def memory_claim(shapes: tuple[Shape, ...]) -> dict:
    """The largest error of preflight's model of these shapes."""
    errors = []
    for shape in shapes:
        found, expected = step_memory("ours", shape), predicted_memory(shape)
        errors.append(abs(expected / found - 1))
        print(
            f"MiB of a step beyond the model, {shape.name}: measured {found:.0f}, preflight's"
            f" model {expected:.0f}"
        )
    return _report.claim("memory_model_error", max(errors), "<=", 0.25, measured=True)


def print_memory(name: str, shape: Shape) -> None:
    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))

    variant = build(name, replace(shape, length=8, batch=2, fill=1.0), torch.float32)
    variant.forward_backward()  # libraries are loaded, thread pools made
    del variant
    variant = build(name, shape, torch.float32)
    # Freed pages that malloc still holds would hide a part of the step's.
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    variant.forward_backward()
    print(status("VmHWM") - before)


# -- the claims -----------------------------------------------------------------------------------


def cpu_claims(args) -> tuple[list[dict], dict]:
    rows, claims = [], []
    dense, padded, others = DENSE, PADDED, (HALF_PADDED,)
    if args.quick:
        small = {"depth": 2, "width": 64, "vocab": 2000, "latent": 64}
        dense = tuple(replace(shape, length=shape.length // 4, **small) for shape in DENSE)
        padded, others = replace(PADDED, length=64, **small), ()
    ratios: dict[str, list[float]] = {}
    for dtype in args.dtypes:
        for shape in (*dense, padded, *others):
            names = ("ours", *PEERS, "gemm", "gemm_attention")
            times = measure(shape, dtype, names, args.rounds)
            show(shape, dtype, times)
            rows.append({"shape": shape.name, "dtype": dtype, "seconds": times})
            ours = times["ours"]
            if shape is padded:
                ratio = times["mmldlm_wiring"]["step_cpu"] / ours["step_cpu"]
                ratios.setdefault("speedup_mmldlm_padded", []).append(ratio)
            elif shape in dense:
                for peer, name in (
                    ("mmldlm_wiring", "speedup_mmldlm_dense"),
                    ("sd3_blocks", "speedup_sd3_dense"),
                ):
                    ratios.setdefault(name, []).append(
                        times[peer]["passes_cpu"] / ours["passes_cpu"]
                    )
            if shape is dense[0] and dtype == "fp32":
                ratios["times_gemm"] = [ours["passes_cpu"] / times["gemm"]["passes_cpu"]]
    # The least favourable of all shapes and dtypes.
    for name, bound in (
        ("speedup_mmldlm_padded", 5),
        ("speedup_mmldlm_dense", 2.3),
        ("speedup_sd3_dense", 1.35),
    ):
        claims.append(_report.claim(name, min(ratios[name]), ">=", bound, measured=True))
    if "times_gemm" in ratios:
        claims.append(
            _report.claim("times_gemm", ratios["times_gemm"][0], "<=", 1.3, measured=True)
        )

    memory = {name: step_memory(name, padded) for name in ("ours", *PEERS)}
    print("\nMiB of a step beyond the model, " + padded.name + ": " + named(memory, ".0f"))
    ratio = memory["ours"] / memory["mmldlm_wiring"]
    claims.append(
        _report.claim("step_memory_ratio_mmldlm_padded", ratio, "<=", 0.25, measured=True)
    )
    claims.append(memory_claim((dense[0],) if args.quick else (dense[0], *NARROW_IMAGES)))
    # The peers' many operations take a minute to count.
    counted = ("ours",) if args.quick else ("ours", *PEERS)
    ops = {name: count_ops(build(name, TINY, torch.float32), True) for name in counted}
    ops["ours without QK norm"] = count_ops(Ours(TINY, torch.float32, qk_rmsnorm=False), True)
    print(f"aten operations of a step, {TINY.name}: " + named(ops, "d"))
    claims.append(_report.claim("aten_ops_depth24", ops["ours"], "<=", 2000))
    saved = {
        name: saved_bytes(build(name, dense[0], torch.float32)) / 1e6 for name in ("ours", *PEERS)
    }
    print(f"MB kept for the backward pass, {dense[0].name}: " + named(saved, ".0f"))
    claims.append(
        _report.claim(
            "saved_bytes_ratio_mmldlm", saved["ours"] / saved["mmldlm_wiring"], "<=", 0.40
        )
    )
    claims.append(
        _report.claim("saved_bytes_ratio_sd3", saved["ours"] / saved["sd3_blocks"], "<=", 0.75)
    )
    image = replace(IMAGE, depth=1, latents=16, vocab=2000)
    claims.append(
        _report.claim(
            "flop_model_error", max(flop_error(s) for s in (*dense, padded, image)), "<=", 0.01
        )
    )
    of_images, more = image_claims(args)
    return claims + of_images, {
        "rows": rows,
        "memory_mib": memory,
        "aten_ops": ops,
        "saved_mb": saved,
        **more,
    }


def named(values: dict, form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())


# -- images ---------------------------------------------------------------------------------------


def image_claims(args) -> tuple[list[dict], dict]:
    """Time per FLOP of a step on images of 256 px over that on texts of as many rows, in one run,
    with the peers.
    """
    image, text = IMAGE, AS_TEXT
    if args.quick:
        small = {"depth": 2, "width": 64, "vocab": 2000}
        image, text = replace(IMAGE, latents=16, **small), replace(AS_TEXT, length=31, **small)
    counts = [training_flops(Ours(shape, torch.float32)) for shape in (image, text)]
    rows, ratios = [], []
    for dtype in args.dtypes:
        names = ("ours", *PEERS, "gemm", "gemm_attention")
        variants = {
            (shape, name): build(name, shape, DTYPES[dtype])
            for shape in (image, text)
            for name in names
        }
        times = time_variants(variants, args.rounds)
        for shape, count in zip((image, text), counts):
            own = {name: times[shape, name] for name in names}
            show(shape, dtype, own)
            print(
                f"  {count / 1e9:.1f} GFLOP: {count / own['ours']['passes_cpu'] / 1e9:.1f} GFLOP/s"
            )
            rows.append(
                {"shape": shape.name, "dtype": dtype, "gflop": count / 1e9, "seconds": own}
            )
        of_image, of_text = (
            times[shape, "ours"]["passes_cpu"] / count
            for shape, count in zip((image, text), counts, strict=True)
        )
        ratios.append(of_image / of_text)
    claims = [_report.claim("image_time_per_flop", max(ratios), "<=", 1.10, measured=True)]
    return claims, {"image_rows": rows, "image_time_per_flop": dict(zip(args.dtypes, ratios))}


# -- growth ---------------------------------------------------------------------------------------


def growth(args) -> tuple[list[dict], dict]:
    """Step time against batch, length, depth and width, beside the FLOP model (fp32, CPU
    seconds).
    """
    base = Shape("base", depth=4, width=384, length=128, batch=4)
    series = {
        "batch": [replace(base, batch=b) for b in (4, 8, 16)],
        "length": [replace(base, length=s) for s in (128, 256, 512)],
        "depth": [replace(base, depth=d) for d in (4, 8, 12)],
        "width": [replace(base, width=w) for w in (384, 576, 768)],
    }
    if args.quick:
        series = {"batch": [replace(base, depth=1, width=64, vocab=500, batch=b) for b in (2, 4)]}
    claims, rows = [], []
    for axis, shapes in series.items():
        variants = [Ours(shape, torch.float32) for shape in shapes]
        flops = [training_flops(variant) for variant in variants]
        taken: list[list[float]] = [[] for _ in variants]
        for turn in range(args.rounds + 1):
            for variant, seconds in zip(variants, taken):
                started = time.process_time()
                variant.forward_backward()
                if turn:
                    seconds.append(time.process_time() - started)
        seconds = [statistics.median(times) for times in taken]
        rates = [count / time / 1e9 for count, time in zip(flops, seconds)]
        rows.append(
            {"axis": axis, "shapes": [s.name for s in shapes], "gflops": flops, "seconds": seconds}
        )
        # Time a FLOP must not rise as the work grows.
        worst = max(rates[0] / rate for rate in rates[1:])
        print(f"{axis:7} " + "  ".join(f"{rate:6.1f} GFLOP/s" for rate in rates))
        claims.append(_report.claim(f"growth_{axis}", worst, "<=", 1.10, measured=True))
    return claims, {"growth": rows}


# -- checkpointing --------------------------------------------------------------------------------


def checkpointing(args) -> tuple[list[dict], dict]:
    """What model.gradient_checkpointing costs in time and saves in activations (fp32)."""
    shape = Shape("S1024 B2", depth=12, width=384, length=1024, batch=2)
    if args.quick:
        shape = replace(shape, depth=8, width=64, length=64, vocab=500)
    settings = (False, 4, 2, True)
    variants = {
        every: Ours(shape, torch.float32, gradient_checkpointing=every) for every in settings
    }
    times = time_variants(variants, args.rounds)
    kept = {every: saved_bytes(variant) for every, variant in variants.items()}
    plain, rows = times[False]["passes_cpu"], []
    print(f"{shape.name}, depth {shape.depth}, width {shape.width}, fp32")
    for every in settings:
        seconds = times[every]["passes_cpu"]
        print(
            f"  model.gradient_checkpointing={str(every).lower():6} {1e3 * seconds:7.0f} CPU ms"
            f" ({seconds / plain:.2f}), {kept[every] / 2**20:6.0f} MiB kept for the backward pass"
            f" ({kept[every] / kept[False]:.2f})"
        )
        rows.append({"every": every, "seconds": seconds, "bytes": kept[every]})
    ratios = [times[every]["passes_cpu"] / plain for every in (2, True)]
    claims = [
        _report.claim("checkpointed_half_time", ratios[0], "<=", 1.2, measured=True),
        _report.claim("checkpointed_time", ratios[1], "<=", 1.35, measured=True),
        _report.claim("checkpointed_half_bytes", kept[2] / kept[False], "<=", 0.6),
        _report.claim("checkpointed_bytes", kept[True] / kept[False], "<=", 0.2),
    ]
    return claims, {"checkpointing": rows}


# -- one GPU --------------------------------------------------------------------------------------


def gpu_claims(args) -> tuple[list[dict], dict]:
    """Tokens/s, MFU by real FLOPs and peak memory of the 0.9B model at S = 512 and 1024, with and
    without compile.

    Without a GPU the same code runs a small model on the CPU (--device cpu --gpu-form) and claims
    nothing of MFU.
    """
    from mmldlm.observe.throughput import peak_flops

    on_gpu = args.device == "cuda"
    size = dict(depth=24, width=1024) if on_gpu else dict(depth=2, width=64, vocab=500, latent=32)
    lengths = (512, 1024) if on_gpu else (16,)
    batch = 32 if on_gpu else 2
    name = torch.cuda.get_device_name() if on_gpu else None
    peak = peak_flops(name, "bf16", args.peak_tflops)
    rows, best = [], 0.0
    for length in lengths:
        for compiled in (False, True) if on_gpu else (False,):
            shape = Shape(
                f"S{length}",
                length=length,
                batch=batch * 512 // length if on_gpu else batch,
                **size,
            )
            variant = Ours(shape, torch.bfloat16, args.device, tokens_per_latent=4)
            if compiled:
                variant.model.compile_blocks()
            seconds, peak_bytes = gpu_steps(variant, args.rounds + 3, on_gpu)
            real = variant.batch.attention_mask.sum(1).tolist()
            flops = training_flops(variant)
            mfu = flops / seconds / peak if peak else None
            best = max(best, mfu or 0.0)
            rows.append(
                {
                    "shape": shape.name,
                    "batch": shape.batch,
                    "compiled": compiled,
                    "seconds": seconds,
                    "tokens_per_second": sum(real) / seconds,
                    "tflops": flops / seconds / 1e12,
                    "mfu": mfu,
                    "peak_gib": peak_bytes / 2**30,
                    "saved_gib": saved_bytes(variant) / 2**30,
                }
            )
            print(
                {
                    key: round(value, 4) if isinstance(value, float) else value
                    for key, value in rows[-1].items()
                }
            )
            # The objective's graph has circles; what they hold would count as the next one's peak.
            del variant
            gc.collect()
    claims = [_report.claim("mfu", best, ">=", 0.45, measured=True)] if peak else []
    return claims, {"device": name or "cpu", "gpu_rows": rows}


def gpu_steps(variant, turns: int, on_gpu: bool) -> tuple[float, int]:
    """Median wall seconds of a whole step, and the peak bytes of device memory."""
    taken = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(turns):
        started = time.perf_counter()
        variant.forward_backward()
        variant.update()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[3:] or taken), (
        torch.cuda.max_memory_allocated() if on_gpu else 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, one round: the form, not the figures"
    )
    parser.add_argument("--rounds", type=int, help="rounds that count (default 5, --quick 1)")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--gpu-form", action="store_true", help="the GPU part's code, small, on this device"
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="only: an image of 256 px beside texts of as many rows",
    )
    parser.add_argument(
        "--growth", action="store_true", help="only: time against batch, length, depth and width"
    )
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="only: time and activations with model.gradient_checkpointing",
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the device, where the table lacks it"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; leave --device out")
    args.rounds = args.rounds or (1 if args.quick else 5)
    torch.set_num_threads(1)
    if args.memory_of:
        print_memory(args.memory_of, eval(args.shape, {"Shape": Shape}))
        return 0
    if args.device == "cuda" or args.gpu_form:
        claims, more = gpu_claims(args)
    elif args.growth:
        claims, more = growth(args)
    elif args.checkpointing:
        claims, more = checkpointing(args)
    else:
        missing = missing_peers()
        if missing:
            print(
                "SKIPPED: this benchmark needs the peers of the extra `bench`:"
                f" {', '.join(missing)}."
            )
            print("Install them with: pip install -c constraints.txt -e '.[bench]'")
            _report.write(args.json, [], args.quick, skipped=missing)
            return _report.COULD_NOT_CHECK
        claims, more = (image_claims if args.images else cpu_claims)(args)
    return _report.write(args.json, claims, args.quick, threads=1, rounds=args.rounds, **more)


if __name__ == "__main__":
    sys.exit(main())
