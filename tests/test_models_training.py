"""Training: losses, checkpointing, compilation, Trainer, LoRA, and the golden losses."""

import json
import re

import pytest
import torch
import transformers

from golden import make_losses
from model_common import FEW, MIXERS, VOCAB, padded, tiny, tiny_config, tokens
from rla.models import RLAForCausalLM
from rla.models.configuration_rla import PAPER

# Torch's own, when it compiles an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(a, b, atol=1e-5):
    assert torch.allclose(a[0], b[0], atol=atol)
    for name, grad in a[1].items():
        assert torch.allclose(grad, b[1][name], atol=atol, rtol=1e-3), name


@pytest.mark.parametrize("preset", PAPER)
def test_golden_losses(preset):
    golden = json.loads(make_losses.FILE.read_text())[preset]
    assert len(golden) == make_losses.STEPS
    assert make_losses.losses(preset) == pytest.approx(golden, rel=1e-5)
    assert golden[-1] < golden[0] - 0.2


def test_loss_is_the_shifted_cross_entropy():
    model, ids = tiny(), tokens(2, 9)
    logits = model(ids).logits
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(model(ids, labels=ids).loss, want)
    labels = ids.clone()
    labels[:, :5] = -100
    want = torch.nn.functional.cross_entropy(logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    assert torch.allclose(model(ids, labels=labels).loss, want)


@pytest.mark.parametrize("chunk", [1, 7, 18, 1000])
def test_chunked_loss_equals_the_whole(chunk):
    model, ids = tiny("rdn+softmax").train(), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    whole, chunked = (gradients(model, input_ids=ids, labels=labels, loss_chunk_size=n) for n in (0, chunk))
    assert_same(whole, chunked)
    model.config.loss_chunk_size = chunk
    out = model(ids, labels=labels, num_items_in_batch=torch.tensor(7))
    assert out.logits is None
    model.config.loss_chunk_size = 0
    assert torch.allclose(out.loss, model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss)


@pytest.mark.parametrize("hooked", [False, True])
def test_chunked_loss_never_holds_the_logits(monkeypatch, hooked):
    model, sizes = tiny().train(), []
    linear = torch.nn.functional.linear

    def watch(x, weight, bias=None):
        if weight.shape[0] == VOCAB:
            sizes.append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    if hooked:  # a head that is not a plain product is recomputed in backward
        model.lm_head.register_forward_hook(lambda module, args, out: None)
    monkeypatch.setattr(torch.nn.functional, "linear", watch)
    model(tokens(2, 9), labels=tokens(2, 9), loss_chunk_size=4).loss.backward()
    assert max(sizes) == 4
    assert sum(sizes) == (2 * 16 if hooked else 16)  # predicted tokens


@pytest.mark.parametrize("mixer", FEW)
def test_loss_and_gradients_of_packed_documents_are_those_of_each_alone(mixer):
    model = tiny(mixer).train()
    documents = [tokens(1, n, seed=n) for n in (5, 9, 2)]
    ids, bounds = torch.cat(documents, 1), torch.tensor([0, 5, 14, 16])
    packed = gradients(model, input_ids=ids, labels=ids, cu_seqlens=bounds)
    position_ids = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    assert_same(packed, gradients(model, input_ids=ids, labels=ids, position_ids=position_ids))
    alone = [gradients(model, input_ids=d, labels=d) for d in documents]
    weights = [(d.shape[1] - 1) / 13 for d in documents]  # predicted tokens
    loss = sum(w * a[0] for w, a in zip(weights, alone, strict=True))
    grads = {name: sum(w * a[1][name] for w, a in zip(weights, alone, strict=True)) for name in packed[1]}
    assert_same(packed, (loss, grads), atol=1e-4)


def test_transformers_flattening_collator_packs():
    model = tiny("rdn+softmax").train()
    documents = [tokens(n, seed=n) for n in (5, 9, 2)]
    batch = transformers.DataCollatorWithFlattening()([{"input_ids": d.tolist()} for d in documents])
    ids, bounds = torch.cat(documents)[None], torch.tensor([0, 5, 14, 16])
    want = model(ids, labels=ids, cu_seqlens=bounds).loss
    assert torch.allclose(model(**batch).loss, want, atol=1e-5)


@pytest.mark.parametrize("mixer", FEW)
def test_left_and_right_padding_train_alike(mixer):
    model = tiny(mixer).train()
    both = []
    for side in ("left", "right"):
        _, ids, mask = padded([9, 4], side)
        both.append(gradients(model, input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)))
    # On the left the first token is predicted from padding, whose hidden state is its own: leave it out by its label.
    _, ids, mask = padded([9, 4], "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 5] = -100
    assert_same(gradients(model, input_ids=ids, attention_mask=mask, labels=labels), both[1], atol=1e-4)


@pytest.mark.parametrize("mixer", MIXERS)
def test_activation_checkpointing_changes_nothing(mixer):
    model, ids = tiny(mixer).train(), tokens(2, 9)
    plain = gradients(model, input_ids=ids, labels=ids)
    model.checkpoint_activations()
    assert_same(plain, gradients(model, input_ids=ids, labels=ids))


@pytest.mark.parametrize("mixer", ["rdn+softmax", pytest.param("mamba2+gla", marks=pytest.mark.slow)])
def test_compiles_without_graph_breaks(mixer):
    torch._dynamo.reset()
    model, ids = tiny(mixer).train(), tokens(2, 9)
    want = gradients(model, input_ids=ids, labels=ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), want)


