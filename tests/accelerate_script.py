"""Run by `accelerate launch`: a few steps of Transformers' Trainer; every process says how many there are and what it saw."""

import json
import sys

import torch
import transformers

from rla.models import RLAConfig, RLAForCausalLM


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.arange(i, i + 12) % 29
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 29}
    model = RLAForCausalLM(RLAConfig(mixer=["rdn", "softmax"], **sizes))
    arguments = transformers.TrainingArguments(
        sys.argv[1], max_steps=20, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    rank = trainer.accelerator.process_index
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        weight = model.lm_head.weight.double().sum().item()
        json.dump({"processes": trainer.accelerator.num_processes, "losses": losses, "weight": weight}, file)


if __name__ == "__main__":
    main()
