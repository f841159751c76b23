"""A corpus of damaged checkpoints: each gives an error that names a file, and no output."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.read.reader import model_names
from tests.merge.checkpoints import SHARDS, finish_checkpoint, make_run, merged_tensors, same_bits, save_dcp

STATE = {
    "a.weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
    "b.weight": torch.randn(600),
    "c": torch.tensor(3.0),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run: two checkpoints of ours; bare: the same weights by bare DCP; full: one safetensors file; bin: one
    pickle."""
    root = tmp_path_factory.mktemp("pristine")
    make_run(root / "run", {1: {name: value + 1 for name, value in STATE.items()}, 2: STATE})
    save_dcp({"model": STATE}, root / "bare" / SHARDS, thread_count=2)
    (root / "full").mkdir()
    save_file(STATE, root / "full" / "model.safetensors", metadata={"format": "pt"})
    (root / "bin").mkdir()
    torch.save(STATE, root / "bin" / "pytorch_model_fsdp.bin")
    return root


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "place")
    return tmp_path / "place"


def fails(source: Path, tmp_path: Path, **options: object) -> FsdpTuneError:
    """The error of a merge that must fail; the output and its stage must not exist afterwards."""
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(source, MergeOptions(output=tmp_path / "out", **options))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    return caught.value


def change(path: Path, edit: Callable[[bytearray], object]) -> Path:
    data = bytearray(path.read_bytes())
    result = edit(data)
    path.write_bytes(result if isinstance(result, (bytes, bytearray)) else data)
    return path


def flip(where: float) -> Callable[[bytearray], object]:
    def edit(data: bytearray) -> None:
        data[int(where * (len(data) - 1))] ^= 0x10

    return edit


def cut(where: float) -> Callable[[bytearray], object]:
    return lambda data: data[: int(where * len(data))]


def metadata(edit: Callable[[object], object]) -> Callable[[bytearray], object]:
    """Changes `.metadata` as torch reads it."""

    def run(data: bytearray) -> bytes:
        value = pickle.loads(bytes(data))
        return pickle.dumps(edit(value) or value)

    return run


def chunk(value, name="model.a.weight"):
    return value.state_dict_metadata[name].chunks[0]


def resize(value) -> None:
    chunk(value).sizes = torch.Size([19, 30])


def overlap(value) -> None:
    value.state_dict_metadata["model.a.weight"].chunks.append(
        type(chunk(value))(offsets=torch.Size([5, 0]), sizes=torch.Size([5, 30]))
    )


def replace_info(field: str, new: object) -> Callable[[object], None]:
    def edit(value) -> None:
        info = next(info for index, info in value.storage_data.items() if index.fqn == "model.a.weight")
        setattr(info, field, new)

    return edit


def other_dtype(value) -> None:
    value.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32


def forget_place(value) -> None:
    value.storage_data = {
        index: info for index, info in value.storage_data.items() if index.fqn != "model.a.weight"
    }


def share_bytes(value) -> None:
    infos = {index.fqn: info for index, info in value.storage_data.items()}
    for name in ("relative_path", "offset", "length"):
        setattr(infos["model.a.weight"], name, getattr(infos["model.b.weight"], name))


def huge(value) -> None:
    value.state_dict_metadata["model.a.weight"].size = torch.Size([2**40, 2**40])


def no_tensors(value) -> None:
    value.state_dict_metadata = {}


def same_name(value) -> None:
    value.state_dict_metadata["model._orig_mod.a.weight"] = value.state_dict_metadata["model.a.weight"]
    value.planner_data["model._orig_mod.a.weight"] = ("model", "_orig_mod.a.weight")
    infos = {index.fqn: (index, info) for index, info in value.storage_data.items()}
    index, info = infos["model.a.weight"]
    value.storage_data[type(index)("model._orig_mod.a.weight", index.offset)] = type(info)(
        "__0_9.distcp", 0, info.length
    )


def two_models(value) -> None:
    value.planner_data["model.b.weight"] = ("teacher", "model", "b.weight")


METADATA_DAMAGE = {
    "chunk of another shape": metadata(resize),
    "overlapping chunks": metadata(overlap),
    "another dtype": metadata(other_dtype),
    "place forgotten": metadata(forget_place),
    "two tensors at one place": metadata(share_bytes),
    "impossible shape": metadata(huge),
    "no tensors": metadata(no_tensors),
    "one name twice": metadata(same_name),
    "two models": metadata(two_models),
    "file outside (..)": metadata(replace_info("relative_path", "../../secret")),
    "file outside (absolute)": metadata(replace_info("relative_path", "/etc/passwd")),
    "file of no name": metadata(replace_info("relative_path", "")),
    "offset beyond the file": metadata(replace_info("offset", 10**9)),
    "negative offset": metadata(replace_info("offset", -1)),
    "length beyond the file": metadata(replace_info("length", 10**9)),
    "length too short": metadata(replace_info("length", 10)),
    "offset inside a chunk": metadata(replace_info("offset", 64)),
    "transformed stream": metadata(replace_info("transform_descriptors", ["zstd"])),
    "something else": lambda _: pickle.dumps({"a": 1}),
    "empty": lambda _: b"",
    "cut in half": cut(0.5),
    "without its last byte": cut(0.9999),
    "no pickle": lambda _: b"hello",
    "code": lambda _: b"cos\nsystem\n(X\x09\x00\x00\x00touch /xytR.",
}


