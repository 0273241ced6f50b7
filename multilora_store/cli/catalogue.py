"""The commands there are: what each is for, what its bare words mean, examples, and where its function lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from types import MappingProxyType
from typing import Any, Final

from multilora_store.cli.outcome import Outcome
from multilora_store.cli.schema import SCHEMAS, Common
from multilora_store.cli.terminal import Terminal

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: The verb.
        summary: One line.
        examples: Command lines without the program's name, the most usual first.
        words: The options that bare words behind the verb stand for, in order.
        demo: Whether it works on the embedded demo where nothing is configured.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    words: tuple[str, ...] = ()
    demo: bool = False

    @property
    def schema(self) -> type[Common]:
        """Its options."""
        return SCHEMAS[self.name]

    def function(self) -> Callable[[Any, Terminal], Outcome]:
        """The function that does it; imported now."""
        module = import_module(f"multilora_store.cli.commands.{self.name}{'_' * iskeyword(self.name)}")
        return module.run  # type: ignore[no-any-return]


def _table(*commands: Command) -> Mapping[str, Command]:
    return MappingProxyType({command.name: command for command in commands})


COMMANDS: Final[Mapping[str, Command]] = _table(
    Command(
        name="assemble",
        summary="build the base with every adapter of the set, then shard, save or export it",
        examples=(
            "assemble '+adapters=[a,b]'",
            "assemble '+adapters=[code,team/zh@best]' store.url=s3://bucket/run7 base=hf base.path=/models/llama",
            "assemble '+adapters=[a,b]' adapters.a.weight=0.3 adapters.b.trainable=true",
            "assemble snapshot=latest lock=set.lock.json export=./out",
            "assemble '+adapters=[a,b]' merge=ties merge.into=ab merge.params.density=0.3",
            "assemble '+adapters=[a,b]' plugins=[cast_adapters] steps.after_load=cast_to_bfloat16",
        ),
        demo=True,
    ),
    Command(
        name="plan",
        summary="what each rank would hold and move if the set were sharded, from shapes alone",
        examples=(
            "plan '+adapters=[a,b]' world_size=4",
            "plan '+adapters=[\"team/*\"]' world_size=64 replicas=8 base=hf base.path=/models/llama",
            "plan '+adapters=[a,b]' world_size=8 granularity=layer adapters.b.trainable=true",
        ),
        demo=True,
    ),
    Command(
        name="import",
        summary="put adapters into the store: PEFT folders, checkpoints, files of other tools",
        examples=(
            "import ./my-adapter",
            "import ./checkpoint-100 name=team/code tags=[best]",
            "import ./checkpoint-100 configs.code=./adapter_config.json allow_pickle=true  # of a whole model",
            "import kohya://s3://bucket/style.safetensors#component=unet",
            "import ./style.safetensors reader=kohya reader.params.component=unet",
        ),
        words=("source", "name"),
    ),
    Command(
        name="export",
        summary="write stored adapters as plain PEFT folders, or merged into the base's own",
        examples=(
            "export a@best ./out",
            "export 'team/*' s3://bucket/adapters",
            "export a@best ./served exporter=vllm exporter.params.max_rank=16",
            "export a@best ./merged kind=merged base=hf base.path=/models/llama",
            "export '+adapters=[a,b]' kind=merged target=./merged base=hf base.path=/models/llama",
        ),
        words=("ref", "target"),
    ),
    Command(
        name="path",
        summary="print a local PEFT folder of a version, fetched and checked if need be",
        examples=("path a@best", "path a@best store.url=s3://bucket/run7  # for vllm serve --lora-modules a=..."),
        words=("ref",),
        demo=True,
    ),
    Command(
        name="list",
        summary="the adapters of the store, newest versions and tags",
        examples=("list", "list 'team/*' output=json"),
        words=("pattern",),
        demo=True,
    ),
    Command(
        name="report",
        summary="the store as a whole: sizes, what sharing saves, what a server of the set needs",
        examples=("report", "report 'team/*' output=json"),
        words=("pattern",),
        demo=True,
    ),
    Command(
        name="show",
        summary="one adapter: versions, configuration, tensors; or `show plugins`",
        examples=("show a", "show a@best tensors=true", "show plugins plugins=[./mine.py]"),
        words=("ref",),
        demo=True,
    ),
    Command(
        name="log",
        summary="the journal: every change of the store, newest first",
        examples=("log", "log a limit=0"),
        words=("name",),
        demo=True,
    ),
    Command(
        name="snapshots",
        summary="the saved sets, and what each names",
        examples=("snapshots", "snapshots latest"),
        words=("snapshot",),
        demo=True,
    ),
    Command(
        name="tag",
        summary="give a version a name, or take it away",
        examples=("tag a@latest best", "tag a best remove=true"),
        words=("ref", "tag"),
    ),
    Command(
        name="delete",
        summary="delete one version, an adapter with all its versions, or a snapshot",
        examples=("delete a@v0123456789abcdef", "delete a all=true", "delete snapshot=20261130T120000Z"),
        words=("ref",),
    ),
    Command(
        name="restore",
        summary="write a whole snapshot out as folders (target=), or make a past state the present one (to=)",
        examples=("restore ./out", "restore to=2026-11-30 dry_run=true"),
        words=("target",),
    ),
    Command(
        name="verify",
        summary="read everything and compare it with what was recorded; exit code 3 if something is wrong",
        examples=("verify", "verify a@best", "verify profile=vllm max_rank=16 output=json"),
        words=("ref",),
        demo=True,
    ),
    Command(
        name="merge",
        summary="merge stored adapters into a new one, and say what was lost",
        examples=(
            "merge '+adapters=[a,b]' merge=linear merge.into=ab adapters.a.weight=0.7",
            "merge '+adapters=[a,b]' merge=ties merge.into=ab merge.params.density=0.3 merge.rank=16",
            "merge '+adapters=[a,b]' merge=ties merge.into=ab dry_run=true",
        ),
        demo=True,
    ),
    Command(
        name="sync",
        summary="bring one store up to another, or a folder of plain PEFT adapters",
        examples=(
            "sync s3://bucket/run7 /data/run7",
            "sync ./store s3://bucket/run7 'include=[\"team/*\"]' dry_run=true",
        ),
        words=("source", "target"),
    ),
    Command(
        name="gc",
        summary="free what no version, tag or snapshot names any more",
        examples=(
            "gc dry_run=true",
            "gc grace_hours=48",
            "gc policies=[keep_last,keep_tagged] policies.keep_last.count=5",
        ),
    ),
    Command(
        name="repair",
        summary="set damaged versions aside and take whole copies from another store",
        examples=("repair dry_run=true", "repair source=s3://backup/run7"),
    ),
    Command(
        name="doctor",
        summary="look at a store, a set or a checkpoint for everything that goes wrong; exit code 3 if there is any",
        examples=(
            "doctor",
            "doctor '+adapters=[a,b]' base=hf base.path=/models/llama plugins=[effect_check]",
            "doctor '+adapters=[a,b]' plugins=[effect_check] checks=[effect_check] checks.effect_check.factor=20",
            "doctor ./checkpoint-100  # of PEFT, transformers, accelerate, torch, DeepSpeed, llama.cpp",
        ),
        words=("checkpoint",),
        demo=True,
    ),
    Command(
        name="diff",
        summary="compare two versions: configuration, tensors, distances; exit code 3 if they differ",
        examples=("diff a@v0123 a@latest", "diff a b"),
        words=("left", "right"),
        demo=True,
    ),
)
"""Verb -> command."""
