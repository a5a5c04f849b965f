"""Other engines' LoRA ops beside ours: taken out of a wheel without the package around them, checked, and told why they are lacking."""
from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lora_bench.engine import bench_peers, peer_files
from lora_bench.engine.bench_kernels import run_kernels
from lora_bench.engine.bench_peers import Peers, peer_run
from lora_bench.engine.peer_cell import PeerCell
from lora_bench.engine.peer_files import PeerError, PeerFiles, installed, unpacked
from lora_bench.engine.peer_sglang import Sglang
from lora_bench.engine.peer_vllm import Vllm
from lora_bench.workbench.cli import main
from lora_bench.workbench.kernel_speed import _lines

NEVER = "raise SystemExit('the package itself was imported')"
OPS = "vllm/lora/ops/triton_ops"
VLLM = {
    "vllm/__init__.py": NEVER, f"{OPS}/__init__.py": NEVER, "vllm/envs.py": NEVER, "other/evil.py": NEVER,
    "vllm/utils/math_utils.py": "def next_power_of_2(n): return 1 << (n - 1).bit_length()",
    f"{OPS}/utils.py": """
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.config import SomeConfig
_LORA_A_PTR_DICT, _LORA_B_PTR_DICT = {}, {}
init_logger(__name__).warning_once("said by nobody")
assert not envs.VLLM_BATCH_INVARIANT and next_power_of_2(5) == 8 and async_tensor_h2d([3], dtype=int, device="cpu").tolist() == [3]
def annotated(config: SomeConfig | None) -> None: ...
""",
    f"{OPS}/lora_shrink_op.py": """
from vllm.lora.ops.triton_ops.utils import _LORA_A_PTR_DICT
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op
def _lora_shrink(x, a, out, slots, scaling):
    for index, matrices in enumerate(a):
        for row, slot in enumerate(slots.tolist()):
            out[index, row] = scaling * (matrices[slot, 0].float() @ x[row].float())
try:
    direct_register_custom_op(op_name="lora_shrink", op_func=_lora_shrink)
except AttributeError:
    lora_shrink = _lora_shrink
""",
    f"{OPS}/lora_expand_op.py": """
def lora_expand(shrunk, b, out, slots, offset_start, add_inputs):
    start = offset_start
    for index, matrices in enumerate(b):
        end = start + matrices.shape[2]
        for row, slot in enumerate(slots.tolist()):
            out[row, start:end] += (matrices[slot, 0].float() @ shrunk[index, row]).to(out.dtype)
        start = end
""",
    f"{OPS}/lora_kernel_metadata.py": """
class LoRAKernelMeta:
    @classmethod
    def make(cls, loras, tokens, device): return cls()
    def prepare_tensors(self, slots): self.slots = slots
    def meta_args(self, tokens, specialize): return (self.slots[:tokens],)
"""}
LORA = "sglang/srt/lora"
SGLANG = {
    "sglang/__init__.py": NEVER, f"{LORA}/__init__.py": NEVER,
    f"{LORA}/utils.py": """
from enum import Enum
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
class Phase(str, Enum):
    DECODE, PREFILL = "decode", "prefill"
def counts(batch: ForwardBatch | None): ...
""",
    f"{LORA}/workspace.py": "class LoraWorkspace: ...",
    f"{LORA}/dense/plan.py": """
from enum import Enum
from sglang.srt.environ import envs
assert envs.SGLANG_LORA_DENSE_CONFIG_DIR.get() is None
class DenseLoraKind(str, Enum):
    LINEAR = "linear"
""",
    f"{LORA}/dense/runner.py": """
from sglang.kernels.ops.lora.common.routing import _LARGE_ROUTE_MIN_PAIRS
class DenseLoraRunner:
    def __init__(self, workspace, max_loras, device): self.fresh = 0
    def begin_batch(self, *, token_slots, lora_ranks, scalings, num_tokens, phase, graph_mode):
        self.slots, self.ranks, self.scalings = token_slots.tolist(), lora_ranks.tolist(), scalings.tolist()
    def plan_for(self, kind, rank, d_in, d_out, *, num_tokens): return kind
    def reset_routes(self): self.fresh += 1
    def apply(self, x, base, plan, *, a, b, offsets):
        y = base()
        for row, slot in enumerate(self.slots):
            rank = self.ranks[slot]
            for index, (start, end) in enumerate(zip(offsets, offsets[1:])):
                h = a[slot, index * rank : (index + 1) * rank].float() @ x[row].float()
                y[row, start:end] += (self.scalings[slot] * (b[slot, start:end, :rank].float() @ h)).to(y.dtype)
        return y
""",
    "sglang/kernels/ops/lora/common/routing.py": """
from sglang.kernels.ops.lora.moe.virtual_experts import _align_block_size_jit
_LARGE_ROUTE_MIN_PAIRS, _SMALL_ROUTE_MAX_PAIRS = 16384, 512
"""}
PEERS = {"vllm": (Vllm, VLLM), "sglang": (Sglang, SGLANG)}


