"""The line of the README under torchrun: sharded, printed once, the same set on every rank, errors on all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multilora_store.storage import open_store

ROOT = Path(__file__).resolve().parents[2]


def torchrun(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
    }
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "load"), [("fsdp2", "first"), ("fsdp1", "all")])
def test_assemble_sharded_saves_and_prints_once(here: Path, store: str, backend: str, load: str) -> None:
    """Case 56: two ranks, one resolved set, one document, no folder; read by each of them, or by the first alone."""
    held = open_store(store)
    before = {name: [version.id for version in held.versions(name)] for name in ("a", "b")}
    line = ["-m", "multilora_store", "assemble", "+adapters=[a,b]", f"shard={backend}", f"shard.load={load}"]
    done = torchrun(here, *line, "output=json", f"store.url={store}", "base=demo", "save.step=3")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["world_size"] == 2
    assert document["shard"]["backend"] == backend
    for name, size in (("a", 32768), ("b", 65536)):
        assert sum(rank["adapters"][name] for rank in document["shard"]["ranks"]) == size
    assert document["shard"]["units"] > 0
    assert document["snapshot"]["step"] == 3
    assert {name: [version.id for version in held.versions(name)] for name in ("a", "b")} == before, "the same content"
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_the_demo_seeds_its_store_once(here: Path) -> None:
    done = torchrun(here, "-m", "multilora_store", "assemble", "+adapters=[a,b]", "shard=fsdp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fsdp2 over 2 ranks") == 1
    assert done.stderr.count("This is the embedded demo") == 1
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_ranks_with_different_lines_all_end_with_the_difference(here: Path, store: str) -> None:
    script = here.parent / "differ.py"
    script.write_text(
        "import os, sys\nfrom multilora_store.cli import main\n"
        f"line = ['assemble', '+adapters=[a,b]', 'shard=fsdp2', 'base=demo', 'store.url={store}']\n"
        "sys.exit(main([*line, f\"seed={os.environ['RANK']}\"]))\n"
    )
    done = torchrun(here, str(script))
    assert done.returncode != 0
    assert done.stderr.count("error: ranks disagree") == 1, done.stderr
    assert "seed" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_a_rank_that_fails_alone_says_so_once(here: Path, store: str) -> None:
    """Case 56: only rank 1 was given a word that there is none of."""
    script = here.parent / "alone.py"
    script.write_text(
        "import os, sys\nfrom multilora_store.cli import main\n"
        f"line = ['assemble', '+adapters=[a,b]', 'shard=fsdp2', 'base=demo', 'store.url={store}']\n"
        "sys.exit(main([*line, *(['sead=1'] if os.environ['RANK'] == '1' else [])]))\n"
    )
    done = torchrun(here, str(script))
    assert done.returncode != 0
    assert done.stderr.count("rank 1: error: ") == 1, done.stderr
    assert "did you mean seed" in done.stderr


@pytest.mark.slow
def test_ranks_that_fail_alike_say_so_once(here: Path, store: str) -> None:
    done = torchrun(here, "-m", "multilora_store", "assemble", "+adapters=[a]", f"store.url={store}", "sead=1")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "rank 1: error" not in done.stderr


@pytest.mark.slow
def test_an_adapter_that_is_nowhere_ends_on_every_rank(here: Path, store: str) -> None:
    line = ["-m", "multilora_store", "assemble", "+adapters=[nope]", "shard=fsdp2", "base=demo"]
    done = torchrun(here, *line, f"store.url={store}")
    assert done.returncode != 0
    assert "is in neither the configuration nor the store" in done.stderr
