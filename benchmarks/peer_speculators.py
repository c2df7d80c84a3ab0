"""The peer's side of `benchmarks.peers`: the DSpark head and losses of speculators; runs in its environment.

    <its python> -m benchmarks.peer_speculators TENSORS

Reads words from standard input and answers each with a line of JSON: `threads N` sets their number, `gradients FILE`
writes the gradients and tells the objective, `seconds` times one forward and backward, `peak` tells the most bytes
alive during one.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.dspark.metrics import compute_metrics
from speculators.models.dspark.model_definitions import MarkovHead

from benchmarks.clocks import peak_bytes, seconds


class Losses:
    """Full logits of draft and teacher for every slot, the Markov bias, and speculators' own compound loss."""

    def __init__(self, path: str) -> None:
        self.tensors = load_file(path)
        sizes = {name: int(self.tensors[name]) for name in ("block", "decay")}
        self.block, self.decay = sizes["block"], float(sizes["decay"])
        self.weight, w1, w2 = (self.tensors[name] for name in ("weight", "w1", "w2"))
        self.markov = MarkovHead(
            verifier_vocab_size=len(w1), draft_vocab_size=len(w2), markov_rank=w1.shape[1], hidden_size=1
        )
        self.markov.markov_w1.weight.data, self.markov.markov_w2.weight.data = w1, w2
        self.hidden = self.tensors["hidden"].requires_grad_()
        # Its total variation is half of the L1 distance. The fused kernels need Triton and a GPU.
        self.loss_config = resolve_loss_config('{"ce": 0.1, "tv": 1.8}', "eager")
        self.tv = resolve_loss_config("tv", "eager")["tv"][0]

    def work(self) -> float:
        """Forward and backward; returns the objective."""
        previous, rows = self.tensors["previous"], self.tensors["rows"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = torch.nn.functional.linear(self.hidden, self.weight)
            bias = self.markov.block_bias(
                prev_token_ids=previous.view(-1, self.block), hidden_states=self.hidden.view(-1, self.block, 1)
            )
            logits = (logits.view(bias.shape) + bias).view(1, len(rows), -1)
            targets = torch.nn.functional.linear(self.tensors["teacher"][rows], self.weight)[None]
        loss, _ = compute_metrics(
            logits,
            targets,
            None,
            torch.ones(1, len(rows), dtype=torch.bool),
            self.block,
            self.loss_config,
            self.tv,
            gamma=self.decay,
        )
        loss.backward()
        return float(loss.detach())

    def gradients(self, path: str) -> float:
        """Write the gradients and return the objective."""
        objective = self.work()
        named = {"hidden": self.hidden, "w1": self.markov.markov_w1.weight, "w2": self.markov.markov_w2.weight}
        save_file({name: tensor.grad.float() for name, tensor in named.items()}, path)
        return objective


def main() -> None:
    losses, cpu = Losses(sys.argv[1]), torch.device("cpu")
    sys.stdout.write(json.dumps({"version": version("speculators"), "torch": torch.__version__}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        word, *rest = line.split(maxsplit=1)
        if word == "threads":
            torch.set_num_threads(int(rest[0]))
            answer: float = torch.get_num_threads()
        elif word == "gradients":
            answer = losses.gradients(rest[0].strip())
        else:
            answer = (seconds if word == "seconds" else peak_bytes)(losses.work, cpu)
        for tensor in (losses.hidden, *losses.markov.parameters()):
            tensor.grad = None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