def _wheel(folder: Path, package: str, files: dict[str, str], version: str = "9.1") -> Path:
    path = folder / f"{package}-{version}-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in PEERS]:
        del sys.modules[name]


def _cell(ends: tuple[int, ...], ranks: tuple[int, ...], rows: int, copies: int = 2) -> PeerCell:
    weights = [torch.randn(ends[-1], 20) for _ in range(copies)]
    return PeerCell(20, ends, ranks, [row * len(ranks) // rows for row in range(rows)], rows > 8, weights, torch.randn(rows, 20))


@pytest.mark.parametrize("package", PEERS)
def test_ops_of_a_wheel_compute_what_the_adapters_give(package: str, tmp_path: Path, seed: int) -> None:
    kind, files = PEERS[package]
    found = unpacked(_wheel(tmp_path, package, files), tmp_path / "out")
    assert (found.package, found.version) == (package, "9.1")
    assert not list((tmp_path / "out").rglob("evil.py"))
    peer = kind(found)
    for ends, ranks, rows in (((24,), (4,), 1), ((8, 30, 37), (2, 7, 3), 8), ((10, 20), (8, 8), 13)):
        cell = _cell(ends, ranks, rows)
        (got, other) = peer_run(peer, cell)()
        assert got.shape == other.shape == (rows, ends[-1]) and not torch.equal(got, other)


def test_other_numbers_and_ops_that_break_are_no_figures(tmp_path: Path, seed: int) -> None:
    files = VLLM | {f"{OPS}/lora_expand_op.py": VLLM[f"{OPS}/lora_expand_op.py"].replace("+=", "+= 1.1 *")}
    peer = Vllm(unpacked(_wheel(tmp_path, "vllm", files), tmp_path))
    with pytest.raises(PeerError, match="it computed other numbers"):
        peer_run(peer, _cell((24,), (4, 4), 4))
    with pytest.raises(PeerError, match="IndexError"):
        peer_run(peer, PeerCell(20, (24,), (4,), [3], False, [torch.randn(24, 20)], torch.randn(1, 20)))


def test_why_a_wheel_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "vllm-1-any.whl").write_text("no zip")
    for path, words in ((tmp_path / "vllm-1-any.whl", "cannot be unpacked"), (tmp_path / "torch-2-any.whl", "a wheel of vllm or sglang"),
                        (_wheel(tmp_path, "vllm", {"vllm/__init__.py": ""}), "has no LoRA ops where they are known to lie")):
        with pytest.raises(PeerError, match=words):
            unpacked(path, tmp_path)
    short = {name: text for name, text in VLLM.items() if "metadata" not in name}
    with pytest.raises(PeerError, match="lora_kernel_metadata"):
        Vllm(unpacked(_wheel(tmp_path, "vllm", short, "9.2"), tmp_path / "a"))
    with pytest.raises(PeerError, match="was imported already"):
        Vllm(PeerFiles("vllm", "9.2", tmp_path))


def test_damaged_and_swollen_wheels_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = tmp_path / "vllm-1-any.whl", f"{OPS}/a.py"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, "x = 1\n" * 1000)
        archive.writestr(f"{OPS}/../../../../../outside.py", "")
    whole = path.read_bytes()
    folder = unpacked(path, tmp_path / "sound").folder
    assert [file.name for file in folder.rglob("*.py")] == ["a.py"] and not list(tmp_path.rglob("outside.py"))
    first, listed = len(name) + 30, whole.index(b"PK\x01\x02")
    for at, byte in ((first, 0xff), (listed + 10, 99), (listed + 8, 1)):  # the deflated bytes, the method, the flag of what is encrypted
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        with pytest.raises(PeerError, match="cannot be unpacked"):
            unpacked(path, tmp_path / str(at))
    path.write_bytes(whole)
    monkeypatch.setattr(peer_files, "MOST_BYTES", 5999)
    with pytest.raises(PeerError, match="would take 6,000 bytes, at most 5,999 are expected"):
        unpacked(path, tmp_path / "swollen")
    assert not (tmp_path / "swollen").exists()


