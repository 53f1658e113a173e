"""A resized vocabulary, other adapters, torch.compile: correct, or refused before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from pose_plugin.beacon import BeaconEmbedding
from pose_plugin.utils.errors import PoSEError
from tests.models import make_base, make_beacon, make_config, make_ids, unlike_base


def as_a_token(ids: torch.Tensor, token: int, new: int) -> torch.Tensor:
    return torch.where(ids == token, new, ids)


def copy_row(model, token: int, new: int) -> None:
    embedding = model.get_input_embeddings()
    embedding.weight.data[new] = embedding.weight.data[token]


@pytest.mark.parametrize(("when", "tied"), [("before", False), ("after", True), ("inner", False)])
@torch.no_grad()
def test_a_resized_vocabulary(tmp_path, when, tied):
    """A new token with an old one's embedding is read like it, in the text and by beacons."""
    ids = make_ids(30)
    assert (ids == ids[0, 5]).sum() and ids[0, 5] != 1
    expected = make_beacon_of(make_base(tie_word_embeddings=tied))(ids).logits
    base = make_base(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    if when == "before":
        base.resize_token_embeddings(70)
    model = make_beacon_of(base)
    if when != "before":
        given = model if when == "after" else base
        found = given.resize_token_embeddings(70)
        assert isinstance(found, BeaconEmbedding) and found is base.get_input_embeddings()
    assert not any(p.requires_grad for name, p in model.named_parameters() if "beacon_" not in name)
    assert (base.config.vocab_size, model.base_model.embedding.sentinel) == (70, 70)
    assert (base.lm_head.weight is base.get_input_embeddings().weight) == tied
    assert torch.equal(model(ids).logits[..., :64], expected)
    copy_row(base, int(ids[0, 5]), 69)
    written = model(as_a_token(ids, int(ids[0, 5]), 69)).logits
    assert written.shape == (1, 30, 70)
    assert torch.equal(written[..., :64], expected)
    assert (model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)).shape[1] > 30
    # PEFT saves a resized embedding with the adapter, and reads it into a base that is resized.
    base.name_or_path = model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    assert any("embed_tokens.base_layer" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    again = make_base(tie_word_embeddings=tied)
    again.resize_token_embeddings(70)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(loaded(as_a_token(ids, int(ids[0, 5]), 69)).logits, written)


def make_beacon_of(base):
    model = get_peft_model(base, make_config())
    unlike_base(model)
    return model.eval()


@torch.no_grad()
def test_resizing_is_undone_and_copied():
    ids = make_ids(20)
    model = make_beacon()
    twin = copy.deepcopy(model)
    twin.resize_token_embeddings(80)
    assert (twin.base_model.embedding.sentinel, model.base_model.embedding.sentinel) == (80, 64)
    assert torch.equal(twin(ids).logits[..., :64], model(ids).logits)
    twin.resize_token_embeddings(60)
    with pytest.raises(PoSEError, match=r"60 is not in the model's vocabulary, 0…59"):
        twin(torch.full_like(ids, 60))
    twin.resize_token_embeddings(66)
    base = twin.unload()
    assert "resize_token_embeddings" not in base.__dict__ and base.resize_token_embeddings(68).num_embeddings == 68
    with pytest.raises(TypeError):
        model.resize_token_embeddings(70, nonsense=1)
    assert torch.equal(model(ids).logits, make_beacon()(ids).logits)


def test_an_embedding_that_was_replaced():
    model = make_beacon()
    model.get_base_model().set_input_embeddings(torch.nn.Embedding(64, 32))
    with pytest.raises(PoSEError, match="its input embedding is a Embedding"):
        model(make_ids(20))


def lora():
    return LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_another_kind_of_adapter_is_refused_and_beacons_stay():
    ids = make_ids(20)
    model = make_beacon()
    expected = model(ids).logits
    for add in (
        lambda: get_peft_model(model, lora()),
        lambda: get_peft_model(model, lora(), adapter_name="lora"),
        lambda: get_peft_model(model.get_base_model(), lora()),
    ):
        with pytest.raises(PoSEError, match=r"has a LoraConfig, but the model has Beacon adapters \['default'\]"):
            add()
    for add in (
        lambda: model.add_adapter("lora", lora()),
        lambda: get_peft_model(make_base(), make_config(), mixed=True),
    ):
        with pytest.raises(ValueError, match=r"different peft types|not compatible with the `PeftMixedModel`"):
            add()
    assert (list(model.peft_config), model.active_adapters) == (["default"], ["default"])
    assert not any("lora" in name for name, _ in model.named_modules())
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_beacons_over_another_adapter_are_refused_and_work_when_it_is_merged():
    ids = make_ids(20)
    torch.manual_seed(0)
    other = get_peft_model(make_base(), lora()).eval()
    expected = other(ids[:, :8]).logits
    for model in (other, other.get_base_model()):
        with pytest.raises(PoSEError, match=r"it has an adapter of another kind \(lora\)"):
            get_peft_model(model, make_config())
    assert torch.equal(other(ids[:, :8]).logits, expected) and type(other.peft_config["default"]) is LoraConfig
    merged = other.merge_and_unload()
    model = get_peft_model(merged, make_config()).eval()
    # Within the rounding of a merge.
    assert (model(ids[:, :8]).logits - expected).abs().max() <= 1e-4
    own = merged.model.layers[0].self_attn.q_proj
    assert torch.equal(own.beacon_proj["default"].weight, own.base_layer.weight)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_second_tuner_on_one_base_is_refused():
    """As when a notebook cell runs twice."""
    ids, base = make_ids(20), make_base()
    model = make_beacon_of(base)
    expected = model(ids).logits
    for given in (base, model):
        with pytest.raises(PoSEError, match="it has Beacon layers already"):
            get_peft_model(given, make_config())
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(make_beacon_of(model.unload())(ids).logits, expected)


@torch.no_grad()
def test_an_adapter_for_each_row():
    """PEFT silently drops the argument for tuners that do not know it."""
    model, ids = make_beacon(), make_ids(20, rows=2)
    model.add_adapter("other", make_config())
    expected = model(ids).logits
    assert torch.equal(model(ids, adapter_names=["default"] * 2).logits, expected)
    for read in (model, model.generate):
        with pytest.raises(PoSEError, match=r"adapter_names: \['default', 'other'\]"):
            read(ids, adapter_names=["default", "other"])


def test_compiling_a_model_traces_no_interval():
    """A graph for each layout would take minutes."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ids, model = make_ids(30), make_beacon().train()
    plain = model(ids, labels=ids, ratio=4)
    model.compile(backend=backend)
    compiled = model(ids, labels=ids, ratio=4)
    assert torch.equal(compiled.logits, plain.logits) and not graphs
    compiled.loss.backward()
    assert model.base_model.embedding.beacon_embedding["default"].weight.grad.any()
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(ids, **how), make_beacon().generate(ids, **how)) and not graphs