@pytest.mark.parametrize("kind", METADATA_DAMAGE)
def test_damaged_table_of_contents_is_refused(kind, place, tmp_path):
    change(place / "bare" / SHARDS / ".metadata", METADATA_DAMAGE[kind])
    error = fails(place / "bare", tmp_path)
    assert error.exit_code == 1
    assert all(str(place / "bare" / SHARDS) in str(problem.where) for problem in error.problems)
    assert (error.problems[0].code == "merge-path-traversal") == kind.startswith("file o")
    assert not Path("/xy").exists()


def rewrite_member(
    name: str, new: bytes | None, compression: int = zipfile.ZIP_STORED
) -> Callable[[bytearray], object]:
    """The archive with one member replaced (or dropped), as a valid zip with valid checksums."""

    def edit(data: bytearray) -> bytes:
        import io

        source, target = zipfile.ZipFile(io.BytesIO(bytes(data))), io.BytesIO()
        with zipfile.ZipFile(target, "w", compression) as made:
            for item in source.infolist():
                if not item.filename.endswith(name):
                    made.writestr(item.filename, source.read(item))
                elif new is not None:
                    made.writestr(item.filename, new)
        return target.getvalue()

    return edit


BIN_DAMAGE = {
    "cut in half": cut(0.5),
    "end missing": cut(0.999),
    "empty": lambda _: b"",
    "flipped value": flip(0.5),
    "data.pkl missing": rewrite_member("data.pkl", None),
    "a storage missing": rewrite_member("data/1", None),
    "a storage too short": rewrite_member("data/1", b"\0" * 100),
    "compressed members": rewrite_member("no such member", None, zipfile.ZIP_DEFLATED),
    "other byte order": rewrite_member("byteorder", b"big"),
    "code in data.pkl": rewrite_member("data.pkl", b"cos\nsystem\n(X\x01\x00\x00\x00atR."),
    "no mapping": rewrite_member("data.pkl", b"\x80\x02K\x01."),
    "no tensors": rewrite_member("data.pkl", b"\x80\x02}."),
    "old format": lambda _: pickle.dumps(119547037146038801333356),
}


@pytest.mark.parametrize("kind", BIN_DAMAGE)
def test_damaged_pickle_of_the_full_model_is_refused(kind, place, tmp_path):
    path = change(place / "bin" / "pytorch_model_fsdp.bin", BIN_DAMAGE[kind])
    error = fails(place / "bin", tmp_path)
    assert error.exit_code == 1
    assert str(path) in str(error.problems[0].where)


def header(edit: Callable[[dict], object]) -> Callable[[bytearray], object]:
    def run(data: bytearray) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        value = json.loads(data[8 : 8 + length])
        made = edit(value)
        raw = made if isinstance(made, bytes) else json.dumps(value).encode()
        return struct.pack("<Q", len(raw)) + raw + bytes(data[8 + length :])

    return run


def set_offsets(name: str, offsets: list[int]) -> Callable[[dict], object]:
    return lambda value: value[name].__setitem__("data_offsets", offsets)