@pytest.mark.slow
def test_compiled_models_refuse_padding_and_packed_positions():
    torch._dynamo.reset()
    compiled = torch.compile(tiny().train(), fullgraph=True, backend="aot_eager")
    ids = tokens(1, 6)
    compiled(ids, attention_mask=torch.ones(1, 6))
    with pytest.raises(RuntimeError, match=r"padding can't be handled under torch\.compile"):
        compiled(ids, attention_mask=torch.tensor([[0.0, 1, 1, 1, 1, 1]]))
    with pytest.raises(RuntimeError, match="give packed documents as cu_seqlens"):
        compiled(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_step_trains():
    torch._dynamo.reset()
    model, ids = tiny("rdn+softmax").train(), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = compiled(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_initial_weights():
    torch.manual_seed(0)
    model = RLAForCausalLM(tiny_config("rdn+softmax", initializer_range=0.006, hidden_size=128))
    for name, p in model.named_parameters():
        if name.endswith(("proj.weight", "embed_tokens.weight")):
            assert p.std().item() == pytest.approx(0.006, rel=0.15), name
        elif "norm" in name:
            assert (p == 1).all(), name
    conv = model.model.layers[0].mixer.conv.weight
    assert conv.abs().max() <= 0.5
    assert conv.std().item() == pytest.approx(12**-0.5, rel=0.1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = tokens(12, seed=i)
        return {"input_ids": ids, "labels": ids}


def trainer(folder, model, steps, **options):
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2, logging_steps=1, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows())


@pytest.mark.filterwarnings("ignore")  # the Trainer's own
def test_trainer_trains_saves_and_resumes(tmp_path):
    whole = trainer(tmp_path / "a", tiny("rdn+softmax"), 4)
    whole.train()
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    again = trainer(tmp_path / "a", tiny("rdn+softmax", seed=1), 4)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for (name, p), q in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5), name
    opened = RLAForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    assert torch.equal(opened.lm_head.weight, whole.model.lm_head.weight)


@pytest.mark.filterwarnings("ignore")
def test_lora_attaches_and_trains(tmp_path):
    import peft

    model, ids = tiny("rdn+softmax"), tokens(2, 9)
    before = {name: p.clone() for name, p in model.named_parameters()}
    targets = ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gamma_proj", "up_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets)
    lora = peft.get_peft_model(model, config).train()
    trained = [p for p in lora.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 0.5 * sum(p.numel() for p in before.values())
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = lora(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    lora.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny("rdn+softmax"), tmp_path).eval()
    assert torch.allclose(again(input_ids=ids).logits, lora.eval()(input_ids=ids).logits, atol=1e-5)
    assert again.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)


def test_labels_of_another_vocabulary_say_so():
    with pytest.raises((IndexError, RuntimeError), match=re.escape(f"Target {VOCAB} is out of bounds")):
        tiny()(tokens(1, 4), labels=torch.full((1, 4), VOCAB))
