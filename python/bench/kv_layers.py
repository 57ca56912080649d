"""The end of a forward pass until its blocks are stored, with whole blocks and with slices.

    BENCH=kv_layers scripts/test-vllm.sh

On a CPU: layers are matrix products, and the store is the connector's own. The set-ups are run in
turns, in a new order each round.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from slipstream._native import StepMetadata, Store
from slipstream.vllm.blocks import Blocks
from slipstream.vllm.groups import Group, Layout
from slipstream.vllm.worker import WorkerHalf


@dataclass
class Run:
    """One set-up."""

    slices: int
    args: argparse.Namespace
    tails: list[float] = field(default_factory=list)
    """From the last layer until all is stored, s."""
    ends: list[float] = field(default_factory=list)
    """CPU time of the engine's thread at the end of the pass, s."""
    steps: list[float] = field(default_factory=list)
    """CPU time of the engine's thread in all calls of a pass, s."""

    def __post_init__(self) -> None:
        args = self.args
        names = tuple(f"layer.{n}" for n in range(args.layers))
        layout = Layout((Group("full", 16, 0, names),), 16, self.slices)
        shape = (args.blocks, args.bytes // args.layers)
        self.caches = {name: torch.randint(255, shape, dtype=torch.uint8) for name in names}
        blocks = Blocks(self.caches, args.blocks, layout.stored_groups)
        store = Store(block_bytes=blocks.group_bytes, host_bytes=args.blocks * args.bytes * 4)
        self.half = WorkerHalf(
            store,
            blocks,
            rank=0,
            slices=self.slices,
            load_deadline_s=10.0,
            saving_bytes_max=1 << 40,
            loading_bytes_max=1 << 30,
            stats_interval_s=1.0,
        )
        self.weights = torch.rand(args.width, args.width)
        self.made = 0

    def step(self) -> None:
        """Compute a pass that fills all blocks, and wait until they are stored."""
        half, args = self.half, self.args
        self.made += 1
        keys = [bytes(4) + n.to_bytes(28, "big") + bytes(4) for n in range(args.blocks)]
        keys = [self.made.to_bytes(4, "big") + key[4:] for key in keys]
        meta = StepMetadata(None, keys, list(range(args.blocks)))
        spent = 0.0
        hidden = torch.rand(args.width, args.width)
        for name in self.caches:
            hidden = torch.tanh(hidden @ self.weights)
            begun = time.thread_time()
            if self.slices > 1:
                half.layer_computed(name, meta)
            spent += time.thread_time() - begun
        end, begun = time.monotonic(), time.thread_time()
        half.end_step(meta)
        last = time.thread_time() - begun
        with half.moved:
            half.moved.wait_for(lambda: half.saving_bytes == 0)
        self.tails.append(time.monotonic() - end)
        self.ends.append(last)
        self.steps.append(spent + last)
        assert half.store.reset() is None


def main() -> None:
    """Print one row per set-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=2 << 20, help="of a block, all layers")
    parser.add_argument("--width", type=int, default=768, help="of a layer's matrix")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [Run(slices, args) for slices in args.slices]
    for _ in range(args.rounds + 1):
        for run in random.sample(runs, len(runs)):
            run.step()
    print(
        "| slices | until stored, ms | of it the engine's thread, ms CPU | all its calls, ms CPU |"
    )
    print("|---|---|---|---|")
    for run in runs:
        row = (run.tails[1:], run.ends[1:], run.steps[1:])
        print(f"| {run.slices} |", *(f"{statistics.median(each) * 1e3:.1f} |" for each in row))
        run.half.close()


if __name__ == "__main__":
    main()