SAFETENSORS_DAMAGE = {
    "header of 2**63 bytes": lambda data: struct.pack("<Q", 2**63) + bytes(data[8:]),
    "header larger than the file": lambda data: struct.pack("<Q", len(data)) + bytes(data[8:]),
    "overlap": header(set_offsets("b.weight", [0, 2400])),
    "end beyond the file": header(set_offsets("b.weight", [2400, 2**62])),
    "negative offset": header(set_offsets("b.weight", [-2400, 0])),
    "hole": header(lambda value: value.pop("b.weight")),
    "duplicate names": header(
        lambda value: json.dumps(value)[:-1].encode() + b', "c": ' + json.dumps(value["c"]).encode() + b"}"
    ),
    "shape that does not fit": header(lambda value: value["a.weight"].__setitem__("shape", [20, 31])),
    "shape that overflows": header(lambda value: value["a.weight"].__setitem__("shape", [2**40, 2**40])),
    "unknown dtype": header(lambda value: value["a.weight"].__setitem__("dtype", "F3")),
    "name with a line end": header(lambda value: value.update({"c\nerror: all is well": value.pop("c")})),
    "name with an escape": header(lambda value: value.update({"c\x1b[2J": value.pop("c")})),
    "boolean shape": header(lambda value: value["c"].__setitem__("shape", [True])),
    "no JSON": header(lambda _: b"{"),
    "a list": header(lambda _: b"[]"),
    "deep JSON": header(lambda _: b"[" * 100_000),
    "cut": cut(0.7),
    "longer": lambda data: bytes(data) + b"\0" * 8,
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("kind", SAFETENSORS_DAMAGE)
def test_damaged_safetensors_file_is_refused(kind, place, tmp_path):
    path = change(place / "full" / "model.safetensors", SAFETENSORS_DAMAGE[kind])
    error = fails(place / "full", tmp_path)
    assert (error.exit_code, error.problems[0].where.source) == (1, str(path))
    assert error.problems[0].message.isprintable()


INDEX_DAMAGE = {
    "file outside": {"weight_map": {"a.weight": "../all.safetensors"}},
    "folder outside": {"weight_map": {"a.weight": "outside/all.safetensors"}},
    "absolute file": {"weight_map": {"a.weight": "/etc/passwd"}},
    "file missing": {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}},
    "tensor too many": {"weight_map": dict.fromkeys([*STATE, "d"], "all.safetensors")},
    "no tensor": {"weight_map": {}},
    "name with a line end": {"weight_map": {"a.weight\nerror: all is well": "model.safetensors"}},
    "file with a line end": {"weight_map": {"a.weight": "model\n.safetensors"}},
    "no map": {"weights": {}},
    "a list": [],
}


@pytest.mark.parametrize("kind", INDEX_DAMAGE)
def test_damaged_index_is_refused(kind, place, tmp_path):
    # it would be read without the index
    (place / "full" / "model.safetensors").rename(place / "full" / "all.safetensors")
    shutil.copy(place / "full" / "all.safetensors", place)
    (place / "full" / "outside").symlink_to(place)
    (place / "full" / "model.safetensors.index.json").write_text(json.dumps(INDEX_DAMAGE[kind]))
    error = fails(place / "full", tmp_path)
    assert error.exit_code == 1
    assert all(problem.message.isprintable() for problem in error.problems)


@pytest.mark.parametrize(
    ("keys", "planner_data"),
    [(["a.weight\nb"], None), (["a\x1b[2J"], None), ([""], None), (["a"], {"a": ("model", "a\r")})],
)
def test_names_that_cannot_be_printed_are_refused(keys, planner_data):
    with pytest.raises(Refused) as caught:
        model_names(keys, planner_data, "")
    assert str(caught.value).isprintable()


SHARD_DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: change(path, cut(0.6)),
    "one byte short": lambda path: change(path, lambda data: data[:-1]),
    "all zero": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "flipped value": lambda path: change(path, flip(0.5)),
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link that leads out": lambda path: (
        path.rename(path.parents[2] / "moved"),
        path.symlink_to(path.parents[2] / "moved"),
    ),
}


@pytest.mark.parametrize("kind", SHARD_DAMAGE)
@pytest.mark.parametrize("owner", ["bare", "run/checkpoint-2"])
def test_damaged_shard_is_named(kind, owner, place, tmp_path):
    shard = max((place / owner / SHARDS).glob("*.distcp"), key=lambda path: path.stat().st_size)
    SHARD_DAMAGE[kind](shard)
    error = fails(place / owner, tmp_path)
    assert error.exit_code == 1
    assert any(shard.name in f"{problem.where} {problem.message}" for problem in error.problems)
    assert any(
        "--step" in f"{problem.hint}{problem.ways_out}" or "link" in problem.message
        for problem in error.problems
    )


def swap(first: Path, second: Path) -> None:
    first.unlink()
    shutil.copyfile(second, first)


def test_shard_of_another_step_is_refused(place, tmp_path):
    for name in ("__0_0.distcp", ".metadata"):
        copy = place / f"copy-{name}"
        shutil.copytree(place / "run", copy)
        swap(copy / "checkpoint-2" / SHARDS / name, copy / "checkpoint-1" / SHARDS / name)
        error = fails(copy, tmp_path)
        assert error.exit_code == 1
        assert name in str(error.problems[0].where)


def test_missing_rank_is_named_and_allow_incomplete_omits_its_tensors(place, tmp_path):
    folder = place / "bare" / SHARDS
    (folder / "__0_1.distcp").unlink()
    assert "__0_1.distcp" in fails(place / "bare", tmp_path).problems[0].message
    result = merge_checkpoint(place / "bare", MergeOptions(output=tmp_path / "out", allow_incomplete=True))
    kept = merged_tensors(tmp_path / "out")
    assert 0 < len(kept) < len(STATE)
    assert all(same_bits(kept[name], STATE[name]) for name in kept)
    gone = sorted(STATE.keys() - kept.keys())
    assert any(name in notice.message for notice in result.notices for name in gone)
    assert sorted(json.loads((tmp_path / "out" / "merge.json").read_text())["left_out"]) == gone