def test_what_a_peer_lacks_is_named(tmp_path: Path) -> None:
    files = SGLANG | {f"{LORA}/dense/plan.py": "import a_package_that_nobody_has"}
    with pytest.raises(PeerError, match="it needs a_package_that_nobody_has, which is not there"):
        Sglang(unpacked(_wheel(tmp_path, "sglang", files), tmp_path))


def test_an_installed_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    info = tmp_path / "vllm-4.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 4.5\n")
    (files,) = (found for found in installed() if found.package == "vllm")
    assert files.version == "4.5" and "vllm" not in sys.modules
    peer_run(Vllm(files), _cell((24,), (4,), 2))()
    (tmp_path / "sglang").mkdir()
    assert [found.version for found in installed() if found.package == "sglang"] == [""]


SHAPE = "layers=1,hidden=32,heads=4,kv_heads=2,head_dim=8,intermediate=48,vocab=64"


def test_their_figures_stand_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(bench_peers, "obstacle", lambda *_: "")
    runner = f"{LORA}/dense/runner.py"
    broken = SGLANG | {runner: SGLANG[runner].replace("rank = self.ranks[slot]", "rank = {2: 2}[len(b)]")}
    wheels = [str(_wheel(tmp_path, "vllm", VLLM)), str(_wheel(tmp_path, "sglang", broken))]
    result = run_kernels(SHAPE, "cpu", rows=2, context=3, tokens=5, ranks=(4, 4), peer_wheels=wheels)
    vllm, sglang = result["peers"]
    assert vllm == {"peer": "vllm", "version": "9.1", "why": ""} and sglang["why"].startswith("qkv_proj, 2 adapters: it computed other")
    for op in result["ops"]:
        measured = op["op"].endswith("2 adapters")
        assert op["peers_us"].keys() == ({"vllm", "sglang"} if measured else set())
        assert not measured or op["peers_us"]["vllm"] > 0 and op["peers_us"]["sglang"] is None
    lines = _lines(result)
    assert "vllm 9.1: torch's product and its LoRA ops on it" in lines and any(line.startswith("sglang 9.1: ") and "not measured" in line
                                                                              for line in lines)
    assert sum(" · vllm " in line and " x" in line for line in lines) == 8


def test_on_a_cpu_they_are_told_to_need_a_device(tmp_path: Path) -> None:
    peers = Peers([str(_wheel(tmp_path, "vllm", VLLM)), str(tmp_path / "sglang-1-any.whl")], tmp_path, torch.device("cpu"), torch.bfloat16)
    vllm, sglang = peers.told()
    assert vllm == {"peer": "vllm", "version": "9.1", "why": "its ops take numbers of 16 bits on a CUDA device alone"}
    assert "cannot be unpacked" in sglang["why"]
    assert peers.medians("o_proj", _cell((24,), (4,), 2), lambda run: [1.0]) == {"vllm": None, "sglang": None}


def test_what_is_no_wheel_of_theirs_is_wrong_usage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "vllm-1-any.whl", tmp_path):
        assert main(["bench", "kernels", "--device", "cpu", "--peer-wheel", str(path)]) == 2
        out, err = capfd.readouterr()
        assert out == "" and "give the file of a wheel of vllm or sglang" in err
    wheels = [_wheel(tmp_path, "vllm", VLLM, version) for version in ("9.1", "9.2")]
    assert main(["bench", "kernels", "--device", "cpu", *(word for wheel in wheels for word in ("--peer-wheel", str(wheel)))]) == 2
    assert "give one wheel of a package" in capfd.readouterr().err
