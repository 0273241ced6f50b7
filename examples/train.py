"""Train two adapters in turn on a sharded base: torchrun --nproc-per-node 2 examples/train.py STORE STEPS [resume]."""

import sys

import torch
import torch.distributed as dist

import multilora_store as mls
from multilora_store.assembly import build_base

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
store, steps = mls.open_store(sys.argv[1]), int(sys.argv[2])
names = ("code", "tone")
config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
base = build_base("demo")  # any torch.nn.Module or Hugging Face model
model = mls.assemble(base, {n: {"if_missing": "init", "config": config, "trainable": True} for n in names}, store=store)
model = mls.shard(model)  # every adapter is on the model before the wrap
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
done = 0
if "resume" in sys.argv:  # weights, flags, optimizer state; on as many ranks their random states too
    done = mls.restore(model, store, optimizer=optimizer).step or 0
for step in range(done + 1, steps + 1):
    name = names[step % 2]
    mls.activate(model, [name], trainable=[name])  # the other one neither travels nor changes
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 64, (4, 16), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mls.save(model, store, step=step, optimizer=optimizer)  # both adapters, one commit
    if dist.get_rank() == 0:
        print(f"step {step}: {name} {loss.item():.4f}")
dist.destroy_process_group()