@pytest.mark.parametrize(
    "break_it", ["no manifest", "torn manifest", "manifest of another step", "file missing"]
)
def test_checkpoint_that_is_not_complete_is_refused_and_can_be_forced(break_it, place, tmp_path):
    checkpoint = place / "run" / "checkpoint-2"
    manifest = checkpoint / "manifest.json"
    if break_it == "no manifest":
        manifest.unlink()
    elif break_it == "torn manifest":
        change(manifest, cut(0.5))
    elif break_it == "manifest of another step":
        finish_checkpoint(checkpoint, 7)
    else:
        (checkpoint / "trainer_state.json").unlink()
    for source, options in ((checkpoint, {}), (checkpoint / SHARDS, {}), (place / "run", {"step": 2})):
        error = fails(source, tmp_path, **options)
        assert error.exit_code == 1
        assert "--allow-incomplete" in str(error.problems[0].ways_out)
    result = merge_checkpoint(
        checkpoint, MergeOptions(output=tmp_path / "out", dtype="keep", allow_incomplete=True)
    )
    assert any("not complete" in notice.message for notice in result.notices)
    assert all(same_bits(merged_tensors(tmp_path / "out")[name], STATE[name]) for name in STATE)


def test_run_without_a_complete_checkpoint_is_explained(place, tmp_path):
    for step in (1, 2):
        (place / "run" / f"checkpoint-{step}" / "manifest.json").unlink()
    error = fails(place / "run", tmp_path)
    assert error.exit_code == 1
    assert "checkpoint-1: it has no manifest" in error.problems[0].message


@pytest.mark.parametrize(
    "make",
    [
        "absent",
        "empty directory",
        "text file",
        "rank files",
        "a rank's file",
        "an optimizer",
        "shards without metadata",
    ],
)
def test_directory_that_is_not_a_checkpoint_is_described(make, tmp_path):
    source = tmp_path / "thing"
    if make == "text file":
        source.write_text("hello")
    elif make != "absent":
        source.mkdir()
    if make in ("rank files", "a rank's file"):
        (source / "pytorch_model_fsdp_0_rank0.bin").write_bytes(b"x")
    if make == "a rank's file":
        source /= "pytorch_model_fsdp_0_rank0.bin"
    if make == "an optimizer":
        save_dcp({"optimizer": {"state": {"a.weight": {"exp_avg": torch.ones(3)}}}}, source)
    if make == "shards without metadata":
        (source / SHARDS).mkdir()
        (source / SHARDS / "__0_0.distcp").write_bytes(b"x")
    error = fails(source, tmp_path)
    assert error.exit_code == (1 if make == "shards without metadata" else 2)
    assert error.problems[0].hint
    assert error.problems[0].code in {
        "absent": "merge-source-not-found",
        "rank files": "merge-local-state",
        "a rank's file": "merge-local-state",
        "an optimizer": "merge-optimizer-state",
    }.get(make, error.problems[0].code)


def weights(
    tensors: dict[str, torch.Tensor], *, names: bool
) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Everything that a model is; without the names where nothing vouches for them."""
    return sorted(
        (name if names else "", str(value.dtype), tuple(value.shape), value.numpy().tobytes())
        for name, value in tensors.items()
    )


@pytest.mark.parametrize("owner", ["bare", "run/checkpoint-2", "bin", "full"])
def test_any_flipped_byte_is_detected_or_harmless(owner, place, tmp_path):
    """Bytes that no tensor depends on (padding, time stamps) may differ; a value that differs is never
    written unseen.

    safetensors files of another tool carry no checksum at all, so there only the header can be guarded.
    """
    files = sorted(
        path for path in (place / owner).rglob("*") if path.suffix in (".distcp", ".bin", ".safetensors")
    )
    chance = random.Random(0)
    found = 0
    for _ in range(60):
        path = chance.choice(files)
        original = path.read_bytes()
        (length,) = struct.unpack_from("<Q", original)
        at = chance.randrange(8 + length if path.suffix == ".safetensors" else len(original))
        path.write_bytes(
            original[:at] + bytes([original[at] ^ (1 << chance.randrange(8))]) + original[at + 1 :]
        )
        try:
            merge_checkpoint(place / owner, MergeOptions(output=tmp_path / "out", dtype="keep"))
        except FsdpTuneError:
            found += 1
        else:
            assert weights(merged_tensors(tmp_path / "out"), names=owner != "full") == weights(
                STATE, names=owner != "full"
            ), (path, at)
            shutil.rmtree(tmp_path / "out")
        path.write_bytes(original)
    assert found > (50 if owner.startswith("run") else 10)
